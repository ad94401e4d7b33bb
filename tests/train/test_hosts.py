"""Groups that span hosts, on CPU tensors, between processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offcore.tools.testbed.launcher import Place, run

HERE = Path(__file__).parent


@pytest.mark.needs("torch")
def test_groups_that_span_hosts() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "hosts_ranks.py")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.needs("torch", "namespaces")
def test_multicast_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's ranks send each byte once to the switch, which is the least, and get each once."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, sys.path)]))
    runs = list(run("mcast_hosts:call", Place(hosts=3), {}))
    assert [one["hosts"] for one in runs] == [2, 3]
    for one in runs:
        for sent, received in zip(one["sent"], one["received"], strict=True):
            assert one["least"] <= sent < 1.05 * one["least"]
            least = (one["hosts"] - 1) * one["least"]
            assert least <= received < 1.05 * least
