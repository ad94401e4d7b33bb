"""The check of random transfers for GPUs' machines runs on the host backend too."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.needs("torch")
def test_random_transfers_are_right() -> None:
    command = [
        sys.executable,
        BENCHMARKS / "kv_check.py",
        "--backend",
        "host",
        "--only",
        "jobs,objects",
        "--jobs",
        "20",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" 20 jobs, 0 wrong") == 7
    assert "objects: 4 calls, 0 wrong\n" in done.stdout
    assert done.stdout.endswith("ALL GOOD\n")
