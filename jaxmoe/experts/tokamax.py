"""The grouped matmul of tokamax (an extra), never chosen unless asked for by name."""

import importlib.util

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.experts.xla import DW, used_weights, without_tail
from jaxmoe.mesh import vary_like


def why_not() -> str | None:
    """Why this backend cannot run here, or None."""
    return None if importlib.util.find_spec("tokamax") else "tokamax is not installed: pip install 'jaxmoe[tokamax]'"


def _library():
    reason = why_not()
    if reason:
        raise NotImplementedError(f"experts backend 'tokamax': {reason}. Or use experts=None to let jaxmoe choose.")
    import tokamax

    return tokamax


def grouped_matmul(
    rows: Float[Array, "M D"], weights: Float[Array, "L D F"], group_sizes: Int[Array, "L"], transpose: bool = False
) -> Float[Array, "M F"]:
    """out[m] = rows[m] @ weights[group of m], or @ weightsᵀ with `transpose` (weights [L, F, D])."""
    library = _library()
    if transpose:
        weights = weights.swapaxes(1, 2)
    rows, weights = without_tail(rows, group_sizes), used_weights(weights, group_sizes)
    out = library.ragged_dot(rows, weights, group_sizes, preferred_element_type=jnp.float32)
    return vary_like(out.astype(rows.dtype), rows, weights)


def grouped_matmul_dw(
    rows: Float[Array, "M D"], dout: Float[Array, "M F"], group_sizes: Int[Array, "L"]
) -> Float[Array, "L D F"]:
    """dweights[e] = rows[group e]ᵀ @ dout[group e]."""
    library = _library()
    a, b = without_tail(rows, group_sizes), without_tail(dout, group_sizes)
    out = library.ragged_dot_general(a, b, group_sizes, DW, preferred_element_type=jnp.float32)
    return vary_like(out.astype(rows.dtype), rows, dout)
