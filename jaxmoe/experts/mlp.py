"""The SwiGLU expert, cut where the schedules cut it: `up` makes pre-activations, `down` ends in weighted sums.

Backward keeps the rows, the pre-activation and the weights only. The gradient of a combine weight is the inner product
of a row's output with the token's cotangent; written <h W, g> = <h, g Wᵀ> it needs no stored output, since g Wᵀ is made
for the data gradient anyway. (The same regrouping is used in SonicMoE, Guo et al. 2025.)
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.experts import pallas
from jaxmoe.experts.api import choose_backend, grouped_matmul, product, product_dw
from jaxmoe.permute import xla as rows_xla
from jaxmoe.permute.api import permute
from jaxmoe.routing.plan import RowMap


def swiglu(pre: Float[Array, "M 2*F"]) -> Float[Array, "M F"]:
    """silu(pre[:, :F]) · pre[:, F:], in float32, rounded once.

    Example:
      >>> import jax.numpy as jnp
      >>> swiglu(jnp.array([[0.0, 3.0]])).tolist()
      [[0.0]]

    References: Shazeer, "GLU variants improve transformer" (2020).
    """
    gate, up = jnp.split(pre.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(pre.dtype)


def expert_up(
    x: Float[Array, "N D"], gate_up: Float[Array, "L D 2*F"], row_map: RowMap, backend: str | None = None
) -> Float[Array, "M 2*F"]:
    """pre = grouped_matmul(permute(x), gate_up): the gate and up products of every row.

    Args:
      x: [N, D] the tokens at this rank.
      gate_up: [L, D, 2F], gate in the first F columns.
      row_map: of these tokens and this rank's experts.
      backend: of the grouped matmul.

    Returns:
      [M, 2F] pre-activations; rows past sum(group_sizes) are unspecified.
    """
    return grouped_matmul(permute(x, row_map), gate_up, row_map.group_sizes, backend=backend)


def expert_down(
    pre: Float[Array, "M 2*F"],
    down: Float[Array, "L F D"],
    weights: Float[Array, "N K"],
    row_map: RowMap,
    backend: str | None = None,
) -> Float[Array, "N D"]:
    """y[n] = Σ_k w[n, k] · (swiglu(pre) @ down)[row_of_slot[n, k]], over this rank's experts.

    Args:
      pre: [M, 2F] from `expert_up`.
      down: [L, F, D].
      weights: [N, K] float32.
      row_map: the one that `expert_up` took.
      backend: of the grouped matmul.

    Returns:
      [N, D] float32: this rank's part of every token's sum.
    """
    return _down(pre, down, weights, row_map, backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _down(pre, down, weights, row_map, backend):
    out = product(swiglu(pre), down, row_map.group_sizes, backend)
    return rows_xla.combine(out, weights, row_map)


def _down_fwd(pre, down, weights, row_map, backend):
    return _down(pre, down, weights, row_map, backend), (pre, down, weights, row_map)


def _down_bwd(backend, saved, dy):
    pre, down, weights, row_map = saved
    sizes = row_map.group_sizes
    live = (row_map.slot_of_row >= 0)[:, None]
    h, swiglu_vjp = jax.vjp(swiglu, jnp.where(live, pre, 0))
    g = rows_xla.permute(dy.astype(pre.dtype), row_map)
    dh = jnp.where(live, product(g, down, sizes, backend, transpose=True), 0)
    dw_row = (h.astype(jnp.float32) * dh.astype(jnp.float32)).sum(-1)
    at = row_map.row_of_slot
    dweights = jnp.where(at >= 0, dw_row[jnp.maximum(at, 0)], 0.0)
    scale = rows_xla.row_weights(weights, row_map)[:, None]
    ddown = product_dw((scale * h).astype(pre.dtype), g, sizes, backend)
    (dpre,) = swiglu_vjp((scale * dh).astype(pre.dtype))
    return dpre, ddown, dweights.astype(weights.dtype), None


_down.defvjp(_down_fwd, _down_bwd)


def expert_up_activated(
    x: Float[Array, "N D"], gate_up: Float[Array, "L D 2*F"], row_map: RowMap, backend: str | None = None
) -> Float[Array, "M F"]:
    """h = swiglu(grouped_matmul(permute(x), gate_up)), for calls that take no gradient.

    Where the pallas kernel runs it is one pass, and the 2F columns of the product are never written. Arguments as
    `expert_up`.
    """
    rows, sizes = permute(x, row_map), row_map.group_sizes
    widths = gate_up.shape[1], gate_up.shape[2] // 2
    if choose_backend(backend, num_rows=rows.shape[0], widths=widths, dtype=rows.dtype) == "pallas":
        return pallas.grouped_swiglu(rows, gate_up, sizes)
    return swiglu(product(rows, gate_up, sizes, backend))


def expert_down_activated(
    h: Float[Array, "M F"],
    down: Float[Array, "L F D"],
    weights: Float[Array, "N K"],
    row_map: RowMap,
    backend: str | None = None,
) -> Float[Array, "N D"]:
    """y[n] = Σ_k w[n, k] · (h @ down)[row_of_slot[n, k]], behind `expert_up_activated`."""
    return rows_xla.combine(product(h, down, row_map.group_sizes, backend), weights, row_map)
