"""Row maps: from expert ids to the places of rows in a buffer sorted by expert."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Where each (token, slot) lies in the expert-sorted buffer, and back.

    Attributes:
      row_of_slot: [N, K] int32, the row of a token's slot; -1 where it has none here.
      slot_of_row: [M] int32, n·K + k of each row; -1 past the last row.
      group_sizes: [L] int32, rows of each local expert; they lie one behind the other from row 0.
    """

    row_of_slot: Int[Array, "N K"]
    slot_of_row: Int[Array, "M"]
    group_sizes: Int[Array, "L"]


def row_map(expert_ids: Int[Array, "N K"], first_expert, num_local: int, num_rows: int) -> RowMap:
    """Sort the slots of this rank's experts by (expert, token, slot), stably.

    Args:
      expert_ids: [N, K] int32 global ids; ids of other ranks and -1 get no row.
      first_expert: the first of this rank's experts, a scalar that may be traced.
      num_local: L, this rank's experts.
      num_rows: M, the buffer's rows. N·min(K, L) holds every slot when ids are distinct within a token. Slots past
        it (only a caller's repeated ids get there) have no row, and `group_sizes` counts rows, so they show.

    Returns:
      A RowMap; the same input gives the same bits.

    Example:
      >>> import jax.numpy as jnp
      >>> m = row_map(jnp.array([[1, 0], [2, 1]]), 0, 2, 4)
      >>> m.row_of_slot.tolist(), m.slot_of_row.tolist(), m.group_sizes.tolist()
      ([[1, 0], [-1, 2]], [1, 0, 3, -1], [1, 2])
    """
    N, K = expert_ids.shape
    local = expert_ids.reshape(-1) - first_expert
    here = (local >= 0) & (local < num_local) & (expert_ids.reshape(-1) >= 0)
    key = jnp.where(here, local, num_local).astype(jnp.int32)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    # The inverse permutation: the place of every slot in sorted order.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(N * K, dtype=jnp.int32), unique_indices=True)
    ends = jnp.minimum(jnp.cumsum(jnp.bincount(key, length=num_local)), num_rows).astype(jnp.int32)
    group_sizes = jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))
    total = ends[-1]
    row_of_slot = jnp.where(here & (place < total), place, -1).reshape(N, K)
    padded = jnp.pad(order[:num_rows], (0, max(0, num_rows - N * K)), constant_values=-1)
    slot_of_row = jnp.where(jnp.arange(num_rows) < total, padded, -1)
    return RowMap(row_of_slot, slot_of_row, group_sizes)


def count_tokens(expert_ids: Int[Array, "N K"], num_experts: int) -> Int[Array, "E"]:
    """counts[e] = |{(n, k) : ids[n, k] = e}|; ids outside [0, E) are not counted.

    Example:
      >>> import jax.numpy as jnp
      >>> count_tokens(jnp.array([[0, 2], [2, -1]]), 3).tolist()
      [1, 0, 2]
    """
    ids = expert_ids.reshape(-1)
    key = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return jnp.bincount(key, length=num_experts).astype(jnp.int32)


def apply_capacity(
    expert_ids: Int[Array, "N K"], num_experts: int, capacity: int
) -> tuple[Int[Array, "N K"], Int[Array, "E"]]:
    """Keep each expert's first `capacity` slots in the order (token, slot); the others become -1.

    Args:
      expert_ids: [N, K] int32.
      num_experts: E.
      capacity: C, slots an expert keeps.

    Returns:
      The ids with dropped slots set to -1, and [E] int32, how many each expert dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> ids, dropped = apply_capacity(jnp.array([[0, 1], [0, 1], [0, -1]]), 2, 2)
      >>> ids.tolist(), dropped.tolist()
      ([[0, 1], [0, 1], [-1, -1]], [1, 0])

    References: GShard (Lepikhin et al., 2020) for capacity; its drop order is the same, first come first kept.
    """
    N, K = expert_ids.shape
    sorted_map = row_map(expert_ids, 0, num_experts, N * K)
    starts = jnp.cumsum(sorted_map.group_sizes) - sorted_map.group_sizes
    start_of_slot = starts[jnp.clip(expert_ids, 0, num_experts - 1)]
    keep = (sorted_map.row_of_slot >= 0) & (sorted_map.row_of_slot - start_of_slot < capacity)
    dropped = jnp.maximum(sorted_map.group_sizes - capacity, 0)
    return jnp.where(keep, expert_ids, -1), dropped
