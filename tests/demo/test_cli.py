"""The command line: wrong usage ends with one line and status 2, and nothing is imported that is not needed."""

import importlib.util
import subprocess
import sys

import pytest

from jaxmoe import cli
from jaxmoe.demo import session


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--top-k", "17"], ["top_k=17, num_experts=16", "Lower top_k"]),
        (["--experts", "12"], ["12 experts on 8 ranks", "Use 8 or 16"]),
        (["--mesh", "16"], ["1x16 on 8 cpu devices", "--devices 16"]),
        (["--mesh", "3x4"], ["3x4 on 8 cpu devices", "--devices 12"]),
        (["--mesh", "2x"], ["must be R or DATAxR", "'2x'"]),
        (["--mesh", "0"], ["must be R or DATAxR", "'0'"]),
        (["--schedule", "chunks:0"], ["sequential or chunks:N", "'chunks:0'"]),
        (["--schedule", "waves"], ["sequential or chunks:N", "'waves'"]),
        (["--transport", "pigeon"], ["'pigeon'", "all_gather"]),
        (["--steps", "0"], ["positive integer", "'0'"]),
        (["--batch", "12"], ["multiple of the 8 devices", "--batch 16"]),
        (["--seed", "-1"], ["--seed must lie in", "-1"]),
        (["--text", "/no/such/file"], ["/no/such/file does not exist", "Mend the path"]),
        (["--out", "/proc/no-such-folder"], ["cannot make /proc/no-such-folder", "Pass another"]),
        (["--json", "/tmp"], ["/tmp is a folder", "results.json"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_bad_options(argv, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(("jaxmoe demo: error: ", "jaxmoe: error: "))
    for words in says:
        assert words in err


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_no_command(argv, capsys):
    assert cli.main(argv) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_help(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "train a small MoE transformer" in out.lower().replace("moe", "MoE")
    assert ("--top-k" in out) == ("demo" in argv)


@pytest.mark.parametrize("name", ["matplotlib", "optax", "rich"])
def test_missing_extra_names_the_remedy(name, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else found(n, *a))
    assert cli.main(["demo"]) == 2
    err = capsys.readouterr().err
    assert f"needs {name}." in err
    assert "pip install 'jaxmoe[viz]'" in err


def test_interrupt_ends_cleanly(capsys, monkeypatch, tmp_path):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run_session", interrupted)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_imports_no_subcommand():
    code = (
        "import sys; from jaxmoe.cli import main; status = main(['--help'])\n"
        "print([m for m in ('jaxmoe.demo', 'matplotlib') if m in sys.modules], status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
