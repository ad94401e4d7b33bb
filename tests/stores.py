"""Where the ranks of a test meet, and ranks that are threads."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from offcore._core import Bootstrap, Rendezvous

import offcore


def free_store() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Store:
    """As much of a torch.distributed store as a meeting needs."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, key: str, number: int) -> int:
        with self._lock:
            self._values[key] = self._values.get(key, 0) + number
            return int(self._values[key])

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return bytes(self._values[key])


def joined(store: str, rank: int, ranks: int, timeout_s: float) -> Rendezvous:
    return Rendezvous(Bootstrap.at(store, rank, ranks), timeout_s)


def as_ranks(
    ranks: int,
    work: Callable[[offcore.Communicator, int], Any],
    timeout: float = 60,
    store: Any = None,
) -> list[Any]:
    """What `work(comm, rank)` returns, with each rank a thread with its own communicator."""
    store = free_store() if store is None else store

    def one(rank: int) -> Any:
        with offcore.Communicator(
            backend="host", store=store, rank=rank, world_size=ranks, timeout=timeout
        ) as comm:
            return work(comm, rank)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))
