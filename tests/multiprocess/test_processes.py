"""Several processes over gloo on one machine: every transport and schedule, against the oracle."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
LIMIT_S = 600


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("count, per_process", [(2, 2)])
def test_processes_agree_with_the_oracle(count, per_process):
    port = str(_free_port())
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(i), str(count), port, str(per_process)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    try:
        outputs = [p.communicate(timeout=LIMIT_S)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for i, (p, out) in enumerate(zip(processes, outputs, strict=True)):
        assert p.returncode == 0, f"process {i} ended with {p.returncode}:\n{out[-3000:]}"
        assert f"process {i} of {count}: {count * per_process} ranks agree" in out
