"""The ragged transport: its emulated collective against a NumPy model, its preflight, and its program for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.harness import Setting, compiled_step, place, random_case
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.comm import available_transports, ragged
from jaxmoe.comm.ragged_emulated import ragged_all_to_all

R, A, B, D = 4, 12, 20, 2


def _model(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, per_rank):
    """The pseudocode of lax.ragged_all_to_all, over all ranks."""
    result = output.copy()
    for source in range(R):
        for i in range(R * per_rank):
            to, size = i // per_rank, send_sizes[source, i]
            assert size == recv_sizes[to, source * per_rank + i % per_rank]
            start, at = input_offsets[source, i], output_offsets[source, i]
            result[to, at : at + size] = operand[source, start : start + size]
    return result


def _slices(rng, per_rank):
    """Random sizes and offsets: slices apart from each other at random distances, some of them empty."""
    shape = (R, R, per_rank)  # [source, destination, slice]
    sizes = rng.integers(0, 3, size=shape) if per_rank == 1 else rng.integers(0, 2, size=shape)
    sizes[2] = 0  # a rank that sends nothing
    apart = lambda n, room: np.sort(rng.integers(0, room + 1, size=n))  # noqa: E731
    inputs, outputs = np.zeros(shape, int), np.zeros(shape, int)
    for r in range(R):
        out = sizes[r].reshape(-1)
        inputs[r] = (np.cumsum(out) - out + apart(out.size, A - out.sum())).reshape(R, per_rank)
        come = sizes[:, r].reshape(-1)
        outputs[:, r] = (np.cumsum(come) - come + apart(come.size, B - come.sum())).reshape(R, per_rank)
    flat = lambda a: a.reshape(R, R * per_rank)  # noqa: E731
    return flat(inputs), flat(sizes), flat(outputs), flat(sizes.swapaxes(0, 1))


@pytest.mark.parametrize("per_rank", [1, 2])
def test_emulation_is_the_model_untouched_rows_included(per_rank):
    mesh = Mesh(np.array(jax.devices()[:R]).reshape(2, 2), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    spec = P(("node", "gpu"))

    def on_rank(*args):
        return ragged_all_to_all(*(a[0] for a in args), axis_name=("node", "gpu"))[None]

    run = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        operand, output = rng.normal(size=(R, A, D)), rng.normal(size=(R, B, D))
        operand, output = operand.astype(np.float32), output.astype(np.float32)
        slices = _slices(rng, per_rank)
        assert slices[1].any()
        got = run(operand, output, *(a.astype(np.int32) for a in slices))
        np.testing.assert_array_equal(got, _model(operand, output, *slices, per_rank))
    inputs, sizes, outputs, receives = (a.astype(np.int32) for a in slices)
    receives[1, 0] += 1
    got = np.asarray(run(operand, output, inputs, sizes, outputs, receives))
    assert np.isnan(got[1]).any(), "ends that disagree show"


def _lowered_for_cuda():
    """A step by 'ragged', forward and gradient, lowered for CUDA: no GPU is needed to see its program."""
    mesh = jaxmoe.make_mesh(R)
    config = jaxmoe.MoEConfig(
        router=jaxmoe.RouterConfig(num_experts=8, top_k=3), transport="ragged", experts="reference"
    )
    setting = Setting()

    def step(params, x, routing, num_valid, dy):
        def forward(params, x, weights):
            given = jaxmoe.Routing(routing.expert_ids, weights)
            schedule = jaxmoe.TokenChunks(2)
            return jaxmoe.moe(params, x, config, schedule=schedule, mesh=mesh, num_valid=num_valid, routing=given)[0]

        y, vjp = jax.vjp(forward, params, x, routing.weights)
        return y, vjp(dy)

    lowered = jax.jit(step).trace(*place(setting, *random_case(0))).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def test_program_for_gpus(monkeypatch):
    """Two lanes: 4 ragged exchanges forward, 4 backward, and no other collective but the one of the metadata."""
    monkeypatch.setattr(ragged, "preflight", lambda *_: None)
    text = _lowered_for_cuda()
    count = lambda op: text.count(f"stablehlo.{op}")  # noqa: E731
    assert text.count("@ragged_all_to_all(") == 8
    assert (count("all_gather"), count("reduce_scatter"), count("all_to_all"), count("all_reduce")) == (1, 1, 0, 0)


def test_ragged_moves_what_all_to_all_moves_bit_for_bit():
    """Rows in the same places, sums in the same order: output and gradients have the same bits."""
    results = []
    for transport in ("all_to_all", "ragged_emulated"):
        setting = Setting(transport=transport)
        results.append(compiled_step(setting)(*place(setting, *random_case(4, valid=[5, 0, 3, 1]))))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "ranks, experts, platform, rule",
    [
        (4, 8, "cpu", r"no ragged all-to-all on 'cpu'. Use 'all_to_all'.*'all_gather'"),
        (4, 8, "tpu", r"no ragged all-to-all on 'tpu'. Use 'all_to_all'"),
        (64, 64, "gpu", r"64 ranks and 64 experts: .*32 slots.*; this is jax .*Use 'all_to_all' or 'all_gather'"),
        (8, 96, "gpu", r"8 ranks and 96 experts: NaN gradients .*Use 'all_to_all'.*JAXMOE_RAGGED_ACCEPT_KNOWN_BAD=1"),
    ],
)
def test_preflight_says_what_to_use(monkeypatch, ranks, experts, platform, rule):
    monkeypatch.delenv(ragged.ACCEPT_KNOWN_BAD, raising=False)
    with pytest.raises(NotImplementedError, match=rule):
        ragged.preflight(ranks, experts, platform=platform)


def test_preflight_passes_and_can_be_overruled(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.delenv(ragged.ACCEPT_KNOWN_BAD, raising=False)
    ragged.preflight(8, 24, platform="gpu")
    ragged.preflight(32, 128, platform="gpu")
    monkeypatch.setenv(ragged.ACCEPT_KNOWN_BAD, "1")
    ragged.preflight(64, 1024, platform="gpu")
    with pytest.raises(NotImplementedError, match="no ragged all-to-all on 'cpu'"):
        ragged.preflight(4, 8, platform="cpu")


def test_preflight_sees_several_ranks_on_one_gpu(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "rank-1")
    ragged.preflight(4, 8, platform="gpu")  # one process drives each GPU once
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(NotImplementedError, match=r"a GPU for each rank; NCCL_HOSTID is set.*Use 'all_to_all'"):
        ragged.preflight(4, 8, platform="gpu")


def test_no_quiet_emulation_on_a_cpu():
    setting = Setting(transport="ragged")
    with pytest.raises(NotImplementedError, match=r"'ragged' needs GPUs.*Use 'all_to_all'"):
        compiled_step(setting).lower(*place(setting, *random_case(0)))
    assert "ragged" not in available_transports(4, 8)
    assert {"all_gather", "all_to_all", "ragged_emulated"} <= set(available_transports(4, 8))


def test_gradient_by_mirrored_offsets():
    """<exchange(x), g> = Σ over ranks <x, its gradient>, and operand rows that no slice covers get exactly 0."""
    mesh = jaxmoe.make_mesh(R)
    rng = np.random.default_rng(7)
    inputs, sizes, outputs, receives = _slices(rng, 1)
    table = np.stack([inputs, sizes, outputs, outputs.T, receives, inputs.T], axis=1).astype(np.int32)

    def on_rank(x, g, table):
        slices = ragged.Slices(*table[0])
        y, vjp = jax.vjp(lambda x: ragged.exchange(x, slices, (A, B), ("expert",), ragged_all_to_all), x[0])
        return y[None], vjp(g[0])[0][None]

    run = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
    x, g = (rng.normal(size=(R, n, D)).astype(np.float32) for n in (A, B))
    covered = np.zeros((R, A), bool)
    for s, d in np.ndindex(R, R):
        covered[s, inputs[s, d] : inputs[s, d] + sizes[s, d]] = True
    assert not covered.all()
    y, dx = map(np.asarray, run(jnp.where(covered[..., None], x, jnp.nan), g, table))
    assert np.isfinite(y).all(), "rows that no slice covers go nowhere"
    assert (dx[~covered] == 0).all()
    want = np.sum(np.asarray(x, np.float64) * dx)
    np.testing.assert_allclose(np.sum(np.asarray(y, np.float64) * g), want, rtol=1e-6)
