"""Captures and replays by the driver's own calls, and cases that are checked at every replay.

For the processes that the tests start: this module is the caller's side of a capture, what
torch.cuda.graph is to users.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_uint64
from typing import Any

import numpy as np
from cuda_driver import NOT_READY, Driver

import offcore
from oracles import Bytes, Case, given, noise

LIMIT_S = 20.0
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Streamed(offcore.Communicator):
    """On given streams, one a local rank, as offcore.torch is on torch's current one."""

    given: Sequence[int] = ()

    def _streams(self) -> list[int]:
        return list(self.given)


class Gpus:
    """The driver as a caller uses it."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.driver = Driver(os.environ["OFFCORE_LIBCUDA"])
        self.driver("cuInit", 0)
        self.contexts = [self.driver.get(c_uint64, "cuDevicePrimaryCtxRetain", gpu) for gpu in gpus]
        self.driver("cuCtxSetCurrent", self.contexts[0])

    def streams(self) -> list[int]:
        """A stream of each GPU."""
        made = []
        for context in self.contexts:
            self.driver("cuCtxSetCurrent", context)
            made.append(self.driver.stream())
        return made

    def graph(self, streams: Sequence[int], mode: int = GLOBAL) -> Graph:
        return Graph(self.driver, streams, mode)

    def settle(self, streams: Sequence[int], limit_s: float = LIMIT_S) -> bool:
        """Whether the streams are through in time."""
        deadline = time.monotonic() + limit_s
        for stream in streams:
            while (code := self.driver.code("cuStreamQuery", stream)) == NOT_READY:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
            assert code == 0, code
        return True


class Graph:
    """A graph on each of some streams, captured and replayed together."""

    def __init__(self, driver: Driver, streams: Sequence[int], mode: int) -> None:
        self.driver = driver
        self.streams = streams
        self.mode = mode
        self.graphs: list[int] = []
        self.execs: list[int] = []

    def __enter__(self) -> Graph:
        for stream in self.streams:
            self.driver("cuStreamBeginCapture", stream, self.mode)
        return self

    def __exit__(self, *raised: object) -> None:
        ended = [self.end(stream) for stream in self.streams]
        if raised[0] is None:
            for code, graph in ended:
                assert code == 0, code
                self.graphs.append(graph)
                self.execs.append(
                    self.driver.get(c_uint64, "cuGraphInstantiateWithFlags", graph, 0)
                )

    def end(self, stream: int) -> tuple[int, int]:
        graph = c_uint64()
        return self.driver.code("cuStreamEndCapture", stream, byref(graph)), graph.value

    def replay(self) -> None:
        for stream, graph in zip(self.streams, self.execs, strict=True):
            self.driver("cuGraphLaunch", graph, stream)

    def forget(self) -> None:
        """The graphs alone; what was instantiated from them can still be replayed."""
        while self.graphs:
            self.driver("cuGraphDestroy", self.graphs.pop())

    def destroy(self) -> None:
        self.forget()
        while self.execs:
            self.driver("cuGraphExecDestroy", self.execs.pop())


class Captured:
    """A case in a window or in arrays outside, filled anew before and checked after each replay."""

    def __init__(self, comm: offcore.Communicator, case: Case, place: str) -> None:
        self.comm, self.case, self.place = comm, case, place
        self.turn = 0
        everyone = range(case.ranks)
        self.out_bytes = [case.out_bytes(rank) for rank in everyone]
        self.in_bytes = [case.in_bytes(rank) for rank in everyone]
        most = max(n or 0 for n in [*self.out_bytes, *self.in_bytes])
        self.window = comm.window(max(2 * most, 1))  # the output, and behind it the input
        self.most = most
        self.arrays = {
            rank: comm.host_array(max(self.out_bytes[rank] or 0, 1)) for rank in comm.local_ranks
        }

    def start(self, **how: Any) -> offcore.comm.communicator.Handle:
        case, comm = self.case, self.comm
        if self.place == "window":
            out: Any = self.window.region(0, max(n or 0 for n in self.out_bytes))
        else:
            out = [
                None if (n := self.out_bytes[rank]) is None else self.arrays[rank][:n]
                for rank in comm.local_ranks
            ]
        arguments = [out]
        if not case.in_place:
            arguments.append(self.window.region(self.most, max(n or 0 for n in self.in_bytes)))
        name = case.op
        if len(set(case.counts)) > 1:
            arguments = [out, *(arguments[1:] or [None])]
            name += "_v"
            counts: Any = list(case.counts)
            if case.op == "all_to_all":
                counts = np.reshape(counts, (case.ranks, case.ranks)).tolist()
            arguments.append(counts)
        root = {} if case.op.startswith("all") else {"root": case.root}
        return getattr(comm, name)(*arguments, **root, **how)

    def fill(self, turn: int) -> None:
        """Fresh inputs, and outputs that hold none of them."""
        self.turn = turn
        self.inputs = [
            None if n is None else noise(n, turn, rank) for rank, n in enumerate(self.in_bytes)
        ]
        for rank in self.comm.local_ranks:
            self.put(rank, np.full(self.out_bytes[rank] or 0, turn % 251, np.uint8), 0)
            if (data := self.inputs[rank]) is None:
                continue
            if self.case.in_place:
                self.put(rank, data, self.case.own_offset(rank))
            else:
                self.window.write(data, self.most, rank)

    def put(self, rank: int, data: Bytes, at: int) -> None:
        if self.place == "window":
            self.window.write(data, at, rank)
        else:
            self.arrays[rank][at : at + data.size] = data

    def check(self, what: str = "") -> None:
        for rank, expected in enumerate(self.case.expected(self.inputs)):
            if expected is None or rank not in self.comm.local_ranks:
                continue
            got = self.look(rank, expected.size)
            wrong = np.flatnonzero(got != given(expected))
            assert wrong.size == 0, (
                f"{self.case} {self.place} {what} turn {self.turn}: rank {rank} has {wrong.size} "
                f"wrong bytes, the first at {wrong[0]}"
            )

    def look(self, rank: int, nbytes: int) -> Bytes:
        if self.place != "window":
            return self.arrays[rank][:nbytes].copy()
        got = np.empty(nbytes, np.uint8)
        self.window.read(got, 0, rank)
        return got


@contextmanager
def opened(ranks: int, **options: Any) -> Iterator[tuple[Streamed, Gpus]]:
    """All ranks here, each with a stream of its own; nothing may be left in the end."""
    comm = Streamed(backend="cuda", ranks=ranks, **{"timeout": 10, **options})
    gpus = Gpus(range(ranks))
    comm.given = gpus.streams()
    yield comm, gpus
    comm.close()
