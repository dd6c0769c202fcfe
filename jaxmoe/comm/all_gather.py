"""The all-gather transport: every token goes to every rank, partial sums come back by reduce-scatter.

    send:     received = all_gather(x)            [R·T, D], rank by rank
    collect:  y = reduce_scatter(partial)         y_r = Σ_s partial_s[r·T : (r+1)·T]

The two are each other's transpose, and JAX's own rules know it. R-1 rows on the wire per rank and token each way,
whatever the routing: immune to skew, and fewer bytes than one copy per expert exactly when K >= R.
"""

from jax import lax
from jaxtyping import Array, Float

from jaxmoe.comm.handle import Handle, RoutingTable, local_experts
from jaxmoe.routing.plan import row_map

NAME = "all_gather"


def arrange_everywhere(table: RoutingTable, num_experts: int, axes: tuple[str, ...], name: str) -> Handle:
    """The handle of a transport that brings all N = R·T tokens to every rank."""
    R, T, K = table.expert_ids.shape
    first, L = local_experts(num_experts, axes)
    ids = table.expert_ids.reshape(R * T, K)
    rows = row_map(ids, first, L, R * T * min(K, L))
    return Handle(rows, table.weights.reshape(R * T, K), name, axes)


def refuse_wire_rows(wire_rows: int | None, name: str) -> None:
    """Raise if a bound on blocks is set for a transport that has no blocks."""
    if wire_rows is not None:
        raise ValueError(
            f"wire_rows bounds the padded blocks of 'all_to_all' and 'ragged'; got {wire_rows!r} with transport "
            f"{name!r}, which sends every token to every rank. Leave wire_rows at None, or use 'all_to_all'."
        )


def arrange(table: RoutingTable, num_experts: int, axes: tuple[str, ...], wire_rows: int | None = None) -> Handle:
    """Where everything goes: computed from the table, with no further collective."""
    refuse_wire_rows(wire_rows, NAME)
    return arrange_everywhere(table, num_experts, axes, NAME)


def send(x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """received[r·T + t] = x of rank r, token t."""
    return lax.all_gather(x, handle.axes, tiled=True) if handle.axes else x


def collect(partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """y[t] = Σ over ranks of their partial[own rank·T + t]."""
    return lax.psum_scatter(partial, handle.axes, tiled=True) if handle.axes else partial
