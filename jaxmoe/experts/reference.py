"""The grouped matmul as its definition says: one masked dense product an expert. Slow and obvious."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _group_mask(group_sizes, expert: int, num_rows: int):
    start = group_sizes[:expert].sum()
    row = jnp.arange(num_rows)
    return ((row >= start) & (row < start + group_sizes[expert]))[:, None]


def grouped_matmul(
    rows: Float[Array, "M D"], weights: Float[Array, "L D F"], group_sizes: Int[Array, "L"], transpose: bool = False
) -> Float[Array, "M F"]:
    """out[m] = rows[m] @ weights[group of m], float32 accumulation; rows of no group are zero.

    With `transpose` weights are [L, F, D] and the product is with weightsᵀ.
    """
    if transpose:
        weights = weights.swapaxes(1, 2)
    M = rows.shape[0]
    out = jnp.zeros((M, weights.shape[2]), jnp.float32)
    for e in range(weights.shape[0]):
        mask = _group_mask(group_sizes, e, M)
        product = jnp.dot(jnp.where(mask, rows, 0), weights[e], preferred_element_type=jnp.float32)
        out = out + jnp.where(mask, product, 0.0)
    return out.astype(rows.dtype)


def grouped_matmul_dw(
    rows: Float[Array, "M D"], dout: Float[Array, "M F"], group_sizes: Int[Array, "L"]
) -> Float[Array, "L D F"]:
    """dweights[e] = rows[group e]ᵀ @ dout[group e], float32 accumulation; exactly zero for an empty group."""
    M, grads = rows.shape[0], []
    for e in range(group_sizes.shape[0]):
        mask = _group_mask(group_sizes, e, M)
        a, b = jnp.where(mask, rows, 0), jnp.where(mask, dout, 0)
        grads.append(jnp.dot(a.T, b, preferred_element_type=jnp.float32))
    return jnp.stack(grads).astype(rows.dtype)
