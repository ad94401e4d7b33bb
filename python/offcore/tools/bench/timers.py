"""How the time of calls is taken, in microseconds, by this rank: the slowest one's counts.

A chain is a batch of calls that are all enqueued before the first one is awaited: what a call costs
a program that goes on enqueuing. A call is one alone, from the host's call until the host has seen
its end. Ranks meet before both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offcore import _core
from offcore.errors import error


class Waits(Protocol):
    def wait(self) -> Any: ...


# Enqueues that many calls and gives what is to be waited for.
Enqueue = Callable[[int], Sequence[Waits]]


class Timer(Protocol):
    def chain(self, enqueue: Enqueue, calls: int) -> float:
        """Of each call of a batch."""

    def call(self, enqueue: Enqueue) -> float:
        """Of one call, seen by the host."""


class HostTimer:
    """By the host's clock: from the first call until the last one's end has been seen."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        self._barrier = barrier

    def chain(self, enqueue: Enqueue, calls: int) -> float:
        return self._seen(enqueue, calls)

    def call(self, enqueue: Enqueue) -> float:
        return self._seen(enqueue, 1)

    def _seen(self, enqueue: Enqueue, calls: int) -> float:
        self._barrier()
        start_ns = time.perf_counter_ns()
        for handle in enqueue(calls):
            handle.wait()
        return (time.perf_counter_ns() - start_ns) / calls / 1e3


class StreamTimer:
    """Chains by a GPU's events: calls are enqueued behind a gate that opens when all ranks have
    done so, hence the host's pace does not count. Raises timeout where that does not end."""

    def __init__(
        self, watch: _core.GpuTimer, barrier: Callable[[], None], timeout_s: float
    ) -> None:
        self._watch = watch
        self._barrier = barrier
        self._timeout_s = timeout_s
        self._host = HostTimer(barrier)

    def chain(self, enqueue: Enqueue, calls: int) -> float:
        watch = self._watch
        # A full stream makes the enqueuing wait for a gate that only this thread would open.
        late = threading.Event()

        def release() -> None:
            late.set()
            watch.open()

        alarm = threading.Timer(self._timeout_s, release)
        alarm.daemon = True
        watch.shut()
        alarm.start()
        try:
            handles = [*enqueue(1)]  # the gates open at different times: this call makes ranks meet
            watch.start()
            handles += enqueue(calls)
            watch.stop()
            self._barrier()
        finally:
            alarm.cancel()
            watch.open()
        if late.is_set():
            raise error(
                "timeout",
                f"{calls} calls were not enqueued within {self._timeout_s:.0f} s: the stream holds "
                "fewer, or a rank did not arrive: take fewer --calls",
            )
        elapsed_us = watch.elapsed_us(self._timeout_s)
        for handle in handles:
            handle.wait()
        return elapsed_us / calls

    def call(self, enqueue: Enqueue) -> float:
        return self._host.call(enqueue)
