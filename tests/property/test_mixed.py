"""Random copies and reductions of torch tensors, as benchmarks/gpu_mixed.py draws them on GPUs."""

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
    done = subprocess.run(
        (sys.executable, SCRIPT, *map(str, words)), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = f"{OPERATIONS} operations on {ranks} ranks, seed {seed}: no wrong byte, 0 refused"
    assert done.stdout.startswith(line)
