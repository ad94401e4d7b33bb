"""Random copies and reductions of torch tensors, as benchmarks/gpu_mixed.py draws them on GPUs."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_mixed.py"
OPERATIONS = 60


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2)])
def test_mixed_operations_on_cpus(ranks: int, seed: int) -> None:
    words = ("--backend", "host", "--ranks", ranks, "--operations", OPERATIONS, "--seed", seed)
    launcher = subprocess.Popen(
        (sys.executable, SCRIPT, *map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = launcher.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its ranks, where they hang
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, told
    line = f"{OPERATIONS} operations on {ranks} ranks, seed {seed}: no wrong byte, 0 refused"
    assert line in told
