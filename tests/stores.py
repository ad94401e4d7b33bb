"""Where the ranks of a test meet, and ranks that are threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import offcore
from offcore.ports import free_port


def free_store() -> str:
    return f"127.0.0.1:{free_port()}"


def as_ranks(
    ranks: int, work: Callable[[offcore.Communicator, int], Any], timeout: float = 60
) -> list[Any]:
    """What `work(comm, rank)` returns, with each rank a thread with its own communicator."""
    store = free_store()

    def one(rank: int) -> Any:
        with offcore.Communicator(
            backend="host", store=store, rank=rank, world_size=ranks, timeout=timeout
        ) as comm:
            return work(comm, rank)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))
