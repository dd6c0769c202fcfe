"""What dispatch leaves for combine: the routing of all ranks, and the handle of one dispatch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.mesh import rank_and_size
from jaxmoe.routing.gating import Routing
from jaxmoe.routing.plan import RowMap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingTable:
    """The routing of every rank of the EP group, on every rank.

    Attributes:
      expert_ids: [R, T, K] int32; -1 for padding tokens and absent slots.
      weights: [R, T, K] float32.
    """

    expert_ids: Int[Array, "R T K"]
    weights: Float[Array, "R T K"]

    def tokens(self, start: int, size: int) -> "RoutingTable":
        """The tokens [start, start + size) of every rank: what one lane of a schedule needs."""
        return RoutingTable(self.expert_ids[:, start : start + size], self.weights[:, start : start + size])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """What `dispatch` returns and `combine` takes.

    Attributes:
      row_map: of the tokens that arrived here, onto this rank's experts.
      weights: [N, K] float32, of the tokens that arrived here, in the order in which they lie here.
      transport: the name of the transport that made it.
      axes: the EP axes, outer to inner; empty without expert parallelism.
      wire: what else this transport needs to send and collect, a pytree of int32 arrays or None.
    """

    row_map: RowMap
    weights: Float[Array, "N K"]
    transport: str = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    wire: Any = None


def gather_routing(routing: Routing, axes: tuple[str, ...]) -> RoutingTable:
    """table[r] = the routing of rank r: one all-gather of T·2K float32, before everything else.

    Ids travel as float32, exact below 2^24, beside the weights: one collective, whose transpose (a reduce-scatter)
    brings the gradients of the weights home.

    Args:
      routing: this rank's, ids [T, K] and weights [T, K].
      axes: the EP axes; empty returns the own routing as rank 0's.

    Returns:
      RoutingTable, [R, T, K] each.
    """
    packed = jnp.concatenate([routing.expert_ids.astype(jnp.float32), routing.weights], axis=-1)
    everyone = lax.all_gather(packed, axes) if axes else packed[None]
    ids, weights = jnp.split(everyone, 2, axis=-1)
    return RoutingTable(lax.stop_gradient(ids).astype(jnp.int32), weights)


def check_tokens(x: Float[Array, "T D"], routing: Routing) -> None:
    """Raise unless x is [T, D] and the routing [T, K]: another T would send other tokens than those routed."""
    ids, weights = routing.expert_ids, routing.weights
    if x.ndim != 2 or ids.ndim != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"x must be [T, D] and routing ids and weights [T, K] of the same tokens; got {x.shape}, {ids.shape} and "
            f"{weights.shape}. Reshape them, or pad the routing with ids of -1."
        )


def local_experts(num_experts: int, axes: tuple[str, ...]) -> tuple[jax.Array | int, int]:
    """(first expert of this rank, L); experts lie in blocks of L = E / R over the ranks.

    Raises:
      ValueError: R does not divide E.
    """
    rank, size = rank_and_size(axes)
    if num_experts % size:
        up = -(-num_experts // size) * size
        raise ValueError(
            f"num_experts must be a multiple of the ranks on axis {axes}; got {num_experts} experts on {size} ranks. "
            f"Add {up - num_experts} unused experts (their router bias at -1e30), or choose an EP size that divides "
            f"{num_experts}."
        )
    L = num_experts // size
    return rank * L, L
