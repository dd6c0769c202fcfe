"""The grouped matmul as `lax.ragged_dot`."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# d weights: contract the ragged row dimension of both sides, one product a group.
DW = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def without_tail(rows: Float[Array, "M D"], group_sizes: Int[Array, "L"]) -> Float[Array, "M D"]:
    """Rows of no group become zero: XLA's dense form multiplies them all, and 0·NaN is NaN."""
    return jnp.where((jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None], rows, 0)


def used_weights(weights: Float[Array, "L D F"], group_sizes: Int[Array, "L"]) -> Float[Array, "L D F"]:
    """An unused expert's weights become zero: they may hold anything, and the dense form would spread a NaN."""
    return jnp.where((group_sizes > 0)[:, None, None], weights, 0)


def grouped_matmul(
    rows: Float[Array, "M D"], weights: Float[Array, "L D F"], group_sizes: Int[Array, "L"], transpose: bool = False
) -> Float[Array, "M F"]:
    """out[m] = rows[m] @ weights[group of m], or @ weightsᵀ with `transpose` (weights [L, F, D])."""
    if transpose:
        weights = weights.swapaxes(1, 2)
    used = used_weights(weights, group_sizes)
    out = lax.ragged_dot(without_tail(rows, group_sizes), used, group_sizes, preferred_element_type=jnp.float32)
    return out.astype(rows.dtype)


def grouped_matmul_dw(
    rows: Float[Array, "M D"], dout: Float[Array, "M F"], group_sizes: Int[Array, "L"]
) -> Float[Array, "L D F"]:
    """dweights[e] = rows[group e]ᵀ @ dout[group e]."""
    a, b = without_tail(rows, group_sizes), without_tail(dout, group_sizes)
    out = lax.ragged_dot_general(a, b, group_sizes, DW, preferred_element_type=jnp.float32)
    return out.astype(rows.dtype)
