"""Ranks as processes that tests may kill, and as threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from groups import Rank, Start

import offcore
from stores import free_store


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
