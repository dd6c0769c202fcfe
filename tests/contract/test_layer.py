"""DESIGN §7 for the whole layer: every transport under every schedule, forward and gradient, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import harness as h
from contract.harness import Setting, check_step, compiled_step, oracle, place, random_case, rel_err
from jax.sharding import AxisType

import jaxmoe

N = h.R * h.T
# All of these run through one compiled step per setting: only values differ.
ROUTINGS = {
    "random": None,
    "one expert hot": np.array([[3, 0, 1]] * N),
    "all tokens to rank 1": np.array([[2, 3, -1]] * N),
    "half the experts empty": np.array([[0, 2, 4], [6, 4, 0]] * (N // 2)),
    "no expert at all": np.full((N, h.K), -1),
    "absent slots": np.array([[0, -1, 5], [-1, -1, -1], [-1, 7, -1], [2, 1, 0]] * (N // 4)),
}
VALID = {"all": [5, 5, 5, 5], "a rank without tokens": [5, 0, 5, 5], "uneven": [5, 0, 3, 1], "no tokens": [0, 0, 0, 0]}

settings = pytest.mark.parametrize(
    "setting",
    [Setting(transport=t, schedule=s) for t in h.TRANSPORT_NAMES for s in h.SCHEDULES],
    ids=lambda s: f"{s.transport}-{s.schedule}",
)


@settings
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(setting, routing):
    check_step(setting, random_case(1, ids=ROUTINGS[routing], setting=setting))


@settings
@pytest.mark.parametrize("valid", VALID)
def test_uneven_ranks(setting, valid):
    case = random_case(2, valid=VALID[valid], setting=setting)
    check_step(setting, case)
    y, stats, _ = compiled_step(setting)(*place(setting, *case))
    padding = np.arange(h.T)[None] >= np.array(VALID[valid])[:, None]
    assert (np.asarray(y)[padding.reshape(-1)] == 0).all(), "padding tokens must get exact zeros"
    assert int(stats.tokens_per_expert.sum()) == h.K * sum(VALID[valid])


@pytest.mark.parametrize("transport", [t for t in h.TRANSPORT_NAMES if t != "naive"])
def test_counts_may_change_every_step_without_a_recompile(transport):
    """200 steps with counts of any kind, ranks without tokens among them: one program, and every token counted."""
    setting = Setting(transport=transport)
    step, rng = compiled_step(setting), np.random.default_rng(0)
    params, x, routing, _, dy = random_case(13, setting=setting)
    before = None
    for _ in range(200):
        counts = rng.integers(0, h.T + 1, h.R) * rng.integers(0, 2, h.R)
        _, stats, _ = step(*place(setting, params, x, routing, jnp.asarray(counts, jnp.int32), dy))
        assert int(stats.tokens_per_expert.sum()) == h.K * counts.sum() and int(stats.dropped) == 0
        before = before or step._cache_size()
    assert step._cache_size() == before


@settings
def test_padding_may_hold_nan(setting):
    """NaN in padding tokens and in the cotangents of their outputs reaches nothing."""
    clean = random_case(3, valid=VALID["uneven"], setting=setting)
    params, x, routing, num_valid, dy = clean
    padding = (np.arange(h.T)[None] >= np.array(VALID["uneven"])[:, None]).reshape(-1, 1)
    dirty = params, jnp.where(padding, jnp.nan, x), routing, num_valid, jnp.where(padding, jnp.nan, dy)
    for got, want in zip(
        jax.tree.leaves(compiled_step(setting)(*place(setting, *dirty))),
        jax.tree.leaves(compiled_step(setting)(*place(setting, *clean))),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@settings
def test_same_bits_twice(setting):
    case = place(setting, *random_case(4, setting=setting))
    for a, b in zip(*(jax.tree.leaves(compiled_step(setting)(*case)) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("schedule", h.SCHEDULES, ids=str)
def test_transports_agree_bit_for_bit_in_what_they_move(schedule):
    """Row maps, counts and forward values of all transports are the same up to the order of the reduction."""
    results = []
    for transport in h.TRANSPORT_NAMES:
        setting = Setting(transport=transport, schedule=schedule)
        results.append(compiled_step(setting)(*place(setting, *random_case(5, setting=setting))))
    for y, stats, grads in results[1:]:
        np.testing.assert_array_equal(stats.tokens_per_expert, results[0][1].tokens_per_expert)
        assert rel_err(y, results[0][0]) <= h.TOLERANCE["float32"]
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(results[0][2]), strict=True):
            assert rel_err(got, want) <= h.TOLERANCE["float32"]


@pytest.mark.parametrize("experts", ["reference", "xla"])  # the kernel on a GPU: tests/layers/test_on_gpu.py
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_backends_and_dtypes(experts, dtype):
    setting = Setting(experts=experts, dtype=dtype)
    check_step(setting, random_case(6, setting=setting))


def test_combine_in_float32_rounds_less():
    case = random_case(7, setting=Setting(dtype="bfloat16"))
    errors = {}
    for combine_dtype in (None, "float32"):
        setting = Setting(dtype="bfloat16", combine_dtype=combine_dtype)
        y, _, _ = compiled_step(setting)(*place(setting, *case))
        errors[combine_dtype] = rel_err(y, oracle(*case, setting)[0])
    assert errors["float32"] < errors[None] <= h.TOLERANCE["bfloat16"]


@pytest.mark.parametrize("transport", h.TRANSPORT_NAMES)
@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 1},
        {"ranks": 8},
        {"axis_type": AxisType.Explicit},
        {"num_experts": 384, "top_k": 6},
        {"num_experts": 12, "top_k": 6},
        {"num_experts": 4, "top_k": 4},
    ],
    ids=str,
)
def test_meshes_and_sizes(transport, change):
    setting = dataclasses.replace(Setting(transport=transport, schedule=jaxmoe.TokenChunks(2)), **change)
    check_step(setting, random_case(8, setting=setting))


@settings
def test_capacity_drops_in_the_stated_order_and_counts(setting):
    """C rows an expert, kept in the order (rank, token, slot), whatever the schedule; the rest as if never routed."""
    capacity = 4
    setting = dataclasses.replace(setting, capacity=capacity)
    params, x, routing, num_valid, dy = random_case(9, setting=setting)
    ids, taken, dropped = np.array(routing.expert_ids), np.zeros(h.E, int), 0
    for n, k in np.ndindex(*ids.shape):
        if taken[ids[n, k]] == capacity:
            ids[n, k], dropped = -1, dropped + 1
        else:
            taken[ids[n, k]] += 1
    assert dropped > 0
    y, stats, grads = compiled_step(setting)(*place(setting, params, x, routing, num_valid, dy))
    kept = jaxmoe.Routing(jnp.asarray(ids), routing.weights)
    want_y, want_grads = oracle(params, x, kept, num_valid, dy, setting)
    assert rel_err(y, want_y) <= h.TOLERANCE["float32"]
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert rel_err(got, want) <= h.TOLERANCE["float32"]
    np.testing.assert_array_equal(stats.tokens_per_expert - stats.dropped_per_expert, taken)
    assert int(stats.dropped) == dropped


@settings
def test_repeated_ids_fault_nothing(setting):
    """A caller's repeated ids with checks off: no row is written out of bounds, and what found none is counted."""
    ids = np.array([[5, 5, 5], [1, 1, 5]] * (N // 2))
    y, stats, grads = compiled_step(setting)(*place(setting, *random_case(10, ids=ids, setting=setting)))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((y, grads)))
    assert int(stats.tokens_per_expert.sum()) == ids.size
    assert 0 <= int(stats.dropped) < ids.size


def test_no_mesh_is_the_same_layer():
    setting = Setting()
    params, x, routing, _, dy = case = random_case(11)
    y, stats = jax.jit(lambda p, x: jaxmoe.moe(p, x, setting.config, routing=routing))(params, x)
    assert rel_err(y, oracle(*case, setting)[0]) <= h.TOLERANCE["float32"]
    assert int(stats.tokens_per_expert.sum()) == N * h.K


@pytest.mark.parametrize("schedule", h.SCHEDULES, ids=str)
def test_static_zero_tokens(schedule):
    setting = Setting(schedule=schedule)
    params, *_ = random_case(12)
    step = jax.jit(
        lambda p, x: jax.vjp(
            lambda p, x: jaxmoe.moe(p, x, setting.config, schedule=schedule, mesh=setting.mesh)[0], p, x
        )[1](x)
    )
    grads, dx = step(params, jnp.zeros((0, h.D)))
    assert dx.shape == (0, h.D)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))
