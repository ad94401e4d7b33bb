"""Ranks as processes that tests may kill, and as threads."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import offcore

STREAM = Path(__file__).with_name("stream.py")


def free_store() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Rank:
    """A rank's process."""

    def __init__(self, words: list[str], prefix: list[str]) -> None:
        path = os.pathsep.join([str(STREAM.parents[1]), *sys.path])
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(STREAM), *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def event(self) -> dict[str, Any]:
        """The next line that the rank prints; {} when there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def end(self) -> dict[str, Any]:
        """The last line, once the process has ended by itself."""
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        assert self.process.wait(10) == 0
        return json.loads(lines[-1])


Start = Callable[..., list[Rank]]


@pytest.fixture
def start_ranks() -> Iterator[Start]:
    """start_ranks(ranks, seed, calls, settings_of(rank)): the processes of a group."""
    started: list[Rank] = []

    def start(
        ranks: int,
        seed: int = 0,
        calls: int = 0,
        settings: Callable[[int], dict[str, Any] | None] = lambda rank: {},
        prefix: tuple[str, ...] = (),
    ) -> list[Rank]:
        store = free_store()
        group = []
        for rank in range(ranks):
            given = settings(rank)
            if given is None:
                continue
            words = [store, *map(str, (rank, ranks, seed, calls))]
            words += [f"{name}={value}" for name, value in given.items()]
            group.append(Rank(words, list(prefix)))
            started.append(group[-1])
        return group

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


Work = Callable[[offcore.Communicator, int], Any]


@pytest.fixture
def as_threads() -> Callable[..., list[Any]]:
    """as_threads(ranks, work): what work(comm, rank) returns, each rank a thread here."""

    def run(ranks: int, work: Work, timeout: float = 10) -> list[Any]:
        store = free_store()

        def one(rank: int) -> Any:
            with offcore.Communicator(
                backend="host", store=store, rank=rank, world_size=ranks, timeout=timeout
            ) as comm:
                return work(comm, rank)

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))

    return run
