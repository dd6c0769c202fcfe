"""The product of sorted rows with their group's matrix, for Hopper.

Three warpgroups a block: one keeps the copy engine busy, two multiply. The grid is persistent: each cluster walks
over tiles, and the copies of the next tile start while the last one is still being stored.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.hopper import ROWS, TILE_K, TILED
from pallas_kernels.grouped_matmul.config import Config
from pallas_kernels.grouped_matmul.tiles import BAND, BASE, BLOCK, END, GROUP, WIDTH

_COMPUTE = 2  # warpgroups that multiply


def views(shape, dtype, *, interpret: bool):
    """One piece of shared memory seen by wgmma (tiled) and by the copy engine (rows). The interpreter knows no tiles,
    and treats the members of a union as different memory, so there it is one plain reference."""
    if interpret:
        return plgpu.SMEM(shape, dtype)
    return plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=TILED), plgpu.SMEM(shape, dtype, transforms=ROWS))


def split_views(ref, *, interpret: bool):
    """The tiled view and the view as rows of what `views` made."""
    return (ref, ref) if interpret else ref


def store_edge(staged, at, out, row, col, valid):
    """Copies the first `valid` < 64 rows of the 64 × 64 block staged[at] to out[row:, col:]. A copy's size is fixed, so
    the rows go out in pieces of 32, 16, …, 1: the binary digits of `valid`."""
    start = 0
    for size in (32, 16, 8, 4, 2, 1):
        piece = functools.partial(
            plgpu.copy_smem_to_gmem,
            staged.at[(*at, pl.ds(start, size))],
            out.at[pl.ds(row + start, size), pl.ds(col, TILE_K)],
        )
        pl.when((valid & size) != 0)(piece)
        start = start + (valid & size)


def forward(lhs, rhs, table, count, *, config: Config, transpose_rhs, swiglu, save_preactivation, num_sms, interpret):
    """Launches the kernel; see `grouped_matmul` for the arguments. Returns a list of outputs."""
    M, D = lhs.shape
    F = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    panels = 2 if swiglu else 1
    F_out = F // panels
    width = config.cols // panels  # columns of each panel in a block's tile
    blocks = config.rows // BLOCK
    mine_blocks = blocks // _COMPUTE if config.split == "rows" else blocks
    mine_width = width if config.split == "rows" else width // _COMPUTE
    k_steps = pl.cdiv(D, TILE_K)
    num_cols = pl.cdiv(F_out, config.cluster_cols // panels)
    clusters = num_sms // config.cluster_size
    stages = config.stages
    outputs = 1 if not swiglu else 3 if save_preactivation else 1
    staged = min(config.staged, mine_blocks * outputs * mine_width // TILE_K)
    share_lhs = "across" if config.cluster == "cols" else None
    share_rhs = "down" if config.cluster == "rows" else None
    axes = tuple(axis for axis in (share_rhs, share_lhs) if axis)
    emulated = bool(interpret)

    def body(table_ref, count_ref, lhs_ref, rhs_ref, *refs):
        *out_refs, a, b, staging, full, free = refs
        a_tiled, a_rows = split_views(a, interpret=emulated)
        o_tiled, o_rows = split_views(staging, interpret=emulated)
        warpgroup = lax.axis_index("warpgroup")
        down = lax.axis_index("down") if share_rhs else 0
        across = lax.axis_index("across") if share_lhs else 0
        first = lax.axis_index("cluster")
        num_tiles = count_ref[0]
        mine = lax.div(num_tiles * num_cols - first + (clusters - 1), jnp.int32(clusters))

        def step_of(i):
            return jnp.clip(first + i * clusters, 0, jnp.maximum(num_tiles * num_cols - 1, 0))

        def look_up_band(i):
            at = lax.div(step_of(i), jnp.int32(num_cols))
            return table_ref[at, BAND], table_ref[at, WIDTH]

        def look_up_tile(i, band_and_width):
            band, band_width = band_and_width
            within = step_of(i) - band * num_cols
            col = lax.div(within, band_width)
            tile = band + within - col * band_width
            return table_ref[tile, GROUP], table_ref[tile, BASE], table_ref[tile, END], col

        def place(group, base, end, col):
            """Group, first row, end of the rows, row blocks in use, column tile; of this block, not of its cluster."""
            in_use = lax.div(end - base + (BLOCK - 1), jnp.int32(BLOCK))
            if share_rhs:  # Halve what there is, so that a short tile keeps both peers busy.
                upper = lax.div(in_use + 1, jnp.int32(2))
                base = base + jnp.where(down == 0, 0, upper * BLOCK)
                in_use = jnp.where(down == 0, upper, in_use - upper)
            if share_lhs:
                col = col * 2 + across
            return group, base, end, in_use, col

        def walk(one_tile):
            """Calls one_tile(place, step) for each of my tiles. A look-up is started one tile before its result is
            needed, the two of a tile two and one before: the table's latency (about 1000 cycles, a whole step of
            the ring) is never waited for. Returns the steps that went through the ring."""

            def go(i, carry):
                tile, next_band, step = carry
                next_tile = look_up_tile(i + 1, next_band)
                band_after = look_up_band(i + 2)
                one_tile(place(*tile), step)
                return next_tile, band_after, step + k_steps

            start = look_up_tile(0, look_up_band(0)), look_up_band(1), jnp.int32(0)
            return lax.fori_loop(0, mine, go, start)[2]

        def produce():
            plgpu.set_max_registers(40, action="decrease")

            def one_tile(now, step):
                group, base, _, _, col = now
                col = col * width

                def load(k, _):
                    slot = lax.rem(step + k, jnp.int32(stages))
                    pl.when(step + k >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    along = pl.ds(k * TILE_K, TILE_K)
                    for p in range(panels):
                        wide = pl.ds(col + p * F_out, width)
                        source = rhs_ref.at[group, wide, along] if transpose_rhs else rhs_ref.at[group, along, wide]
                        plgpu.copy_gmem_to_smem(source, b.at[slot, p], full.at[slot], collective_axes=share_rhs)
                    source = lhs_ref.at[pl.ds(base, config.rows), along]
                    plgpu.copy_gmem_to_smem(source, a_rows.at[slot], full.at[slot], collective_axes=share_lhs)

                lax.fori_loop(0, k_steps, load, None)

            steps = walk(one_tile)
            # Wait for the last hand-backs: a block must not end while its peer still signals it.
            last = jnp.minimum(steps, stages)
            lax.fori_loop(
                0, last, lambda d, _: plgpu.barrier_wait(free.at[lax.rem(steps - last + d, jnp.int32(stages))]), None
            )

        def mine_block(j):
            return j * _COMPUTE + warpgroup if config.split == "rows" else j

        def multiply(accs, step, first_col):
            """accs[j][p] += my lhs block j @ rhs panel p, over the whole contraction."""

            def one_step(k, _):
                slot = lax.rem(step + k, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                for j, row_accs in enumerate(accs):
                    for p, acc in enumerate(row_accs):
                        right = b.at[slot, p]
                        if config.split == "cols":
                            cut = pl.ds(first_col, mine_width)
                            right = right.at[cut] if transpose_rhs else right.at[:, cut]
                        if transpose_rhs:
                            right = right.transpose((1, 0))
                        plgpu.wgmma(acc, a_tiled.at[slot, pl.ds(mine_block(j) * BLOCK, BLOCK)], right)
                if accs:
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            lax.fori_loop(0, k_steps, one_step, None)

        def write(values, rows, valid, col):
            """values[j][p] are float32 [64, mine_width]; row block j goes to rows[j]."""
            pending = []
            for j, row_values in enumerate(values):
                if swiglu:
                    gate, up = row_values
                    pending.append((out_refs[0], j, col, gate / (1 + jnp.exp(-gate)) * up))
                    if save_preactivation:
                        pending.append((out_refs[1], j, col, gate))
                        pending.append((out_refs[1], j, col + F_out, up))
                else:
                    pending.append((out_refs[0], j, col, row_values[0]))
            cells = [(*item, c) for item in pending for c in range(0, mine_width, TILE_K)]
            for i in range(0, len(cells), staged):
                batch = list(enumerate(cells[i : i + staged]))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for slot, (out, _, _, value, c) in batch:
                    o_tiled[warpgroup, slot] = value[:, c : c + TILE_K].astype(out.dtype)
                plgpu.commit_smem()
                for j in sorted({item[1] for _, item in batch}):
                    cells_of_j = [(slot, out, start, c) for slot, (out, of, start, _, c) in batch if of == j]

                    def each(copy, cells_of_j=cells_of_j):
                        for slot, out, start, c in cells_of_j:
                            run = functools.partial(copy, slot, out, start + c)
                            # The copy engine drops what lies past the last column, but the gate's last column is
                            # followed by up columns, which another tile writes.
                            if swiglu and out is not out_refs[0] and start is col:
                                pl.when(start + c < F_out)(run)
                            else:
                                run()

                    def whole_block(slot, out, at, row=rows[j]):
                        block = out.at[pl.ds(row, BLOCK), pl.ds(at, TILE_K)]
                        plgpu.copy_smem_to_gmem(o_rows.at[warpgroup, slot], block)

                    def edge_block(slot, out, at, row=rows[j], valid=valid[j]):
                        store_edge(o_rows, (warpgroup, slot), out, row, at, valid)

                    whole, edge = functools.partial(each, whole_block), functools.partial(each, edge_block)

                    pl.when(valid[j] >= BLOCK)(whole)
                    pl.when(valid[j] < BLOCK)(edge)

        def consume():
            plgpu.set_max_registers(232, action="increase")
            first_col = 0 if config.split == "rows" else warpgroup * mine_width

            def one_tile(now, step):
                _, base, end, in_use, col = now
                col = col * width
                rows = [base + BLOCK * mine_block(j) for j in range(mine_blocks)]
                valid = [jnp.minimum(BLOCK, end - row) for row in rows]
                mine_in_use = sum((mine_block(j) < in_use).astype(jnp.int32) for j in range(mine_blocks))

                def run(n):
                    def scope(*flat):
                        accs = [flat[j * panels : (j + 1) * panels] for j in range(n)]
                        multiply(accs, step, first_col)
                        if n:
                            write([[acc[...] for acc in row] for row in accs], rows, valid, col + first_col)

                    shape = plgpu.ACC((BLOCK, mine_width), jnp.float32)
                    pl.run_scoped(scope, *[shape] * (n * panels)) if n else scope()

                for n in range(mine_blocks + 1):
                    pl.when(mine_in_use == n)(functools.partial(run, n))

            walk(one_tile)
            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup < _COMPUTE)(consume)
        pl.when(warpgroup == _COMPUTE)(produce)

    b_shape = (stages, panels, width, TILE_K) if transpose_rhs else (stages, panels, TILE_K, width)
    outs = [jax.ShapeDtypeStruct((M, F_out), lhs.dtype)]
    if swiglu and save_preactivation:
        outs.append(jax.ShapeDtypeStruct((M, F), lhs.dtype))
    free_barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=axes) if axes else plgpu.Barrier
    return plgpu.kernel(
        body,
        out_type=outs,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(2,) * len(axes),
        cluster_names=axes,
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=[
            views((stages, config.rows, TILE_K), lhs.dtype, interpret=emulated),
            plgpu.SMEM(b_shape, rhs.dtype, transforms=() if emulated else TILED),
            views((_COMPUTE, staged, BLOCK, TILE_K), lhs.dtype, interpret=emulated),
            plgpu.Barrier(num_arrivals=1 + panels, num_barriers=stages),
            free_barrier(num_arrivals=_COMPUTE, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=swiglu),
        kernel_name="grouped_matmul",
        interpret=interpret,
    )(table, count, lhs, rhs)
