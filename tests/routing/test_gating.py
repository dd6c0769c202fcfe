"""Scores and top-k against NumPy in float64, and the rows that must not break them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import SCORES, RouterConfig
from jaxmoe.routing import gate, scores_of, select_experts

T, E, K = 16, 12, 4


def _logits(seed=0, t=T, e=E):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(t, e)) * 2, jnp.float32)


def _numpy_scores(z, score):
    z = np.asarray(z, np.float64)
    if score == "softmax":
        p = np.exp(z - z.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)
    if score == "sigmoid":
        return 1 / (1 + np.exp(-z))
    return np.sqrt(np.log1p(np.exp(z)))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_gate_is_its_equation(score, renormalize, biased):
    """The bias selects; the unbiased score weighs, is renormalised, then scaled."""
    cfg = RouterConfig(num_experts=E, top_k=K, score=score, renormalize=renormalize, scale=2.5)
    z = _logits()
    bias = np.linspace(-1, 1, E) if biased else np.zeros(E)
    s = _numpy_scores(z, score)
    ids = np.argsort(-(s + bias), axis=-1, kind="stable")[:, :K]
    w = np.take_along_axis(s, ids, -1)
    w = 2.5 * (w / w.sum(-1, keepdims=True) if renormalize else w)
    got = gate(z, cfg, bias=jnp.asarray(bias, jnp.float32) if biased else None)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, w, rtol=1e-5)
    assert got.expert_ids.dtype == jnp.int32 and got.weights.dtype == jnp.float32


@pytest.mark.parametrize("biased", [True, False])
def test_group_limit(biased):
    """A group's score is its two best experts with a bias, its best one without."""
    groups, keep = 4, 2
    cfg = RouterConfig(num_experts=E, top_k=K, score="sigmoid", num_groups=groups, top_groups=keep)
    z, bias = _logits(1), np.linspace(0.5, -0.5, E)
    choice = _numpy_scores(z, "sigmoid") + (bias if biased else 0)
    per_group = np.sort(choice.reshape(T, groups, -1), -1)[..., -(2 if biased else 1) :].sum(-1)
    chosen = np.argsort(-per_group, -1, kind="stable")[:, :keep]
    allowed = np.zeros((T, groups), bool)
    np.put_along_axis(allowed, chosen, True, -1)
    choice = np.where(np.repeat(allowed, E // groups, 1), choice, -np.inf)
    want = np.argsort(-choice, -1, kind="stable")[:, :K]
    got = gate(z, cfg, bias=jnp.asarray(bias, jnp.float32) if biased else None)
    np.testing.assert_array_equal(got.expert_ids, want)


def test_ties_go_to_the_lowest_id():
    ids = select_experts(jnp.zeros((3, E)), RouterConfig(num_experts=E, top_k=K))
    np.testing.assert_array_equal(ids, np.tile(np.arange(K), (3, 1)))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf], ids=str)
@pytest.mark.parametrize("limited", [True, False])
def test_bad_rows_give_distinct_ids_finite_weights_and_finite_gradients(score, bad, limited):
    """One whole bad row, one row with one bad entry, E=8, K=3: the other rows do not change."""
    groups = {"num_groups": 4, "top_groups": 2} if limited else {}
    cfg = RouterConfig(num_experts=8, top_k=3, score=score, **groups)
    clean = _logits(2, 6, 8)
    z = clean.at[1].set(bad).at[3, 5].set(bad)
    routing, vjp = jax.vjp(lambda z: gate(z, cfg).weights, z)
    ids = gate(z, cfg).expert_ids
    for row in np.asarray(ids):
        assert len(set(row.tolist())) == 3 and min(row) >= 0 and max(row) < 8
    assert np.isfinite(routing).all() and np.isfinite(vjp(jnp.ones_like(routing))[0]).all()
    good = np.array([0, 2, 4, 5])
    np.testing.assert_array_equal(np.asarray(ids)[good], np.asarray(gate(clean, cfg).expert_ids)[good])


@pytest.mark.parametrize("score", SCORES)
def test_gradient_by_finite_differences(score):
    cfg = RouterConfig(num_experts=E, top_k=K, score=score, scale=1.5)
    z, direction = _logits(3), _logits(4)
    ids = gate(z, cfg).expert_ids
    loss = lambda z: (gate(z, cfg, expert_ids=ids).weights * jnp.arange(1.0, K + 1)).sum()  # noqa: E731
    analytic = float((jax.grad(loss)(z) * direction).sum())
    step = 1e-2
    numeric = float(loss(z + step * direction) - loss(z - step * direction)) / (2 * step)
    assert abs(analytic - numeric) <= 2e-3 * max(1.0, abs(numeric))


def test_replay_takes_ids_and_keeps_absent_slots():
    cfg = RouterConfig(num_experts=E, top_k=2)
    ids = jnp.array([[3, -1]] * T)
    got = gate(_logits(), cfg, expert_ids=ids)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, np.tile([1.0, 0.0], (T, 1)), rtol=1e-6)


def test_invalid_tokens_get_no_expert():
    valid = jnp.arange(T) % 3 > 0
    got = gate(_logits(), RouterConfig(num_experts=E, top_k=K), valid=valid)
    assert (got.expert_ids[~valid] == -1).all() and (got.weights[~valid] == 0).all()
    assert (got.expert_ids[valid] >= 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scores_are_float32_whatever_comes(dtype):
    s = scores_of(_logits().astype(dtype), RouterConfig(num_experts=E, top_k=K))
    assert s.dtype == jnp.float32
    np.testing.assert_allclose(s.sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"top_k": 9}, r"top_k must be at most num_experts; got top_k=9, num_experts=8. Lower top_k"),
        ({"top_k": 0}, r"top_k must be a positive integer; got 0. Pass"),
        ({"top_k": 1.5}, r"top_k must be a positive integer; got 1.5. Pass"),
        ({"num_experts": True}, r"num_experts must be a positive integer; got True. Pass"),
        ({"score": "relu"}, r"score must be one of softmax, .*; got 'relu'. Choose"),
        (
            {"num_groups": 3},
            r"num_groups must divide num_experts; got num_groups=3.*Choose num_groups among \[1, 2, 4, 8",
        ),
        ({"top_groups": 2}, r"top_groups must be at most num_groups; got top_groups=2.*Lower"),
        ({"num_groups": 8, "top_groups": 1}, r"must hold at least top_k experts; got top_k=2.*Raise top_groups"),
        ({"scale": 0.0}, r"scale must be positive; got 0.0. Pass scale=1.0"),
        ({"scale": float("nan")}, r"scale must be positive; got nan"),
    ],
    ids=str,
)
def test_config_refuses(fields, says):
    with pytest.raises(ValueError, match=says):
        RouterConfig(**{"num_experts": 8, "top_k": 2} | fields)
