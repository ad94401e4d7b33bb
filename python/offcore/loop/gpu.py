"""A plan on a GPU: compiles its kernel, launches it once, and shares words with it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import _core
from offcore.comm.requests import Requests
from offcore.device.cuda import nvrtc
from offcore.device.cuda.driver import Driver
from offcore.errors import error
from offcore.loop.graph import Graph, Slice
from offcore.loop.host import TIMES
from offcore.loop.plan import RUN, STAMP, Instruction, Plan
from offcore.loop.source import THREADS, include_paths, text_of

WORD = 8


class Shared(ctypes.Structure):
    """As kernel.cuh has it."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("abort", "stop", "end", "begun"))
    abort: int
    stop: int
    end: int
    begun: int


POINTERS: tuple[str, ...] = (
    "instructions",
    "first",
    "memory",
    "port",
    "shared",
    "counters",
    "tickets",
    "times",
)
POINTERS += ("fault", "until", "base", "end", "limit_ns")


class Args(ctypes.Structure):
    """As kernel.cuh has it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in POINTERS),
        ("stamps", ctypes.c_uint32),
        ("free_running", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class Coded(ctypes.Structure):
    """An Instruction, as kernel.cuh has it."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in Instruction._fields)


class GpuExecutor:
    """One rank's."""

    def __init__(self, graph: Graph, blocks: int | None, gpu: int, addresses: list[int]) -> None:
        nvrtc.library()
        self.driver = driver = Driver(gpu)
        try:
            self.plan = plan = Plan(graph, blocks or driver.sms)
            cubin = nvrtc.compile_cubin(text_of(plan), driver.arch, include_paths())
            driver.load(cubin)
            self._loop, self._step = map(driver.function, ("offcore_loop", "offcore_step"))
            room = driver.co_resident(self._loop, THREADS)
            if len(plan.blocks) > room:
                raise error(
                    "invalid", f"loop: {len(plan.blocks)} blocks; the GPU runs {room} at once"
                )
            self._set_up(addresses)
        except BaseException:
            driver.close()
            raise
        self.base = 0
        self._free = False

    def _set_up(self, addresses: list[int]) -> None:
        plan, driver = self.plan, self.driver
        self._places = []
        for one in plan.graph.buffers.values():
            if one.number is None:
                self._places.append(driver.allocate(one.count * one.itemsize))
            else:
                self._places.append(addresses[one.number] + one.offset)
        lists = [Coded(*one) for block in (*plan.blocks, plan.tail) for one in block]
        sizes = [0, *(len(block) for block in plan.blocks), len(plan.tail)]
        first = np.cumsum(sizes).astype(np.uint32)
        shared = driver.host_words(ctypes.sizeof(Shared))
        self._shared = Shared.from_address(shared)
        row = plan.stamps + 1
        operators = max(1, len(plan.tiles))
        self._times = driver.allocate(TIMES * row * WORD)
        self._words = driver.allocate((2 * operators + 4) * WORD)
        self._fault = self._words + 2 * operators * WORD
        self._args = Args(
            instructions=driver.place(bytes((Coded * len(lists))(*lists))),
            first=driver.place(first.tobytes()),
            memory=driver.place(np.array([*self._places, 0], np.uint64).tobytes()),
            shared=shared,
            counters=self._words,
            tickets=self._words + operators * WORD,
            times=self._times,
            fault=self._fault,
            until=self._fault + WORD,
            stamps=plan.stamps,
            blocks=len(plan.blocks),
        )
        driver.wait(10.0)

    def connect(self, requests: Requests | None, rank: int, limit: float) -> None:
        self._args.port = 0 if requests is None else requests.port(rank)
        self._args.limit_ns = int(limit * 1e9)

    def start(self, iterations: int | None, launched: bool) -> None:
        args, shared = self._args, self._shared
        shared.stop = shared.end = 0
        shared.begun = self.base
        self._free = iterations is None
        args.free_running = self._free
        args.base, args.end = self.base, 0 if iterations is None else self.base + iterations
        self.driver.fill(self._fault + WORD, 2 * WORD)  # `until` and where it ended
        if not launched:
            self.driver.launch(self._loop, len(self.plan.blocks), THREADS, [args], True)
            return
        if iterations is None:
            raise error("invalid", "loop: with launched=True, pass a number of iterations")
        ordered = Plan(self.plan.graph, 1).blocks[0]
        end = self.base + iterations
        for k in range(self.base, end):
            for one in ordered if k < end - 1 else (*ordered, *self.plan.tail):
                if one.kind == STAMP or (one.kind == RUN and one.b > 0):
                    continue
                grid = self.plan.tiles[one.a] if one.kind == RUN else 1
                given = [args, Coded(*one), ctypes.c_uint64(k)]
                self.driver.launch(self._step, grid, THREADS, given, False)

    def ended(self) -> bool:
        if not self.driver.idle():
            return False
        if self._args.end > self.base:
            self.base = self._args.end
        elif self._free and self._shared.end > 0:
            self.base = self._shared.end - 1
        return True

    def ask_to_stop(self) -> int:
        self._shared.stop = 1
        _core.fence()  # as in `begin` of kernel.cuh: one of both sees what the other wrote
        return self._shared.begun

    def end_at(self, iterations: int) -> None:
        self._shared.end = iterations + 1

    def abort(self) -> None:
        self._shared.abort = 1

    def close(self) -> None:
        self.driver.close()

    @property
    def begun(self) -> int:
        return max(self._shared.begun, self.base)  # which only free-running loops count

    @property
    def fault(self) -> int:
        return int(self._words_at(self._fault, 1)[0])

    @property
    def times(self) -> dict[int, list[int]]:
        row = self.plan.stamps + 1
        found = self._words_at(self._times, TIMES * row).reshape(TIMES, row)
        return dict(enumerate(found.tolist()))

    def read(self, one: Slice) -> NDArray[Any]:
        found = np.empty(one.count, one.buffer.dtype)
        self.driver.read(found.ctypes.data, self._place(one), found.nbytes)
        return found

    def write(self, one: Slice, data: NDArray[Any]) -> None:
        self.driver.write(self._place(one), data.ctypes.data, data.nbytes)

    def _place(self, one: Slice) -> int:
        at = list(self.plan.graph.buffers).index(one.buffer.name)
        return int(self._places[at]) + one.first * one.buffer.itemsize

    def _words_at(self, place: int, count: int) -> NDArray[np.uint64]:
        found = np.empty(count, np.uint64)
        self.driver.read(found.ctypes.data, place, found.nbytes)
        return found
