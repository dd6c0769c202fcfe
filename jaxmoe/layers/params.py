"""The arrays of a MoE layer, and what comes back beside its output."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxmoe.config import RouterConfig
from jaxmoe.routing.gating import Routing


def _spec(*parts: Any) -> Any:
    """A PartitionSpec, to stand where a tree of arrays has an array."""
    return P(*parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """The parameters of a SwiGLU MoE layer.

    Attributes:
      router: [D, E].
      gate_up: [E, D, 2F], the gate product in the first F columns, the up product in the last F.
      down: [E, F, D].
      bias: [E] added to the scores for the selection only, or None.
    """

    router: Float[Array, "D E"]
    gate_up: Float[Array, "E D 2*F"]
    down: Float[Array, "E F D"]
    bias: Float[Array, "E"] | None = None

    def specs(self, axes: tuple[str, ...]) -> "MoEParams":
        """The PartitionSpecs of these arrays: experts over `axes`, the router on every rank."""
        whole, experts = _spec(None, None), _spec(axes or None, None, None)
        return MoEParams(whole, experts, experts, None if self.bias is None else _spec(None))


def init_params(
    key: jax.Array, d_model: int, d_ff: int, router: RouterConfig, dtype=jnp.float32, *, use_bias: bool = False
) -> MoEParams:
    """Normal parameters with variance 1 / fan-in, for the functional core.

    Args:
      key: a PRNG key.
      d_model: D.
      d_ff: F, the width of one expert.
      router: E comes from it.
      dtype: of all arrays.
      use_bias: make a selection bias of zeros.

    Returns:
      MoEParams, unsharded; place them with `jax.device_put(params, …)` and `params.specs(axes)`.

    Example:
      >>> import jax
      >>> init_params(jax.random.key(0), 4, 8, RouterConfig(num_experts=2, top_k=1)).gate_up.shape
      (2, 4, 16)
    """
    E = router.num_experts
    shapes = {"router": (d_model, E), "gate_up": (E, d_model, 2 * d_ff), "down": (E, d_ff, d_model)}
    arrays = {
        name: jax.random.normal(k, shape, dtype) * shape[-2] ** -0.5
        for (name, shape), k in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    }
    return MoEParams(**arrays, bias=jnp.zeros((E,), dtype) if use_bias else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """What a MoE layer reports with every call.

    Attributes:
      routing: expert ids and weights [..., K] of every token, with -1 for padding; as chosen, before any drop.
      tokens_per_expert: [E] int32, (token, slot) pairs routed to each expert by all ranks; sharded like the experts.
      dropped_per_expert: [E] int32, those of them that found no row.
    """

    routing: Routing
    tokens_per_expert: Int[Array, "E"]
    dropped_per_expert: Int[Array, "E"]

    @property
    def dropped(self) -> Int[Array, ""]:
        """(token, slot) pairs that found no row, over all experts."""
        return self.dropped_per_expert.sum()

    @property
    def load(self) -> Float[Array, "E"]:
        """[E] each expert's share of the routed pairs; sums to 1, or is 0 where nothing was routed."""
        return self.tokens_per_expert / jnp.maximum(self.tokens_per_expert.sum(), 1)

    @property
    def imbalance(self) -> Float[Array, ""]:
        """The fullest expert's load over the mean load: 1 is even, E is all on one."""
        return self.load.max() * self.tokens_per_expert.shape[0]
