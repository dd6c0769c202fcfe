"""Facts about Hopper (sm_90a) that the kernels share."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

SMEM_BYTES = 232_448  # what one block may take of an SM's shared memory
SMS = 132  # of an H100 or H200 SXM; used when no GPU is there to ask
TILE_K = 64  # elements of 2 bytes in the 128 bytes of one swizzle row

SWIZZLE = plgpu.SwizzleTransform(128)
# What wgmma reads: 8 × 64 cells, each swizzled.
TILED = (plgpu.TilingTransform((8, TILE_K)), SWIZZLE)
# The same bytes for a block 64 elements wide, seen as plain rows. The copy engine can start such a block at any row,
# where the tiled view can only start at multiples of 8.
ROWS = (SWIZZLE,)


def sm_count() -> int:
    """SMs of the default GPU, or an H200's where there is none (lowering ahead of time)."""
    if jax.default_backend() == "gpu":
        return jax.devices()[0].core_count
    return SMS
