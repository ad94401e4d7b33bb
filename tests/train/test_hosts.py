"""The backend "offcore" in groups that span hosts, on CPU tensors, between processes."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs("torch")
def test_groups_that_span_hosts() -> None:
    script = str(Path(__file__).with_name("hosts_ranks.py"))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
