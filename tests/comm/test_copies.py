"""The maps of one copy per (token, destination rank), against loops over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.comm.copies import block_width, compact_map, make_copies, needed_by, pack, padded_map, sum_copies

R, T, K, E = 4, 6, 3, 8


def _ids(seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)])
    ids[1], ids[4, 0] = -1, -1
    return ids


@pytest.mark.parametrize("width", [6, 3, 1])
def test_blocks_hold_the_first_needed_tokens(width):
    ids = _ids()
    blocks = pack(needed_by(jnp.asarray(ids), E // R, R).T, width)
    for d in range(R):
        want = [t for t in range(T) if any(ids[t] // (E // R) == d)][:width]
        assert blocks.token[d].tolist() == want + [-1] * (width - len(want))
        assert blocks.sizes[d] == len(want)
        assert blocks.place[d].tolist() == [want.index(t) if t in want else -1 for t in range(T)]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("width", [6, 2])
def test_copies_and_their_sum(compact, width):
    """Each copy where its map says, bit for bit; garbage in the gaps reaches no sum."""
    blocks = pack(needed_by(jnp.asarray(_ids()), E // R, R).T, width)
    out = compact_map(blocks, min(T * K, R * width)) if compact else padded_map(blocks)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(T, 2)), jnp.float32)
    rows, live = np.asarray(make_copies(x, out)), np.zeros(out.slot_of_row.shape, bool)
    sizes = np.asarray(blocks.sizes)
    starts = np.cumsum(sizes) - sizes if compact else np.arange(R) * width
    want = np.zeros((T, 2), np.float64)
    for d in range(R):
        for j in range(sizes[d]):
            t, m = int(blocks.token[d, j]), starts[d] + j
            np.testing.assert_array_equal(rows[m], x[t])
            live[m] = True
            want[t] += np.asarray(x[t], np.float64)
    assert not rows[~live].any()
    got = sum_copies(jnp.where(jnp.asarray(live)[:, None], rows, jnp.nan), out)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("bad", [0, -2, 1.5, True])
def test_refuses_a_width_that_is_none(bad):
    with pytest.raises(ValueError, match=r"wire_rows must be a positive integer or None; got .*which drops nothing"):
        block_width(4, bad)


def test_a_wide_block_is_no_wider_than_the_tokens():
    assert (block_width(4, None), block_width(4, 9), block_width(4, 2)) == (4, 4, 2)
