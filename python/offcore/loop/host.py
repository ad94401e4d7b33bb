"""A plan on the CPU: threads as blocks, numpy as operators; for backend host."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore.comm.requests import Requests
from offcore.errors import error
from offcore.loop.graph import Operator, Slice
from offcore.loop.plan import ARRIVED, AWAIT, RUN, STAMP, TILE, Instruction, Plan, in_chunks
from offcore.loop.source import part_of

ABORTED, TIMEOUT, TIMES = 15, 1, 4096


class HostExecutor:
    """One rank's. addresses: of the registered buffers."""

    port: Any = None
    limit = 0.0

    def __init__(self, plan: Plan, addresses: list[int]) -> None:
        self.plan = plan
        self.memory: dict[str, NDArray[Any]] = {}
        for name, one in plan.graph.buffers.items():
            if one.number is None:
                self.memory[name] = np.zeros(one.count, one.dtype)
                continue
            at = addresses[one.number] + one.offset
            raw: Any = (ctypes.c_uint8 * (one.count * one.itemsize)).from_address(at)
            self.memory[name] = np.frombuffer(raw, np.dtype(one.dtype))
        self.counters = [0] * len(plan.tiles)
        self.tickets: dict[int, Any] = {}
        self.base = self.begun = self.until = 0
        self.fault = 0
        self.times: dict[int, list[int]] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._end: int | None = 0
        self._threads: list[threading.Thread] = []

    def connect(self, requests: Requests | None, rank: int, limit: float) -> None:
        self.port, self.limit = None if requests is None else requests.host_port(rank), limit

    def start(self, iterations: int | None, launched: bool) -> None:
        if launched:
            raise error("unsupported", "loop: launched=True needs backend cuda; here use blocks=1")
        self._stop, self._end = False, None if iterations is None else self.base + iterations
        self._threads = [
            threading.Thread(target=self._block, args=(block,), daemon=True)
            for block in range(len(self.plan.blocks))
        ]
        for thread in self._threads:
            thread.start()

    def ended(self) -> bool:
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._end is not None:
            self.base = self._end
        return True

    def ask_to_stop(self) -> int:
        """Iterations that have begun; no more begin until `end_at`."""
        with self._changed:
            self._stop = True
            return self.begun

    def end_at(self, iterations: int) -> None:
        with self._changed:
            self._end = iterations
            self._changed.notify_all()

    def abort(self) -> None:
        self._fail(ABORTED, 0, 0)

    def close(self) -> None:
        pass

    def read(self, one: Slice) -> NDArray[Any]:
        return np.array(self._view(one))

    def write(self, one: Slice, data: NDArray[Any]) -> None:
        self._view(one)[:] = data

    def _view(self, one: Slice) -> NDArray[Any]:
        found: NDArray[Any] = self.memory[one.buffer.name][one.first : one.first + one.count]
        return found

    def _fail(self, code: int, block: int, at: int) -> None:
        with self._changed:
            self.fault = self.fault or code | block << 8 | at << 24
            self._changed.notify_all()

    def _until(self, ready: Callable[[], bool], block: int, at: int, nap: float = 0.1) -> bool:
        deadline = time.monotonic() + self.limit
        with self._changed:
            while not ready():
                if self.fault:
                    return False
                if time.monotonic() > deadline:
                    self._fail(TIMEOUT, block, at)
                    return False
                self._changed.wait(nap)
        return True

    def _begin(self, block: int, iteration: int) -> bool:
        if block != 0:

            def ready() -> bool:
                return self.until > iteration or self._over(iteration)

            return self._until(ready, block, 0) and not self._over(iteration)
        if self.fault:
            return False
        with self._changed:
            stopping = self._stop
            if not stopping and not self._over(iteration):
                self.begun = iteration + 1
        if stopping and not self._until(lambda: self._end is not None, 0, 0):
            return False
        with self._changed:
            if self._over(iteration):
                self._changed.notify_all()
                return False
            self.begun = self.until = iteration + 1
            self._changed.notify_all()
        self.times[iteration % TIMES] = [time.perf_counter_ns()]
        return True

    def _over(self, iteration: int) -> bool:
        return self._end is not None and iteration >= self._end

    def _block(self, block: int) -> None:
        iteration = self.base
        try:
            while self._begin(block, iteration):
                for at, one in enumerate(self.plan.blocks[block]):
                    if not self._do(one, iteration, block, at):
                        return
                iteration += 1
            if block == 0 and not self.fault:
                for at, one in enumerate(self.plan.tail):
                    self._do(one, iteration, block, at)
        except BaseException:
            self._fail(ABORTED, block, 0)
            raise

    def _do(self, one: Instruction, iteration: int, block: int, at: int) -> bool:
        if one.kind == RUN:
            operator = self.plan.graph.operators[one.a]
            if operator.kind in ("put", "signal"):
                fault = self._push(one.a, operator)
                if fault:
                    self._fail(fault, block, at)
                    return False
            else:
                self._compute(one.a, operator, one.b)
            with self._changed:
                self.counters[one.a] += 1
                self._changed.notify_all()
            return True
        if one.kind == STAMP:
            self.times[iteration % TIMES].append(time.perf_counter_ns())
            return True
        if iteration < one.lag:
            return True
        if one.kind == AWAIT:
            count = (iteration + 1 - one.lag) * one.b
            return self._until(lambda: self.counters[one.a] >= count, block, at)
        if one.kind == ARRIVED:
            count = (iteration - one.lag) * one.each + one.nth + 1

            def arrived() -> bool:
                return bool(self.port.received(one.a, one.b) >= count)

            return self._until(arrived, block, at, 20e-6)
        ticket = self.tickets.get(one.a)
        return ticket is None or self._until(lambda: self.port.test(ticket), block, at, 20e-6)

    def _push(self, number: int, one: Operator) -> int:
        if one.kind == "signal":
            ticket = self.port.signal(one.peer, one.buffer)
        else:
            assert one.out is not None
            src, place = one.inputs[0], in_chunks(self.plan.graph, one)
            named = src.buffer.number
            if place is not None:
                ticket = self.port.put_signal(one.peer, one.buffer, named, *place)
            else:
                (_, to, _), (_, first, last) = one.out.place, src.place
                given = (one.peer, one.buffer, to, named, first, last - first)
                ticket = self.port.put_bytes(*given, True)
        self.tickets[number] = ticket
        return int(ticket.fault)

    def _compute(self, number: int, one: Operator, tile: int) -> None:
        if one.out is None:
            return
        out, inputs = self._view(one.out), [self._view(inp) for inp in one.inputs]
        if one.kind == "gemm":
            m, n, k = one.sizes
            wide = -(-n // TILE)
            rows = slice(tile // wide * TILE, min(m, (tile // wide + 1) * TILE))
            columns = slice(tile % wide * TILE, min(n, (tile % wide + 1) * TILE))
            a, b = inputs[0].reshape(m, k), inputs[1].reshape(k, n)
            out.reshape(m, n)[rows, columns] = a[rows] @ b[:, columns]
            return
        part = part_of(self.plan, number)
        own = slice(tile * part, (tile + 1) * part)
        if one.kind == "reduce":
            parts = inputs[0].reshape(one.sizes[0], -1)[:, own]
            total = parts[0].copy()
            for other in parts[1:]:
                total += other
            out[own] = total
        elif one.function is not None:
            out[own] = one.function.host(*(inp[own] for inp in inputs))
