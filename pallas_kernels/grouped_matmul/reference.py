"""The grouped matmul as a loop over groups: slow, obvious, in float32. What the kernels are compared with."""

import jax
import jax.numpy as jnp


def _group_mask(group_sizes: jax.Array, group: int, M: int) -> jax.Array:
    end = jnp.cumsum(group_sizes)[group]
    row = jnp.arange(M)
    return (row >= end - group_sizes[group]) & (row < end)


def grouped_matmul_reference(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool = False
) -> jax.Array:
    """out[m] = lhs[m] @ rhs[g(m)], where g(m) is the group of row m; rows of no group give 0.

    Args:
        lhs: [M, D], rows sorted by group.
        rhs: [G, D, F], or [G, F, D] with `transpose_rhs`.
        group_sizes: [G] int32.

    Returns:
        [M, F] float32.
    """
    if transpose_rhs:
        rhs = rhs.swapaxes(1, 2)
    M = lhs.shape[0]
    out = jnp.zeros((M, rhs.shape[2]), jnp.float32)
    for g in range(rhs.shape[0]):
        product = jnp.dot(lhs.astype(jnp.float32), rhs[g].astype(jnp.float32), precision="highest")
        out = jnp.where(_group_mask(group_sizes, g, M)[:, None], product, out)
    return out


def swiglu_reference(preactivation: jax.Array) -> jax.Array:
    """silu(gate) · up, for [M, 2F] with the gate in the first F columns; [M, F] float32."""
    gate, up = jnp.split(preactivation.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


def grouped_matmul_dw_reference(lhs: jax.Array, dout: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """dw[g] = Σ_m∈g lhs[m]ᵀ dout[m]; an empty group gives exact zeros.

    Args:
        lhs: [M, D], rows sorted by group.
        dout: [M, F].
        group_sizes: [G] int32.

    Returns:
        [G, D, F] float32.
    """
    M = lhs.shape[0]
    groups = []
    for g in range(group_sizes.shape[0]):
        mine = _group_mask(group_sizes, g, M)[:, None]
        x = jnp.where(mine, lhs, 0).astype(jnp.float32)
        dy = jnp.where(mine, dout, 0).astype(jnp.float32)
        groups.append(jnp.dot(x.T, dy, precision="highest"))
    return jnp.stack(groups)
