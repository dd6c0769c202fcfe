"""What the quantised wire costs a whole layer."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.config import MoEConfig
from jaxmoe.layers.functional import moe
from jaxmoe.layers.params import MoEParams


def wire_error(params: MoEParams, x: Float[Array, "... D"], config: MoEConfig, **options) -> Float[Array, ""]:
    """‖y - y'‖ / ‖y'‖: y of the layer, y' of the same layer with an unquantised wire, in float32.

    Both choose the same experts, since the router sees the exact tokens.

    Args:
      params: of the layer.
      x: [..., D], tokens like those that it will see.
      config: the layer, with `wire_dtype`, `wire_dtype_combine` or both.
      **options: of `jaxmoe.moe`.

    Returns:
      A float32; 0 where nothing travels. For normally distributed tokens and weights about 0.036 with the dispatch
      quantised, 0.026 with the combine, 0.044 with both.

    Raises:
      ValueError: as `jaxmoe.moe`.
      NotImplementedError: as `jaxmoe.moe`.

    Example:
      >>> import jax, jaxmoe
      >>> cfg = jaxmoe.MoEConfig(router=jaxmoe.RouterConfig(num_experts=8, top_k=2), wire_dtype="float8_e4m3fn")
      >>> float(wire_error(jaxmoe.init_params(jax.random.key(0), 16, 32, cfg.router), jnp.ones((4, 16)), cfg))
      0.0
    """
    plain = dataclasses.replace(config, wire_dtype=None, wire_dtype_combine=None)
    y, want = (moe(params, x, c, **options)[0].astype(jnp.float32) for c in (config, plain))
    norm = jnp.linalg.norm(want)
    return jnp.linalg.norm(y - want) / jnp.where(norm == 0, 1, norm)
