"""Execute the notebooks of a folder, each a jupytext pair NAME.py and NAME.ipynb.

python -m scripts.run_notebooks notebooks            execute, and check that the two halves of each pair agree
python -m scripts.run_notebooks notebooks --write    execute, and write each NAME.ipynb anew from its NAME.py

The .py is the source that people edit and review; the .ipynb is what Jupyter opens. It is kept without outputs, so
that a change of the source is all that a diff shows.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELL_TIMEOUT_S = 900


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """What the two halves of a pair must share."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def check_pair(source: Path) -> str | None:
    """Why the .ipynb of this .py is not its twin, or None."""
    twin = source.with_suffix(".ipynb")
    if not twin.exists():
        return f"{twin} is missing"
    notebook = nbformat.read(twin, as_version=4)
    if cells(jupytext.read(source)) != cells(notebook):
        return f"{twin} has other cells than {source}"
    if any(cell.get("outputs") for cell in notebook.cells):
        return f"{twin} carries outputs"
    return None


def write_pair(source: Path) -> None:
    """Write the .ipynb of this .py: the same cells, no outputs, the same bytes every time."""
    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"  # random otherwise
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def execute(source: Path) -> nbformat.NotebookNode:
    """Run the cells in a fresh kernel of this interpreter, in the notebook's own folder."""
    notebook = jupytext.read(source)
    resources = {"metadata": {"path": str(source.parent)}}
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    return notebook


def main() -> int:
    """Exit status 0 when every notebook ran and every pair agrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write each .ipynb anew")
    options = parser.parse_args()
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not one of the same name in the home

    sources = sorted(options.folder.glob("*.py"))
    faults = [f"{n} has no .py" for n in sorted(options.folder.glob("*.ipynb")) if n.with_suffix(".py") not in sources]
    if not sources:
        faults.append(f"no notebook in {options.folder}")
    for source in sources:
        start_s = time.perf_counter()
        try:
            notebook = execute(source)
        except CellExecutionError as error:
            faults.append(f"{source}: {error}")
            continue
        print(f"{source}: {len(notebook.cells)} cells in {time.perf_counter() - start_s:.1f} s", flush=True)
        if options.write:
            write_pair(source)
        elif fault := check_pair(source):
            faults.append(f"{fault}. Remedy: python -m scripts.run_notebooks {options.folder} --write")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
