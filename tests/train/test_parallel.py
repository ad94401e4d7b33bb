"""Context parallelism and compiled collectives by the backend "offcore", on CPU tensors."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs("torch")
@pytest.mark.parametrize("more", [(), pytest.param(("long",), marks=pytest.mark.long)])
def test_as_by_gloo(more: tuple[str, ...]) -> None:
    script = str(Path(__file__).with_name("parallel_ranks.py"))
    done = subprocess.run(
        [sys.executable, script, *more], capture_output=True, text=True, timeout=210, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
