"""Calls of a group on GPUs that go from its methods to the core in one step (direct.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from cuda_library import fake_cuda_library

RANKS = Path(__file__).with_name("direct_ranks.py")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("main", ["well", "wrong"])
def test_calls_go_straight_to_the_core(main: str) -> None:
    env = os.environ | {"OFFCORE_LIBCUDA": str(fake_cuda_library())}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    done = subprocess.run(
        [sys.executable, str(RANKS), main], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
