"""Permute and combine as gathers alone, each with its derivative derived beside it.

With R[m] = slot_of_row and P[n, k] = row_of_slot, inverse to each other where defined:

  permute:  rows[m] = x[R[m] div K]            dx[n]   = Σ_k drows[P[n, k]]
  combine:  y[n]    = Σ_k w[n, k] rows[P[n,k]] drows[m] = w[R[m]] · dy[R[m] div K]
                                               dw[n, k] = <rows[P[n, k]], dy[n]>

So no direction needs a scatter, and the sums run in slot order in float32 with one rounding at the end.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.plan import RowMap


def _rows_of(x, row_map: RowMap):
    """x[token of row]; rows past the last one are zero, so that they poison nothing."""
    K = row_map.row_of_slot.shape[1]
    slot = row_map.slot_of_row
    return jnp.where((slot >= 0)[:, None], x[jnp.maximum(slot, 0) // K], 0)


def _slot_sum(rows, weights, row_map: RowMap):
    """Σ_k weights[n, k] · rows[row_of_slot[n, k]] in float32; weights of None are ones."""
    N, K = row_map.row_of_slot.shape
    y = jnp.zeros((N, rows.shape[1]), jnp.float32)
    for k in range(K):
        at = row_map.row_of_slot[:, k]
        row = jnp.where((at >= 0)[:, None], rows[jnp.maximum(at, 0)], 0).astype(jnp.float32)
        y = y + (row if weights is None else jnp.where(at >= 0, weights[:, k], 0)[:, None] * row)
    return y


@jax.custom_vjp
def permute(x: Float[Array, "N D"], row_map: RowMap) -> Float[Array, "M D"]:
    """rows[m] = x[slot_of_row[m] div K]."""
    return _rows_of(x, row_map)


def _permute_fwd(x, row_map):
    return _rows_of(x, row_map), row_map


def _permute_bwd(row_map, drows):
    return _slot_sum(drows, None, row_map).astype(drows.dtype), None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def combine(rows: Float[Array, "M D"], weights: Float[Array, "N K"], row_map: RowMap) -> Float[Array, "N D"]:
    """y[n] = Σ_k weights[n, k] · rows[row_of_slot[n, k]], float32."""
    return _slot_sum(rows, weights, row_map)


def _combine_fwd(rows, weights, row_map):
    return _slot_sum(rows, weights, row_map), (rows, weights, row_map)


def row_weights(weights: Float[Array, "N K"], row_map: RowMap) -> Float[Array, "M"]:
    """w[slot_of_row[m]], 0 past the last row."""
    slot = row_map.slot_of_row
    return jnp.where(slot >= 0, weights.reshape(-1)[jnp.maximum(slot, 0)], 0.0)


def _combine_bwd(saved, dy):
    rows, weights, row_map = saved
    drows = (row_weights(weights, row_map)[:, None] * _rows_of(dy, row_map)).astype(rows.dtype)
    dot = []
    for k in range(weights.shape[1]):
        at = row_map.row_of_slot[:, k]
        row = jnp.where((at >= 0)[:, None], rows[jnp.maximum(at, 0)], 0).astype(jnp.float32)
        dot.append((row * dy).sum(-1))
    return drows, jnp.stack(dot, axis=-1).astype(weights.dtype), None


combine.defvjp(_combine_fwd, _combine_bwd)
