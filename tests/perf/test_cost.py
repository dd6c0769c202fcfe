"""The formulas for bytes on the wire, against the compiled layer and against what a routing really needs."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import harness as h
from contract.harness import Setting, place, random_case
from jax.sharding import PartitionSpec as P
from perf.wire import bytes_by_collective

import jaxmoe
from jaxmoe.perf import HARDWARE, Wire, Workload, block_counts, needed_rows, observed_skew, predicted_us, traffic

CASES = [
    *(Setting(transport=name) for name in h.TRANSPORT_NAMES),  # a new transport needs a formula
    Setting(transport="all_gather", schedule=jaxmoe.TokenChunks(2)),
    Setting(transport="all_to_all", schedule=jaxmoe.TokenChunks(2), wire_rows=3),
    Setting(transport="ragged_emulated", schedule=jaxmoe.TokenChunks(2), wire_rows=3),
    Setting(transport="naive", ranks=8, num_experts=16, top_k=2),
    # Not bfloat16, which the CPU's compiler widens to float32 on the wire.
    Setting(transport="all_gather", dtype="float16", combine_dtype="float32"),
    Setting(transport="all_to_all", dtype="float16", combine_dtype="float32"),
    Setting(transport="all_gather", ranks=1),
]


def _workload(setting: Setting) -> Workload:
    return Workload(
        tokens=h.T,
        d_model=h.D,
        num_experts=setting.num_experts,
        top_k=setting.top_k,
        ranks=setting.ranks,
        dtype=setting.dtype,
        combine_dtype=setting.combine_dtype,
        wire_rows=setting.wire_rows,
        lanes=setting.schedule.num_lanes,
    )


def _name(s: Setting) -> str:
    return f"{s.transport}-R{s.ranks}-lanes{s.schedule.num_lanes}-W{s.wire_rows}-{s.dtype}"


@pytest.mark.parametrize("setting", CASES, ids=_name)
def test_formula_against_the_compiled_layer(setting):
    """The forward program of a whole layer holds these bytes, to the last one, and no other collective."""
    params, x, routing, num_valid, _ = place(setting, *random_case(setting=setting))

    @jax.jit
    def forward(params, x, routing, num_valid):
        return jaxmoe.moe(
            params,
            x,
            setting.config,
            schedule=setting.schedule,
            mesh=setting.mesh,
            num_valid=num_valid,
            routing=routing,
        )

    found = bytes_by_collective(forward.lower(params, x, routing, num_valid).compile().as_text())
    want = traffic(setting.transport, _workload(setting))
    assert sum(found.values()) == want.bytes, found
    if setting.transport == "all_gather" and setting.ranks > 1:
        assert found == {
            "all-gather": want.metadata.bytes + want.dispatch.bytes,
            "reduce-scatter": want.combine.bytes,
        }
    if setting.transport == "all_to_all":
        assert found == {"all-gather": want.metadata.bytes, "all-to-all": want.dispatch.bytes + want.combine.bytes}
    if setting.transport == "naive":
        assert found == {"all-gather": want.metadata.bytes, "all-reduce": want.dispatch.bytes + want.combine.bytes}


def test_a_ragged_exchange_sends_what_the_formula_counts():
    """The slices of `ragged`'s own program (its collective emulated), rank by rank."""
    R, T, E, K, D = 4, 6, 8, 3, 16
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(R * T)])
    ids[2] = -1

    def on_rank(ids):
        routing = jaxmoe.Routing(ids, jnp.ones(ids.shape, jnp.float32))
        x = jnp.ones((T, D))
        _, handle = jaxmoe.dispatch(x, routing, num_experts=E, axis="expert", transport="ragged_emulated")
        return handle.wire.slices.send_sizes, handle.wire.slices.recv_sizes

    run = jax.jit(jax.shard_map(on_rank, mesh=jaxmoe.make_mesh(R), in_specs=P("expert"), out_specs=P("expert")))
    sent, received = (np.asarray(a).reshape(R, R) for a in run(jnp.asarray(ids, jnp.int32)))
    counts = block_counts(ids.reshape(R, T, K), E)
    np.testing.assert_array_equal(sent, counts)
    np.testing.assert_array_equal(received, counts.T)
    others = counts - np.diag(np.diag(counts))
    load = Workload(tokens=T, d_model=D, num_experts=E, top_k=K, ranks=R, dtype="float32")
    got = traffic("ragged", load, counts)
    assert got.dispatch.bytes == max(sum(row) for row in others) * D * 4
    assert got.combine.bytes == max(sum(col) for col in others.T) * D * 4


@pytest.mark.parametrize(("E", "K", "R"), [(8, 3, 4), (6, 1, 3), (6, 6, 2), (8, 7, 2), (4, 2, 1)])
def test_chance_against_every_draw(E, K, R):
    """p counted over all C(E, K) choices."""
    L = E // R
    draws = list(itertools.combinations(range(E), K))
    hits = sum(any(e < L for e in draw) for draw in draws)
    load = Workload(tokens=1, d_model=1, num_experts=E, top_k=K, ranks=R)
    assert load.chance == pytest.approx(hits / len(draws), abs=1e-15)


def test_expected_ragged_bytes_against_random_routing():
    R, T, E, K = 8, 2000, 64, 8
    load = Workload(tokens=T, d_model=32, num_experts=E, top_k=K, ranks=R)
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((R, T, E)), axis=-1)[..., :K]
    counts = block_counts(ids, E)
    off = counts.sum() - np.trace(counts)
    assert traffic("ragged", load).dispatch.bytes == pytest.approx(off / R * 64, rel=0.01)
    # Blocks sized by the observed skew hold every block of this routing, and no fewer rows would.
    assert abs(needed_rows(load, observed_skew(counts)) - counts.max()) <= 0.02 * counts.max()


def test_all_gather_beats_a_copy_per_expert_from_k_equal_r():
    """DESIGN §3: fewer bytes than one copy per expert, K(R-1)/R rows, exactly when K >= R."""
    for K in range(1, 17):
        load = Workload(tokens=1, d_model=1, num_experts=64, top_k=K, ranks=8, dtype="int8")
        rows = traffic("all_gather", load).dispatch.bytes
        assert (rows <= K * 7 / 8) == (K >= 8)
        assert traffic("ragged", dataclasses.replace(load, tokens=10**6)).dispatch.bytes <= rows * 10**6


def test_predicted_times_add_up():
    hw = dataclasses.replace(HARDWARE["h200"], latency_us=3.0, network_latency_us=7.0, ranks_per_node=4)
    wire = Wire(9_000_000, 2, ring=True, copied_bytes=4_800_000)
    assert predicted_us(wire, 4, hw) == pytest.approx(6 + 20 + 1)
    # Across nodes: a quarter of a ring's bytes cross, 2.25 MB at 50 GB/s; the rest moves at the same time.
    assert predicted_us(wire, 8, hw) == pytest.approx(14 + 45 + 1)
    # Straight to each rank: 4 of 7 lie elsewhere.
    assert predicted_us(dataclasses.replace(wire, ring=False), 8, hw) == pytest.approx(14 + 9e3 * 4 / 7 / 50 + 1)
    assert predicted_us(wire, 8, hw, measured_gbs=90.0) == pytest.approx(100)
    assert predicted_us(wire, 1, hw) == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": 0}, "tokens must be a positive integer; got 0"),
        ({"top_k": 9}, "top_k must be at most num_experts; got 9 of 8"),
        ({"ranks": 3}, "8 experts on 3 ranks"),
        ({"wire_rows": -1}, "wire_rows must be a positive integer"),
    ],
    ids=str,
)
def test_workload_refuses(fields, says):
    with pytest.raises(ValueError, match=says):
        Workload(**{"tokens": 4, "d_model": 8, "num_experts": 8, "top_k": 2, "ranks": 2, **fields})


def test_no_formula_for_an_unknown_transport():
    with pytest.raises(ValueError, match="got 'pigeon'"):
        traffic("pigeon", Workload(tokens=4, d_model=8, num_experts=8, top_k=2, ranks=2))
