"""The grouped matmul: every backend, forward and both gradients, against float64, with poisoned memory."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.harness import EXPERT_NAMES, TOLERANCE, rel_err

from jaxmoe.experts import choose_backend, grouped_matmul, pallas, tokamax
from jaxmoe.experts.mlp import expert_down, swiglu
from jaxmoe.permute import combine_rows
from jaxmoe.routing import row_map

M, D, F, L = 32, 64, 128, 4  # widths that every backend takes
KERNEL_REASON = pallas.why_not(M, (D, F), jnp.bfloat16, pallas.device_kind())


def _backends(*dtypes) -> list:
    """Every backend, with the kernel skipped where it cannot run and for dtypes that it refuses."""
    reason = f"pallas: {KERNEL_REASON}"
    skips = {"pallas": [pytest.mark.skip(reason=reason)] if KERNEL_REASON else []}
    if tokamax.why_not():
        skips["tokamax"] = [pytest.mark.skip(reason=tokamax.why_not())]
    return [
        pytest.param(name, dtype, marks=skips.get(name, []))
        for name in EXPERT_NAMES
        for dtype in dtypes
        if name != "pallas" or dtype != "float32"
    ]


SIZES = {
    "full": [8, 8, 8, 8],
    "empty between": [8, 0, 8, 0],
    "empty first": [0, 0, 5, 9],
    "all empty": [0, 0, 0, 0],
    "one has all": [0, 32, 0, 0],
    "odd edges": [1, 13, 2, 7],
}


@functools.cache
def _step(backend, dtype):
    def step(rows, weights, sizes, dout):
        out, vjp = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes, backend=backend), rows, weights)
        return out, *vjp(dout)

    return jax.jit(step)


def _arrays(seed, dtype):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in ((M, D), (L, D, F), (M, F))]


def _oracle(rows, weights, sizes, dout):
    rows, weights, dout = (np.asarray(a.astype(jnp.float32), np.float64) for a in (rows, weights, dout))
    out, drows, dweights = np.zeros((M, F)), np.zeros((M, D)), np.zeros((L, D, F))
    start = 0
    for e, size in enumerate(sizes):
        at = slice(start, start + size)
        out[at], drows[at] = rows[at] @ weights[e], dout[at] @ weights[e].T
        dweights[e] = rows[at].T @ dout[at]
        start += size
    return out, drows, dweights


@pytest.mark.parametrize("backend, dtype", _backends(*TOLERANCE))
@pytest.mark.parametrize("sizes", SIZES)
def test_against_float64_with_poison(backend, dtype, sizes):
    """A NaN tail in rows and cotangents, NaN weights in unused experts: no valid row and no gradient sees them."""
    rows, weights, dout = _arrays(0, dtype)
    sizes = SIZES[sizes]
    total = sum(sizes)
    want = _oracle(rows, weights, sizes, dout)
    unused = (np.array(sizes) == 0)[:, None, None]
    poisoned = rows.at[total:].set(jnp.nan), jnp.where(unused, jnp.nan, weights), dout.at[total:].set(jnp.nan)
    out, drows, dweights = _step(backend, dtype)(poisoned[0], poisoned[1], jnp.array(sizes, jnp.int32), poisoned[2])
    assert rel_err(out[:total], want[0][:total]) <= TOLERANCE[dtype]
    assert rel_err(drows[:total], want[1][:total]) <= TOLERANCE[dtype]
    assert rel_err(dweights, want[2]) <= TOLERANCE[dtype]
    assert (np.asarray(dweights)[unused[:, 0, 0]] == 0).all(), "an empty group's gradient is exactly zero"


@pytest.mark.parametrize("backend", [None, "reference", "xla"])
def test_no_rows(backend):
    _, weights, _ = _arrays(1, "bfloat16")
    out = grouped_matmul(jnp.zeros((0, D), jnp.bfloat16), weights, jnp.zeros((L,), jnp.int32), backend=backend)
    assert out.shape == (0, F)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_expert_down_is_the_plain_composition_and_keeps_only_what_it_must(backend):
    """The gradient that stores no output equals the one of swiglu, product and weighted sum, taken apart."""
    rng = np.random.default_rng(2)
    ids = jnp.asarray(np.stack([rng.permutation(6)[:3] for _ in range(10)]), jnp.int32)
    maps = row_map(ids, 2, L, 40)
    args = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((40, 2 * F), (L, F, D), (10, 3))]
    dy = jnp.asarray(rng.normal(size=(10, D)), jnp.float32)

    def plain(pre, down, weights):
        rows = grouped_matmul(swiglu(pre), down, maps.group_sizes, backend="reference")
        return combine_rows(rows, weights, maps, backend="reference")

    def fused(pre, down, weights):
        return expert_down(pre, down, weights, maps, backend)

    want_y, want_vjp = jax.vjp(plain, *args)
    got_y, got_vjp = jax.vjp(fused, args[0].at[int(maps.group_sizes.sum()) :].set(jnp.nan), *args[1:])
    assert rel_err(got_y, want_y) <= TOLERANCE["float32"]
    live = int(maps.group_sizes.sum())
    for name, got, want in zip(("pre", "down", "weights"), got_vjp(dy), want_vjp(dy), strict=True):
        got, want = (got[:live], want[:live]) if name == "pre" else (got, want)
        assert rel_err(got, want) <= TOLERANCE["float32"], name
    saved = {a.shape for a in jax.tree.leaves(got_vjp) if hasattr(a, "shape") and a.dtype == jnp.float32}
    assert saved <= {(40, 2 * F), (L, F, D), (10, 3)}, "backward may keep pre-activations, weights and scores only"


def test_choice():
    sizes = dict(num_rows=64, widths=(128, 256), dtype=jnp.bfloat16)
    assert choose_backend(**sizes, device_kind="cpu") == "xla"
    assert choose_backend(**sizes, device_kind="NVIDIA H200") == "pallas"
    assert choose_backend("reference", **sizes, device_kind="NVIDIA H200") == "reference"
    with pytest.raises(ValueError, match=r"experts backend must be one of .*; got 'cutlass'.*None to let"):
        choose_backend("cutlass", **sizes)


def test_xla_on_cuda_warns_with_the_reason():
    from jaxmoe.experts import api

    sizes = dict(num_rows=64, widths=(128, 256), dtype=jnp.float32, device_kind="NVIDIA H200")
    for name, why in ((None, "takes bfloat16 and float16; got float32"), ("xla", "it was asked for")):
        api._warn_slow_on_cuda.cache_clear()
        with pytest.warns(UserWarning, match=f"{why}.*ragged_dot is a dense masked product"):
            assert choose_backend(name, **sizes) == "xla"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            choose_backend(name, **sizes)  # once


@pytest.mark.parametrize(
    "num_rows, widths, dtype, kind, says",
    [
        (64, (128, 256), "bfloat16", "cpu", "written for Hopper GPUs; this device is 'cpu'"),
        (64, (128, 256), "float32", "NVIDIA H200", "takes bfloat16 and float16; got float32"),
        (64, (128, 100), "bfloat16", "NVIDIA H200", r"multiples of 64; got \(128, 100\)"),
        (0, (128, 256), "bfloat16", "NVIDIA H200", "needs a row"),
    ],
)
def test_pinned_kernel_fails_loudly(num_rows, widths, dtype, kind, says, monkeypatch):
    monkeypatch.setattr(pallas, "device_kind", lambda: kind)
    rows, weights = jnp.zeros((num_rows, widths[0]), dtype), jnp.zeros((2, *widths), dtype)
    with pytest.raises(NotImplementedError, match=f"'pallas': .*{says}.*Use experts='xla'"):
        grouped_matmul(rows, weights, jnp.zeros((2,), jnp.int32), backend="pallas")


@pytest.mark.parametrize(
    "shapes, rule",
    [(((4, 3), (2, 5, 6), (2,)), "Make D and L agree"), (((4, 5), (2, 5, 6), (3,)), "Make D and L agree")],
)
def test_refuses_shapes(shapes, rule):
    rows, weights, sizes = shapes
    with pytest.raises(ValueError, match=rule):
        grouped_matmul(jnp.zeros(rows), jnp.zeros(weights), jnp.zeros(sizes, jnp.int32))


def test_refuses_mixed_dtypes():
    with pytest.raises(ValueError, match=r"one dtype; got float32 and bfloat16. Cast one"):
        grouped_matmul(jnp.zeros((4, 5)), jnp.zeros((2, 5, 6), jnp.bfloat16), jnp.zeros((2,), jnp.int32))


def test_tokamax_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"'tokamax': .*pip install 'jaxmoe\[tokamax\]'.*experts=None"):
        grouped_matmul(jnp.zeros((4, 5)), jnp.zeros((2, 5, 6)), jnp.zeros((2,), jnp.int32), backend="tokamax")
