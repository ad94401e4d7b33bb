"""The same between two GPUs by the host: events, synchronisation, polling.

ping-pong  `events`: two events and two waits of streams for them a way (C-Drv), all enqueued ahead;
           `host`: the host synchronises twice a way, Python's time included; `polling`: it looks
           at events until they are there.
step       What the way by polling is made of, as paper 003's table I takes it apart: a kernel's
           launch until it runs, its end until the host sees its event, the copy until the host
           sees its event, and another stream's wait for an event (by the GPU's clock).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy  # type: ignore[import-not-found]
import numpy as np

from offcore.errors import error
from offcore.tools.driven.gpu import RANKS, Bench
from offcore.tools.driven.rows import LIMIT_S, SIZES


def copy(bench: Bench, rank: int, nbytes: int, stream: Any) -> None:
    """To the other rank; the current device is the rank's."""
    dst, src = bench.windows[1].address(1 - rank), bench.windows[0].address(rank)
    cupy.cuda.runtime.memcpyAsync(dst, src, nbytes, 4, stream.ptr)


def shut(bench: Bench) -> Callable[[], None]:
    """What is enqueued in rank 0's stream now waits until the result is called."""
    flags = bench.results[0]["flags"]
    with cupy.cuda.Device(0):
        side = cupy.cuda.Stream(non_blocking=True)
        flags.fill(0)
        cupy.cuda.get_current_stream().synchronize()
    gate = np.uint64(flags.data.ptr)
    bench.launch(0, "hold", (gate, gate + np.uint64(8), gate + np.uint64(16)))

    def open_it() -> None:
        with cupy.cuda.Device(0):
            flags[1:2].set(np.ones(1, "uint64"), stream=side)

    return open_it


def by_events(bench: Bench, nbytes: int) -> float:
    """Kernel, event, copy, event, kernel on the other GPU; all enqueued ahead of the first."""
    rounds = 40
    copies = []
    for rank in RANKS:
        with cupy.cuda.Device(rank):
            copies.append(cupy.cuda.Stream(non_blocking=True))
    open_it = shut(bench)
    kept = []
    for k in range(rounds):
        for rank in RANKS:
            bench.launch(rank, "stamp_time", (bench.address(rank, "times") + np.uint64(8 * k),))
            for after, before in (
                (bench.streams[rank], copies[rank]),
                (copies[rank], bench.streams[1 - rank]),
            ):
                with cupy.cuda.Device(rank):
                    event = cupy.cuda.Event(disable_timing=True)
                    event.record(after)
                    if before is copies[rank]:
                        before.wait_event(event)
                        if nbytes > 0:
                            copy(bench, rank, nbytes, before)
                if before is not copies[rank]:
                    with cupy.cuda.Device(1 - rank):
                        before.wait_event(event)
                kept.append(event)
    open_it()
    bench.end("events")
    times = np.diff(bench.results[0]["times"].get()[:rounds].astype(np.int64))[5:]
    return float(statistics.median(times.tolist())) / 2e3


def by_host(bench: Bench, nbytes: int) -> None:
    rounds, times = 200, []
    for k in range(rounds):
        rank = k % 2
        began = time.perf_counter_ns()
        bench.launch(rank, "stamp_time", (bench.address(rank, "times"),))
        with cupy.cuda.Device(rank):
            bench.streams[rank].synchronize()
            copy(bench, rank, nbytes, bench.streams[rank])
            bench.streams[rank].synchronize()
        times.append(time.perf_counter_ns() - began)
    bench.add("ping-pong", "host", nbytes, statistics.median(times) / 1e3, "us one way")


def look(ready: Any) -> int:
    """Looks until it is ready: when that was."""
    until = time.perf_counter_ns() + int(LIMIT_S * 1e9)
    while not ready():
        if time.perf_counter_ns() > until:
            raise error("timeout", f"the GPU has not answered in {LIMIT_S:g} s")
    return time.perf_counter_ns()


def by_polling(bench: Bench, nbytes: int) -> None:
    word = bench.comm.host_array(8, "uint64")
    events = []
    for rank in RANKS:
        with cupy.cuda.Device(rank):
            events.append(cupy.cuda.Event(disable_timing=True))
    steps: dict[str, list[int]] = {"launch": [], "event seen": [], "copy seen": [], "way": []}
    for k in range(1, 201):
        rank = k % 2
        event = events[rank]
        times = [time.perf_counter_ns()]
        bench.launch(rank, "tell_host", (np.uint64(word.ctypes.data), np.uint64(k)))
        with cupy.cuda.Device(rank):
            event.record(bench.streams[rank])
            times.append(look(lambda k=k: int(word[0]) == k))
            times.append(look(lambda event=event: event.done))
            copy(bench, rank, nbytes, bench.streams[rank])
            event.record(bench.streams[rank])
            times.append(look(lambda event=event: event.done))
        spans = [*np.diff(times).tolist(), times[-1] - times[0]]
        for step, span in zip(steps.values(), spans, strict=True):
            step.append(span)
    medians = {name: statistics.median(spans) / 1e3 for name, spans in steps.items()}
    bench.add("ping-pong", "polling", nbytes, medians.pop("way"), "us one way")
    for name, us in medians.items():
        bench.add("step", name, nbytes, us, "us")


def by_the_cpu(bench: Bench) -> None:
    for nbytes in SIZES:
        bench.add("ping-pong", "events", nbytes, by_events(bench, nbytes), "us one way")
        by_host(bench, nbytes)
        by_polling(bench, nbytes)
    bench.add("step", "two streams' waits", 0, by_events(bench, 0), "us")
