"""Which rows each tile of the output takes: a small table, made by a few cheap XLA operations.

Tiles begin where their group begins, so a tile never holds two groups. A group's blocks of 64 rows are dealt out
evenly over as few tiles as hold them: tiles that take the same time keep the SMs in step, and SMs in step find each
other's operands in L2. (At DeepSeek-V3's up product that took the reads of memory from 8.0 to 3.7 GB.) The walk over
tiles keeps to one group as long as it can: its row tiles together (up to `band`), column by column.
"""

import jax
import jax.numpy as jnp

BLOCK = 64  # rows of one matrix instruction

GROUP, BASE, END, BAND, WIDTH = range(5)


def table_length(M: int, G: int, rows: int) -> int:
    """The most tiles of `rows` rows that M rows in G groups can need."""
    nonempty = min(M, G)
    return max(1, (M + (rows - 1) * nonempty) // rows)


def tile_table(group_sizes: jax.Array, M: int, rows: int, band: int) -> tuple[jax.Array, jax.Array]:
    """For each tile its group, its rows [base, end), and the band of tiles that it is walked with.

    Args:
        group_sizes: [G] int32, sum at most M.
        M: rows.
        rows: rows of a tile.
        band: the most tiles of a group that are walked together.

    Returns:
        table: [T, 5] int32, the columns group, base, end, band (its first tile), width (its tiles).
        count: [1] int32, how many of the T tiles are in use.
    """
    G = group_sizes.shape[0]
    sizes = group_sizes.astype(jnp.int32)
    # Sums under a triangle instead of cumsum: XLA fuses them into one kernel for the few groups there are.
    upto = jnp.arange(G)[:, None] >= jnp.arange(G)[None, :]
    ends = jnp.sum(jnp.where(upto, sizes[None, :], 0), axis=1, dtype=jnp.int32)
    blocks = (sizes + (BLOCK - 1)) // BLOCK
    tiles = (sizes + (rows - 1)) // rows
    tile_ends = jnp.sum(jnp.where(upto, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(table_length(M, G, rows), dtype=jnp.int32)
    passed = tile_ends[None, :] <= tile[:, None]
    group = jnp.minimum(jnp.sum(passed, axis=1, dtype=jnp.int32), G - 1)
    of_group = jnp.stack([ends, sizes, blocks, tile_ends, tiles], axis=1)[group]
    end, size, blocks, last, count = (of_group[:, i] for i in range(5))
    within = tile - (last - count)
    # `extra` tiles take one block more than the others.
    each = blocks // jnp.maximum(count, 1)
    extra = blocks - each * count
    base = end - size + BLOCK * (each * within + jnp.minimum(within, extra))
    tile_end = jnp.minimum(end, base + BLOCK * (each + (within < extra)))
    start = within // band * band
    columns = [group, base, tile_end, last - count + start, jnp.clip(count - start, 1, band)]
    return jnp.stack(columns, axis=1), tile_ends[-1:]
