"""One copy per (token, destination rank): who sends what, which rows arrive, and the sum of what comes back.

The routing of all ranks is on every rank, so both sides of every exchange work out the same answer from the same table,
with no further collective:

  need[s, t, d] = rank d holds an expert of token t of rank s
  block (s, d)  = the tokens t with need[s, t, d], ascending; at most `width` of them, the first ones

The maps are `RowMap`s whose blocks may leave gaps (slot_of_row = -1 in their middle), which is why they are read with
the "xla" backend: it looks at the maps alone, never at the number of rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.comm.handle import RoutingTable, local_experts
from jaxmoe.mesh import rank_and_size
from jaxmoe.permute.api import combine_rows, permute
from jaxmoe.routing.plan import RowMap


def block_width(tokens: int, wire_rows: int | None) -> int:
    """The rows of one (source, destination) block: T, which always suffices, or `wire_rows` where that is less.

    Raises:
      ValueError: wire_rows is not a positive integer.
    """
    if wire_rows is None:
        return tokens
    if not isinstance(wire_rows, int) or isinstance(wire_rows, bool) or wire_rows < 1:
        raise ValueError(
            f"wire_rows must be a positive integer or None; got {wire_rows!r}. Pass the most tokens that one rank may "
            "send to another, or None, which drops nothing."
        )
    return min(wire_rows, tokens)


class Blocks(NamedTuple):
    """The first `width` needed tokens of each of R blocks, in token order.

    Attributes:
      place: [R, T] int32, a token's place in its block; -1 where it is not needed or found no room.
      token: [R, width] int32, the token at each place; -1 past the last.
      sizes: [R] int32, tokens in each block.
    """

    place: Int[Array, "R T"]
    token: Int[Array, "R W"]
    sizes: Int[Array, "R"]


def pack(need: Bool[Array, "R T"], width: int) -> Blocks:
    """The blocks of the tokens that are needed.

    Example:
      >>> import jax.numpy as jnp
      >>> pack(jnp.array([[False, True, True, True]]), 2).token.tolist()
      [[1, 2]]
    """
    place = jnp.cumsum(need, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(need & (place < width), place, -1)
    sizes = jnp.minimum(need.sum(axis=1, dtype=jnp.int32), width)
    order = jnp.argsort(~need, axis=1, stable=True).astype(jnp.int32)[:, :width]
    return Blocks(place, jnp.where(jnp.arange(width) < sizes[:, None], order, -1), sizes)


def outgoing(table: RoutingTable, num_experts: int, axes: tuple[str, ...], width: int) -> Blocks:
    """The tokens of this rank that each rank d needs."""
    rank, R = rank_and_size(axes)
    own = lax.dynamic_index_in_dim(table.expert_ids, rank, keepdims=False)
    return pack(needed_by(own, num_experts // R, R).T, width)


def needed_by(expert_ids: Int[Array, "... T K"], num_local: int, ranks: int) -> Bool[Array, "... T R"]:
    """need[..., t, d] = some expert of token t lies on rank d. Ids of -1 lie on none."""
    return (expert_ids[..., None] // num_local == jnp.arange(ranks)).any(-2)


def incoming(table: RoutingTable, num_experts: int, axes: tuple[str, ...], width: int) -> Blocks:
    """The tokens of each rank s that this rank needs."""
    first, L = local_experts(num_experts, axes)
    return pack(((table.expert_ids >= first) & (table.expert_ids < first + L)).any(-1), width)


def padded_map(blocks: Blocks) -> RowMap:
    """Of the copies (t, d), d the faster: block d begins at row d·width."""
    R, width = blocks.token.shape
    d = jnp.arange(R, dtype=jnp.int32)[:, None]
    rows = jnp.where(blocks.place >= 0, blocks.place + d * width, -1)
    slots = jnp.where(blocks.token >= 0, blocks.token * R + d, -1)
    return RowMap(rows.T, slots.reshape(-1), blocks.sizes)


def compact_map(blocks: Blocks, num_rows: int) -> RowMap:
    """Of the copies (t, d), d the faster: the blocks lie one behind the other, in `num_rows` rows."""
    R, width = blocks.token.shape
    ends = jnp.cumsum(blocks.sizes)
    starts = ends - blocks.sizes
    rows = jnp.where(blocks.place >= 0, blocks.place + starts[:, None], -1)
    m = jnp.arange(num_rows, dtype=jnp.int32)
    d = jnp.minimum(jnp.searchsorted(ends, m, side="right"), R - 1).astype(jnp.int32)
    token = blocks.token[d, jnp.clip(m - starts[d], 0, width - 1)]
    return RowMap(rows.T, jnp.where(m < ends[-1], token * R + d, -1), blocks.sizes)


def received_routing(table: RoutingTable, blocks: Blocks) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
    """Ids and weights [R·width, K] of the rows that arrive, block s at s·width; ids of -1 where there is no row."""
    R, T, K = table.expert_ids.shape
    width = blocks.token.shape[1]
    s = jnp.arange(R, dtype=jnp.int32)[:, None]
    rows = jnp.where(blocks.place >= 0, blocks.place + s * width, -1).reshape(R * T, 1)
    slots = jnp.where(blocks.token >= 0, blocks.token + s * T, -1).reshape(-1)
    ids = table.expert_ids.reshape(R * T, K)[jnp.maximum(slots, 0)]
    # The gradient of the weights goes back by the inverse map: a gather, where indexing would make it a scatter-add.
    weights = permute(table.weights.reshape(R * T, K), RowMap(rows, slots, blocks.sizes), backend="xla")
    return jnp.where(slots[:, None] >= 0, ids, -1), weights


def make_copies(x: Float[Array, "T D"], out: RowMap) -> Float[Array, "M D"]:
    """rows[row of (t, d)] = x[t]; rows that no copy has are zero. Its transpose is `sum_copies`."""
    return permute(x, out, backend="xla")


@jax.custom_vjp
def sum_copies(rows: Float[Array, "M D"], out: RowMap) -> Float[Array, "T D"]:
    """y[t] = Σ_d rows[row of (t, d)], in float32 and in rank order, rounded once. Its transpose is `make_copies`."""
    # Unlike `combine_rows` with weights, it needs no rows for its gradient, so none are kept.
    ones = jnp.ones(out.row_of_slot.shape, jnp.float32)
    return combine_rows(rows, ones, out, backend="xla").astype(rows.dtype)


def _sum_copies_fwd(rows, out):
    return sum_copies(rows, out), out


def _sum_copies_bwd(out, dy):
    return make_copies(dy, out), None


sum_copies.defvjp(_sum_copies_fwd, _sum_copies_bwd)
