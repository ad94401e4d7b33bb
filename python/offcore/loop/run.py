"""Loops: the graphs of all ranks, run by this process's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offcore import defaults
from offcore.comm.requests import Requests
from offcore.comm.window import Window
from offcore.errors import error
from offcore.loop.graph import Graph, Slice
from offcore.loop.host import ABORTED, TIMES, HostExecutor
from offcore.loop.plan import Plan, check_ranks, schedule_of

CODES = {1: "timeout", 2: "timeout", 3: "invalid", 5: "peer", 6: "driver", ABORTED: "cancelled"}
NAMES = {1: "a wait ran past its limit", 2: "the ring was full", 3: "a request was refused"}
NAMES |= {4: "the engine was stopped", 5: "a rank died or aborted", 6: "a driver failed"}
NAMES |= {ABORTED: "it was aborted"}


class Executor(Protocol):
    base: int

    @property
    def begun(self) -> int: ...
    @property
    def fault(self) -> int: ...
    @property
    def times(self) -> dict[int, list[int]]: ...

    def connect(self, requests: Requests | None, rank: int, limit: float) -> None: ...
    def start(self, iterations: int | None, launched: bool) -> None: ...
    def ended(self) -> bool: ...
    def ask_to_stop(self) -> int: ...
    def end_at(self, iterations: int) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def read(self, one: Slice) -> NDArray[Any]: ...
    def write(self, one: Slice, data: NDArray[Any]) -> None: ...


class Loop:
    """One kernel per GPU that repeats a graph (docs/loop.md). Collective, like all methods except
    abort, read, write, begun and times.

    graphs: of all ranks.
    buffers: the windows to which the graphs' numbers refer.
    engine: of the puts, "proxy" or "armed" (docs/gpu-driven.md).
    blocks: of the kernel; None: one per SM, or 4 on backend host.
    limit: timeout of each wait, in seconds.
    spin: as in `comm.requests`.
    Raises `Error`: invalid (graphs that do not match), unsupported (no NVRTC, or a backend other
    than host and cuda), driver, and as `comm.requests` does.
    """

    requests: Requests | None = None
    """Of a graph that communicates. They are opened last and stopped first: work parked in streams
    would hold up code that is loaded and memory that is freed."""

    def __init__(
        self,
        comm: Any,
        graphs: Sequence[Graph],
        *,
        buffers: Sequence[Window] = (),
        engine: str = "proxy",
        blocks: int | None = None,
        limit: float = 10.0,
        spin: float | None = None,
    ) -> None:
        check_ranks(graphs)
        if len(graphs) != comm.ranks:
            raise error("invalid", f"loop: {len(graphs)} graphs for {comm.ranks} ranks")
        if comm.backend not in ("host", "cuda"):
            raise error("unsupported", f"loop: needs backend host or cuda, not {comm.backend}")
        if engine not in ("proxy", "armed"):
            raise error("invalid", f"loop: engine {engine!r}; proxy and armed are engines")
        self._comm, self._running, self._endless, self._dead = comm, False, False, False
        self._executors: list[Executor] = []
        try:
            for rank, gpu in zip(comm.local_ranks, comm._gpus, strict=True):
                addresses = _addresses(graphs[rank], buffers, rank)
                self._executors.append(_executor_of(comm, graphs[rank], blocks, gpu, addresses))
            if any(one.peer >= 0 for graph in graphs for one in graph.operators):
                plan = schedule_of(graphs) if engine == "armed" else ()
                given = {"schedule": plan, "chunk": graphs[0].chunk, "limit": limit, "spin": spin}
                self.requests = comm.requests(buffers, **given)
            for rank, one in zip(comm.local_ranks, self._executors, strict=True):
                one.connect(self.requests, rank, limit)
        except BaseException:
            self.close()
            raise

    def start(self, iterations: int | None = None, *, launched: bool = False) -> None:
        """Starts `iterations`, or runs until `stop`. launched: launch each operator separately, in
        order, with the same code, instead of the loop (cuda only)."""
        if self._running or self._dead:
            raise error("invalid", "loop: it runs already, or has failed")
        if iterations is not None and iterations < 1:
            raise error("invalid", f"loop: {iterations} iterations")
        self._endless = iterations is None
        for one in self._executors:
            one.start(iterations, launched)
            self._running = True

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the loop has ended. Raises `Error`: timeout (the loop continues), or the
        reason why it ended early: timeout of a wait, cancelled, peer, driver, invalid. The loop is
        then dead."""
        deadline = time.monotonic() + self._seconds(timeout)
        while not all([one.ended() for one in self._executors]):
            if time.monotonic() > deadline:
                raise error("timeout", "loop: it has not ended; abort() ends it")
            time.sleep(50e-6)
        self._running = False
        for rank, one in zip(self._comm.local_ranks, self._executors, strict=True):
            if one.fault:
                self._dead = True
                code, block, at = one.fault & 255, one.fault >> 8 & 65535, one.fault >> 24
                told = f"loop: rank {rank}: {NAMES.get(code, 'it failed')}"
                where = f"block {block}, instruction {at}"
                raise error(CODES.get(code, "invalid"), f"{told} ({where})")

    def run(self, iterations: int, timeout: float | None = None, *, launched: bool = False) -> None:
        """Calls start and wait."""
        self.start(iterations, launched=launched)
        self.wait(timeout)

    def stop(self, timeout: float | None = None) -> int:
        """Ends an unlimited loop after an iteration on which all ranks agree. Returns the number of
        iterations since it was opened. Raises `Error` as wait does, and invalid if none runs."""
        if not self._running or not self._endless:
            raise error("invalid", "loop: there is nothing to stop: none without an end runs")
        seconds, comm = self._seconds(timeout), self._comm
        begun = max(one.ask_to_stop() for one in self._executors)
        if len(comm.local_ranks) < comm.ranks:
            told = comm._core.exchange("loop", begun.to_bytes(8, "little"), seconds)
            begun = max(int.from_bytes(one, "little") for one in told)
        for one in self._executors:
            one.end_at(begun)
        self.wait(seconds)
        return begun

    def abort(self) -> None:
        """Ends this process's kernels at their next wait; `wait` then raises cancelled."""
        for one in self._executors:
            one.abort()

    def close(self) -> None:
        """Frees the memory; a running loop is aborted."""
        if self._running:
            self.abort()
            deadline = time.monotonic() + self._comm.timeout
            while not all([one.ended() for one in self._executors]):
                if time.monotonic() > deadline:
                    raise error("timeout", "loop: a kernel did not end; its memory is kept")
                time.sleep(1e-3)
        self._running, self._dead = False, True
        if self.requests is not None:
            self.requests.stop()
        for one in self._executors:
            one.close()

    def read(self, one: Slice, rank: int | None = None) -> NDArray[Any]:
        """Returns a copy of a slice's elements. Not while the loop runs."""
        return self._executor(rank).read(one)

    def write(self, one: Slice, data: NDArray[Any], rank: int | None = None) -> None:
        """Sets a slice's elements. Not while the loop runs."""
        data = np.ascontiguousarray(data, one.buffer.dtype).ravel()
        if data.size != one.count:
            raise error("invalid", f"loop: {data.size} elements for {one.count}")
        self._executor(rank).write(one, data)

    def begun(self, rank: int | None = None) -> int:
        """Returns how many iterations have begun since it was opened, also while a loop without an
        end runs. On GPUs, those of `start(iterations)` count once `wait` has seen their end."""
        return self._executor(rank).begun

    def times(self, rank: int | None = None) -> NDArray[np.int64]:
        """Returns the start times of up to 4096 last iterations and their stamps, one row each, in
        ns of the clock of the rank's GPU."""
        one = self._executor(rank)
        found = one.times
        first = max(0, one.base - TIMES)
        return np.array([found[i % TIMES] for i in range(first, one.base)], np.int64)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seconds(self, timeout: float | None) -> float:
        return float(self._comm.timeout) if timeout is None else defaults.seconds(timeout)

    def _executor(self, rank: int | None) -> Executor:
        local: list[int] = self._comm.local_ranks
        if rank is None and len(local) == 1:
            return self._executors[0]
        if rank not in local:
            raise error("invalid", f"rank {rank} is not local; local ranks: {local}")
        return self._executors[local.index(rank)]


def _addresses(graph: Graph, buffers: Sequence[Window], rank: int) -> list[int]:
    for one in graph.buffers.values():
        if one.number is None:
            continue
        if not 0 <= one.number < len(buffers):
            raise error("invalid", f"loop: buffer {one.name}: there is no window {one.number}")
        if one.offset + one.count * one.itemsize > buffers[one.number].nbytes:
            raise error("invalid", f"loop: buffer {one.name} ends behind its window")
    return [window.address(rank) for window in buffers]


def _executor_of(
    comm: Any, graph: Graph, blocks: int | None, gpu: int, addresses: list[int]
) -> Executor:
    if comm.backend == "host":
        return HostExecutor(Plan(graph, blocks or 4), addresses)
    from offcore.loop.gpu import GpuExecutor

    return GpuExecutor(graph, blocks, gpu, addresses)
