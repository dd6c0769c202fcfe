"""The public functions: check the arguments, choose tiles, launch."""

import jax
import jax.numpy as jnp

from pallas_kernels._common import hopper
from pallas_kernels.grouped_matmul.config import Config, choose_config, choose_dw_config
from pallas_kernels.grouped_matmul.forward import forward
from pallas_kernels.grouped_matmul.tiles import tile_table
from pallas_kernels.grouped_matmul.weight_grad import weight_grad

_MIN_ROWS = 64  # one matrix instruction


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    num_sms: int | None = None,
    config: Config | None = None,
    interpret=None,
) -> jax.Array:
    """Multiplies sorted rows with their group's matrix: out[m] = lhs[m] @ rhs[g(m)].

    g(m) is the group of row m: rows lie sorted by group, `group_sizes[g]` of them for group g. The data gradient is
    the same function: dlhs = grouped_matmul(dout, rhs, group_sizes, transpose_rhs=True).

    Args:
        lhs: [M, D] bfloat16 or float16. Rows past sum(group_sizes) may hold anything, NaN too.
        rhs: [G, D, F], or [G, F, D] with `transpose_rhs`; lhs's dtype.
        group_sizes: [G] int32, any sizes with sum ≤ M.
        num_sms: SMs that the kernel may take; None takes all.
        config: tile sizes; None takes them from a measured table.
        interpret: `plgpu.InterpretGPUParams(...)` runs on a CPU; None needs a Hopper GPU.

    Returns:
        [M, F] in lhs's dtype, summed in float32. Rows past sum(group_sizes) are unspecified.

    Raises:
        ValueError: shapes or dtypes that do not fit each other, `num_sms` out of range.
        NotImplementedError: a dtype or a size that the kernel cannot do; the `xla` backend can.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> rows, weights = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((2, 64, 128), jnp.bfloat16)
        >>> sizes = jnp.array([100, 28], jnp.int32)
        >>> out = grouped_matmul(rows, weights, sizes, num_sms=2, interpret=plgpu.InterpretGPUParams())
        >>> float(out[0, 0])
        64.0

    Idea: the block-sparse product of MegaBlocks (Gale et al., 2022); two multiplying warpgroups and shared copies
    from CUTLASS's persistent kernels for Hopper.
    """
    F = rhs.shape[1 if transpose_rhs else 2] if rhs.ndim == 3 else 0
    _check_forward(lhs, rhs, group_sizes, transpose_rhs)
    _check_multiple_of_64(D=lhs.shape[1], F=F)
    config = config or choose_config(lhs.shape[0], lhs.shape[1], F, rhs.shape[0], transpose_rhs=transpose_rhs)
    launch = dict(transpose_rhs=transpose_rhs, swiglu=False, save_preactivation=False)
    return _launch(lhs, rhs, group_sizes, config, num_sms, interpret, launch)[0]


def grouped_swiglu(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    save_preactivation: bool = False,
    num_sms: int | None = None,
    config: Config | None = None,
    interpret=None,
):
    """The up product and SwiGLU in one pass: p = lhs[m] @ rhs[g(m)], h = silu(p[:F]) · p[F:].

    h is made from the float32 sums, before any rounding.

    Args:
        lhs: [M, D] bfloat16 or float16, as in `grouped_matmul`.
        rhs: [G, D, 2F], gate in the first F columns, up in the last F; lhs's dtype.
        group_sizes: [G] int32.
        save_preactivation: also return p, which the backward needs.
        num_sms, config, interpret: as in `grouped_matmul`.

    Returns:
        h [M, F] in lhs's dtype; with `save_preactivation` the pair h, p [M, 2F].

    Raises:
        ValueError, NotImplementedError: as `grouped_matmul`, and for tiles split over columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> rows, weights = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((1, 64, 256), jnp.bfloat16)
        >>> sizes, interpret = jnp.array([64], jnp.int32), plgpu.InterpretGPUParams()
        >>> h = grouped_swiglu(rows, weights, sizes, num_sms=2, interpret=interpret)
        >>> h.shape, float(h[0, 0])
        ((64, 128), 4096.0)
    """
    _check_forward(lhs, rhs, group_sizes, False)
    if rhs.shape[2] % 2:
        raise ValueError(f"SwiGLU needs gate and up columns side by side, an even number; got rhs {rhs.shape}")
    F = rhs.shape[2] // 2
    _check_multiple_of_64(D=lhs.shape[1], F=F)
    config = config or choose_config(lhs.shape[0], lhs.shape[1], 2 * F, rhs.shape[0], swiglu=True)
    if config.split != "rows":
        raise ValueError(f"SwiGLU needs gate and up in one warpgroup: use split='rows', got {config}")
    launch = dict(transpose_rhs=False, swiglu=True, save_preactivation=save_preactivation)
    outs = _launch(lhs, rhs, group_sizes, config, num_sms, interpret, launch)
    return tuple(outs) if save_preactivation else outs[0]


def grouped_matmul_dw(
    lhs: jax.Array,
    dout: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype=None,
    num_sms: int | None = None,
    config: Config | None = None,
    interpret=None,
) -> jax.Array:
    """The gradient of `grouped_matmul` to its matrices: dw[g] = Σ over rows m of g of lhs[m]ᵀ dout[m].

    Args:
        lhs: [M, D] bfloat16 or float16. Rows past sum(group_sizes) may hold anything, NaN too. Unless M is a
            multiple of 8, both operands are copied once to pad them.
        dout: [M, F], lhs's dtype; the same holds for its rows.
        group_sizes: [G] int32, any sizes with sum ≤ M.
        out_dtype: lhs's dtype (None) or float32.
        num_sms, config, interpret: as in `grouped_matmul`.

    Returns:
        [G, D, F], summed in float32; exact zeros for an empty group.

    Raises:
        ValueError: shapes or dtypes that do not fit each other, `num_sms` out of range, tiles it cannot use.
        NotImplementedError: a dtype or a size that the kernel cannot do; the `xla` backend can.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.experimental.pallas import mosaic_gpu as plgpu
        >>> rows, dout = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
        >>> sizes, interpret = jnp.array([40, 0], jnp.int32), plgpu.InterpretGPUParams()
        >>> dw = grouped_matmul_dw(rows, dout, sizes, num_sms=2, interpret=interpret)
        >>> float(dw[0, 0, 0]), float(dw[1, 0, 0])
        (40.0, 0.0)
    """
    if lhs.ndim != 2 or dout.ndim != 2 or lhs.shape[0] != dout.shape[0] or lhs.dtype != dout.dtype:
        raise ValueError(
            f"the weight gradient takes lhs [M, D] and dout [M, F] of one dtype; got {lhs.dtype} {lhs.shape} and "
            f"{dout.dtype} {dout.shape}"
        )
    _check_common(lhs, group_sizes)
    _check_multiple_of_64(D=lhs.shape[1], F=dout.shape[1])
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.dtype(lhs.dtype), jnp.dtype(jnp.float32)):
        raise NotImplementedError(f"out_dtype is lhs's or float32, got {out_dtype}; cast, or use the `xla` backend")
    config = config or choose_dw_config()
    if config.split != "rows" or config.cluster == "cols":
        raise ValueError(f"the weight gradient needs split='rows' and cluster None or 'rows'; got {config}")
    sms = _sms(num_sms, config)
    return weight_grad(lhs, dout, group_sizes, config=config, out_dtype=out_dtype, num_sms=sms, interpret=interpret)


def _launch(lhs, rhs, group_sizes, config, num_sms, interpret, launch):
    M = lhs.shape[0]
    if M < _MIN_ROWS:
        lhs = jnp.pad(lhs, ((0, _MIN_ROWS - M), (0, 0)))
    table, count = tile_table(group_sizes, lhs.shape[0], config.cluster_rows, config.band)
    sms = _sms(num_sms, config)
    outs = forward(lhs, rhs, table, count, config=config, num_sms=sms, interpret=interpret, **launch)
    return [out[:M] for out in outs] if M < _MIN_ROWS else outs


def _check_forward(lhs, rhs, group_sizes, transpose_rhs):
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2 if transpose_rhs else 1] or lhs.dtype != rhs.dtype:
        layout = "[G, F, D]" if transpose_rhs else "[G, D, F]"
        raise ValueError(
            f"grouped_matmul takes lhs [M, D] and rhs {layout} of one dtype; got {lhs.dtype} {lhs.shape} and "
            f"{rhs.dtype} {rhs.shape}"
        )
    _check_common(lhs, group_sizes)
    if group_sizes.shape[0] != rhs.shape[0]:
        raise ValueError(f"one size per group: rhs has {rhs.shape[0]} groups, group_sizes {group_sizes.shape[0]}")


def _check_common(lhs, group_sizes):
    if lhs.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"the pallas grouped matmul takes bfloat16 or float16, got {lhs.dtype}; cast, or use the `xla` backend"
        )
    if group_sizes.ndim != 1 or group_sizes.shape[0] == 0 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes is [G] int32 with G ≥ 1, got {group_sizes.dtype} {group_sizes.shape}")
    if lhs.shape[0] == 0:
        raise NotImplementedError("the pallas grouped matmul needs a row, got M = 0; use the `xla` backend")


def _check_multiple_of_64(**sizes: int):
    for name, size in sizes.items():
        if size == 0 or size % hopper.TILE_K:
            raise NotImplementedError(
                f"the pallas grouped matmul needs {name} to be a multiple of {hopper.TILE_K}, got {size}; "
                "pad the weights, or use the `xla` backend"
            )


def _sms(num_sms: int | None, config: Config) -> int:
    most = hopper.sm_count()
    sms = most if num_sms is None else num_sms
    if not config.cluster_size <= sms <= most:
        raise ValueError(f"num_sms must be between {config.cluster_size} and the GPU's {most}, got {num_sms}")
    return sms
