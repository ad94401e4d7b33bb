"""The torch.distributed backend, a process a rank."""

import subprocess
import sys
from pathlib import Path

import pytest

from stores import free_store

RANKS = 3


@pytest.mark.needs("torch")
def test_init_process_group_just_works() -> None:
    port = free_store().rpartition(":")[2]
    script = str(Path(__file__).with_name("torch_ranks.py"))
    crew = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(RANKS), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=90)[0] for process in crew]
    finally:
        for process in crew:
            process.kill()
    assert [process.returncode for process in crew] == [0] * RANKS, "\n".join(said)
    assert all(text.endswith("done\n") for text in said), said
