"""The same between two GPUs by NCCL's send and receive, whose kernels the host launches.

ping-pong  `nccl`: a send and a receive in turns, all enqueued ahead as for `events`, so that each
           receive is there before its data; by the GPU's clock. `nccl host`: the host waits for
           each way, Python's time included. All bytes compared.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import cupy  # type: ignore[import-not-found]
import numpy as np

from offcore.errors import Error
from offcore.tools.driven.by_cpu import shut
from offcore.tools.driven.gpu import RANKS, Bench
from offcore.tools.driven.nccl import Nccl
from offcore.tools.driven.rows import SIZES

ROUNDS, SPANS = 40, 5


class Trips:
    """Of one size: from `sent` of rank 0 to `passed` of rank 1, and on to `got` of rank 0."""

    def __init__(self, bench: Bench, nccl: Nccl, nbytes: int) -> None:
        self._bench, self._nccl, self._nbytes = bench, nccl, nbytes
        self._streams = [stream.ptr for stream in bench.streams]
        self.data = np.random.default_rng(nbytes).integers(0, 256, nbytes, "uint8")
        with cupy.cuda.Device(0):
            self._sent, self.got = cupy.asarray(self.data), cupy.zeros(nbytes, "uint8")
        with cupy.cuda.Device(1):
            self._passed = cupy.zeros(nbytes, "uint8")
        for rank in RANKS:
            with cupy.cuda.Device(rank) as device:
                device.synchronize()

    def way(self, sender: int) -> None:
        there, back = (self._sent, self._passed), (self._passed, self.got)
        src, dst = (one.data.ptr for one in (back if sender else there))
        self._nccl.way(sender, 1 - sender, src, dst, self._nbytes, self._streams)

    def ahead_us(self) -> float:
        """One way, of trips that are all enqueued before the first begins."""
        open_it = shut(self._bench)
        with cupy.cuda.Device(0):
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(self._bench.streams[0])
        for _ in range(ROUNDS):
            for sender in RANKS:
                self.way(sender)
        with cupy.cuda.Device(0):
            last.record(self._bench.streams[0])
            open_it()
            last.synchronize()
            return float(cupy.cuda.get_elapsed_time(first, last)) * 1e3 / (2 * ROUNDS)

    def by_host_us(self) -> float:
        times = []
        for _ in range(ROUNDS):
            for sender in RANKS:
                began = time.perf_counter_ns()
                self.way(sender)
                self._bench.streams[1 - sender].synchronize()
                times.append(time.perf_counter_ns() - began)
        return statistics.median(times) / 1e3


def by_nccl(bench: Bench) -> None:
    try:
        nccl: Any = Nccl(len(RANKS))
    except Error as failure:
        if failure.code != "unavailable":
            raise
        bench.note(f"nccl: left out: {failure}")
        return
    bench.note(f"NCCL {nccl.version}")
    for nbytes in SIZES:
        trips = Trips(bench, nccl, nbytes)
        by_host = trips.by_host_us()  # its first opens the connections: nothing may behind a gate
        us = statistics.median(trips.ahead_us() for _ in range(SPANS))
        bench.add("ping-pong", "nccl", nbytes, us, "us one way")
        bench.add("ping-pong", "nccl host", nbytes, by_host, "us one way")
        bench.end(f"nccl, {nbytes} bytes")
        with cupy.cuda.Device(0), bench.streams[0]:
            if not np.array_equal(trips.got.get(), trips.data):
                bench.failures.append(f"nccl: wrong bytes of {nbytes}")
    nccl.close()
