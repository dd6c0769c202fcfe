"""The ragged transport with its collective emulated, so that its program runs, and is tested, on any backend.

Everything but the collective is `ragged`'s: the same offsets, sizes, buffers and gradients. The emulation gathers every
rank's rows and picks from them, so it moves more than `all_gather` does. It is for tests and for trying a program on a
laptop, and has a name of its own because a `ragged` that quietly did this on a CPU would only pretend.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.comm.handle import Handle, RoutingTable
from jaxmoe.comm.ragged import add_up as add_up
from jaxmoe.comm.ragged import arrange_ragged, bring_back_through, collect_through, send_through

NAME = "ragged_emulated"


def ragged_all_to_all(
    operand: Float[Array, "A ..."],
    output: Float[Array, "B ..."],
    input_offsets: Int[Array, "S"],
    send_sizes: Int[Array, "S"],
    output_offsets: Int[Array, "S"],
    recv_sizes: Int[Array, "S"],
    *,
    axis_name: tuple[str, ...] | str,
) -> jax.Array:
    """`lax.ragged_all_to_all`, argument for argument, by an all-gather and a gather.

    With S = R·n slices, n for each rank: slice i of rank s, operand[input_offsets[i] : … + send_sizes[i]], is written
    on rank i div n from its output_offsets[i]; later slices over earlier ones; other rows of output stay as they are.

    Args:
      operand: the rows to send.
      output: the rows to write into.
      input_offsets: where the slices begin in operand.
      send_sizes: their rows.
      output_offsets: where they begin in their receivers' output.
      recv_sizes: rows of the slices that arrive here.
      axis_name: the mapped axis or axes.

    Returns:
      output, with what arrived. Slices whose two ends state different sizes, an error that the real collective answers
      with a hang or with foreign rows, arrive as NaN (as bytes of 255, if they are bytes).

    Example: under `jax.shard_map`, like `lax.ragged_all_to_all`.
    """
    S, A = input_offsets.shape[0], operand.shape[0]
    per_rank = S // lax.axis_size(axis_name)
    ends = jnp.stack([input_offsets, output_offsets, send_sizes], axis=1)
    begin, at, sent = lax.all_to_all(ends, axis_name, 0, 0, tiled=True).T
    everyone = lax.all_gather(operand, axis_name, tiled=True)
    offset = jnp.arange(output.shape[0])[:, None] - at  # [B, S]: the place of each output row in each slice
    inside = (offset >= 0) & (offset < recv_sizes)
    last = S - 1 - jnp.argmax(inside[:, ::-1], axis=1)
    place = jnp.take_along_axis(offset, last[:, None], axis=1)[:, 0]
    picked = everyone[(last // per_rank) * A + jnp.clip(begin[last] + place, 0, A - 1)]
    spread = (slice(None),) + (None,) * (output.ndim - 1)
    # Bytes of 255 are NaN again once they are seen as floats.
    wrong = jnp.nan if jnp.issubdtype(picked.dtype, jnp.inexact) else jnp.iinfo(picked.dtype).max
    picked = jnp.where((sent == recv_sizes)[last][spread], picked, jnp.asarray(wrong, picked.dtype))
    return jnp.where(inside.any(axis=1)[spread], picked, output)


def arrange(table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None = None) -> Handle:
    """`ragged`'s, without its preflight."""
    return arrange_ragged(table, num_experts, axes, wire_rows, NAME)


def send(x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """`ragged`'s, by the emulation."""
    return send_through(ragged_all_to_all, x, handle)


def collect(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """`ragged`'s, by the emulation."""
    return collect_through(ragged_all_to_all, partial, handle)


def bring_back(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "A D"]:
    """`ragged`'s, by the emulation."""
    return bring_back_through(ragged_all_to_all, partial, handle)
