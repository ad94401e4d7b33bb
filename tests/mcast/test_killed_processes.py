"""Processes that die or hang while others count on them."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stores import free_store

RANKS = 3
WORKER = Path(__file__).with_name("endless_rank.py")


class Crew:
    def __init__(self, counts: list[int], **options: Any) -> None:
        address = free_store()
        options = {"timeout": 20.0, "silence": 1.0, **options}
        self.processes = [
            subprocess.Popen(
                [sys.executable, WORKER, address, str(rank), str(RANKS), str(count),
                 json.dumps(options)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, count in enumerate(counts)
        ]  # fmt: skip

    def line(self, rank: int) -> str:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def lines_after(self, rank: int) -> list[str]:
        return self.processes[rank].communicate(timeout=30)[0].split()

    def __enter__(self) -> "Crew":
        for rank in range(RANKS):
            assert self.line(rank) == "open"
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def check_survivors(crew: Crew, victim: int, within_s: float) -> None:
    began = time.monotonic()
    for rank in range(RANKS):
        if rank == victim:
            continue
        *before, last = crew.lines_after(rank)
        assert last == "peer"
        assert "wrong" not in before
    assert time.monotonic() - began < within_s


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_that_dies_before_it_comes_to_the_operation(victim: int) -> None:
    counts = [1000] * RANKS
    counts[victim] = 0
    with Crew(counts) as crew:
        time.sleep(0.1)  # the others wait at its barrier
        crew.processes[victim].kill()
        check_survivors(crew, victim, 5)


@pytest.mark.parametrize("multicast", [True, False])
@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_that_dies_in_the_middle(victim: int, multicast: bool) -> None:
    with Crew([1_000_000] * RANKS, multicast=multicast) as crew:
        for _ in range(3):
            assert crew.line(victim) == "right"
        time.sleep(random.random() * 0.01)  # somewhere in an operation
        crew.processes[victim].kill()
        check_survivors(crew, victim, 5)


def test_a_rank_that_hangs() -> None:
    with Crew([100_000] * RANKS) as crew:
        assert crew.line(1) == "right"
        crew.processes[1].send_signal(signal.SIGSTOP)
        check_survivors(crew, 1, 10)
