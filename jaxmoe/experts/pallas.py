"""The grouped matmul as the Mosaic GPU kernel of `pallas_kernels`, on Hopper."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.mesh import vary_like
from pallas_kernels import grouped_matmul as kernels

_MULTIPLE = 64  # of widths, in the kernel
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def why_not(num_rows: int, widths: tuple[int, ...], dtype, device_kind: str) -> str | None:
    """The reason why the kernel cannot run a product of these sizes on this device, or None.

    Example:
      >>> import jax.numpy as jnp
      >>> why_not(64, (128, 100), jnp.bfloat16, "NVIDIA H200")
      'widths must be multiples of 64; got (128, 100)'
      >>> why_not(64, (128, 256), jnp.bfloat16, "NVIDIA H200") is None
      True
    """
    if not any(name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return f"it is written for Hopper GPUs; this device is {device_kind!r}"
    if jnp.dtype(dtype) not in _DTYPES:
        return f"it takes bfloat16 and float16; got {jnp.dtype(dtype)}"
    if any(w % _MULTIPLE for w in widths):
        return f"widths must be multiples of {_MULTIPLE}; got {widths}"
    return None if num_rows else "it needs a row; got M = 0"


def device_kind() -> str:
    """The kind of the default device; a CPU's when there is no GPU."""
    return jax.devices()[0].device_kind


def _check(rows, widths) -> None:
    reason = why_not(rows.shape[0], widths, rows.dtype, device_kind())
    if reason:
        raise NotImplementedError(
            f"experts backend 'pallas': {reason}. Use experts='xla', or None to let jaxmoe choose."
        )


def grouped_matmul(
    rows: Float[Array, "M D"], weights: Float[Array, "L D F"], group_sizes: Int[Array, "L"], transpose: bool = False
) -> Float[Array, "M F"]:
    """out[m] = rows[m] @ weights[group of m], or @ weightsᵀ with `transpose` (weights [L, F, D])."""
    _check(rows, weights.shape[1:])
    return vary_like(kernels.grouped_matmul(rows, weights, group_sizes, transpose_rhs=transpose), rows, weights)


def grouped_matmul_dw(
    rows: Float[Array, "M D"], dout: Float[Array, "M F"], group_sizes: Int[Array, "L"]
) -> Float[Array, "L D F"]:
    """dweights[e] = rows[group e]ᵀ @ dout[group e]."""
    _check(rows, (rows.shape[1], dout.shape[1]))
    return vary_like(kernels.grouped_matmul_dw(rows, dout, group_sizes), rows, dout)


def grouped_swiglu(
    rows: Float[Array, "M D"], weights: Float[Array, "L D 2*F"], group_sizes: Int[Array, "L"]
) -> Float[Array, "M F"]:
    """silu(rows @ gate) · (rows @ up) in one pass: the product's 2F columns are not written."""
    _check(rows, (weights.shape[1], weights.shape[2] // 2))
    return vary_like(kernels.grouped_swiglu(rows, weights, group_sizes), rows, weights)
