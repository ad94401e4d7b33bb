"""What the driver's own calls cost for pages of a KV cache, by form of the call and kind of memory.

    python benchmarks/kv_calls.py

It tells where the time of a transfer goes that offcore does not spend itself. `strided`: a copy of
28 rows for each of 64 scattered blocks, by cuMemcpy2DAsync, whose sides are named (host, device) or
left to the driver to find out (unified), and in one cuMemcpy3DBatchAsync of 32. `pages`: 256
scattered pages of a block each, by cuMemcpyBatchAsync of so many. Host memory is the driver's own
(cuMemHostAlloc), a HostPool's, or registered in small pages; a GPU's comes from cuMemAlloc or is a
window. Times are medians: until the calls have returned, and until the copies have ended.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np
from gpu_batch import Attributes, Driver

import offcore
from offcore import kv
from offcore.sizes import format_bytes

LAYERS, BLOCKS, PAGES = 28, 64, 256
ROOM = 4 * LAYERS * BLOCKS * (16 << 10)
TURNS = 11
HOST, DEVICE, UNIFIED = 1, 2, 4
PORTABLE = 3  # and mapped
POINTER = 1  # an operand of a 3-D batch


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


class Calls:
    """The memories, and a stream."""

    def __init__(self) -> None:
        self.driver = Driver(0)
        self.hosts = {"pool": self._pool(), "small pages": self._registered()}
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

    def _registered(self) -> int:
        self.mapped = mmap.mmap(-1, ROOM)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self.mapped.madvise(mmap.MADV_NOHUGEPAGE)
        self.mapped.write(bytes(ROOM))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))
        self.driver("cuMemHostRegister", c_void_p(address), c_size_t(ROOM), c_uint(PORTABLE))
        return address

    def _window(self) -> int:
        self.comm = offcore.Communicator(backend="cuda", ranks=1)
        self.held = self.comm.window(ROOM)
        return self.held.address(0)

    def timed(self, call: Callable[[], None]) -> Times:
        taken = []
        for _ in range(TURNS + 2):
            began = time.perf_counter_ns()
            call()
            submitted = time.perf_counter_ns()
            self.driver.settle()
            ended = time.perf_counter_ns()
            taken.append(((submitted - began) / 1e3, (ended - began) / 1e3))
        submit, whole = (statistics.median(column) for column in zip(*taken[2:], strict=True))
        return submit, whole

    def strided(self, host: str, device: str, load: bool, page: int, named: bool) -> Times:
        """64 calls of 28 rows."""
        copies = [Copy2D(width=page, height=LAYERS) for _ in range(BLOCKS)]
        for copy, (cache, row) in zip(copies, self._blocks(host, device, page), strict=True):
            on_gpu, on_host = (copy.dst, copy.src) if load else (copy.src, copy.dst)
            on_gpu.type, on_gpu.device, on_gpu.pitch = DEVICE, cache, 2 * BLOCKS * page
            on_host.type, on_host.host, on_host.pitch = HOST, row, page
            on_host.device = row
            if not named:
                on_gpu.type = on_host.type = UNIFIED
        function, stream = self.driver.find("cuMemcpy2DAsync"), c_uint64(self.driver.stream)
        pointers = [byref(copy) for copy in copies]

        def call() -> None:
            for pointer in pointers:
                if code := function(pointer, stream):
                    raise SystemExit(f"cuMemcpy2DAsync: {code}")

        return self.timed(call)

    def together(self, host: str, device: str, load: bool, page: int, count: int) -> Times | None:
        """The same in batches of strided copies; None: this driver has none, or refuses them."""
        function = self.driver.find("cuMemcpy3DBatchAsync")
        if function is None or self.driver.version < 13000:
            return None
        copies = (Copy3D * BLOCKS)()
        for copy, (cache, row) in zip(copies, self._blocks(host, device, page), strict=True):
            on_gpu = Operand(POINTER, cache, 2 * BLOCKS * page, LAYERS)
            on_host = Operand(POINTER, row, page, LAYERS)
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

    def _blocks(self, host: str, device: str, page: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng(1)
        caches, rows = (rng.permutation(2 * BLOCKS)[:BLOCKS].tolist() for _ in range(2))
        return [
            (self.devices[device] + block * page, self.hosts[host] + row * LAYERS * page)
            for block, row in zip(caches, rows, strict=True)
        ]

    def pages(self, load: bool, page: int, count: int) -> Times:
        """256 scattered pages in batches of so many."""
        rng = np.random.default_rng(2)
        slots = [rng.permutation(4 * PAGES)[:PAGES].astype(np.uint64) * page for _ in range(2)]
        cache = slots[0] + next(reversed(self.devices.values()))
        rows = slots[1] + self.hosts["pool"]
        columns = (cache, rows) if load else (rows, cache)
        sizes = np.full(PAGES, page, np.uint64)
        attributes, first = Attributes(order=1), c_size_t(0)
        function, stream = self.driver.find("cuMemcpyBatchAsync"), c_uint64(self.driver.stream)

        def call() -> None:
            for at in range(0, PAGES, count):
                pointers = [c_void_p(c.ctypes.data + 8 * at) for c in (*columns, sizes)]
                given = (*pointers, c_size_t(count), byref(attributes), byref(first), c_size_t(1))
                if code := function(*given, stream):
                    raise SystemExit(f"cuMemcpyBatchAsync: {code}")

        return self.timed(call)


def show(what: str, times: Times | None, nbytes: int) -> None:
    if times is None:
        print(f"  {what}: absent")
    else:
        submit, whole = times
        print(f"  {what}: calls {submit:7.1f} us, all {whole:7.1f} us, {nbytes / whole / 1e3:5.1f}")


def main() -> int:
    calls = Calls()
    for page in (8 << 10, 16 << 10):
        nbytes = LAYERS * BLOCKS * page
        for load in (True, False):
            name = "load" if load else "store"
            print(f"strided, {name} of {format_bytes(page)} pages (GB/s last)")
            for host in calls.hosts:
                for device in calls.devices:
                    for named in (True, False):
                        what = f"{host}, {device}, {'named' if named else 'unified'}"
                        show(what, calls.strided(host, device, load, page, named), nbytes)
            device = next(reversed(calls.devices))
            for count in (8, 32, 64):
                times = calls.together("pool", device, load, page, count)
                show(f"3-D batches of {count}", times, nbytes)
    for page in (8 << 10, 32 << 10):
        for load in (True, False):
            print(f"pages, {'load' if load else 'store'} of {format_bytes(page)}")
            for count in (8, 16, 32, 64, 128, 256):
                show(f"batches of {count}", calls.pages(load, page, count), PAGES * page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
