"""The weight gradient of the grouped matmul, for Hopper: for each group the product of its rows' transposes.

The contraction runs over a group's rows, whose edges may be anywhere. Steps take 64 rows from the multiple of 8 at or
before the group's first row, because the copy engine fills wgmma's 8-row cells only from multiples of 8. A cell that a
group does not fill is copied from a small buffer of masked edge rows instead, and cells behind the group are read
past the end of the array, where the copy engine writes zeros. So neither a neighbour's rows nor the tail get in, and
the inner loop knows no masks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.hopper import SWIZZLE, TILE_K, TILED
from pallas_kernels.grouped_matmul.config import Config

_CELL = 8
_CELLS = TILE_K // _CELL  # of a step
_BLOCK = 64
_COMPUTE = 2


def edge_rows(x: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
    """The first and the last 8-row cell that each group touches, rows of others zeroed: [G·2·8, columns]."""
    first = begin // _CELL
    last = jnp.maximum(first, (end + (_CELL - 1)) // _CELL - 1)
    row = jnp.stack([first, last], axis=1)[:, :, None] * _CELL + jnp.arange(_CELL)
    mine = (row >= begin[:, None, None]) & (row < end[:, None, None])
    rows = x[jnp.clip(row, 0, x.shape[0] - 1).reshape(-1)]
    return jnp.where(mine.reshape(-1, 1), rows, 0)


def weight_grad(lhs, dout, group_sizes, *, config: Config, out_dtype, num_sms, interpret):
    """Launches the kernel; see `grouped_matmul_dw` for the arguments."""
    if pad := -lhs.shape[0] % _CELL:
        lhs, dout = (jnp.pad(x, ((0, pad), (0, 0))) for x in (lhs, dout))
    M, D = lhs.shape
    F = dout.shape[1]
    G = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes.astype(jnp.int32), dtype=jnp.int32)
    begins = ends - group_sizes
    spans = jnp.stack([begins, ends], axis=1)

    stages = config.stages
    blocks = config.rows // _BLOCK // _COMPUTE  # of a compute warpgroup
    num_rows = pl.cdiv(D, config.cluster_rows)
    num_cols = pl.cdiv(F, config.cols)
    clusters = num_sms // config.cluster_size
    share = "pair" if config.cluster else None
    chunk = 128 // jnp.dtype(out_dtype).itemsize  # columns in a swizzled row of the staging
    staged = min(config.staged, blocks * config.cols // chunk)
    emulated = bool(interpret)

    def body(spans_ref, lhs_ref, dout_ref, lhs_edges_ref, dout_edges_ref, out_ref, *scratch):
        a, b, staging, full, full_edge, free = scratch
        warpgroup = lax.axis_index("warpgroup")
        peer = lax.axis_index("pair") if config.cluster else jnp.int32(0)
        first = lax.axis_index("cluster")
        per_group = num_rows * num_cols
        mine = lax.div(G * per_group - first + (clusters - 1), jnp.int32(clusters))

        def place(i):
            tile = first + i * clusters
            group = lax.div(tile, jnp.int32(per_group))
            # Bands of row tiles, column by column: what is read at one time is near a square, the least L2 traffic.
            within = tile - group * per_group
            band = lax.div(within, jnp.int32(config.band * num_cols))
            within = within - band * (config.band * num_cols)
            band_width = jnp.minimum(config.band, num_rows - band * config.band)
            col = lax.div(within, band_width)
            row = band * config.band + within - col * band_width
            begin, end = spans_ref[group, 0], spans_ref[group, 1]
            first_cell = lax.div(begin, jnp.int32(_CELL))
            cells = jnp.where(end > begin, lax.div(end + (_CELL - 1), jnp.int32(_CELL)) - first_cell, 0)
            steps = lax.div(cells + (_CELLS - 1), jnp.int32(_CELLS))
            head, tail = lax.rem(begin, jnp.int32(_CELL)) != 0, lax.rem(end, jnp.int32(_CELL)) != 0
            open_end = tail | (lax.rem(cells, jnp.int32(_CELLS)) != 0)

            def is_edge(k):
                return ((k == 0) & head) | ((k == steps - 1) & open_end)

            at = (row * config.cluster_size + peer) * config.rows, col * config.cols
            return group, *at, (first_cell, cells, head, tail), steps, is_edge

        def produce():
            plgpu.set_max_registers(40, action="decrease")

            def one_tile(i, step):
                group, row, col, (first_cell, cells, head, tail), steps, is_edge = place(i)
                wide, across = pl.ds(row, config.rows), pl.ds(col, config.cols)

                def load(k, step):
                    slot = lax.rem(step, jnp.int32(stages))
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))

                    def inside():
                        along = pl.ds(pl.multiple_of((first_cell + k * _CELLS) * _CELL, _CELL), TILE_K)
                        plgpu.copy_gmem_to_smem(lhs_ref.at[along, wide], a.at[slot], full.at[slot])
                        plgpu.copy_gmem_to_smem(
                            dout_ref.at[along, across], b.at[slot], full.at[slot], collective_axes=share
                        )

                    def edge():
                        for c in range(_CELLS):
                            cell = k * _CELLS + c
                            is_head, is_tail = (cell == 0) & head, (cell == cells - 1) & tail
                            to = pl.ds(c * _CELL, _CELL)

                            def copy(x, dy, cell_row, to=to):
                                along = pl.ds(pl.multiple_of(cell_row, _CELL), _CELL)
                                into = full_edge.at[slot]
                                plgpu.copy_gmem_to_smem(x.at[along, wide], a.at[slot, to], into)
                                plgpu.copy_gmem_to_smem(
                                    dy.at[along, across], b.at[slot, to], into, collective_axes=share
                                )

                            masked = (2 * group + jnp.where(is_head, 0, 1)) * _CELL
                            whole = jnp.where(cell < cells, (first_cell + cell) * _CELL, M)
                            special = is_head | is_tail
                            pl.when(special)(functools.partial(copy, lhs_edges_ref, dout_edges_ref, masked))
                            pl.when(~special)(functools.partial(copy, lhs_ref, dout_ref, whole))

                    on_edge = is_edge(k)
                    pl.when(on_edge)(edge)
                    pl.when(~on_edge)(inside)
                    return step + 1

                return lax.fori_loop(0, steps, load, step)

            steps = lax.fori_loop(0, mine, one_tile, jnp.int32(0))
            last = jnp.minimum(steps, stages)
            lax.fori_loop(
                0, last, lambda d, _: plgpu.barrier_wait(free.at[lax.rem(steps - last + d, jnp.int32(stages))]), None
            )

        def multiply(accs, step, steps, is_edge):
            def one_step(k, _):
                slot = lax.rem(step + k, jnp.int32(stages))
                on_edge = is_edge(k)
                pl.when(on_edge)(lambda: plgpu.barrier_wait(full_edge.at[slot]))
                pl.when(~on_edge)(lambda: plgpu.barrier_wait(full.at[slot]))
                for j, acc in enumerate(accs):
                    columns = pl.ds((warpgroup * blocks + j) * _BLOCK, _BLOCK)
                    plgpu.wgmma(acc, a.at[slot, :, columns].transpose((1, 0)), b.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            lax.fori_loop(0, steps, one_step, None)

        def consume():
            plgpu.set_max_registers(232, action="increase")

            def one_tile(i, step):
                group, row, col, _, steps, is_edge = place(i)

                def scope(*accs):
                    multiply(accs, step, steps, is_edge)
                    count = 0
                    for j, acc in enumerate(accs):
                        value = acc[...]
                        rows = pl.ds(row + (warpgroup * blocks + j) * _BLOCK, _BLOCK)
                        for c in range(0, config.cols, chunk):
                            slot = count % staged
                            count += 1
                            plgpu.wait_smem_to_gmem(staged - 1 if count > 1 else 0, wait_read_only=True)
                            staging[warpgroup, slot] = value[:, c : c + chunk].astype(out_dtype)
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(
                                staging.at[warpgroup, slot], out_ref.at[group, rows, pl.ds(col + c, chunk)]
                            )

                pl.run_scoped(scope, *[plgpu.ACC((_BLOCK, config.cols), jnp.float32)] * blocks)
                return step + steps

            lax.fori_loop(0, mine, one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup < _COMPUTE)(consume)
        pl.when(warpgroup == _COMPUTE)(produce)

    tiled = () if emulated else TILED
    free: dict[str, Any] = dict(num_arrivals=_COMPUTE, num_barriers=stages)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((G, D, F), out_dtype),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(2,) if config.cluster else (),
        cluster_names=("pair",) if config.cluster else (),
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, TILE_K, config.rows), lhs.dtype, transforms=tiled),
            plgpu.SMEM((stages, TILE_K, config.cols), dout.dtype, transforms=tiled),
            plgpu.SMEM(
                (_COMPUTE, staged, _BLOCK, chunk),
                out_dtype,
                transforms=() if emulated else (plgpu.TilingTransform((8, chunk)), SWIZZLE),
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2 * _CELLS, num_barriers=stages),
            plgpu.ClusterBarrier(collective_axes=("pair",), **free) if config.cluster else plgpu.Barrier(**free),
        ],
        kernel_name="grouped_matmul_dw",
        interpret=interpret,
    )(spans, lhs, dout, edge_rows(lhs, begins, ends), edge_rows(dout, begins, ends))
