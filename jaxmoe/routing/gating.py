"""Scores and top-k: which experts a token goes to, and with what weight."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import RouterConfig

# A stand-in for logits that are NaN or infinite: far outside what a network makes, and far from overflow.
_FAR = 1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Attributes:
      expert_ids: [T, K] int32, distinct within a row; -1 is no expert.
      weights: [T, K] float32, the factor on each expert's output.
    """

    expert_ids: Int[Array, "... K"]
    weights: Float[Array, "... K"]


def scores_of(logits: Float[Array, "T E"], config: RouterConfig) -> Float[Array, "T E"]:
    """softmax(z), sigmoid(z) or sqrt(softplus(z)) in float32; NaN and -inf count as the least, +inf as the most.

    Args:
      logits: [T, E], any float dtype.
      config: names the score.

    Returns:
      [T, E] float32, finite for every input.

    Example:
      >>> import jax.numpy as jnp
      >>> cfg = RouterConfig(num_experts=2, top_k=1, score="sigmoid")
      >>> scores_of(jnp.zeros((1, 2)), cfg).tolist()
      [[0.5, 0.5]]
    """
    z = logits.astype(jnp.float32)
    z = jnp.where(jnp.isnan(z), -_FAR, jnp.clip(z, -_FAR, _FAR))
    if config.score == "softmax":
        return jax.nn.softmax(z, axis=-1)
    if config.score == "sigmoid":
        return jax.nn.sigmoid(z)
    s = jax.nn.softplus(z)
    # sqrt has an infinite slope at 0, which softplus reaches by underflow.
    return jnp.where(s > 0, jnp.sqrt(jnp.where(s > 0, s, 1.0)), 0.0)


def _allowed_by_group(choice: Float[Array, "T E"], config: RouterConfig, biased: bool) -> Bool[Array, "T E"]:
    """The experts of the `top_groups` best groups; a group's score is its two best, or its best without a bias."""
    T, E = choice.shape
    grouped = choice.reshape(T, config.num_groups, E // config.num_groups)
    best = lax.top_k(grouped, min(2 if biased else 1, grouped.shape[-1]))[0].sum(-1)
    _, chosen = lax.top_k(best, config.top_groups)
    mask = jax.nn.one_hot(chosen, config.num_groups, dtype=jnp.bool_).any(1)
    return jnp.repeat(mask, E // config.num_groups, axis=1)


def select_experts(
    scores: Float[Array, "T E"], config: RouterConfig, bias: Float[Array, "E"] | None = None
) -> Int[Array, "T K"]:
    """ids[t] = the K experts of largest scores[t] + bias, within the group limit; ties to the lowest id.

    Args:
      scores: [T, E] float32, finite.
      config: top_k and the group limit.
      bias: [E], selects only: it is not part of the weight (DeepSeek-V3's load balancing without a loss).

    Returns:
      [T, K] int32, K distinct ids in range for every token, best first.

    Example:
      >>> import jax.numpy as jnp
      >>> select_experts(jnp.array([[0.1, 0.7, 0.7]]), RouterConfig(num_experts=3, top_k=2)).tolist()
      [[1, 2]]
    """
    choice = scores
    if bias is not None:
        b = bias.astype(jnp.float32)
        choice = scores + jnp.where(jnp.isnan(b), -_FAR, jnp.clip(b, -_FAR, _FAR))
    choice = lax.stop_gradient(choice)
    if config.num_groups > 1 and config.top_groups < config.num_groups:
        choice = jnp.where(_allowed_by_group(choice, config, bias is not None), choice, -jnp.inf)
    return lax.top_k(choice, config.top_k)[1].astype(jnp.int32)


def _sum_to_one(weights: Float[Array, "T K"]) -> Float[Array, "T K"]:
    """weights / Σ weights; all zero stays all zero. Scaled by the largest first: sigmoids of -60 square to 0."""
    largest = lax.stop_gradient(weights.max(-1, keepdims=True))
    scaled = weights / jnp.where(largest > 0, largest, 1.0)
    total = scaled.sum(-1, keepdims=True)
    return scaled / jnp.where(total > 0, total, 1.0)


def gate(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    *,
    bias: Float[Array, "E"] | None = None,
    valid: Bool[Array, "T"] | None = None,
    expert_ids: Int[Array, "T K"] | None = None,
) -> Routing:
    """w[t] = scale · s[t, ids[t]] / (renormalize ? Σ_k s[t, ids[t, k]] : 1), s = score(logits).

    Args:
      logits: [T, E], any float dtype; NaN and infinities still give K distinct ids and finite weights.
      config: the routing rule.
      bias: [E], added for the selection only.
      valid: [T]; tokens that are not get expert -1 and weight 0.
      expert_ids: [T, K] int32 to use in place of the selection (a replay); their weights come from these logits.

    Returns:
      Routing with ids [T, K] int32 and weights [T, K] float32.

    Example:
      >>> import jax.numpy as jnp
      >>> r = gate(jnp.array([[0.0, 2.0, 1.0]]), RouterConfig(num_experts=3, top_k=2))
      >>> r.expert_ids.tolist(), bool(r.weights[0, 0] > r.weights[0, 1]), round(float(r.weights.sum()), 5)
      ([[1, 2]], True, 1.0)

    References: Shazeer et al., "Outrageously large neural networks" (2017); DeepSeek-V3 (2024) for bias, groups, scale.
    """
    scores = scores_of(logits, config)
    ids = select_experts(scores, config, bias) if expert_ids is None else expert_ids
    weights = jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1)
    weights = jnp.where(ids >= 0, weights, 0.0)
    if config.renormalize:
        weights = _sum_to_one(weights)
    weights = weights * config.scale
    if valid is not None:
        ids = jnp.where(valid[:, None], ids, -1)
        weights = jnp.where(valid[:, None], weights, 0.0)
    return Routing(ids, weights)
