"""The backend "offcore" of torch.distributed, on CPU tensors, between processes."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("torch")
def test_torch_finds_the_backend_by_its_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    found = re.search(r'"torch\.distributed\.backends"\]\noffcore = "([\w.]+):(\w+)"', text)
    assert found is not None
    module, name = found.groups()
    getattr(importlib.import_module(module), name)()  # a second time
    backends = importlib.import_module("torch.distributed").Backend
    assert backends("offcore") == "offcore"
    assert backends.backend_capability["offcore"] == ["cpu", "cuda"]


@pytest.mark.needs("torch")
def test_a_group_of_processes() -> None:
    script = str(Path(__file__).with_name("distributed_ranks.py"))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
