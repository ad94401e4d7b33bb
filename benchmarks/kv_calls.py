"""What the driver's own calls cost for pages of a KV cache, by form of the call and kind of memory.

    python benchmarks/kv_calls.py [--only strided pages tensors]

It tells where the time of a transfer goes that offcore does not spend itself. `strided`: a copy of
28 rows for each of 64 scattered blocks, by cuMemcpy2DAsync, whose sides are named (host, device) or
left to the driver to find out (unified); with other numbers of rows, which tells what a row costs
and what a call; by two threads with a stream each, half of the blocks each or a direction each (the
interpreter's lock goes to and fro between calls); in some cuMemcpy3DBatchAsync of so many; and as
pages, by cuMemcpyBatchAsync of so many, which tells what an engine takes from call to call; and by
the kernel of `BlockTransfer(kernel=True)`, launched once with so many workgroups: the 16 that a
transfer takes, one for each block of the cache (64), and more.
`pages`: 256 scattered pages of a block each, by cuMemcpyBatchAsync of so many. `tensors`: the pages
of 64 blocks in 56 allocations, by such calls too, listed by block, by tensor, and of four blocks by
tensor. Host memory is a HostPool's, the driver's own (cuMemHostAlloc), or registered, for which
small or huge pages were asked; a GPU's comes from cuMemAlloc or is a window. Times are medians:
until the calls have returned, and until the copies have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from gpu_batch import Attributes, Driver
from numpy.typing import NDArray

import offcore
from offcore import kv
from offcore.sizes import format_bytes

KERNEL = Path(__file__).parents[1] / "core" / "backend" / "cuda" / "copy_kernel.cpp"
PAIRS, UNIT_BYTES, THREADS = 128, 16, 1024  # of the kernel in it
LAYERS, BLOCKS, PAGES = 28, 64, 256
TENSORS, TENSOR_BYTES = 2 * LAYERS, 64 << 20  # an allocation each
WORKGROUPS = (16, 32, BLOCKS, 132, 264)
ROOM = 4 * LAYERS * BLOCKS * (32 << 10)
TURNS = 11
HOST, DEVICE, UNIFIED = 1, 2, 4
PORTABLE = 3  # and mapped
POINTER = 1  # an operand of a 3-D batch
DEVICE_HINT, HOST_HINT = 1, 2


class Side(ctypes.Structure):
    """One side of a strided copy."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("pitch", c_size_t),
    )


class Copy2D(ctypes.Structure):
    """A strided copy."""

    _fields_ = (("src", Side), ("dst", Side), ("width", c_size_t), ("height", c_size_t))


class Operand(ctypes.Structure):
    """One side of a copy of a 3-D batch: a pointer with a pitch."""

    _fields_ = (
        ("type", c_int),
        ("pointer", c_uint64),
        ("row", c_size_t),
        ("layer", c_size_t),
        ("hint", c_int * 2),
    )


class Copy3D(ctypes.Structure):
    """A copy of a 3-D batch."""

    _fields_ = (
        ("src", Operand),
        ("dst", Operand),
        ("extent", c_size_t * 3),
        ("order", c_int),
        ("flags", c_uint),
    )


Times = tuple[float, float]
Copies = list["Copy2D"]
Places = NDArray[np.uint64]


class Calls:
    """The memories, and a stream."""

    def __init__(self) -> None:
        self.driver = Driver(0)
        self.gather: c_uint64 | None = None
        self.allocations: list[int] = []
        self.context = c_uint64()
        self.driver("cuDevicePrimaryCtxRetain", byref(self.context), c_uint64(0))
        self.mapped: list[mmap.mmap] = []
        self.hosts = {
            "pool": self._pool(),
            "small pages": self._registered("MADV_NOHUGEPAGE"),
            "huge pages": self._registered("MADV_HUGEPAGE"),
        }
        self.devices = {"window": self._window()}
        for kinds, name, given in (
            (self.hosts, "cuMemHostAlloc", (c_size_t(ROOM), c_uint(PORTABLE))),
            (self.devices, "cuMemAlloc", (c_size_t(ROOM),)),
        ):
            address = c_uint64()
            if self.driver.find(name) is None:
                print(f"{name} is absent")
                continue
            self.driver(name, byref(address), *given)
            kinds[name] = address.value

    def _pool(self) -> int:
        self.host_pool = kv.HostPool(ROOM, 1, backend="cuda")
        self.host_pool.allocate(1, timeout=60.0)
        return self.host_pool.row(0).ctypes.data

    def _registered(self, advice: str) -> int:
        """Registered memory for which small or huge pages were asked of the kernel."""
        mapped = mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapped.append(mapped)
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapped.madvise(getattr(mmap, advice))
        mapped.write(bytes(ROOM))
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.driver("cuMemHostRegister", c_void_p(address), c_size_t(ROOM), c_uint(PORTABLE))
        return address

    def _window(self) -> int:
        self.comm = offcore.Communicator(backend="cuda", ranks=1)
        self.held = self.comm.window(ROOM)
        return self.held.address(0)

    @property
    def device(self) -> str:
        """What the cache lies in where that is not compared."""
        return next(reversed(self.devices))

    def timed(self, call: Callable[[], None]) -> Times:
        taken = []
        for _ in range(TURNS + 2):
            began = time.perf_counter_ns()
            call()
            submitted = time.perf_counter_ns()
            self.driver.settle()
            ended = time.perf_counter_ns()
            taken.append(((submitted - began) / 1e3, (ended - began) / 1e3))
        return medians(taken)

    def copies(
        self, host: str, device: str, load: bool, page: int, named: bool = True, rows: int = LAYERS
    ) -> Copies:
        """One of so many rows for each block."""
        copies = [Copy2D(width=page, height=rows) for _ in range(BLOCKS)]
        places = self._blocks(host, device, page, rows)
        for copy, (cache, row) in zip(copies, places, strict=True):
            on_gpu, on_host = (copy.dst, copy.src) if load else (copy.src, copy.dst)
            on_gpu.type, on_gpu.device, on_gpu.pitch = DEVICE, cache, 2 * BLOCKS * page
            on_host.type, on_host.host, on_host.pitch = HOST, row, page
            on_host.device = row
            if not named:
                on_gpu.type = on_host.type = UNIFIED
        return copies

    def enqueue(self, copies: Copies, stream: int) -> None:
        function, handle = self.driver.find("cuMemcpy2DAsync"), c_uint64(stream)
        for copy in copies:
            if code := function(byref(copy), handle):
                raise SystemExit(f"cuMemcpy2DAsync: {code}")

    def strided(self, copies: Copies) -> Times:
        return self.timed(lambda: self.enqueue(copies, self.driver.stream))

    def threads(self, parts: list[Copies]) -> Times:
        """Each part by a thread of its own, in a stream of its own."""
        streams = []
        for _ in parts:
            stream = c_uint64()
            self.driver("cuStreamCreateWithPriority", byref(stream), c_uint64(1), c_uint64(0))
            streams.append(stream.value)
        taken = []
        for _ in range(TURNS + 2):
            times: list[tuple[int, int, int]] = []
            ready = threading.Barrier(len(parts))

            def work(copies: Copies, stream: int, ready: Any = ready, times: Any = times) -> None:
                self.driver("cuCtxSetCurrent", self.context)
                ready.wait(10)
                began = time.perf_counter_ns()
                self.enqueue(copies, stream)
                submitted = time.perf_counter_ns()
                self.driver("cuStreamSynchronize", c_uint64(stream))
                times.append((began, submitted, time.perf_counter_ns()))

            workers = [
                threading.Thread(target=work, args=pair)
                for pair in zip(parts, streams, strict=True)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            first = min(began for began, _, _ in times)
            submitted, ended = (max(one[k] for one in times) for k in (1, 2))
            taken.append(((submitted - first) / 1e3, (ended - first) / 1e3))
        return medians(taken)

    def together(self, load: bool, page: int, count: int) -> Times | None:
        """The same in batches of strided copies; None: this driver has none, or refuses them."""
        function = self.driver.find("cuMemcpy3DBatchAsync")
        if function is None or self.driver.version < 13000:
            return None
        copies = (Copy3D * BLOCKS)()
        places = self._blocks("pool", self.device, page, LAYERS)
        for copy, (cache, row) in zip(copies, places, strict=True):
            on_gpu = Operand(POINTER, cache, 2 * BLOCKS * page, LAYERS, (DEVICE_HINT, 0))
            on_host = Operand(POINTER, row, page, LAYERS, (HOST_HINT, 0))
            copy.dst, copy.src = (on_gpu, on_host) if load else (on_host, on_gpu)
            copy.extent[:] = (page, LAYERS, 1)
            copy.order = 1
        stream = c_uint64(self.driver.stream)

        def call() -> None:
            for first in range(0, BLOCKS, count):
                code = function(c_size_t(count), byref(copies[first]), c_uint64(0), stream)
                if code:
                    raise OSError(f"cuMemcpy3DBatchAsync: {code}")

        try:
            return self.timed(call)
        except OSError as refusal:
            print(f"  {refusal}")
            return None

    def apart(self, load: bool, page: int, count: int) -> Times:
        """The same as pages, in batches of so many."""
        places = self._blocks("pool", self.device, page, LAYERS)
        cache, rows = (
            np.array(column, np.uint64)[:, np.newaxis] for column in zip(*places, strict=True)
        )
        layers = np.arange(LAYERS, dtype=np.uint64)
        columns = (cache + layers * (2 * BLOCKS * page), rows + layers * page)
        dsts, srcs = (column.reshape(-1) for column in (columns if load else columns[::-1]))
        return self.batches(dsts, srcs, page, count)

    def kernel(self, load: bool, page: int, workgroups: int) -> Times:
        """The same by one launch of a kernel."""
        if self.gather is None:
            self.gather = self._loaded_gather()
        places = (c_uint64 * (2 * PAIRS))()
        for number, (cache, row) in enumerate(self._blocks("pool", self.device, page, LAYERS)):
            places[2 * number : 2 * number + 2] = [cache, row] if load else [row, cache]
        steps = (2 * BLOCKS * page, page) if load else (page, 2 * BLOCKS * page)
        units = page // UNIT_BYTES
        given = (
            places,
            *map(c_uint64, steps),
            *map(c_uint, (units, LAYERS, BLOCKS * LAYERS * units)),
        )
        pointers = (c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        grid = tuple(map(c_uint, (workgroups, 1, 1, THREADS, 1, 1, 0)))
        stream = c_uint64(self.driver.stream)
        return self.timed(
            lambda: self.driver("cuLaunchKernel", self.gather, *grid, stream, pointers, None)
        )

    def _loaded_gather(self) -> c_uint64:
        """The kernel of the backend, from its source."""
        found = re.search(r'kGatherPtx = R"\((.*?)\)"', KERNEL.read_text("utf-8"), re.DOTALL)
        assert found is not None
        module, function = c_uint64(), c_uint64()
        self.driver("cuModuleLoadData", byref(module), found[1].encode())
        self.driver("cuModuleGetFunction", byref(function), module, b"gather")
        return function

    def _blocks(self, host: str, device: str, page: int, rows: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng(1)
        caches, slots = (rng.permutation(2 * BLOCKS)[:BLOCKS].tolist() for _ in range(2))
        return [
            (self.devices[device] + block * page, self.hosts[host] + slot * rows * page)
            for block, slot in zip(caches, slots, strict=True)
        ]

    def pages(self, load: bool, page: int, count: int) -> Times:
        """256 scattered pages in batches of so many."""
        rng = np.random.default_rng(2)
        slots = [rng.permutation(4 * PAGES)[:PAGES].astype(np.uint64) * page for _ in range(2)]
        cache = slots[0] + self.devices[self.device]
        rows = slots[1] + self.hosts["pool"]
        return self.batches(*((cache, rows) if load else (rows, cache)), page, count)

    def tensors(self, load: bool, page: int, count: int, together: int) -> Times:
        """The pages of blocks in many allocations, in batches of so many: of so many blocks those
        of an allocation, then those of the next."""
        while len(self.allocations) < TENSORS:
            address = c_uint64()
            self.driver("cuMemAlloc", byref(address), c_size_t(TENSOR_BYTES))
            self.allocations.append(address.value)
        rng = np.random.default_rng(1)
        blocks, slots = (rng.permutation(2 * BLOCKS)[:BLOCKS].astype(np.uint64) for _ in range(2))
        cache = np.array(self.allocations, np.uint64) + blocks[:, np.newaxis] * page
        at = slots[:, np.newaxis] * TENSORS + np.arange(TENSORS, dtype=np.uint64)
        pages, rows = (
            np.concatenate(
                [side[k : k + together].T.reshape(-1) for k in range(0, BLOCKS, together)]
            )
            for side in (cache, self.hosts["pool"] + at * page)
        )
        return self.batches(*((pages, rows) if load else (rows, pages)), page, count)

    def batches(self, dsts: Places, srcs: Places, page: int, count: int) -> Times:
        columns = (dsts, srcs, np.full(len(dsts), page, np.uint64))
        attributes, first = Attributes(order=1), c_size_t(0)
        function, stream = self.driver.find("cuMemcpyBatchAsync"), c_uint64(self.driver.stream)

        def call() -> None:
            for at in range(0, len(dsts), count):
                pointers = [c_void_p(c.ctypes.data + 8 * at) for c in columns]
                given = (*pointers, c_size_t(count), byref(attributes), byref(first), c_size_t(1))
                if code := function(*given, stream):
                    raise SystemExit(f"cuMemcpyBatchAsync: {code}")

        return self.timed(call)


def medians(taken: Iterable[Sequence[float]]) -> Times:
    submit, whole = (statistics.median(column) for column in zip(*list(taken)[2:], strict=True))
    return submit, whole


def show(what: str, cells: Mapping[str, tuple[Times | None, int]]) -> None:
    """A line: under each name the times, and GB/s of so many bytes."""
    line = f"  {what:16}"
    for name, (times, nbytes) in cells.items():
        told = "absent"
        if times is not None:
            submit, whole = times
            told = f"{submit:.0f}/{whole:.0f} {nbytes / whole / 1e3:.1f}"
        line += f" | {name} {told}"
    print(line)


def show_strided(calls: Calls, page: int, load: bool) -> None:
    nbytes = LAYERS * BLOCKS * page
    print(f"strided, {'load' if load else 'store'} of {format_bytes(page)} pages")
    for host in calls.hosts:
        cells = {}
        for device in calls.devices:
            for named in (True, False):
                name = f"{device} {'named' if named else 'unified'}"
                cells[name] = (
                    calls.strided(calls.copies(host, device, load, page, named)),
                    nbytes,
                )
        show(host, cells)

    def copies(load: bool, rows: int = LAYERS) -> Copies:
        return calls.copies("pool", calls.device, load, page, rows=rows)

    show(
        "rows of a copy",
        {str(n): (calls.strided(copies(load, n)), n * BLOCKS * page) for n in (7, 14, 28, 56)},
    )
    half = copies(load)
    show(
        "threads",
        {
            "one": (calls.threads([half]), nbytes),
            "two": (calls.threads([half[::2], half[1::2]]), nbytes),
            "one each way": (calls.threads([copies(True), copies(False)]), 2 * nbytes),
        },
    )
    show(
        "3-D batches of",
        {str(n): (calls.together(load, page, n), nbytes) for n in (4, 8, 16, 32, 64)},
    )
    counts = (LAYERS, 32, 2 * LAYERS, 4 * LAYERS, 8 * LAYERS)
    show("pages apart", {str(n): (calls.apart(load, page, n), nbytes) for n in counts})
    show("kernel of", {str(n): (calls.kernel(load, page, n), nbytes) for n in WORKGROUPS})


def show_all_strided(calls: Calls) -> None:
    for page in (8 << 10, 16 << 10, 32 << 10):
        for load in (True, False):
            show_strided(calls, page, load)


def show_pages(calls: Calls) -> None:
    print(f"{PAGES} scattered pages in batches")
    for page in (8 << 10, 32 << 10):
        for load in (True, False):
            sizes = (8, 16, 32, 64, 128, 256)
            cells = {str(n): (calls.pages(load, page, n), PAGES * page) for n in sizes}
            show(f"{'load' if load else 'store'} of {format_bytes(page)}", cells)


def show_tensors(calls: Calls) -> None:
    print(f"pages of {BLOCKS} blocks in {TENSORS} tensors")
    for page in (8 << 10, 16 << 10, 32 << 10):
        for load in (True, False):
            for order, together in (("by block", 1), ("by tensor", BLOCKS), ("of 4", 4)):
                cells = {
                    str(n): (calls.tensors(load, page, n, together), TENSORS * BLOCKS * page)
                    for n in (64, 128, 256, 512)
                }
                show(f"{'load' if load else 'store'} {format_bytes(page)} {order}", cells)


PARTS = {"strided": show_all_strided, "pages": show_pages, "tensors": show_tensors}


def main() -> int:
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parts = parser.parse_args().only
    calls = Calls()
    print("us until the calls have returned / until the copies have ended, and GB/s")
    for part in parts:
        PARTS[part](calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
