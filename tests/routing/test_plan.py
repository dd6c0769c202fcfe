"""Row maps against three loops, and the check of a caller's routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jaxmoe.routing import Routing, apply_capacity, check_routing, count_tokens, row_map


def _ids(seed, n, k, e):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(e)[:k] for _ in range(n)])
    return np.where(rng.uniform(size=ids.shape) < 0.15, -1, ids)


@pytest.mark.parametrize(
    "n, k, e, first, L", [(10, 3, 8, 2, 4), (33, 6, 384, 96, 96), (1, 1, 1, 0, 1), (7, 16, 16, 15, 1)]
)
def test_row_map_is_a_stable_sort(n, k, e, first, L):
    ids = _ids(0, n, k, e)
    M = n * min(k, L) + 3
    got = row_map(jnp.asarray(ids, jnp.int32), first, L, M)
    want = [(a * k + b) for x in range(first, first + L) for a in range(n) for b in range(k) if ids[a, b] == x]
    np.testing.assert_array_equal(got.slot_of_row, want + [-1] * (M - len(want)))
    np.testing.assert_array_equal(got.group_sizes, [(ids == x).sum() for x in range(first, first + L)])
    for row, slot in enumerate(want):
        assert int(got.row_of_slot[slot // k, slot % k]) == row
    assert int((got.row_of_slot >= 0).sum()) == len(want)


def test_counts_ignore_what_is_out_of_range():
    np.testing.assert_array_equal(count_tokens(jnp.array([[0, -1, 7], [3, 3, 0]]), 4), [2, 0, 0, 2])


def test_capacity_keeps_the_first():
    ids, dropped = apply_capacity(jnp.array([[2, 1], [2, 0], [-1, 2], [2, 1]]), 3, 2)
    np.testing.assert_array_equal(ids, [[2, 1], [2, 0], [-1, -1], [-1, 1]])
    np.testing.assert_array_equal(dropped, [0, 0, 2])


@pytest.mark.parametrize(
    "ids, weights, says",
    [
        ([5, 88, 88, 65], [0.25] * 4, r"must be distinct; got ids \[5, 88, 88, 65\].*at token \(1,\). Mend the router"),
        ([5, 96, 88, 65], [0.25] * 4, r"lie in \[0, 96\) or be -1; got ids \[5, 96, 88, 65\]"),
        ([5, -2, 88, 65], [0.25] * 4, r"lie in \[0, 96\) or be -1"),
        ([5, -1, -1, 65], [0.25, 0.5, float("nan"), 1.0], r"weights must be finite"),
    ],
    ids=str,
)
def test_check_routing(ids, weights, says):
    good = [0, 1, 2, -1]
    routing = Routing(jnp.array([good, ids]), jnp.array([[0.25] * 4, weights]))
    with pytest.raises(ValueError, match=says):
        check_routing(routing, 96)
    # Under jit the same rule is a checkify check.
    error, _ = checkify.checkify(jax.jit(lambda r: check_routing(r, 96)))(routing)
    with pytest.raises(checkify.JaxRuntimeError, match="Mend the router"):
        error.throw()
    check_routing(Routing(jnp.array([good, [-1, -1, 5, 6]]), jnp.ones((2, 4))), 96)
