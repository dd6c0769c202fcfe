"""The whole demo in a few steps: what it prints, writes and returns, and that its oracle can disagree."""

import json
import re

import jax.numpy as jnp
import pytest
from matplotlib import image

import jaxmoe
from jaxmoe import cli

KEYS = {
    "loss_first",
    "loss_last",
    "forward_rel_err",
    "grad_rel_err",
    "dropped_tokens",
    "ep_size",
    "transport",
    "schedule",
    "seconds",
}
SMALL = ["--steps", "3", "--seq", "16", "--batch", "8", "--experts", "8"]


def run(folder, *argv) -> tuple[int, dict]:
    status = cli.main(["demo", *SMALL, "--out", str(folder), "--json", str(folder / "r.json"), *argv])
    return status, json.loads((folder / "r.json").read_text())


def test_defaults(tmp_path, capsys):
    status, results = run(tmp_path)
    out, err = capsys.readouterr()
    assert status == 0
    assert err == ""
    assert results.keys() >= KEYS
    assert results["loss_first"] == pytest.approx(5.545, abs=0.1)
    assert 0 <= results["forward_rel_err"] < 1e-5
    assert 0 < results["grad_rel_err"] < 1e-5
    assert results["grad_rel_err"] == max(results["grad_rel_err_by_parameter"].values())
    assert results["dropped_tokens"] == 0
    assert (results["ep_size"], results["transport"], results["schedule"]) == (8, "all_gather", "chunks:2")
    assert [sum(layer) for layer in results["tokens_per_expert"]] == [8 * 16 * 2] * 2
    for name in ("loss.png", "expert_load.png"):
        assert str(tmp_path / name) in out
        assert image.imread(tmp_path / name).std() > 0.05
    assert "The oracle agrees" in out
    assert re.search(r"step 3/3  loss \d\.\d+  [\d,]+ tokens/s", out)
    for name in (
        "embed.embedding",
        "blocks.1.moe.router",
        "blocks.0.moe.gate_up",
        "blocks.1.moe.down",
        "logits.kernel",
    ):
        assert f"∂ {name}" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_other_mesh_transport_and_schedule(tmp_path, capsys):
    argv = ["--top-k", "3", "--quiet", "--steps", "2"]
    status, results = run(tmp_path, *argv, "--mesh", "2x4", "--transport", "naive", "--schedule", "sequential")
    assert status == 0
    assert (results["ep_size"], results["data_size"], results["top_k"]) == (4, 2, 3)
    assert (results["transport"], results["schedule"]) == ("naive", "sequential")
    assert [sum(layer) for layer in results["tokens_per_expert"]] == [8 * 16 * 3] * 2
    assert len(capsys.readouterr().out.splitlines()) == 5  # loss, verdict, three files


def test_one_wrong_token_is_found(tmp_path, capsys, monkeypatch):
    dense_moe = jaxmoe.dense_moe

    def wrong(params, x, router, **kwargs):
        y, routing = dense_moe(params, x, router, **kwargs)
        return y.at[0, 3].multiply(jnp.float32(1.5)), routing

    monkeypatch.setattr(jaxmoe, "dense_moe", wrong)
    status, results = run(tmp_path, "--quiet", "--steps", "1")
    out, err = capsys.readouterr()
    assert status == 1
    assert results["oracle_agrees"] is False
    assert results["forward_rel_err"] > results["tolerance"]
    assert "the oracle disagrees: the logits differ by" in err
    assert "agrees" not in out
