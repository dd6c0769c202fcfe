"""The check that the two halves of a notebook pair agree. The notebooks themselves run in `make notebooks`."""

import shutil
from pathlib import Path

import pytest

NEEDED = "in the extra `notebooks`: pip install -e '.[notebooks]'"
pytest.importorskip("jupytext", reason=f"jupytext is {NEEDED}")
pytest.importorskip("nbclient", reason=f"nbclient is {NEEDED}")

from scripts.run_notebooks import check_pair, write_pair  # noqa: E402

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_pair_is_in_sync_and_as_written(source, tmp_path):
    assert check_pair(source) is None
    copy = Path(shutil.copy(source, tmp_path))
    write_pair(copy)
    assert copy.with_suffix(".ipynb").read_bytes() == source.with_suffix(".ipynb").read_bytes()


def test_there_is_a_notebook():
    assert NOTEBOOKS / "quickstart.py" in SOURCES


def test_faults_are_found(tmp_path):
    source = tmp_path / "n.py"
    source.write_text("# %%\nx = 1\n")
    assert "is missing" in check_pair(source)
    write_pair(source)
    assert check_pair(source) is None
    source.write_text("# %%\nx = 2\n")
    assert "other cells" in check_pair(source)
