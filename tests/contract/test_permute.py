"""Permute and combine: every backend against the definition, bit for bit in movement, with poisoned rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.harness import PERMUTE_NAMES, TOLERANCE, rel_err

from jaxmoe.permute import combine_rows, permute
from jaxmoe.routing import row_map

E, D = 6, 8
backends = pytest.mark.parametrize("backend", PERMUTE_NAMES)


def _ids(seed, n, k):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(n)]) if n else np.zeros((0, k), int)
    return np.where(rng.uniform(size=ids.shape) < 0.2, -1, ids)


CASES = {
    "mixed": (_ids(0, 9, 3), 2, 3),
    "all local": (_ids(1, 7, 2), 0, E),
    "none local": (np.full((5, 2), 5), 0, 2),
    "one token": (np.array([[4, 0, 1]]), 0, E),
    "one expert": (np.zeros((6, 1), int), 0, 1),
    "no tokens": (np.zeros((0, 2), int), 0, 2),
}


def _numpy_rows(x, ids, first, L):
    """Rows in the order (expert, token, slot), by three loops."""
    rows = [
        x[n]
        for e in range(first, first + L)
        for n in range(ids.shape[0])
        for k in range(ids.shape[1])
        if ids[n, k] == e
    ]
    return np.array(rows).reshape(-1, D)


@backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_permute_moves_bits(backend, dtype, case):
    ids, first, L = CASES[case]
    x = jnp.asarray(np.random.default_rng(2).normal(size=(ids.shape[0], D)), dtype)
    maps = row_map(jnp.asarray(ids, jnp.int32), first, L, ids.shape[0] * min(ids.shape[1], L))
    want = _numpy_rows(np.asarray(x), ids, first, L)
    rows = permute(x, maps, backend=backend)
    np.testing.assert_array_equal(np.asarray(rows)[: len(want)], want)
    assert int(maps.group_sizes.sum()) == len(want)
    # The transpose: <permute(x), r> = <x, combine(r, 1)>, and so dx of <permute(x), r>.
    r = jnp.asarray(np.random.default_rng(3).normal(size=rows.shape), dtype).at[len(want) :].set(jnp.nan)
    (dx,) = jax.vjp(lambda x: permute(x, maps, backend=backend), x)[1](r)
    ones = combine_rows(r, jnp.ones(ids.shape, jnp.float32), maps, backend="reference")
    assert rel_err(dx.astype(jnp.float32), ones) <= TOLERANCE[dtype]


@backends
@pytest.mark.parametrize("case", CASES)
def test_combine_and_its_gradients(backend, case):
    ids, first, L = CASES[case]
    N, K = ids.shape
    rng = np.random.default_rng(4)
    maps = row_map(jnp.asarray(ids, jnp.int32), first, L, N * min(K, L))
    live = int(maps.group_sizes.sum())
    rows = jnp.asarray(rng.normal(size=(maps.slot_of_row.shape[0], D)), jnp.float32).at[live:].set(jnp.nan)
    w = jnp.asarray(rng.uniform(size=(N, K)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    want_y, want_rows, want_w = np.zeros((N, D)), np.zeros(rows.shape), np.zeros((N, K))
    for n in range(N):
        for k in range(K):
            at = int(maps.row_of_slot[n, k])
            if at >= 0:
                want_y[n] += float(w[n, k]) * np.asarray(rows[at], np.float64)
                want_rows[at] = float(w[n, k]) * np.asarray(dy[n], np.float64)
                want_w[n, k] = np.dot(np.asarray(rows[at], np.float64), np.asarray(dy[n], np.float64))
    y, vjp = jax.vjp(lambda r, w: combine_rows(r, w, maps, backend=backend), rows, w)
    drows, dw = vjp(dy)
    assert rel_err(y, want_y) <= TOLERANCE["float32"]
    assert rel_err(drows[:live], want_rows[:live]) <= TOLERANCE["float32"]
    assert rel_err(dw, want_w) <= TOLERANCE["float32"]


@backends
def test_token_without_expert_is_exactly_zero(backend):
    maps = row_map(jnp.array([[0, -1], [-1, -1]]), 0, 1, 2)
    rows = jnp.full((2, D), jnp.nan).at[0].set(3.0)
    y = combine_rows(rows, jnp.ones((2, 2)), maps, backend=backend)
    np.testing.assert_array_equal(y, np.stack([np.full(D, 3.0), np.zeros(D)]))


@backends
def test_a_weight_without_a_row_may_be_nan(backend):
    maps = row_map(jnp.array([[0, -1], [-1, -1]]), 0, 1, 2)
    weights = jnp.array([[2.0, jnp.nan], [jnp.inf, jnp.nan]])
    y = combine_rows(jnp.full((2, D), 3.0), weights, maps, backend=backend)
    np.testing.assert_array_equal(y, np.stack([np.full(D, 6.0), np.zeros(D)]))


@backends
def test_a_buffer_too_short_writes_nothing_behind_it(backend):
    """Repeated ids outgrow the buffer: slots past its end have no row, and the map says how many there are."""
    maps = row_map(jnp.array([[0, 0, 0], [0, 0, 0]]), 0, 1, 2)
    assert int(maps.group_sizes.sum()) == 2 and maps.row_of_slot.tolist() == [[0, 1, -1], [-1, -1, -1]]
    rows = permute(jnp.array([[1.0], [2.0]]), maps, backend=backend)
    assert rows.tolist() == [[1.0], [1.0]]


@pytest.mark.gpu
@backends
def test_rows_times_width_past_2_to_the_31(backend):
    if backend == "reference":
        pytest.skip("the reference scatters; two buffers of 4.3 GB and its copies do not fit beside each other")
    n, width = 299_600, 7168
    x = jax.random.normal(jax.random.key(0), (n, width), jnp.bfloat16)
    ids = jnp.where(jnp.arange(n)[:, None] % 2 == 0, 1, 0).astype(jnp.int32)
    maps = row_map(ids, 0, 2, n)
    rows = jax.jit(permute)(x, maps)
    for m in (0, n // 2 - 1, n // 2, n - 1):
        np.testing.assert_array_equal(rows[m], x[maps.slot_of_row[m]])


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"permute backend must be one of .*; got 'cuda'"):
        permute(jnp.zeros((1, 1)), row_map(jnp.array([[0]]), 0, 1, 1), backend="cuda")
