"""`jaxmoe bench transport`: its rows, that a virtual mesh is named as such, and its refusals."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from contract.harness import TRANSPORT_NAMES

from jaxmoe import cli
from jaxmoe.bench import transport as bench
from jaxmoe.perf import HARDWARE, TINY

ROW = {"bench", "case", "backend", "direction", "us", "rate", "unit", "ceiling", "fraction", "device", "jax", "date"}


def test_every_transport_is_timed_and_a_virtual_mesh_says_so(capsys, tmp_path):
    out = tmp_path / "rows.json"
    assert cli.main(["bench", "transport", "--ranks", "4", "--tokens", "8", "--repeats", "2", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "virtual" in text and "mean nothing" in text and "Left out, ragged: " in text
    rows = json.loads(out.read_text())
    assert {(r["backend"], r["direction"]) for r in rows} == {
        (name, direction) for name in TRANSPORT_NAMES for direction in ("dispatch", "combine")
    }
    for row in rows:
        assert set(row) >= ROW
        assert row["bench"] == "transport" and row["unit"] == "GB/s" and row["virtual"]
        assert row["us"] > 0 and row["rate"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["ceiling"] is None and row["fraction"] is None  # a link that is not there has no rate
        assert row["jax"] == jax.__version__ and "virtual" in row["device"]
        assert f"R=4 {'bfloat16'}" in row["case"] and TINY.name in row["case"]
        assert row["backend"] in text
    by = {(r["backend"], r["direction"]): r for r in rows}
    assert by["all_gather", "dispatch"]["bytes"] == 3 * 8 * TINY.d_model * 2
    assert by["naive", "combine"]["bytes"] == 2 * by["all_gather", "combine"]["bytes"]
    for direction in ("dispatch", "combine"):
        naive, other = by["naive", direction], by["all_gather", direction]
        assert naive["vs_naive"] == 1 and other["vs_naive"] == pytest.approx(naive["us"] / other["us"])


def test_on_real_hardware_the_link_is_the_ceiling(monkeypatch):
    """Times replaced: what is checked is the arithmetic, and that the emulation is left out."""
    monkeypatch.setattr(bench, "_time_one", lambda case, name, repeats: {"dispatch": 2.0, "combine": 4.0})
    args = _args("--tokens", "8", "--ranks", "4")
    rows = bench.time_transports(bench.make_case(args, virtual=True), HARDWARE["h200"], 1)
    assert {r.backend for r in rows} == set(TRANSPORT_NAMES) - {"ragged_emulated"}
    for row in rows:
        assert row.ceiling == 450 and row.fraction == row.rate / 450 and not row.virtual
    far = dataclasses.replace(HARDWARE["h200"], ranks_per_node=2)
    assert bench.time_transports(bench.make_case(args, virtual=True), far, 1)[0].ceiling == 50


def _args(*argv):
    return cli.build_parser("bench").parse_args(["bench", "transport", *argv])


def test_the_blocks_hold_every_copy_of_the_routing():
    case = bench.make_case(_args("--tokens", "16", "--ranks", "4"), virtual=True)
    L = TINY.num_experts // 4
    for s in range(4):
        for d in range(4):
            need = ((case.expert_ids[s] // L) == d).any(-1).sum()
            assert need == case.counts[s, d] <= case.load.wire_rows
    assert case.load.wire_rows == case.counts.max()
    assert all(len(set(row)) == TINY.top_k for row in np.reshape(case.expert_ids, (-1, TINY.top_k)).tolist())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ranks", "1"], ["two ranks or more; got 1", "JAX_PLATFORMS=cpu"]),
        (["--ranks", "3"], ["16 experts on 3 ranks"]),
        (["--ranks", "64"], ["ep_size=64 and 8 devices"]),
        (["--tokens", "0"], ["--tokens must be a positive integer; got 0"]),
        (["--shape", "gpt-9"], ["gpt-9", "deepseek-v3"]),
    ],
)
def test_refusals(argv, says, capsys):
    assert cli.main(["bench", "transport", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxmoe bench transport: error: ")
    for words in says:
        assert words in err


def test_no_area(capsys):
    assert cli.main(["bench"]) == 2
    assert "AREA" in capsys.readouterr().err


def test_missing_rich_names_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    assert cli.main(["bench", "transport"]) == 2
    assert "pip install 'jaxmoe[viz]'" in capsys.readouterr().err


def test_the_command_line_imports_it_only_when_asked():
    code = (
        "import sys; from jaxmoe.cli import main; main(['--help']);"
        "print([m for m in sys.modules if m.startswith('jaxmoe.bench')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
