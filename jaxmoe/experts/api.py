"""The grouped matmul: one product a local expert, over rows sorted by expert."""

import functools
import warnings
from types import ModuleType

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmoe.experts import pallas, reference, tokamax, xla
from jaxmoe.mesh import vary_like

BACKENDS: dict[str, ModuleType] = {"pallas": pallas, "reference": reference, "tokamax": tokamax, "xla": xla}


def choose_backend(
    name: str | None = None,
    *,
    num_rows: int,
    widths: tuple[int, ...],
    dtype: DTypeLike,
    device_kind: str | None = None,
) -> str:
    """The backend that one product takes: `name` if it is known, else the best one that can run it.

    Each direction of a product chooses for itself, since its widths are others.

    Args:
      name: a backend, or None to choose: "pallas" on a Hopper GPU for the sizes and dtypes that it takes, else "xla".
      num_rows: M.
      widths: the contracted and the output width.
      dtype: of rows and weights.
      device_kind: None is the default device's.

    Returns:
      The backend's name.

    Raises:
      ValueError: no such backend.

    Example:
      >>> choose_backend(num_rows=64, widths=(128, 256), dtype="bfloat16", device_kind="NVIDIA H200")
      'pallas'
      >>> choose_backend(num_rows=64, widths=(128, 256), dtype="bfloat16", device_kind="cpu")
      'xla'
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"the experts backend must be one of {sorted(BACKENDS)}; got {name!r}. Use one of them, or None to let "
            "jaxmoe choose."
        )
    kind = device_kind or pallas.device_kind()
    reason = pallas.why_not(num_rows, widths, dtype, kind)
    chosen = name or ("xla" if reason else "pallas")
    if chosen == "xla" and "NVIDIA" in kind:
        _warn_slow_on_cuda("it was asked for" if name else f"the pallas kernel cannot take over: {reason}")
    return chosen


@functools.cache
def _warn_slow_on_cuda(why: str) -> None:
    warnings.warn(
        f"experts backend 'xla' on CUDA ({why}): without cuDNN >= 9.22, lax.ragged_dot is a dense masked product "
        "(82 ms where a grouped kernel takes 0.9, with a 32 GiB temporary at Qwen3-30B-A3B sizes).",
        stacklevel=3,
    )


def product(rows, weights, group_sizes, backend: str | None, transpose: bool = False) -> jax.Array:
    """The chosen backend's product, without a derivative."""
    name = choose_backend(backend, num_rows=rows.shape[0], widths=weights.shape[1:], dtype=rows.dtype)
    return BACKENDS[name].grouped_matmul(rows, weights, group_sizes, transpose)


def product_dw(rows, dout, group_sizes, backend: str | None) -> jax.Array:
    """The chosen backend's weight gradient."""
    widths = rows.shape[1], dout.shape[1]
    name = choose_backend(backend, num_rows=rows.shape[0], widths=widths, dtype=rows.dtype)
    return BACKENDS[name].grouped_matmul_dw(rows, dout, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows, weights, group_sizes, backend):
    return product(rows, weights, group_sizes, backend)


def _product_fwd(rows, weights, group_sizes, backend):
    return _product(rows, weights, group_sizes, backend), (rows, weights, group_sizes)


def _product_bwd(backend, saved, dout):
    rows, weights, group_sizes = saved
    drows = product(dout, weights, group_sizes, backend, transpose=True)
    return drows, product_dw(rows, dout, group_sizes, backend), None


_product.defvjp(_product_fwd, _product_bwd)


def grouped_matmul(
    rows: Float[Array, "M D"],
    weights: Float[Array, "L D F"],
    group_sizes: Int[Array, "L"],
    *,
    backend: str | None = None,
) -> Float[Array, "M F"]:
    """out[m] = rows[m] @ weights[e(m)], with e(m) the group that row m lies in.

    The groups lie one behind the other from row 0. With drows = grouped_matmul(dout, weightsᵀ) and
    dweights[e] = rows[group e]ᵀ @ dout[group e]; an empty group's gradient is exactly zero.

    Args:
      rows: [M, D] float32, bfloat16 or float16. Rows past sum(group_sizes) may hold anything.
      weights: [L, D, F], the dtype of rows.
      group_sizes: [L] int32, summing to at most M.
      backend: "pallas" (Hopper), "reference", "xla", "tokamax" (an extra); None chooses by device, sizes, dtype.

    Returns:
      [M, F] in the dtype of rows, accumulated in float32. Rows past sum(group_sizes) are unspecified.

    Raises:
      ValueError: no such backend, or shapes or dtypes that do not fit each other.
      NotImplementedError: a backend asked for by name that cannot run this; the message names one that can.

    Example:
      >>> import jax.numpy as jnp
      >>> w = jnp.array([[[1.0]], [[10.0]]])
      >>> grouped_matmul(jnp.ones((3, 1)), w, jnp.array([1, 2])).tolist()
      [[1.0], [10.0], [10.0]]

    References: MegaBlocks (Gale et al., 2022).
    """
    L, D, _ = weights.shape
    if rows.shape[1] != D or group_sizes.shape != (L,):
        raise ValueError(
            f"grouped_matmul takes rows [M, D], weights [L, D, F] and group_sizes [L]; got {rows.shape}, "
            f"{weights.shape} and {group_sizes.shape}. Make D and L agree."
        )
    if rows.dtype != weights.dtype:
        raise ValueError(
            f"rows and weights must have one dtype; got {rows.dtype} and {weights.dtype}. Cast one: "
            f"weights.astype({rows.dtype})."
        )
    rows, weights = vary_like(rows, rows, weights), vary_like(weights, rows, weights)
    return _product(rows, weights, group_sizes, backend)
