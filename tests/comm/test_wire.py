"""The quantised wire: its rounding, what it leaves alone, its gradient, and its bytes in the compiled layer."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import harness as h
from contract.harness import Setting, compiled_step, place, random_case, rel_err
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.comm import wire
from jaxmoe.layers import wire_error

FP8 = "float8_e4m3fn"
MOVERS = [t for t in h.TRANSPORT_NAMES if t != "naive"]
ADD_AT_HOME = [t for t in MOVERS if t != "all_gather"]
WIDTH = 200  # one block of 128 columns, and one of 72
quantise = jax.jit(wire.quantise)
there_and_back = jax.jit(lambda x: wire.unpack(wire.pack(x), x.shape[1], x.dtype))


def _reference(x):
    """The same, block by block in numpy: values of e4m3 and scales."""
    x = np.asarray(x, np.float32)
    values, scales = np.zeros(x.shape, np.float32), np.zeros((len(x), -(-x.shape[1] // 128)), np.float32)
    for t, row in enumerate(x):
        for b in range(scales.shape[1]):
            block = row[128 * b : 128 * (b + 1)]
            scale = max(np.abs(block).max() / 448, 2.0**-100)
            scales[t, b] = scale
            values[t, 128 * b : 128 * (b + 1)] = (block / np.float32(scale)).astype(jnp.float8_e4m3fn)
    return values, scales


def _rows(width, dtype="float32", count=32):
    """Normally distributed rows with magnitudes from 1e-6 to 1e3 within a row, and some zeros."""
    rng = np.random.default_rng(width)
    x = rng.normal(size=(count, width)) * 10.0 ** rng.uniform(-6, 3, size=(count, width))
    x[:, ::7] = 0
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("width", [1, 127, 128, 129, 200, 256])
def test_each_value_keeps_three_bits_or_the_step_of_its_block(width):
    """|q·scale − x| ≤ max(|x|/16, scale/1024), and both as a plain loop in numpy says."""
    x = _rows(width)
    q, scales = quantise(x)
    want_q, want_scales = _reference(x)
    assert q.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float32
    np.testing.assert_allclose(scales, want_scales, rtol=2e-7)
    np.testing.assert_allclose(np.asarray(q, np.float32), want_q, rtol=2**-3, atol=2**-9)  # a tie may go either way
    got, x = np.asarray(wire.dequantise(q, scales), np.float64), np.asarray(x, np.float64)
    step = np.repeat(np.asarray(scales, np.float64), 128, axis=1)[:, :width]
    assert (np.abs(got - x) <= np.maximum(np.abs(x) / 16, step / 1024) * (1 + 1e-6)).all()
    assert (got[x == 0] == 0).all()
    assert x.max() == 0 or 0 < rel_err(got, x) <= 0.04
    if width > 1:
        assert abs(float(wire.quantisation_error(jnp.asarray(x, jnp.float32))) - rel_err(got, x)) <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_packed_rows_are_their_bytes_and_unpack_to_their_dtype(dtype):
    x = jnp.clip(_rows(WIDTH, dtype), -6e4, 6e4)
    packed = jax.jit(wire.pack)(x)
    q, scales = map(np.asarray, quantise(x))
    assert packed.dtype == jnp.uint8 and packed.shape == (32, WIDTH + 8) and wire.row_bytes(WIDTH) == WIDTH + 8
    want = np.concatenate([q.view(np.uint8), scales.view(np.uint8)], axis=1)
    np.testing.assert_array_equal(packed, want)
    got = there_and_back(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, wire.dequantise(q, scales, dtype))
    np.testing.assert_array_equal(wire.unpack(jnp.zeros_like(packed), WIDTH, dtype), jnp.zeros_like(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_zeros_give_zeros_and_extremes_stay_finite(dtype):
    """Zero blocks beside full ones, the largest and the smallest numbers of each dtype: no NaN, no infinity."""
    info = jnp.finfo(dtype)
    x = np.zeros((6, WIDTH), jnp.dtype(dtype))
    x[1, 128:] = info.max
    x[2, :128] = -info.max
    x[3] = info.tiny
    x[4] = info.smallest_subnormal
    x[5, ::2], x[5, 1::2] = info.max, info.tiny
    got = np.asarray(there_and_back(jnp.asarray(x)), np.float64)
    assert np.isfinite(got).all()
    assert (got[0] == 0).all() and (got[1, :128] == 0).all() and (got[2, 128:] == 0).all()
    big = np.abs(x.astype(np.float64)) == float(info.max)
    np.testing.assert_allclose(got[big], x.astype(np.float64)[big], rtol=1e-2 if dtype == "bfloat16" else 1e-3)
    assert float(wire.quantisation_error(jnp.zeros((2, 3)))) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_own_block_nan_and_no_other(bad):
    x = np.array(_rows(WIDTH))
    clean = np.asarray(there_and_back(x))
    x[3, 130] = bad
    got = np.array(there_and_back(x))
    assert np.isnan(got[3, 128:]).all()
    got[3, 128:] = clean[3, 128:]
    np.testing.assert_array_equal(got, clean)


def _wired(transport):
    """Dispatch and, where it can be, combine quantised; in two lanes over all_gather, which compiles fastest."""
    combine = FP8 if transport in ADD_AT_HOME else None
    schedule = jaxmoe.TokenChunks(2) if transport == "all_gather" else jaxmoe.Sequential()
    return Setting(transport=transport, schedule=schedule, wire_dtype=FP8, wire_dtype_combine=combine)


@functools.cache
def _compiled(setting):
    """The compiled step, for its results and its text."""
    return compiled_step(setting).lower(*place(setting, *random_case(0, setting=setting))).compile()


movers = pytest.mark.parametrize("transport", MOVERS)


def _equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@movers
def test_the_gradient_is_straight_through(transport):
    """Bit for bit the unquantised layer's output and gradients at the tokens that arrived."""
    setting = _wired(transport)
    plain = dataclasses.replace(setting, wire_dtype=None, wire_dtype_combine=None)
    params, x, *rest = random_case(1, valid=[5, 0, 3, 5], setting=setting)
    y, stats, grads = _compiled(setting)(*place(setting, params, x, *rest))
    want_y, want_stats, want_grads = _compiled(plain)(*place(plain, params, there_and_back(x), *rest))
    _equal(stats, want_stats)
    _equal(grads, want_grads)
    if setting.wire_dtype_combine:
        assert 0.005 <= rel_err(y, want_y) <= 0.03
    else:
        _equal(y, want_y)


@movers
@pytest.mark.parametrize("garbage", [1e30, np.nan, np.inf])
def test_padding_of_any_size_changes_nothing(transport, garbage):
    """Padding tokens, and tokens without an expert, with anything in them: output and gradients bit for bit."""
    setting = _wired(transport)
    params, x, routing, num_valid, dy = random_case(2, valid=[5, 0, 3, 4], setting=setting)
    ids = routing.expert_ids.at[jnp.array([1, 10])].set(-1)
    routing = jaxmoe.Routing(ids, routing.weights)
    unused = np.array([[t >= n for t in range(h.T)] for n in num_valid]).reshape(-1)
    unused[[1, 10]] = True
    run = lambda x: _compiled(setting)(*place(setting, params, x, routing, num_valid, dy))  # noqa: E731
    _equal(run(jnp.where(unused[:, None], garbage, x)), run(x))


@movers
def test_a_nan_stays_in_its_own_token(transport):
    setting = _wired(transport)
    params, x, *rest = random_case(3, setting=setting)
    run = lambda x: np.asarray(_compiled(setting)(*place(setting, params, x, *rest))[0])  # noqa: E731
    got, want = run(x.at[7, 2].set(jnp.nan)), run(x)
    assert np.isnan(got[7]).all()
    np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(want, 7, 0))


def test_error_of_the_whole_layer(record_property):
    """Reported by `wire_error`, and bounded; on an Explicit mesh."""
    router = jaxmoe.RouterConfig(num_experts=8, top_k=2)
    plain = jaxmoe.MoEConfig(router=router, transport="all_to_all")
    wires = {
        "dispatch": ({"wire_dtype": FP8}, 0.04),
        "combine": ({"wire_dtype_combine": FP8}, 0.03),
        "both": ({"wire_dtype": FP8, "wire_dtype_combine": FP8}, 0.05),
    }
    mesh = jaxmoe.make_mesh(4, axis_type=AxisType.Explicit)
    params = jaxmoe.init_params(jax.random.key(0), WIDTH, 64, router)
    params = jax.tree.map(lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)), params, params.specs(("expert",)))
    x = jax.device_put(jax.random.normal(jax.random.key(1), (64, WIDTH)), jax.NamedSharding(mesh, P("expert", None)))

    def errors(params, x):
        run = lambda fields: wire_error(params, x, dataclasses.replace(plain, **fields), mesh=mesh)  # noqa: E731
        return {name: run(fields) for name, (fields, _) in wires.items()}

    for name, error in jax.jit(errors)(params, x).items():
        record_property(f"wire_error_{name}", float(error))
        assert 0.01 <= float(error) <= wires[name][1], name


def _collectives(text):
    """[(name, dtype, elements)] of every collective in a compiled program, sorted; a tuple's parts are added up."""
    pattern = r"= (\(?[^=]*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
    found = []
    for shapes, name in re.findall(pattern, text):
        parts = [
            (d, np.prod([int(n) for n in dims.split(",") if n])) for d, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        ]
        (dtype,) = {d for d, _ in parts}
        found.append((name, dtype, int(sum(n for _, n in parts))))
    return sorted(found)


@pytest.mark.parametrize("transport", ["all_gather", "all_to_all"])
def test_what_crosses_the_wire(transport):
    """A lane's dispatch is one collective of R·W rows of D + 4 bytes (D = 16), and so is its combine over all_to_all.

    No row crosses in the dtype of x, but for the reduce-scatter of all_gather's combine and for the cotangents.
    """
    setting = _wired(transport)
    lanes = setting.schedule.num_lanes
    chunk = -(-h.T // lanes)
    found = _collectives(_compiled(setting).as_text())
    rows, packed = h.R * chunk * h.D, h.R * chunk * (h.D + 4)
    # The routing's small gather, and the reduce-scatter that brings the weights' gradient home.
    small = [("all-gather", "f32", h.R * h.T * 2 * h.K), ("reduce-scatter", "f32", h.T * 2 * h.K)]
    want = {
        # Forward: gather bytes, scatter sums; backward: gather dy, scatter dx.
        "all_gather": [("all-gather", "u8", packed), ("all-gather", "f32", rows)]
        + [("reduce-scatter", "f32", chunk * h.D)] * 2,
        "all_to_all": [("all-to-all", "u8", packed), ("all-to-all", "f32", rows)] * 2,
    }[transport]
    assert found == sorted(small + want * lanes)
    assert packed == h.R * chunk * wire.row_bytes(h.D)


@functools.cache
def _ops(transport):
    """(x, ids, weights) -> combine(dispatch(x)) by the public ops on 2×2 ranks, quantised where it can be."""
    axes = ("node", "gpu")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    home = FP8 if transport in ADD_AT_HOME else None

    def on_rank(x, ids, weights):
        rows, handle = jaxmoe.dispatch(
            x, jaxmoe.Routing(ids, weights), num_experts=8, axis=axes, transport=transport, wire_dtype=FP8
        )
        return rows, handle.row_map.group_sizes, jaxmoe.combine(rows, handle, wire_dtype=home)

    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))


@movers
def test_dispatch_brings_the_quantised_rows_bit_for_bit(transport):
    """Row for row what quantising on the spot gives, wide rows included; combine adds a token's copies up."""
    x = _rows(WIDTH, count=24)
    ids = np.stack([np.random.default_rng(n).permutation(8)[:3] for n in range(24)]).astype(np.int32)
    rows, sizes, y = _ops(transport)(x, ids, jnp.full((24, 3), 1 / 3))
    arrived = np.asarray(there_and_back(x))
    for rank, rows_here in enumerate(np.asarray(rows).reshape(4, -1, WIDTH)):
        want = [arrived[n] for e in (2 * rank, 2 * rank + 1) for n in range(24) if e in ids[n]]
        np.testing.assert_array_equal(rows_here[: len(want)], want)
    assert int(sizes.sum()) == 72
    assert rel_err(y, arrived) <= (0.03 if transport in ADD_AT_HOME else 1e-6)


@movers
def test_one_rank_quantises_nothing(transport):
    """Where nothing travels there is nothing to save."""
    x, routing = _rows(WIDTH, count=4), jaxmoe.Routing(jnp.arange(4)[:, None], jnp.ones((4, 1)))
    rows, handle = jaxmoe.dispatch(x, routing, num_experts=4, axis=None, transport=transport, wire_dtype=FP8)
    np.testing.assert_array_equal(rows, x)
    if transport in ADD_AT_HOME:
        np.testing.assert_array_equal(jaxmoe.combine(rows, handle, wire_dtype=FP8), x)


def _refused(transport, combine=False):
    routing = jaxmoe.Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    first = None if combine else FP8
    rows, handle = jaxmoe.dispatch(
        jnp.zeros((1, 4)), routing, num_experts=1, axis=None, transport=transport, wire_dtype=first
    )
    jaxmoe.combine(rows, handle, wire_dtype=FP8)


def test_naive_cannot_dispatch_it():
    with pytest.raises(NotImplementedError, match=r"needs a transport that moves rows; got 'naive'.*Use 'all_gather'"):
        _refused("naive")
    setting = Setting(transport="naive", wire_dtype=FP8)
    with pytest.raises(NotImplementedError, match="got 'naive'"):
        compiled_step(setting).lower(*place(setting, *random_case(0, setting=setting)))


@pytest.mark.parametrize("transport", ["all_gather", "naive"])
def test_a_sum_on_the_way_cannot_combine_it(transport):
    says = rf"combine in 'float8_e4m3fn' needs .*; got '{transport}', whose reduction.*Use 'all_to_all' or 'ragged'"
    with pytest.raises(NotImplementedError, match=says):
        _refused(transport, combine=True)
    setting = Setting(transport=transport, wire_dtype_combine=FP8)
    with pytest.raises(NotImplementedError, match=says):
        compiled_step(setting).lower(*place(setting, *random_case(0, setting=setting)))


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"wire_dtype": "int8"}, "wire_dtype must be None or 'float8_e4m3fn'; got 'int8'. Pass the name"),
        (
            {"wire_dtype_combine": "float8_e5m2"},
            "wire_dtype_combine must be None or 'float8_e4m3fn'; got 'float8_e5m2'",
        ),
        ({"wire_dtype": jnp.float8_e4m3fn}, "as a string"),
        (
            {"wire_dtype_combine": FP8, "combine_dtype": "float32"},
            "combine_dtype and wire_dtype_combine both say what crosses the wire in combine; got 'float32'",
        ),
    ],
    ids=["int8", "e5m2", "a dtype", "two dtypes"],
)
def test_config_refuses(fields, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        jaxmoe.MoEConfig(router=jaxmoe.RouterConfig(num_experts=8, top_k=2), transport="all_to_all", **fields)


def test_ops_refuse():
    x, routing = jnp.zeros((1, 4)), jaxmoe.Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    with pytest.raises(ValueError, match="wire_dtype must be None or 'float8_e4m3fn'; got 'fp8'"):
        jaxmoe.dispatch(x, routing, num_experts=1, axis=None, wire_dtype="fp8")
    rows, handle = jaxmoe.dispatch(x, routing, num_experts=1, axis=None, transport="all_to_all")
    with pytest.raises(ValueError, match="combine_dtype and wire_dtype both say what crosses the wire; got 'float32'"):
        jaxmoe.combine(rows, handle, combine_dtype="float32", wire_dtype=FP8)
