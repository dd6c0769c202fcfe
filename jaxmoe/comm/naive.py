"""The naive transport: each rank broadcasts in turn, partial sums come back by all-reduce. The baseline to beat.

    send:     for r in ranks: received[r] = broadcast(x, from r)
    collect:  y = all_reduce(partial)[own slice]

A broadcast is an all-reduce to which the other ranks give -0.0, the one value v with v + a = a for every bit of a.
It moves twice the bytes of a gather in dispatch and again in combine, in R collectives one behind the other.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.comm.all_gather import arrange_everywhere, refuse_wire_rows
from jaxmoe.comm.handle import Handle, RoutingTable
from jaxmoe.mesh import rank_and_size, vary

NAME = "naive"
MOVES_BITS = False  # a broadcast is a sum here


def arrange(table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None = None) -> Handle:
    """Where everything goes: computed from the table, with no further collective."""
    refuse_wire_rows(wire_rows, NAME)
    return arrange_everywhere(table, num_experts, axes, NAME)


def send(x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """received[r·T + t] = x of rank r, token t."""
    if not handle.axes:
        return x
    rank, size = rank_and_size(handle.axes)
    nothing = jnp.full_like(x, -0.0)
    turns = []
    for r in range(size):
        mine = jnp.where(rank == r, x, nothing)
        turns.append(vary(lax.psum(mine, handle.axes), handle.axes))
    return jnp.concatenate(turns)


def collect(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ over ranks of their partial[own rank·T + t]."""
    if not handle.axes:
        return partial
    rank, size = rank_and_size(handle.axes)
    total = vary(lax.psum(partial, handle.axes), handle.axes)
    T = partial.shape[0] // size
    return lax.dynamic_slice_in_dim(total, rank * T, T)
