"""FSDP2 with offcore's communication, on CPU tensors, between processes."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs("torch")
@pytest.mark.parametrize("more", [(), pytest.param(("long",), marks=pytest.mark.long)])
def test_models_train_to_the_same_weights(more: tuple[str, ...]) -> None:
    script = str(Path(__file__).with_name("fsdp_ranks.py"))
    done = subprocess.run(
        [sys.executable, script, *more], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
