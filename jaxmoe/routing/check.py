"""The check of routing that a caller hands in."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jaxmoe.routing.gating import Routing


def check_routing(routing: Routing, num_experts: int) -> None:
    """Raise unless each token's expert ids are distinct and in [0, E), or -1, and all weights are finite.

    Outside jit this looks at the values and raises ValueError. Under jit the values are not known yet: the same
    conditions become `checkify.check`s, and the function must be run through `jax.experimental.checkify.checkify`.

    Args:
      routing: ids [..., K] int32, weights [..., K] float32.
      num_experts: E.

    Raises:
      ValueError: an id repeats within a token or is out of range, or a weight is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> check_routing(Routing(jnp.array([[0, 1]]), jnp.array([[0.5, 0.5]])), 2)
    """
    ids, weights = routing.expert_ids, routing.weights
    K = ids.shape[-1]
    in_range = (ids >= -1) & (ids < num_experts)
    same = (ids[..., :, None] == ids[..., None, :]) & (ids[..., :, None] >= 0) & ~jnp.eye(K, dtype=bool)
    rules = (
        (in_range.all(), f"expert ids must lie in [0, {num_experts}) or be -1"),
        (~same.any(), "a token's expert ids must be distinct"),
        (jnp.isfinite(weights).all(), "routing weights must be finite"),
    )
    if isinstance(ids, jax.core.Tracer) or isinstance(weights, jax.core.Tracer):
        for holds, rule in rules:
            checkify.check(holds, rule + "; found some that are not. Mend the router, or pass checks=False.")
        return
    bad_tokens = (~in_range.all(-1), same.any((-1, -2)), ~jnp.isfinite(weights).all(-1))
    for (holds, rule), bad in zip(rules, bad_tokens, strict=True):
        if not holds:
            where = np.argwhere(np.asarray(bad))[0]
            token = tuple(int(i) for i in where)
            raise ValueError(
                f"{rule}; got ids {np.asarray(ids)[token].tolist()} with weights "
                f"{np.asarray(weights)[token].tolist()} at token {token}. Mend the router that made them, or pass "
                "checks=False to let repeated ids compete for the buffer's rows."
            )
