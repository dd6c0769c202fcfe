"""The oracle: a MoE layer on one device in which every expert computes every token. Slow, obvious, right."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import RouterConfig
from jaxmoe.layers.params import MoEParams
from jaxmoe.routing.gating import Routing, gate


def dense_moe(
    params: MoEParams,
    x: Float[Array, "... D"],
    router: RouterConfig,
    *,
    mask: Bool[Array, "..."] | None = None,
    expert_ids: Int[Array, "... K"] | None = None,
    routing: Routing | None = None,
) -> tuple[Float[Array, "... D"], Routing]:
    """y[n] = Σ_e W[n, e] · (silu(x[n] G_e) · (x[n] U_e)) D_e, W[n, e] = Σ_k weights[n, k] [ids[n, k] = e].

    Args:
      params: of the layer, whole on this device.
      x: [..., D].
      router: the routing rule.
      mask: [...], False for padding, whose output is zero.
      expert_ids: [..., K] to use in place of the selection, so that near-ties cannot be chosen differently.
      routing: ids and weights to use in place of the router.

    Returns:
      y [..., D] in the dtype of x, computed in float32 (float64 where x is), and the routing used.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxmoe.layers.params import init_params
      >>> cfg = RouterConfig(num_experts=4, top_k=2)
      >>> y, r = dense_moe(init_params(jax.random.key(0), 8, 16, cfg), jnp.ones((3, 8)), cfg)
      >>> y.shape, r.expert_ids.shape
      ((3, 8), (3, 2))
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    tokens = x.reshape(-1, x.shape[-1])
    E, K = router.num_experts, router.top_k
    if routing is None:
        logits = jnp.dot(tokens.astype(jnp.float32), params.router.astype(jnp.float32), precision=router.precision)
        ids = None if expert_ids is None else expert_ids.reshape(-1, K)
        routing = gate(logits, router, bias=params.bias, expert_ids=ids)
    else:
        K = routing.expert_ids.shape[-1]
        routing = Routing(routing.expert_ids.reshape(-1, K), routing.weights.reshape(-1, K))
    ids, weights = routing.expert_ids, routing.weights
    if mask is not None:
        ids = jnp.where(mask.reshape(-1, 1), ids, -1)

    def add_expert(y, expert):
        e, gate_up, down = expert
        mine = ids == e
        share = jnp.where(mine, weights, 0.0).sum(-1)
        gate_part, up_part = jnp.split(tokens.astype(wide) @ gate_up.astype(wide), 2, axis=-1)
        out = (jax.nn.silu(gate_part) * up_part) @ down.astype(wide)
        return y + jnp.where(mine.any(-1, keepdims=True), share[:, None] * out, 0.0), None

    y, _ = lax.scan(add_expert, jnp.zeros(tokens.shape, wide), (jnp.arange(E), params.gate_up, params.down))
    lead = x.shape[:-1]
    return y.astype(x.dtype).reshape(x.shape), Routing(ids.reshape(*lead, K), weights.reshape(*lead, K))
