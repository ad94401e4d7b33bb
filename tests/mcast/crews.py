"""Ranks as threads of one process, on UDP over the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import offcore
from offcore import mcast
from stores import free_store

Body = Callable[[mcast.Communicator], Any]


def at_once(bodies: list[Callable[[], Any]]) -> list[Any]:
    """What each call gives or raises, called by a thread each."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except Exception as failure:
            results[index] = failure

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_ranks(ranks: int, body: Body, **options: Any) -> list[Any]:
    """What `body` gives at each rank. Skips where this machine cannot multicast to itself."""
    address = free_store()
    defaults = {"interface": "lo", "timeout": 20.0, "receive_workers": 0, "send_workers": 0}

    def rank_of(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            with mcast.Communicator(
                address, rank=rank, world_size=ranks, **{**defaults, **options}
            ) as comm:
                result = body(comm)
                comm.barrier().wait()
                return result

        return run

    results = at_once([rank_of(rank) for rank in range(ranks)])
    for result in results:
        if isinstance(result, offcore.Error) and result.code == "driver":
            pytest.skip(f"no multicast on the loopback interface here: {result}")
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
