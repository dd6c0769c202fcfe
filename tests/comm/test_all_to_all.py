"""What `wire_rows` drops, and what crosses the wire in the compiled layer."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from contract import harness as h
from contract.harness import Setting, compiled_step, oracle, place, random_case, rel_err

import jaxmoe

WIRE_ROWS = 3


def _kept(ids, lanes):
    """The ids that survive: a token past the W-th of its (source, destination) block loses its slots on that rank."""
    ids, L = np.array(ids), h.E // h.R
    size, width = -(-h.T // lanes), -(-WIRE_ROWS // lanes)
    for s in range(h.R):
        for lane in range(lanes):
            sent = [0] * h.R
            for t in range(lane * size, min(h.T, (lane + 1) * size)):
                token = ids[s * h.T + t]
                for d in {int(e) // L for e in token if e >= 0}:
                    sent[d] += 1
                    if sent[d] > width:
                        token[(token >= 0) & (token // L == d)] = -1
    return ids


@pytest.mark.parametrize(
    "setting",
    [
        Setting(transport="all_to_all", wire_rows=WIRE_ROWS, schedule=jaxmoe.TokenChunks(2)),
        Setting(transport="ragged_emulated", wire_rows=WIRE_ROWS),
    ],
    ids=lambda s: f"{s.transport}-{s.schedule}",
)
def test_wire_rows_drops_in_the_stated_order_and_counts(setting):
    """Kept in the order (rank, token); output and every gradient as if the dropped slots had never been routed."""
    hot = np.array([[3, 2, 0], [2, -1, 7], [3, -1, -1], [3, 5, 2], [2, 6, 1]] * h.R)
    for case in (random_case(1, setting=setting), random_case(2, ids=hot, valid=[5, 0, 4, 5], setting=setting)):
        params, x, routing, num_valid, dy = case
        valid = (np.arange(h.T)[None] < np.asarray(num_valid)[:, None]).reshape(-1, 1)
        routed = np.where(valid, routing.expert_ids, -1)
        kept = _kept(routed, setting.schedule.num_lanes)
        count = lambda ids: np.bincount(ids[ids >= 0], minlength=h.E)  # noqa: E731
        assert count(kept).sum() < count(routed).sum(), "the case must drop something"
        y, stats, grads = compiled_step(setting)(*place(setting, *case))
        want_y, want_grads = oracle(
            params, x, jaxmoe.Routing(jnp.asarray(kept), routing.weights), num_valid, dy, setting
        )
        assert rel_err(y, want_y) <= h.TOLERANCE["float32"]
        for got, want in zip(*map(_leaves, (grads, want_grads)), strict=True):
            assert rel_err(got, want) <= h.TOLERANCE["float32"]
        np.testing.assert_array_equal(stats.tokens_per_expert, count(routed))
        np.testing.assert_array_equal(stats.dropped_per_expert, count(routed) - count(kept))


def _leaves(grads):
    params, x, weights = grads
    return [params.router, params.gate_up, params.down, x, weights]


def _collectives(text):
    """name -> [elements of the largest operand] of every collective in a compiled program."""
    found: dict[str, list[int]] = {}
    pattern = r"= (\(?[^=]*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
    for shapes, name in re.findall(pattern, text):
        sizes = [np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        found.setdefault(name, []).append(int(sum(sizes)))
    return found


@pytest.mark.parametrize("wire_rows", [None, 4])
def test_what_crosses_the_wire(wire_rows):
    """One small all-gather first; then one all-to-all of R·W rows for each dispatch and combine of a lane; no more."""
    lanes, chunk = 2, 3  # 5 tokens in 2 lanes
    setting = Setting(transport="all_to_all", schedule=jaxmoe.TokenChunks(lanes), wire_rows=wire_rows)
    arguments = place(setting, *random_case(3, setting=setting))
    found = _collectives(compiled_step(setting).lower(*arguments).compile().as_text())
    width = chunk if wire_rows is None else -(-wire_rows // lanes)
    # Forward: dispatch and combine of each lane; backward: their transposes. The gathers of ids and weights, and the
    # reduce-scatter that brings the weights' gradient home, hold no rows.
    assert found.pop("all-to-all") == [h.R * width * h.D] * (4 * lanes)
    assert found.pop("all-gather") == [h.R * h.T * 2 * h.K]
    assert found.pop("reduce-scatter") == [h.T * 2 * h.K]
    assert not found


@pytest.mark.parametrize("transport", ["all_gather", "naive"])
def test_wire_rows_is_refused_where_nothing_is_padded(transport):
    routing = jaxmoe.Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    with pytest.raises(ValueError, match=rf"wire_rows bounds .*; got 2 with transport '{transport}'.*use 'all_to_all'"):
        jaxmoe.dispatch(jnp.zeros((1, 1)), routing, num_experts=1, axis=None, transport=transport, wire_rows=2)


def test_config_refuses_no_rows():
    config = jaxmoe.MoEConfig(router=jaxmoe.RouterConfig(num_experts=8, top_k=2))
    with pytest.raises(ValueError, match=r"wire_rows must be a positive integer; got 0"):
        dataclasses.replace(config, wire_rows=0)
