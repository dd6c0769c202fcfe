"""transport="auto": what it chooses, why, that the layer does the same, and that it prints."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from contract import harness as h
from contract.harness import Setting, compiled_step, oracle, place, random_case, rel_err
from perf.wire import bytes_by_collective

import jaxmoe
from jaxmoe.comm import ragged
from jaxmoe.perf import HARDWARE, SHAPES, Hardware, Workload, choose_transport, find_hardware

H200 = HARDWARE["h200"]
ROUTER = jaxmoe.RouterConfig(num_experts=256, top_k=8)


def _load(shape="deepseek-v3", ranks=8, **changes) -> Workload:
    s = SHAPES[shape]
    fields = dict(tokens=4096, d_model=s.d_model, num_experts=s.num_experts, top_k=s.top_k, ranks=ranks)
    return Workload(**{**fields, **changes})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("hardware", sorted(HARDWARE))
def test_the_choice_is_the_fastest_that_is_allowed(shape, ranks, hardware):
    for skew in (None, 1.0, 1.2, 3.0):
        choice = choose_transport(_load(shape, ranks), HARDWARE[hardware], skew=skew)
        assert choice.name in ("all_gather", "all_to_all")
        fastest = min((o for o in choice.options if o.refused is None), key=lambda o: o.total_us)
        assert choice.option(choice.name).total_us == fastest.total_us
        if skew is None:  # blocks of T rows never move less than the gather, and nothing may be dropped
            assert (choice.name, choice.wire_rows) == ("all_gather", None)


def test_skew_decides_between_blocks_and_gather():
    """Blocks of T·p·skew rows win while they are well below T, and lose when skew fills them."""
    low, high = (choose_transport(_load(), H200, skew=s) for s in (1.1, 1.5))
    assert low.name == "all_to_all"
    assert low.wire_rows == int(np.ceil(4096 * low.workload.chance * 1.1))
    assert low.option("all_to_all").traffic.bytes < low.option("all_gather").traffic.bytes
    assert high.name == "all_gather" and high.wire_rows is None
    assert high.option("all_to_all").wire_rows == 4067  # of 4096: as many bytes, and copies beside
    assert "dropped and counted" in low.reason and "skew of 1.10" in low.reason


def test_wire_rows_bounds_the_blocks_and_overrules_skew():
    choice = choose_transport(_load(wire_rows=1000), H200, skew=1.5)
    assert (choice.name, choice.wire_rows) == ("all_to_all", 1000)
    assert choice.option("all_gather").wire_rows is None


def test_a_measured_rate_decides():
    slow = dataclasses.replace(H200, measured_gbs=(("all_gather", 300.0), ("all_to_all", 100.0)))
    assert choose_transport(_load(), slow, skew=1.1).name == "all_gather"
    fast = dataclasses.replace(H200, measured_gbs=(("all_gather", 100.0), ("all_to_all", 300.0)))
    got = choose_transport(_load(), fast)
    assert got.name == "all_to_all" and got.wire_rows is None  # the same bytes, sent faster: nothing is dropped
    assert got.option("all_gather").dispatch_us == pytest.approx(7 * 4096 * 7168 * 2 / 100e3)


def test_two_levels_change_the_choice():
    """Across nodes each byte of a gather enters a node once, while copies go to every rank there."""
    load = _load("deepseek-v3", ranks=32)
    near, far = dataclasses.replace(H200, ranks_per_node=32), dataclasses.replace(H200, network_gbs=10.0)
    assert choose_transport(load, near, skew=1.2).name == "all_to_all"
    assert choose_transport(load, far, skew=1.2).name == "all_gather"


def test_naive_is_never_chosen_and_ragged_only_where_allowed():
    free = Hardware(
        name="x", link_gbs=1, network_gbs=1, memory_gbs=1, ranks_per_node=8, latency_us=0, network_latency_us=0,
        measured_gbs=(("naive", 1e9), ("ragged", 1e8), ("all_gather", 1.0)),
    )  # fmt: skip
    closed = choose_transport(_load(), free)
    assert closed.name == "all_gather"
    assert "allow_ragged=True" in closed.option("ragged").refused
    assert choose_transport(_load(), free, allow_ragged=True).name == "ragged"
    failed = choose_transport(_load(), free, allow_ragged=True, refused={"ragged": "no GPU"})
    assert failed.name == "all_gather" and failed.option("ragged").refused == "no GPU"
    assert choose_transport(_load(), H200, allow_ragged=True).name == "ragged"


def test_ragged_passes_its_preflight_first(monkeypatch):
    fast = dataclasses.replace(H200, measured_gbs=(("ragged", 1e6),))
    config = jaxmoe.MoEConfig(router=ROUTER, auto=jaxmoe.AutoTransport(hardware=fast, allow_ragged=True))
    on_cpu = jaxmoe.explain_transport(config, 7168, 4096, 4)
    assert on_cpu.name != "ragged" and "needs GPUs" in on_cpu.option("ragged").refused
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv(ragged.ACCEPT_KNOWN_BAD, raising=False)
    assert jaxmoe.explain_transport(config, 7168, 4096, 4).name == "ragged"
    assert "not trusted" in jaxmoe.explain_transport(config, 7168, 4096, 8).option("ragged").refused


def test_one_rank():
    choice = choose_transport(_load(ranks=1), H200)
    assert choice.name == "all_gather" and choice.option("all_gather").traffic.bytes == 0
    assert "nothing travels" in choice.reason


def test_a_choice_prints_as_a_table():
    lines = str(choose_transport(_load(), H200, skew=1.1)).splitlines()
    assert lines[0].startswith("transport 'all_to_all': ")
    assert "T=4096 D=7168 E=256 K=8 R=8 L=32" in lines[1] and "skew=1.10" in lines[1]
    assert "450 GB/s" in lines[2]
    rows = lines[4:]
    assert [bool(re.match(r" >", r)) for r in rows].count(True) == 1
    assert {r.split()[0].lstrip(">") for r in rows} == {"naive", "all_gather", "all_to_all", "ragged"}
    assert "411.042" in next(r for r in rows if "all_gather" in r)  # 7 · 4096 · 7168 · 2 bytes
    assert all(len(line) <= 200 for line in lines)


@pytest.mark.parametrize(("skew", "transport", "drops"), [(None, "all_gather", False), (1.0, "all_to_all", True)])
def test_the_layer_takes_what_explain_transport_says(skew, transport, drops):
    """Same bytes in the compiled program, and the same results bit for bit as the transport named by hand."""
    # One expert a token, so a block needs 2 of 5 tokens at a skew of 1; here all tokens go to rank 0 or 1.
    setting = Setting(transport="auto", top_k=1)
    config = dataclasses.replace(setting.config, auto=jaxmoe.AutoTransport(skew=skew))
    choice = jaxmoe.explain_transport(config, h.D, h.T, h.R, "float32")
    assert choice.name == transport

    ids = np.arange(h.R * h.T)[:, None] % 4
    params, x, routing, num_valid, dy = place(setting, *random_case(4, ids=ids, setting=setting))
    run = {
        c.transport: jax.jit(lambda p, x, r, c=c: jaxmoe.moe(p, x, c, mesh=setting.mesh, routing=r))
        for c in (config, dataclasses.replace(config, transport=choice.name, wire_rows=choice.wire_rows))
    }
    compiled = {name: fn.lower(params, x, routing).compile() for name, fn in run.items()}
    sent = bytes_by_collective(compiled["auto"].as_text())
    assert sum(sent.values()) == choice.option(choice.name).traffic.bytes
    (auto_y, auto_stats), (y, stats) = (compiled[name](params, x, routing) for name in ("auto", transport))
    np.testing.assert_array_equal(auto_y, y)
    assert int(auto_stats.dropped) == int(stats.dropped)
    assert (int(stats.dropped) > 0) == drops


def test_auto_forward_and_gradient_against_the_oracle():
    setting = Setting(transport="auto", schedule=jaxmoe.TokenChunks(2))
    case = random_case(5, setting=setting)
    y, stats, grads = compiled_step(setting)(*place(setting, *case))
    want_y, want_grads = oracle(*case, setting)
    assert rel_err(y, want_y) <= h.TOLERANCE["float32"]
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert rel_err(got, want) <= h.TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jaxmoe.AutoTransport(hardware="abacus"), r"hardware must be one of .*'h200'.*got 'abacus'"),
        (lambda: jaxmoe.AutoTransport(skew=0.5), r"at least 1; got 0.5"),
        (lambda: find_hardware("abacus"), r"got 'abacus'"),
        (lambda: choose_transport(_load(), H200, skew=0.0), r"at least 1; got 0.0"),
        (lambda: choose_transport(_load(), H200, refused={"all_gather": "", "all_to_all": ""}), "every transport"),
        (lambda: dataclasses.replace(H200, link_gbs=0.0), "link_gbs must be positive"),
        (lambda: dataclasses.replace(H200, latency_us=-1.0), "latency_us must be 0 or more"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_hardware_is_found_by_the_device_kind(monkeypatch):
    assert find_hardware().virtual and find_hardware().name == "virtual-cpu"

    class Device:
        platform = "gpu"

    for kind, name in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
    ):
        Device.device_kind = kind
        monkeypatch.setattr(jax, "devices", lambda: [Device])
        assert find_hardware().name == name
    Device.device_kind = "Some New Thing"
    assert find_hardware().virtual and "Some New Thing" in find_hardware().name


def test_every_number_has_a_source():
    for hardware in HARDWARE.values():
        numbers = {f.name for f in dataclasses.fields(Hardware) if f.type in ("float", "int", float, int)}
        assert numbers == {field for field, source in hardware.sources if source}, hardware.name
