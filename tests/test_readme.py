"""The README's example runs as printed, and is as short as it says."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_example_runs_as_printed():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20, f"the README promises twenty lines; got {len(lines)}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    counts = [int(n) for n in re.search(r"tokens per expert \[([\d\s]+)\]", run.stdout)[1].split()]
    assert len(counts) == 16 and sum(counts) == 8 * 32 * 2
    assert run.stdout.rstrip().endswith("dropped 0")
