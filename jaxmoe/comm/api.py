"""Dispatch and combine, inside `jax.shard_map`, over any transport."""

from types import ModuleType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmoe.comm import all_gather, all_to_all, naive, ragged, ragged_emulated, wire
from jaxmoe.comm.handle import Handle, RoutingTable, check_tokens, gather_routing
from jaxmoe.config import AxisNames, WireDtype
from jaxmoe.mesh import axis_tuple, vary, vary_like
from jaxmoe.permute.api import combine_rows, permute
from jaxmoe.routing.gating import Routing
from jaxmoe.routing.plan import apply_capacity

TRANSPORTS: dict[str, ModuleType] = {
    module.NAME: module for module in (all_gather, all_to_all, naive, ragged, ragged_emulated)
}


def transport_of(name: str) -> ModuleType:
    """The transport's module: `arrange(table, E, axes, wire_rows)`, `send(x, handle)` and `collect(partial, handle)`.

    Raises:
      ValueError: no such transport.
    """
    if name not in TRANSPORTS:
        raise ValueError(
            f"transport must be one of {sorted(TRANSPORTS)}; got {name!r}. The default, 'all_gather', always works."
        )
    return TRANSPORTS[name]


def available_transports(num_ranks: int, num_experts: int) -> list[str]:
    """The transports that run here with these ranks and experts: all but `ragged`, and that where its preflight passes.

    Example:
      >>> available_transports(4, 8)  # on a CPU
      ['all_gather', 'all_to_all', 'naive', 'ragged_emulated']
    """
    names = sorted(TRANSPORTS)
    try:
        ragged.preflight(num_ranks, num_experts)
    except NotImplementedError:
        names.remove(ragged.NAME)
    return names


def limit_to_capacity(table: RoutingTable, num_experts: int, capacity: int | None) -> RoutingTable:
    """The table with every expert's slots past its `capacity` set to -1, in the order (rank, token, slot)."""
    if capacity is None:
        return table
    R, T, K = table.expert_ids.shape
    ids, _ = apply_capacity(table.expert_ids.reshape(R * T, K), num_experts, capacity)
    return RoutingTable(ids.reshape(R, T, K), table.weights)


def dispatch(
    x: Float[Array, "T D"],
    routing: Routing,
    *,
    num_experts: int,
    axis: AxisNames,
    transport: str = "all_gather",
    capacity: int | None = None,
    wire_rows: int | None = None,
    wire_dtype: WireDtype = None,
) -> tuple[Float[Array, "M D"], Handle]:
    """rows[row of (n, k) on the rank of expert e] = x[n] for each token n and slot k with ids[n, k] = e.

    `combine` is its transpose: with all weights 1, Σ_ranks <dispatch(x), r> = Σ_ranks <x, combine(r)>, and so each is
    the other's gradient.

    Args:
      x: [T, D] this rank's tokens, any float dtype; T is the same on all ranks (pad, with ids of -1).
      routing: of these tokens, ids [T, K] int32 and weights [T, K] float32.
      num_experts: E over all ranks; rank r holds [r·L, (r+1)·L), L = E / R.
      axis: the EP axis or axes of the surrounding shard_map; None for a single rank.
      transport: the collectives to use.
      capacity: most rows an expert takes; None drops nothing.
      wire_rows: most tokens that one rank sends to another by `all_to_all` or `ragged`; None drops nothing. A token
        past it loses its slots on that rank.
      wire_dtype: "float8_e4m3fn" sends the rows quantised, one float32 scale per 128 columns, and dequantises them on
        arrival; None sends them as they are. The gradient is straight-through: as if nothing had been rounded.

    Returns:
      [M, D] rows sorted by local expert (M = N·min(K, L), with N = R·T, or R·wire_rows; those past the last are
      unspecified), and the handle, with `handle.row_map.group_sizes` [L], the rows of each local expert.

    Raises:
      ValueError: an unknown transport, experts that do not divide over the ranks, or wire_rows for a transport that
        sends every token to every rank, or another wire_dtype.
      NotImplementedError: `ragged` where it cannot be trusted; wire_dtype with `naive`.

    Example:
      >>> import jax.numpy as jnp
      >>> routing = Routing(jnp.array([[1], [0]]), jnp.ones((2, 1)))
      >>> rows, handle = dispatch(jnp.array([[5.0], [6.0]]), routing, num_experts=2, axis=None)
      >>> rows.tolist(), combine(rows, handle).tolist()
      ([[6.0], [5.0]], [[5.0], [6.0]])

    References: GShard (Lepikhin et al., 2020); DeepEP for the handle; MegaScale-MoE for gather and scatter as
    transport.
    """
    check_tokens(x, routing)
    axes = axis_tuple(axis)
    x = vary_like(vary(x, axes), x, routing.weights)
    table = limit_to_capacity(gather_routing(routing, axes), num_experts, capacity)
    module = transport_of(transport)
    wire.check_wire(module, wire_dtype)
    handle = module.arrange(table, num_experts, axes, wire_rows)
    return permute(send_rows(x, handle, wire_dtype), handle.row_map), handle


def combine(
    rows: Float[Array, "M D"],
    handle: Handle,
    *,
    combine_dtype: DTypeLike | None = None,
    wire_dtype: WireDtype = None,
) -> Float[Array, "T D"]:
    """y[n] = Σ_k weights[n, k] · rows[row of (n, k)], over all ranks, back on the token's own rank.

    Args:
      rows: [M, D] the experts' outputs, in the order that `dispatch` made.
      handle: from `dispatch`.
      combine_dtype: dtype of the partial sums on the wire; None is the dtype of rows. Within a rank the sum is in
        float32 and in slot order, and is rounded once to this dtype.
      wire_dtype: "float8_e4m3fn" quantises the partial sums for the wire, one float32 scale per 128 columns, and adds
        them up in float32 at home; the gradient is straight-through. Only transports that add at home: `all_to_all`,
        `ragged`.

    Returns:
      [T, D] in the dtype of rows. Tokens without an expert get zeros.

    Raises:
      ValueError: another wire_dtype, or one beside combine_dtype.
      NotImplementedError: wire_dtype with a transport that adds on the way.

    Example: see `dispatch`.
    """
    if combine_dtype is not None and wire_dtype is not None:
        raise ValueError(
            f"combine_dtype and wire_dtype both say what crosses the wire; got {combine_dtype!r} and {wire_dtype!r}. "
            "Leave one at None."
        )
    wire.check_wire(transport_of(handle.transport), None, wire_dtype)
    partial = combine_rows(rows, handle.weights, handle.row_map)
    return send_home(partial, handle, rows.dtype, combine_dtype, wire_dtype)


def send_rows(x: Float[Array, "T D"], handle: Handle, wire_dtype: WireDtype = None) -> Float[Array, "N D"]:
    """The transport's `send`, the rows quantised on the wire if `wire_dtype` says so."""
    transport = transport_of(handle.transport)
    return transport.send(x, handle) if wire_dtype is None else wire.send(transport, x, handle)


def send_home(
    partial: Float[Array, "N D"],
    handle: Handle,
    dtype: DTypeLike,
    combine_dtype: DTypeLike | None = None,
    wire_dtype: WireDtype = None,
) -> jax.Array:
    """The transport's `collect`, in `combine_dtype` (None: `dtype`) or quantised, the result in `dtype`."""
    transport, on_wire = transport_of(handle.transport), partial.astype(jnp.dtype(combine_dtype or dtype))
    home = transport.collect(on_wire, handle) if wire_dtype is None else wire.collect(transport, on_wire, handle)
    return home.astype(dtype)
