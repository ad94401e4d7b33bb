"""A kernel on all SMs beside all-gathers of 64 MB in a row: what each costs the other.

A kernel that reads L2, and one that issues multiplications (paper 003's section II-C), in blocks of
about 100 us, which begin in a hundred waves. Beside them offcore's all-gathers, and NCCL's by
torch, whose kernels have a stream of high priority. Values: how many times as long as alone the
kernel takes, and an all-gather.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import cupy  # type: ignore[import-not-found]
import numpy as np

from offcore.errors import error
from offcore.tools.driven.gpu import BUFFER, RANKS, Bench
from offcore.tools.driven.rows import LIMIT_S, MIB

KERNELS = {"L2": "read_l2", "FFMA": "multiply"}
WORDS = 16 * MIB // 16  # that fit into L2
THREADS, BLOCKS_AN_SM = 1024, 2
BLOCK_US, WAVES = 100, 100
ALONE_S = 0.02
AHEAD = 4  # all-gathers that are enqueued before the first has ended
HALF = BUFFER // 2

Call = Callable[[], Callable[[], Any]]  # enqueues an all-gather: what waits for its end


class Kernel:
    """The same on both GPUs."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, KERNELS[name]
        self._args: list[tuple[Any, Any]] = []
        self._grid = 0
        for rank in RANKS:
            with cupy.cuda.Device(rank):
                sms = cupy.cuda.Device(rank).attributes["MultiProcessorCount"]
                self._grid = sms * BLOCKS_AN_SM
                data = cupy.ones(4 * WORDS, "uint32"), cupy.zeros(1, "uint32")
                self._args.append(data)
                cupy.cuda.get_current_stream().synchronize()
        self._passes, waves = 1000, 1
        us = max(self._timed(waves))
        self._passes = max(1, int(self._passes * BLOCK_US / us))

    def start(self, waves: int) -> list[tuple[Any, Any]]:
        """Events that it begins and ends with, by GPU."""
        events = []
        for rank in RANKS:
            data, total = self._args[rank]
            args = (np.uint64(data.data.ptr), np.uint32(WORDS), np.uint32(self._passes))
            with cupy.cuda.Device(rank):
                first, last = cupy.cuda.Event(), cupy.cuda.Event()
                first.record(self._bench.streams[rank])
                self._bench.launch(
                    rank,
                    self._name,
                    (*args, np.uint64(total.data.ptr)),
                    grid=self._grid * waves,
                    block=THREADS,
                )
                last.record(self._bench.streams[rank])
            events.append((first, last))
        return events

    def _timed(self, waves: int) -> list[float]:
        self.start(waves)
        return ended_us(self.start(waves))

    def alone_us(self) -> float:
        return statistics.median(max(self._timed(WAVES)) for _ in range(5))


def ended_us(events: list[tuple[Any, Any]]) -> list[float]:
    for _, last in events:
        last.synchronize()
    return [float(cupy.cuda.get_elapsed_time(first, last)) * 1e3 for first, last in events]


def gathers(call: Call, go_on: Callable[[], bool]) -> float:
    """Microseconds of an all-gather in a row of them."""
    pending: deque[Callable[[], Any]] = deque()
    ends: list[float] = []
    until = time.perf_counter() + LIMIT_S
    while go_on() or len(ends) < 2 * AHEAD:
        pending.append(call())
        if len(pending) > AHEAD:
            pending.popleft()()
            ends.append(time.perf_counter())
        if time.perf_counter() > until:
            raise error("timeout", f"a kernel did not end in {LIMIT_S:g} s")
    for wait in pending:
        wait()
    return (ends[-1] - ends[0]) * 1e6 / (len(ends) - 1)


def own_call(bench: Bench) -> Call:
    out = bench.windows[1]
    for rank in RANKS:
        out.write(np.full(HALF, 7 + rank, "uint8"), rank * HALF, rank=rank)

    def call() -> Callable[[], Any]:
        return bench.comm.all_gather(out).wait

    return call


def own_right(bench: Bench) -> bool:
    got = np.empty(BUFFER, "uint8")
    right = True
    for rank in RANKS:
        bench.windows[1].read(got, rank=rank)
        right = right and bool((got[:HALF] == 7).all() and (got[HALF:] == 8).all())
    return right


def nccl_call(torch: Any) -> Call:
    made = {"dtype": torch.uint8}
    parts = [torch.full((HALF,), 7 + rank, device=f"cuda:{rank}", **made) for rank in RANKS]
    outs = [torch.zeros(BUFFER, device=f"cuda:{rank}", **made) for rank in RANKS]
    streams = [torch.cuda.Stream(device=rank, priority=-1) for rank in RANKS]
    for rank in RANKS:
        torch.cuda.synchronize(rank)

    def call() -> Callable[[], Any]:
        torch.cuda.nccl.all_gather(parts, outs, streams)
        events = [torch.cuda.Event() for _ in RANKS]
        for event, stream in zip(events, streams, strict=True):
            event.record(stream)
        return lambda: [event.synchronize() for event in events]

    call()()
    return call


def for_a_while(call: Call) -> float:
    until = time.perf_counter() + ALONE_S
    return gathers(call, lambda: time.perf_counter() < until)


def beside(kernel: Kernel, call: Call) -> tuple[float, float]:
    """Microseconds of the kernel, and of an all-gather."""
    gathers(call, lambda: False)
    events = kernel.start(WAVES)
    gather_us = gathers(call, lambda: not all(last.done for _, last in events))
    return max(ended_us(events)), gather_us


def contention(bench: Bench) -> None:
    calls = {"offcore": own_call(bench)}
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ImportError("it has no CUDA")
        calls["NCCL"] = nccl_call(torch)
    except ImportError as failure:
        bench.note(f"contention: NCCL was left out, since torch cannot be used: {failure}")
    alone = {}
    for name, call in calls.items():
        for_a_while(call)
        alone[name] = for_a_while(call)
        bench.add("all-gather", name, BUFFER, alone[name], "us alone")
    for kind in KERNELS:
        kernel = Kernel(bench, kind)
        kernel_us = kernel.alone_us()
        bench.add("kernel", kind, 0, kernel_us, "us alone")
        for name, call in calls.items():
            found = [beside(kernel, call) for _ in range(5)]
            both = f"{kind} + {name}"
            times = statistics.median(one for one, _ in found) / kernel_us
            bench.add("kernel", both, BUFFER, times, "times as long")
            times = statistics.median(one for _, one in found) / alone[name]
            bench.add("all-gather", both, BUFFER, times, "times as long")
    if not own_right(bench):
        bench.failures.append("contention: wrong bytes of an all-gather")
