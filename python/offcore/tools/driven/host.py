"""Requests of this host's threads, on backend host, without a GPU.

ping-pong   One way: half of a round trip between two threads, median. `proxy`: requests; `memcpy`:
            each thread copies for itself and raises a word. All bytes compared.
push        What a push costs its thread; until the engine has taken it; requests a second from
            many threads, until all have ended, and copies that they became.
throughput  Messages in flight, all bytes compared: side by side (merged by the engine) or apart;
            beside a loop of memcpy of the same.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

import offcore
from offcore import _core
from offcore.errors import error
from offcore.tools.driven.rows import KIB, LIMIT_S, MESSAGES, MIB, SIZES, Rows

BUFFER = 16 * MIB
MOVED = 64 * MIB  # in messages of a size
PUSHERS = (1, 2, 4)
PUSHED = 100_000
SPANS = 3


class Bench(Rows):
    """Two ranks of this process."""

    def __init__(self, rounds: int, file: Path) -> None:
        super().__init__(file)
        self.rounds = rounds
        self.comm = offcore.Communicator(backend="host", ranks=2, timeout=20)
        self.send, self.receive = (self.comm.empty(BUFFER) for _ in range(2))

    def requests(self, chunk: int) -> offcore.Requests:
        return self.comm.requests([self.send, self.receive], chunk=chunk, limit=LIMIT_S)

    def looked_at(self, what: str, rank: int, wanted: Any) -> None:
        if not np.array_equal(self.receive[rank][: len(wanted)], wanted):
            self.failures.append(f"{what}: wrong bytes")


def median_us(times_ns: list[int]) -> float:
    if not times_ns:
        raise error("driver", "a call of a thread has failed")
    return statistics.median(times_ns) / 1e3


def ping_pongs(bench: Bench) -> None:
    chunk = 4 * KIB
    dsts, srcs = ((a[0].ctypes.data, a[1].ctypes.data) for a in (bench.receive, bench.send))
    with bench.requests(chunk) as requests:
        first, second = requests.host_port(0), requests.host_port(1)
        for nbytes in SIZES:
            for rank in range(2):
                bench.send[rank][:nbytes] = nbytes // chunk % 251 + rank
            trips = _core.time_trips(first, second, nbytes // chunk, bench.rounds)
            requests.check()
            bench.add("ping-pong", "proxy", nbytes, median_us(trips) / 2, "us one way")
            for rank in range(2):
                what = f"ping-pong of {nbytes}"
                bench.looked_at(what, rank, bench.send[1 - rank][:nbytes])
            trips = _core.time_plain_trips(dsts, srcs, nbytes, bench.rounds)
            bench.add("ping-pong", "memcpy", nbytes, median_us(trips) / 2, "us one way")


def pushes(bench: Bench) -> None:
    with bench.requests(64) as requests:
        port = requests.host_port(0)
        pushed, taken = _core.time_pushes(port, bench.rounds)
        bench.add("push", "one thread", 8, median_us(pushed), "us")
        bench.add("push", "to and fro", 8, median_us(taken), "us")
        for threads in PUSHERS:
            before = requests.stats(0)
            each = PUSHED // threads
            span_ns = _core.time_messages(port, threads, each, 1, 1, BUFFER // 64)
            count = threads * each
            stats = requests.stats(0)
            if stats.requests - before.requests != count:
                bench.failures.append(f"{count} pushed, {stats.requests - before.requests} came")
            name = f"{threads} threads"
            rate = count / median_us([span_ns] if span_ns else [])
            bench.add("push rate", name, 8, rate, "M requests/s")
            copies = (stats.copies - before.copies) / count
            bench.add("push copies", name, 8, copies, "copies a request")
        requests.check()


def throughput(bench: Bench) -> None:
    bench.send[0][:] = np.random.default_rng(1).integers(0, 256, BUFFER, "uint8")
    with bench.requests(KIB) as requests:
        port = requests.host_port(0)
        for nbytes in MESSAGES:
            count = MOVED // nbytes
            for name, apart in (("contiguous", 1), ("apart", 2)):
                stride = nbytes * apart
                bench.receive[1][:] = 0
                shape = (nbytes // KIB, stride // KIB, BUFFER // KIB)
                spans = [_core.time_messages(port, 1, count, *shape) for _ in range(SPANS)]
                requests.check()
                wanted = np.zeros_like(bench.send[0]).reshape(-1, stride)
                wanted[:count, :nbytes] = bench.send[0].reshape(-1, stride)[:count, :nbytes]
                bench.looked_at(f"{name} messages of {nbytes}", 1, wanted.reshape(-1))
                rate = count * nbytes / median_us(spans) / 1e3
                bench.add("throughput", name, nbytes, rate, "GB/s")
            where = bench.receive[1].ctypes.data, bench.send[0].ctypes.data
            spans = [_core.time_copies(*where, nbytes, count, BUFFER) for _ in range(SPANS)]
            rate = count * nbytes / median_us(spans) / 1e3
            bench.add("throughput", "memcpy loop", nbytes, rate, "GB/s")


SECTIONS = {"ping-pong": ping_pongs, "push": pushes, "throughput": throughput}


def measure(section: str, rounds: int, file: Path) -> list[str]:
    """What was wrong."""
    bench = Bench(rounds, file)
    with bench.comm:
        SECTIONS[section](bench)
    return bench.failures
