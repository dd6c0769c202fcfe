"""Permute and combine as their definitions say: a scatter of tokens into rows, a sum over slots. Slow and obvious."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.plan import RowMap


def permute(x: Float[Array, "N D"], row_map: RowMap) -> Float[Array, "M D"]:
    """rows[row_of_slot[n, k]] = x[n]; rows that no slot has are zero."""
    N, K = row_map.row_of_slot.shape
    M = row_map.slot_of_row.shape[0]
    rows = jnp.where(row_map.row_of_slot >= 0, row_map.row_of_slot, M)  # M is out of bounds: dropped
    copies = jnp.broadcast_to(x[:, None], (N, K, x.shape[1]))
    return jnp.zeros((M, x.shape[1]), x.dtype).at[rows].set(copies, mode="drop")


def combine(rows: Float[Array, "M D"], weights: Float[Array, "N K"], row_map: RowMap) -> Float[Array, "N D"]:
    """y[n] = Σ_k weights[n, k] · rows[row_of_slot[n, k]], float32, slot by slot; absent slots add nothing."""
    N, K = row_map.row_of_slot.shape
    y = jnp.zeros((N, rows.shape[1]), jnp.float32)
    for k in range(K):
        at = row_map.row_of_slot[:, k]
        row = jnp.where((at >= 0)[:, None], rows[jnp.maximum(at, 0)], 0).astype(jnp.float32)
        y = y + jnp.where(at >= 0, weights[:, k], 0)[:, None] * row
    return y
