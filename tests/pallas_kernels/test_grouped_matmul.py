"""The grouped matmul kernels against their references: interpreted on a CPU with race detection, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import Config, choose_config, grouped_matmul, grouped_matmul_dw, grouped_swiglu
from pallas_kernels.grouped_matmul.reference import (
    grouped_matmul_dw_reference,
    grouped_matmul_reference,
    swiglu_reference,
)
from pallas_kernels.grouped_matmul.tiles import tile_table

# A race is printed by jax 0.11 and raised by 0.12; `no_races` turns the print into a failure.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TOLERANCE = 5e-3  # one rounding to bfloat16 leaves 1.7e-3
SIZES = {
    "edges anywhere": [70, 0, 5, 150, 3],
    "multiples of 64": [64, 128, 0, 64],
    "all in one": [0, 0, 200],
    "all empty": [0, 0, 0],
    "one row each": [1, 1, 1, 1],
    "head and tail in one cell": [3, 2, 1, 9],
}
FORWARD = {
    "cols": Config(),
    "rows": Config(cluster="rows"),
    "alone": Config(cluster=None),
    "split over columns": Config(split="cols", cluster=None),
    "rows, split over columns": Config(split="cols", cluster="rows"),
    "wide": Config(rows=256, cols=128),
    "decode": Config(rows=64, split="cols", cluster=None),
    "192": Config(rows=256, cols=192, stages=3),
}


@pytest.fixture
def no_races(capfd):
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def operands(M, sizes, *second, D=128, kind="rhs", seed=0):
    """Random rows with a NaN tail, the second operand, and the sizes."""
    key = jax.random.split(jax.random.key(seed), 2)
    sizes = jnp.array(sizes, jnp.int32)
    n = int(sizes.sum())
    lhs = jax.random.normal(key[0], (M, D), jnp.bfloat16).at[n:].set(jnp.nan)
    other = jax.random.normal(key[1], second, jnp.bfloat16)
    if kind == "dout":
        other = other.at[n:].set(jnp.nan)
    return lhs, other, sizes, n


def assert_close(out, ref):
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    assert out.shape == ref.shape
    assert np.linalg.norm(out - ref) <= TOLERANCE * np.linalg.norm(ref)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("sizes", "transpose_rhs"), [(s, t) for t in (False, True) for s in list(SIZES.values())[: 1 if t else 6]]
)
def test_forward_follows_the_reference(sizes, transpose_rhs):
    G = len(sizes)
    lhs, rhs, sizes, n = operands(300, sizes, *((G, 192, 128) if transpose_rhs else (G, 128, 192)))
    out = grouped_matmul(lhs, rhs, sizes, transpose_rhs=transpose_rhs, config=Config(), num_sms=4, interpret=INTERPRET)
    assert_close(out[:n], grouped_matmul_reference(lhs, rhs, sizes, transpose_rhs=transpose_rhs)[:n])


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("config", FORWARD.values(), ids=FORWARD.keys())
def test_every_tiling_agrees(config):
    lhs, rhs, sizes, n = operands(300, [70, 0, 5, 150, 3], 5, 128, 192)
    out = grouped_matmul(lhs, rhs, sizes, config=config, num_sms=2, interpret=INTERPRET)
    assert_close(out[:n], grouped_matmul_reference(lhs, rhs, sizes)[:n])


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("config", [Config(), Config(cluster="rows"), Config(rows=256, cols=128)])
def test_swiglu_and_its_preactivation(config):
    lhs, rhs, sizes, n = operands(200, [70, 0, 5, 100], 4, 128, 384)
    run = functools.partial(grouped_swiglu, lhs, rhs, sizes, config=config, num_sms=2, interpret=INTERPRET)
    h, preactivation = run(save_preactivation=True)
    ref = grouped_matmul_reference(lhs, rhs, sizes)[:n]
    assert_close(preactivation[:n], ref)
    assert_close(h[:n], swiglu_reference(ref))
    np.testing.assert_array_equal(h[:n], run()[:n])


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    ("sizes", "out_dtype"), [(s, t) for t in (None, jnp.float32) for s in list(SIZES.values())[: 1 if t else 6]]
)
def test_weight_gradient_follows_the_reference(sizes, out_dtype):
    lhs, dout, sizes, _ = operands(296, sizes, 296, 192, kind="dout")
    dw = grouped_matmul_dw(lhs, dout, sizes, out_dtype=out_dtype, num_sms=2, interpret=INTERPRET)
    assert dw.dtype == (out_dtype or lhs.dtype)
    assert_close(dw, grouped_matmul_dw_reference(lhs, dout, sizes))
    assert not np.any(np.asarray(dw)[np.asarray(sizes) == 0])


@pytest.mark.parametrize("rows", [1, 63, 65])
def test_few_rows_and_rows_that_are_no_multiple_of_8(rows):
    lhs, rhs, sizes, _ = operands(rows, [rows], 1, 128, 64)
    out = grouped_matmul(lhs, rhs, sizes, num_sms=2, interpret=INTERPRET)
    assert_close(out, grouped_matmul_reference(lhs, rhs, sizes))
    dw = grouped_matmul_dw(lhs, out, sizes, num_sms=2, interpret=INTERPRET)
    assert_close(dw, grouped_matmul_dw_reference(lhs, out, sizes))


def test_neighbours_rows_do_not_leak_into_a_group():
    """A group's neighbours are infinite, in the same 64-row block and the same cell of 8 rows."""
    lhs, dout, sizes, _ = operands(64, [11, 20, 9], 64, 64, D=64, kind="dout")
    inside = (jnp.arange(64) >= 11) & (jnp.arange(64) < 31)
    lhs, dout = (jnp.where(inside[:, None], x, jnp.inf) for x in (lhs, dout))
    dw = grouped_matmul_dw(lhs, dout, sizes, num_sms=2, interpret=INTERPRET)
    rhs = jnp.ones((3, 64, 64), jnp.bfloat16)
    out = grouped_matmul(lhs, rhs, sizes, num_sms=2, interpret=INTERPRET)
    assert_close(dw[1], jnp.dot(lhs[11:31].T, dout[11:31], preferred_element_type=jnp.float32))
    assert np.isfinite(np.asarray(out[11:31], np.float32)).all()


def test_same_input_same_bits():
    lhs, rhs, sizes, n = operands(200, [70, 0, 5, 100], 4, 128, 128)
    first, second = (grouped_matmul(lhs, rhs, sizes, num_sms=2, interpret=INTERPRET)[:n] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("band", [1, 3])
def test_the_table_covers_each_row_once(rows, band):
    rng = np.random.default_rng(0)
    make = jax.jit(functools.partial(tile_table, M=30 * 700, rows=rows, band=band))
    for _ in range(50):
        sizes = rng.integers(0, 700, 30) * rng.integers(0, 2, 30)
        table, count = (np.asarray(x) for x in make(jnp.array(sizes, jnp.int32)))
        assert count[0] == sum(-(-sizes // rows))
        assert count[0] <= len(table)
        covered = np.concatenate([[], *(np.arange(base, end) for _, base, end, _, _ in table[: count[0]])])
        np.testing.assert_array_equal(covered, np.arange(sizes.sum()))
        starts = np.cumsum(sizes) - sizes
        for i, (group, base, end, first, width) in enumerate(table[: count[0]]):
            assert starts[group] <= base < end <= starts[group] + sizes[group]
            assert end - base <= rows
            assert first <= i < first + width <= count[0]
            assert width <= band
            assert set(table[first : first + width, 0]) == {group}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("D", "F", "G", "M"),
    # One a kind of tiles: split over columns, widths that are no multiple of 128, decode.
    [(7168, 4096, 32, 32768), (2880, 5760, 32, 4096), (768, 2048, 128, 1024)],
)
def test_the_models_shapes_lower_for_a_gpu(D, F, G, M):
    """Lowering runs Mosaic's layout inference: a tiling that cannot be compiled fails here, without a GPU."""

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    sizes = spec(G, dtype=jnp.int32)

    def lower(f, *args):
        return jax.jit(f).trace(*args, sizes).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lower(grouped_matmul, spec(M, D), spec(G, D, F))
    assert "mosaic_gpu" in lower(functools.partial(grouped_matmul, transpose_rhs=True), spec(M, F), spec(G, D, F))
    assert "mosaic_gpu" in lower(grouped_matmul_dw, spec(M, D), spec(M, F))
    with_preactivation = functools.partial(grouped_swiglu, save_preactivation=True)
    if F % 128 == 0:
        assert "mosaic_gpu" in lower(with_preactivation, spec(M, D), spec(G, D, F))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, w, s: grouped_matmul(x[:, :100], w[:, :100], s), NotImplementedError, "multiple of 64.*xla"),
        (lambda x, w, s: grouped_matmul(x.astype(jnp.float32), w.astype(jnp.float32), s), NotImplementedError, "xla"),
        (lambda x, w, s: grouped_matmul(x[:0], w, s), NotImplementedError, "xla"),
        (lambda x, w, s: grouped_matmul(x, w.astype(jnp.float16), s), ValueError, "one dtype"),
        (lambda x, w, s: grouped_matmul(x, w, s, transpose_rhs=True), ValueError, r"\[G, F, D\]"),
        (lambda x, w, s: grouped_matmul(x, w, s[:1]), ValueError, "one size per group"),
        (lambda x, w, s: grouped_matmul(x, w, s.astype(jnp.float32)), ValueError, "int32"),
        (lambda x, w, s: grouped_matmul(x, w, s, num_sms=1, config=Config()), ValueError, "num_sms must be between 2"),
        (lambda x, w, s: grouped_matmul(x, w, s, num_sms=10**6), ValueError, "num_sms must be"),
        (lambda x, w, s: grouped_swiglu(x, w, s, config=Config(split="cols")), ValueError, "split='rows'"),
        (lambda x, w, s: grouped_matmul_dw(x, x[:8], s), ValueError, r"dout \[M, F\]"),
        (lambda x, w, s: grouped_matmul_dw(x, x, s, config=Config()), ValueError, "cluster None or 'rows'"),
        (lambda x, w, s: grouped_matmul_dw(x, x, s, out_dtype=jnp.float16), NotImplementedError, "xla"),
    ],
)
def test_refusals_name_the_rule_and_the_remedy(call, error, words):
    x, w = jnp.zeros((64, 128), jnp.bfloat16), jnp.zeros((2, 128, 256), jnp.bfloat16)
    with pytest.raises(error, match=words):
        call(x, w, jnp.array([3, 4], jnp.int32))


@pytest.mark.parametrize(
    "fields",
    [
        dict(rows=96),
        dict(cols=64),
        dict(stages=1),
        dict(stages=9),
        dict(rows=64),
        dict(rows=256),
        dict(band=0),
        dict(cluster="both"),
        dict(split="k"),
    ],
)
def test_config_refuses_what_does_not_fit(fields):
    with pytest.raises(ValueError, match="grouped matmul tiles"):
        Config(**fields)


def test_few_rows_take_the_decode_tiles_and_swiglu_never_splits_columns():
    assert choose_config(1024, 2048, 1536, 128).rows == 64
    assert choose_config(65536, 2048, 1536, 128).rows == 128
    for D in (768, 2048, 7168, 14336):
        for F in (1536, 4096, 5760):
            assert choose_config(65536, D, F, 32, swiglu=True).split == "rows"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[700, 0, 5, 1290, 3], [0] * 4 + [1999], [0] * 5], ids=["edges", "one", "empty"])
def test_on_a_gpu(sizes):
    lhs, rhs, sizes, n = operands(2000, sizes, 5, 576, 704, D=576)
    _, dout, _, _ = operands(2000, sizes, 2000, 704, kind="dout", seed=1)
    ref = grouped_matmul_reference(lhs, rhs, sizes)[:n]
    assert_close(jax.jit(grouped_matmul)(lhs, rhs, sizes)[:n], ref)
    dx = jax.jit(functools.partial(grouped_matmul, transpose_rhs=True))(dout, rhs, sizes)
    assert_close(dx[:n], grouped_matmul_reference(dout, rhs, sizes, transpose_rhs=True)[:n])
    dw = jax.jit(grouped_matmul_dw)(lhs, dout, sizes)
    assert_close(dw, grouped_matmul_dw_reference(lhs, dout, sizes))
    assert not np.any(np.asarray(dw, np.float32)[np.asarray(sizes) == 0])
    wide = jnp.concatenate([rhs, rhs[..., :64]], axis=2)
    h, p = jax.jit(functools.partial(grouped_swiglu, save_preactivation=True))(lhs, wide, sizes)
    ref = grouped_matmul_reference(lhs, wide, sizes)[:n]
    assert_close(p[:n], ref)
    assert_close(h[:n], swiglu_reference(ref))
