"""The all-to-all transport: one copy per (token, destination rank), in blocks of equal, static size.

    send:     rows[d·W + j] = x[j-th token that rank d needs]        received = all_to_all(rows)     [R·W, D]
    collect:  back = all_to_all(partial)                             y[t] = Σ_d back[row of (t, d)]

A token with several experts on one rank travels once; the receiving rank, which has the routing of all tokens, spreads
it over the rows of its experts, weighs their outputs, and sends one partial sum back. The two are each other's
transpose: make_copies and sum_copies are, and an all-to-all of equal blocks is its own.

A block has W = T rows, what one rank sends to another at most. So without `wire_rows` nothing is ever dropped, and
(R-1)·T rows a rank cross the wire each way: the all-gather's bytes exactly. `wire_rows` makes it cheaper. Expected need
of a block is T·p tokens with p = 1 - C(E-L, K) / C(E, K), if experts are drawn evenly; a token past the W-th of its
block loses its slots on that rank, in the order (rank, token), last first, and they count as dropped. A rank's block
for itself has the same bound.

The buffers of the experts shrink with it, to M = R·W·min(K, L).
"""

from jax import lax
from jaxtyping import Array, Float

from jaxmoe.comm.all_gather import arrange_everywhere
from jaxmoe.comm.copies import (
    block_width,
    incoming,
    make_copies,
    outgoing,
    padded_map,
    received_routing,
    sum_copies,
)
from jaxmoe.comm.handle import Handle, RoutingTable, local_experts
from jaxmoe.routing.plan import row_map

NAME = "all_to_all"


def arrange(table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None = None) -> Handle:
    """Where everything goes: computed from the table, with no further collective."""
    R, T, K = table.expert_ids.shape
    width = block_width(T, wire_rows)
    first, L = local_experts(num_experts, axes)
    if R == 1:  # nothing travels, and so nothing is dropped
        return arrange_everywhere(table, num_experts, axes, NAME)
    ids, weights = received_routing(table, incoming(table, num_experts, axes, width))
    rows = row_map(ids, first, L, R * width * min(K, L))
    return Handle(rows, weights, NAME, axes, padded_map(outgoing(table, num_experts, axes, width)))


def send(x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """received[s·W + j] = the j-th token of rank s that this rank needs; zeros past the last."""
    if handle.wire is None:
        return x
    return lax.all_to_all(make_copies(x, handle.wire), handle.axes, 0, 0, tiled=True)


def collect(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ over the ranks to which t was sent of their partial sums, in rank order."""
    return partial if handle.wire is None else add_up(bring_back(partial, handle), handle)


def bring_back(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "M D"]:
    """back[d·W + j] = the partial sum of rank d for the j-th token that was sent there."""
    return lax.all_to_all(partial, handle.axes, 0, 0, tiled=True)


def add_up(back: Float[Array, "M D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ_d back[row of (t, d)]."""
    return sum_copies(back, handle.wire)
