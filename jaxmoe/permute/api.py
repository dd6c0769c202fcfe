"""Permute tokens into the expert-sorted buffer, and combine its rows back into tokens."""

from types import ModuleType

from jaxtyping import Array, Float

from jaxmoe.permute import reference, xla
from jaxmoe.routing.plan import RowMap

BACKENDS: dict[str, ModuleType] = {"reference": reference, "xla": xla}


def _backend(name: str | None) -> ModuleType:
    if name is None:
        return xla
    if name not in BACKENDS:
        raise ValueError(
            f"the permute backend must be one of {sorted(BACKENDS)}; got {name!r}. Use one of them, or None."
        )
    return BACKENDS[name]


def permute(x: Float[Array, "N D"], row_map: RowMap, *, backend: str | None = None) -> Float[Array, "M D"]:
    """rows[row_of_slot[n, k]] = x[n]: each token copied to the rows of its slots.

    Args:
      x: [N, D], any float dtype.
      row_map: from `jaxmoe.routing.row_map`.
      backend: "reference", "xla" or None, which takes "xla".

    Returns:
      [M, D] rows sorted by local expert. Rows past sum(group_sizes) are unspecified.

    Raises:
      ValueError: no such backend.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe.routing import row_map
      >>> m = row_map(jnp.array([[1], [0]]), 0, 2, 2)
      >>> permute(jnp.array([[1.0], [2.0]]), m).tolist()
      [[2.0], [1.0]]
    """
    return _backend(backend).permute(x, row_map)


def combine_rows(
    rows: Float[Array, "M D"], weights: Float[Array, "N K"], row_map: RowMap, *, backend: str | None = None
) -> Float[Array, "N D"]:
    """y[n] = Σ_k weights[n, k] · rows[row_of_slot[n, k]], in float32 and in slot order.

    With weights of 1 this is the transpose of `permute`: <permute(x), r> = <x, combine_rows(r, 1)>.

    Args:
      rows: [M, D], any float dtype.
      weights: [N, K] float32.
      row_map: the one that made the rows.
      backend: "reference", "xla" or None, which takes "xla".

    Returns:
      [N, D] float32, not yet rounded. Slots without a row add nothing, whatever lies in the buffer.

    Raises:
      ValueError: no such backend.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmoe.routing import row_map
      >>> m = row_map(jnp.array([[1, 0], [0, -1]]), 0, 2, 4)
      >>> combine_rows(jnp.array([[1.0], [2.0], [3.0], [jnp.nan]]), jnp.ones((2, 2)), m).tolist()
      [[4.0], [2.0]]
    """
    return _backend(backend).combine(rows, weights, row_map)
