"""The naive transport: each rank broadcasts in turn, partial sums come back by all-reduce. The baseline to beat.

    send:     for r in ranks: received[r] = broadcast(x, from r)
    collect:  y = all_reduce(partial)[own slice]

A broadcast is an all-reduce of the rows' bits as integers, to which the other ranks give 0: a sum of floats would turn
-0.0 into 0.0. The baseline moves twice the bytes of a gather in dispatch and again in combine, in R collectives one
behind the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.comm.all_gather import arrange_everywhere, refuse_wire_rows
from jaxmoe.comm.handle import Handle, RoutingTable
from jaxmoe.mesh import rank_and_size, vary

NAME = "naive"
MOVES_BITS = False  # no fp8 wire: the baseline stays as plain as it is


def arrange(table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None = None) -> Handle:
    """Where everything goes: computed from the table, with no further collective."""
    refuse_wire_rows(wire_rows, NAME)
    return arrange_everywhere(table, num_experts, axes, NAME)


def _as_words(x: Float[Array, "T D"]) -> Int[Array, "T W"]:
    """The bits of each row as uint32, which every backend can add up; 16-bit rows are padded to whole words."""
    if x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2)))
    return lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)


def _from_words(words: Int[Array, "N W"], dtype, width: int) -> Float[Array, "N D"]:
    """The inverse of `_as_words`."""
    return lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)[:, :width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _broadcast_in_turn(x, axes):
    rank, size = rank_and_size(axes)
    words = _as_words(x)
    turns = [lax.psum(jnp.where(rank == r, words, 0), axes) for r in range(size)]
    return vary(_from_words(jnp.concatenate(turns), x.dtype, x.shape[1]), axes)


# The transpose of sending to every rank is the sum over the ranks: `collect`.
_broadcast_in_turn.defvjp(
    lambda x, axes: (_broadcast_in_turn(x, axes), None), lambda axes, _, g: (_all_reduce_own(g, axes),)
)


def _all_reduce_own(partial, axes):
    rank, size = rank_and_size(axes)
    T = partial.shape[0] // size
    return lax.dynamic_slice_in_dim(vary(lax.psum(partial, axes), axes), rank * T, T)


def send(x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """received[r·T + t] = x of rank r, token t."""
    return _broadcast_in_turn(x, handle.axes) if handle.axes else x


def collect(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ over ranks of their partial[own rank·T + t]."""
    return _all_reduce_own(partial, handle.axes) if handle.axes else partial
