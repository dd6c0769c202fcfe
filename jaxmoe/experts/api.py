"""The grouped matmul: one product a local expert, over rows sorted by expert."""

import functools
import warnings
from types import ModuleType

import jax
from jaxtyping import Array, Float, Int

from jaxmoe.experts import reference, xla

BACKENDS: dict[str, ModuleType] = {"reference": reference, "xla": xla}


def choose_backend(name: str | None = None, platform: str | None = None) -> str:
    """The backend that `grouped_matmul` takes: `name` if it is known, else the best of the platform.

    Args:
      name: a backend, or None to choose.
      platform: "cpu", "gpu", …; None is `jax.default_backend()`.

    Returns:
      The backend's name.

    Raises:
      ValueError: no such backend.

    Example:
      >>> choose_backend(None, "cpu")
      'xla'
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(
            f"the experts backend must be one of {sorted(BACKENDS)}; got {name!r}. Use one of them, or None to let "
            "jaxmoe choose."
        )
    chosen = name or "xla"
    if chosen == "xla" and (platform or jax.default_backend()) in ("gpu", "cuda"):
        _warn_slow_on_cuda()
    return chosen


@functools.cache
def _warn_slow_on_cuda() -> None:
    warnings.warn(
        "experts backend 'xla' on CUDA: without cuDNN >= 9.22, lax.ragged_dot is a dense masked product (82 ms where "
        "a grouped kernel takes 0.9, with a 32 GiB temporary at Qwen3-30B-A3B sizes).",
        stacklevel=3,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows, weights, group_sizes, backend):
    return BACKENDS[backend].grouped_matmul(rows, weights, group_sizes)


def _product_fwd(rows, weights, group_sizes, backend):
    return _product(rows, weights, group_sizes, backend), (rows, weights, group_sizes)


def _product_bwd(backend, saved, dout):
    rows, weights, group_sizes = saved
    drows = BACKENDS[backend].grouped_matmul(dout, weights.swapaxes(1, 2), group_sizes)
    return drows, BACKENDS[backend].grouped_matmul_dw(rows, dout, group_sizes), None


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
      backend: "reference", "xla" or None to choose by platform.

    Returns:
      [M, F] in the dtype of rows, accumulated in float32. Rows past sum(group_sizes) are unspecified.

    Raises:
      ValueError: no such backend, or shapes or dtypes that do not fit each other.

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
    return _product(rows, weights, group_sizes, choose_backend(backend))
