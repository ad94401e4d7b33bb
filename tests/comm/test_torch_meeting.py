"""Communicators whose ranks meet by torch.distributed, with no port of their own; two at once."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_bootstrap import at_once, environment, seen

import offcore


@pytest.mark.needs("torch")
def test_threads_make_communicators_at_once_over_one_connection_to_a_store() -> None:
    """A wait for a key would keep the other thread from setting its own."""
    dist: Any = pytest.importorskip("torch.distributed")
    master = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    both = threading.Barrier(4)

    def opened(store: Any, name: str, rank: int) -> list[int]:
        both.wait(20)
        with offcore.Communicator(
            backend="host",
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=2,
            timeout=20,
        ) as comm:
            return seen(comm, rank, ord(name))

    stores = [dist.TCPStore("127.0.0.1", master.port, None, False) for _ in range(2)]
    calls = [
        lambda rank=rank, name=name: opened(stores[rank], name, rank)
        for rank, names in enumerate(("ab", "ba"))
        for name in names
    ]
    a, b = [97, 98], [98, 99]
    assert at_once(calls) == [a, b, b, a]


GROUP_RANK = """
import datetime, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist
import offcore
from test_bootstrap import seen

rank, ranks = int(sys.argv[2]), 3
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=ranks,
                        timeout=datetime.timedelta(seconds=30))
groups = [dist.group.WORLD, dist.new_group([2, 1, 0])]

def opened(number):
    with offcore.Communicator(backend="host", store=groups[number], timeout=30) as comm:
        assert comm.machine == "host-3"
        return seen(comm, comm.local_ranks[0], 10 * number)

with ThreadPoolExecutor(2) as pool:
    print(*pool.map(opened, range(2)))
dist.barrier()
"""


@pytest.mark.needs("torch")
def test_torch_groups_open_at_once_without_a_port_to_meet_at(tmp_path: Path) -> None:
    crew = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP_RANK, str(tmp_path / "meeting"), str(rank)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=90)[0] for process in crew]
    finally:
        for process in crew:
            process.kill()
    assert said == ["[0, 1, 2] [10, 11, 12]\n"] * 3
