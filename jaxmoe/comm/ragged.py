"""The ragged all-to-all transport: one copy per (token, destination rank), exactly as many rows as there are.

    send:     rows = the copies for rank 0, rank 1, … one behind the other     received = ragged_all_to_all(rows)
    collect:  back = ragged_all_to_all(partial), offsets mirrored              y[t] = Σ_d back[row of (t, d)]

What arrives lies where `all_to_all` puts it, rank s's rows from s·W, so both transports give the same rows, and
`wire_rows` means the same. Rows that do not arrive are zeros. The gradient of an exchange is the exchange with the
offsets of both sides swapped, written here: the built-in transpose asks the other ranks for them in two collectives
more, and drops `axis_index_groups`.

`lax.ragged_all_to_all` is young: GPU only, and with reports of wrong results. So this transport is opt-in and checks
first (`preflight`). `ragged_emulated` runs the same code with the collective replaced, on any backend.
"""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.comm.all_gather import arrange_everywhere
from jaxmoe.comm.copies import (
    Blocks,
    block_width,
    compact_map,
    incoming,
    make_copies,
    needed_by,
    outgoing,
    received_routing,
    sum_copies,
)
from jaxmoe.comm.handle import Handle, RoutingTable, local_experts
from jaxmoe.compat import varying_axes
from jaxmoe.mesh import rank_and_size, vary
from jaxmoe.routing.plan import RowMap, row_map

NAME = "ragged"
# Set to "1" to go ahead although the sizes are reported as bad, on an XLA that is known to have mended it.
ACCEPT_KNOWN_BAD = "JAXMOE_RAGGED_ACCEPT_KNOWN_BAD"


def preflight(num_ranks: int, num_experts: int, *, platform: str | None = None) -> None:
    """Raise unless `lax.ragged_all_to_all` can be trusted here.

    Args:
      num_ranks: R.
      num_experts: E.
      platform: "cpu", "gpu", …; None is `jax.default_backend()`.

    Raises:
      NotImplementedError: the backend has none, or ranks and experts are among those that were reported to crash or to
        give NaN. The message names the transport to use, and the environment variable that overrules a report.

    Example:
      >>> preflight(4, 64, platform="gpu")
    """
    platform = platform or jax.default_backend()
    if platform not in ("gpu", "cuda"):
        raise NotImplementedError(
            f"transport 'ragged' needs GPUs: XLA has no ragged all-to-all on {platform!r}. Use 'all_to_all', which "
            "moves the same rows in padded blocks, or 'all_gather'; 'ragged_emulated' tests the same program here."
        )
    if "NCCL_HOSTID" in os.environ and jax.process_count() > 1:
        raise NotImplementedError(
            "transport 'ragged' needs a GPU for each rank; NCCL_HOSTID is set, the way to put several ranks on one "
            "GPU, and there XLA refuses it ('fallback to NCCL is not allowed'). Use 'all_to_all' or 'all_gather'."
        )
    if os.environ.get(ACCEPT_KNOWN_BAD) == "1":
        return
    # Neither is known to be mended in any release up to jax 0.12.0.1.
    if num_ranks > 32:
        bad = "the one-shot kernel's barrier has 32 slots and writes past them (openxla/xla issue 47283, jax 0.11.1)"
    elif num_ranks >= 8 and num_experts // num_ranks >= 12:
        # Seen with 8 ranks × 96 experts and 16 × 192, not with 8 × 24; a slice an expert there, a slice a rank here.
        bad = "NaN gradients were reported from 12 experts a rank on 8 ranks (marin issue 8077, jax 0.11.0)"
    else:
        return
    raise NotImplementedError(
        f"transport 'ragged' is not trusted with {num_ranks} ranks and {num_experts} experts: {bad}; this is jax "
        f"{jax.__version__}. Use 'all_to_all' or 'all_gather', or set {ACCEPT_KNOWN_BAD}=1 and check the results."
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices that this rank exchanges with each rank, both ends of both directions; all [R] int32.

    Attributes:
      send_at: where the slice for rank d begins in this rank's rows.
      send_sizes: its rows.
      lands_at: where it begins in what rank d receives.
      recv_at: where the slice from rank s begins in what this rank receives.
      recv_sizes: its rows.
      came_from: where it begins in rank s's rows.
    """

    send_at: Int[Array, "R"]
    send_sizes: Int[Array, "R"]
    lands_at: Int[Array, "R"]
    recv_at: Int[Array, "R"]
    recv_sizes: Int[Array, "R"]
    came_from: Int[Array, "R"]

    def mirrored(self) -> "Slices":
        """The same slices, on their way back."""
        return Slices(self.recv_at, self.recv_sizes, self.came_from, self.send_at, self.send_sizes, self.lands_at)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedWire:
    """What `send` and `collect` need beside the handle's own maps: the copies made here, and the slices exchanged."""

    out: RowMap
    slices: Slices


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(
    rows: Float[Array, "A D"], slices: Slices, sizes: tuple[int, int], axes: tuple[str, ...], collective: Callable
) -> Float[Array, "B D"]:
    """received[recv_at[s] : … + recv_sizes[s]] = rank s's rows[send_at : … + send_sizes]; zeros elsewhere.

    Its transpose is exchange(drows, slices.mirrored()): what went to (d, lands_at) comes back from there.

    Args:
      rows: [A, D].
      slices: of this rank.
      sizes: (A, B).
      axes: of the EP group.
      collective: `lax.ragged_all_to_all` or its emulation.

    Returns:
      [B, D].
    """
    nothing = vary(jnp.zeros((sizes[1], *rows.shape[1:]), rows.dtype), tuple(varying_axes(rows)))
    return collective(
        rows,
        nothing,
        slices.send_at,
        slices.send_sizes,
        slices.lands_at,
        slices.recv_sizes,
        axis_name=axes,
    )


def _exchange_fwd(rows, slices, sizes, axes, collective):
    return exchange(rows, slices, sizes, axes, collective), slices


def _exchange_bwd(sizes, axes, collective, slices, dreceived):
    return exchange(dreceived, slices.mirrored(), sizes[::-1], axes, collective), None


exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _slices(table: RoutingTable, num_experts: int, axes, out: Blocks, into: Blocks) -> Slices:
    """Offsets of both ends, from the table: senders' slices lie one behind the other, receivers' from s·W."""
    rank, R = rank_and_size(axes)
    width = into.token.shape[1]
    counts = needed_by(table.expert_ids, num_experts // R, R).sum(axis=1, dtype=jnp.int32)  # [source, destination]
    counts = jnp.minimum(counts, width)
    starts = jnp.cumsum(counts, axis=1) - counts
    here = jnp.asarray(rank, jnp.int32)
    return Slices(
        send_at=lax.dynamic_index_in_dim(starts, here, 0, keepdims=False),
        send_sizes=out.sizes,
        lands_at=jnp.full((R,), width, jnp.int32) * here,
        recv_at=jnp.arange(R, dtype=jnp.int32) * width,
        recv_sizes=into.sizes,
        came_from=lax.dynamic_index_in_dim(starts, here, 1, keepdims=False),
    )


def arrange_ragged(
    table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None, name: str
) -> Handle:
    """The handle of an exchange of exact sizes."""
    R, T, K = table.expert_ids.shape
    width = block_width(T, wire_rows)
    first, L = local_experts(num_experts, axes)
    if R == 1:  # nothing travels, and so nothing is dropped
        return arrange_everywhere(table, num_experts, axes, name)
    out, into = outgoing(table, num_experts, axes, width), incoming(table, num_experts, axes, width)
    ids, weights = received_routing(table, into)
    rows = row_map(ids, first, L, R * width * min(K, L))
    # A token goes to K ranks at most, so the copies need no more rows than this.
    copies = compact_map(out, min(T * min(K, R), R * width))
    wire = RaggedWire(copies, _slices(table, num_experts, axes, out, into))
    return Handle(rows, weights, name, axes, wire)


def send_through(collective: Callable, x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """`send` by a given collective."""
    if handle.wire is None:
        return x
    rows = make_copies(x, handle.wire.out)
    return exchange(rows, handle.wire.slices, _sizes(handle), handle.axes, collective)


def collect_through(collective: Callable, partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """`collect` by a given collective."""
    if handle.wire is None:
        return partial
    return add_up(bring_back_through(collective, partial, handle), handle)


def bring_back_through(collective: Callable, partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "A D"]:
    """`bring_back` by a given collective."""
    return exchange(partial, handle.wire.slices.mirrored(), _sizes(handle)[::-1], handle.axes, collective)


def add_up(back: Float[Array, "A D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ_d back[row of (t, d)]."""
    return sum_copies(back, handle.wire.out)


def _sizes(handle: Handle) -> tuple[int, int]:
    """Rows of the buffers on this side and on the other."""
    return handle.wire.out.slot_of_row.shape[0], handle.weights.shape[0]


def arrange(table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None = None) -> Handle:
    """Where everything goes, after the preflight: computed from the table, with no further collective."""
    R = table.expert_ids.shape[0]
    if R > 1:
        preflight(R, num_experts)
    return arrange_ragged(table, num_experts, axes, wire_rows, NAME)


def send(x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """received[s·W + j] = the j-th token of rank s that this rank needs; zeros past the last."""
    return send_through(lax.ragged_all_to_all, x, handle)


def collect(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ over the ranks to which t was sent of their partial sums, in rank order."""
    return collect_through(lax.ragged_all_to_all, partial, handle)


def bring_back(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "A D"]:
    """back = the partial sums of the copies that were sent, in the order in which they were sent."""
    return bring_back_through(lax.ragged_all_to_all, partial, handle)
