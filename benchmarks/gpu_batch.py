"""Measures batch_copy on one GPU beside what it replaces, in one process.

    python benchmarks/gpu_batch.py

Pages of a host's pool go to a GPU and back: `scattered`, random pages on both sides, of which
nothing folds; `paged`, blocks of a cache whose layers lie apart, to rows that have all layers of a
block side by side. `loop` is a cuMemcpyAsync a page, `batch` one cuMemcpyBatchAsync of all pages,
by the driver itself, `ceiling` one contiguous copy of as many bytes; `--sub-batches 16,64` adds
offcore with calls of so many pages. Every time runs from before the call until the stream is
through; medians, the implementations in turn. Bytes are checked after the last round. Rows go to
$OUT/cuda-batch.jsonl where OUT is set, else to benchmarks/results.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import offcore
from offcore import BatchPolicy, _core
from offcore.sizes import format_bytes, parse_sizes
from offcore.tools.report import JsonLines, Stamp

WARMUP = 3


class Attributes(ctypes.Structure):
    """How the copies of a batch are to be made: in the stream's order, and nothing else."""

    _fields_ = (("order", c_int), ("hints", c_int * 4), ("flags", ctypes.c_uint))


class Driver:
    """The few calls that are measured without offcore."""

    def __init__(self, gpu: int) -> None:
        self.library = ctypes.CDLL(_core.env("OFFCORE_LIBCUDA"))
        self.functions: dict[str, Any] = {}
        context, stream, version = c_uint64(), c_uint64(), c_int()
        self.library.cuDriverGetVersion(byref(version))
        self.version = version.value
        self("cuInit", c_uint64(0))
        self("cuDevicePrimaryCtxRetain", byref(context), c_uint64(gpu))
        self("cuCtxSetCurrent", context)
        self("cuStreamCreateWithPriority", byref(stream), c_uint64(1), c_uint64(0))
        self.stream: int = stream.value

    def find(self, name: str) -> Any:
        if name not in self.functions:
            function, status = c_void_p(), c_int()
            self.library.cuGetProcAddress_v2(
                name.encode(), byref(function), min(self.version, 13000), c_uint64(0), byref(status)
            )
            address = function.value if status.value == 0 else None
            self.functions[name] = ctypes.CFUNCTYPE(c_int)(address) if address else None
        return self.functions[name]

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := self.find(name)(*arguments):
            raise SystemExit(f"{name}: {code}")

    def settle(self) -> None:
        self("cuStreamSynchronize", c_uint64(self.stream))


@dataclass
class Entries:
    """Pages to copy, as offsets, and what they are called."""

    layout: str
    page_bytes: int
    layers: int
    blocks: int
    device: np.ndarray[Any, Any] = field(repr=False)
    host: np.ndarray[Any, Any] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return len(self.device) * self.page_bytes


def scattered(page: int, blocks: int, rng: Any) -> Entries:
    slots = [rng.permutation(4 * blocks)[:blocks].astype(np.uint64) * page for _ in range(2)]
    return Entries("scattered", page, 1, blocks, *slots)


def paged(page: int, layers: int, blocks: int, rng: Any) -> Entries:
    """A row of the host holds a block of all layers; a layer of the cache is `stride` long."""
    stride = 2 * blocks * page
    ours, theirs = (rng.permutation(2 * blocks)[:blocks].astype(np.uint64) for _ in range(2))
    layer = np.arange(layers, dtype=np.uint64)[None, :]
    device = ours[:, None] * page + layer * stride
    host = (theirs[:, None] * layers + layer) * page
    return Entries("paged", page, layers, blocks, device.ravel(), host.ravel())


class Bench:
    """Memory of one GPU and of the host, and the ways to copy between them."""

    def __init__(self, room: int) -> None:
        self.comm = offcore.Communicator(backend="cuda", ranks=1)
        self.driver = Driver(0)
        self.window = self.comm.window(room)
        self.host = self.comm.host_array(room)
        self.device_base = self.window.address(0)
        self.host_base = self.host.ctypes.data

    def columns(self, entries: Entries, load: bool) -> tuple[Any, Any, Any]:
        device, host = entries.device + self.device_base, entries.host + self.host_base
        sizes = np.full(len(device), entries.page_bytes, np.uint64)
        return (device, host, sizes) if load else (host, device, sizes)

    def by_offcore(self, columns: Any, **policy: Any) -> Callable[[], offcore.BatchHandle]:
        chosen = BatchPolicy(timed=False, **policy)
        stream = self.driver.stream

        def copy() -> offcore.BatchHandle:
            return offcore.batch_copy(*columns, stream=stream, policy=chosen, backend="cuda")

        return copy

    def by_one_batch(self, columns: Any) -> Callable[[], None] | None:
        count = len(columns[0])
        pointers = [column.ctypes.data_as(c_void_p) for column in columns]
        attributes, first = Attributes(order=1), c_size_t(0)
        if self.driver.version < 13000:
            return None  # an older form, or none
        call = self.driver.find("cuMemcpyBatchAsync")
        stream = c_uint64(self.driver.stream)

        def copy() -> None:
            code = call(
                *pointers, c_size_t(count), byref(attributes), byref(first), c_size_t(1), stream
            )
            if code:
                raise SystemExit(f"cuMemcpyBatchAsync: {code}")

        return copy

    def time_us(self, copy: Callable[[], Any]) -> tuple[float, float, Any]:
        """The whole, the caller's share of it, and what the call returned."""
        start = time.perf_counter_ns()
        returned = copy()
        submitted = time.perf_counter_ns()
        self.driver.settle()
        end = time.perf_counter_ns()
        return (end - start) / 1e3, (submitted - start) / 1e3, returned

    def wrong(self, entries: Entries, load: bool, copy: Callable[[], Any]) -> int:
        """Bytes of both memories that a copy of fresh contents leaves other than they should be."""
        self.driver.settle()
        room = int(max(entries.device.max(), entries.host.max())) + entries.page_bytes
        device, host = np.empty(room, np.uint8), self.host[:room]
        offcore.fill(device, 1)
        offcore.fill(host, 2)
        self.window.write(device)
        wanted = {"device": device, "host": host.copy()}
        pairs = zip(entries.device.tolist(), entries.host.tolist(), strict=True)
        for to, at in pairs:
            ours, theirs = slice(to, to + entries.page_bytes), slice(at, at + entries.page_bytes)
            if load:
                wanted["device"][ours] = wanted["host"][theirs]
            else:
                wanted["host"][theirs] = wanted["device"][ours]
        copy()
        self.driver.settle()
        found = np.empty(room, np.uint8)
        self.window.read(found)
        return int((found != wanted["device"]).sum() + (host != wanted["host"]).sum())


def ways_of(
    bench: Bench, entries: Entries, load: bool, sub_batches: list[int]
) -> dict[str, Callable[[], Any]]:
    """The implementations by name."""
    columns = bench.columns(entries, load)
    whole = [np.array([bench.device_base]), np.array([bench.host_base])]
    whole = (whole if load else whole[::-1]) + [np.array([entries.nbytes])]
    ways: dict[str, Callable[[], Any] | None] = {
        "ceiling": bench.by_offcore(whole),
        "offcore": bench.by_offcore(columns),
        "batch": bench.by_one_batch(columns),
        "loop": bench.by_offcore(columns, merge=False, fold=False, sub_batch=1),
    }
    if entries.layers > 1:
        ways["offcore, unfolded"] = bench.by_offcore(columns, fold=False)
    for number in sub_batches:
        ways[f"offcore by {number}"] = bench.by_offcore(columns, fold=False, sub_batch=number)
    return {name: way for name, way in ways.items() if way is not None}


def measure(
    bench: Bench, entries: Entries, load: bool, rounds: int, sub_batches: list[int]
) -> list[dict[str, Any]]:
    """A row for each implementation."""
    known = ways_of(bench, entries, load, sub_batches)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in known}
    results: dict[str, Any] = {}
    for turn in range(WARMUP + rounds):
        for name, way in known.items():
            whole_us, submit_us, handle = bench.time_us(way)
            if isinstance(handle, offcore.BatchHandle):
                results[name] = result = handle.wait(10.0)
                if name == "loop":  # the driver's calls alone: such a loop plans nothing
                    whole_us, submit_us = whole_us - result.plan_us, submit_us - result.plan_us
            if turn >= WARMUP:
                times[name].append((whole_us, submit_us))
    ceiling = entries.nbytes / statistics.median(us for us, _ in times["ceiling"]) / 1e3
    return [
        {
            "impl": name,
            "direction": "load" if load else "store",
            "layout": entries.layout,
            "page_bytes": entries.page_bytes,
            "layers": entries.layers,
            "blocks": entries.blocks,
            "time_us": round(time_us := statistics.median(us for us, _ in taken), 2),
            "time_us_min": round(min(us for us, _ in taken), 2),
            "time_us_max": round(max(us for us, _ in taken), 2),
            "gbps": round(entries.nbytes / time_us / 1e3, 3),
            "ceiling_gbps": round(ceiling, 3),
            "submit_us": round(statistics.median(us for _, us in taken), 2),
            "commands": results[name].commands if name in results else 1,
            "path": results[name].path if name in results else "batches",
            "wrong": 0 if name == "ceiling" else bench.wrong(entries, load, known[name]),
        }
        for name, taken in times.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """A line a layout, page and direction: GB/s of each, and how many times as fast offcore is."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    print(f"{'layout':>9} {'page':>5} {'':>5} " + " ".join(f"{name:>17}" for name in names), end="")
    print("   % of ceiling   vs batch   vs loop   submit us")
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (row["layout"], row["page_bytes"], row["direction"])
        groups.setdefault(key, {})[row["impl"]] = row
    for (layout, page, direction), of in groups.items():
        ours = of["offcore"]
        cells = [f"{of[name]['gbps']:17.1f}" if name in of else f"{'-':>17}" for name in names]
        against = [
            f"{of[name]['time_us'] / ours['time_us']:.2f}x" if name in of else "-"
            for name in ("batch", "loop")
        ]
        share = 100 * ours["gbps"] / ours["ceiling_gbps"]
        print(f"{layout:>9} {format_bytes(page):>5} {direction:>5} {' '.join(cells)}", end="")
        print(f" {share:14.0f} {against[0]:>10} {against[1]:>9} {ours['submit_us']:11.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", default="8K,16K,32K,64K", help="bytes of a page, a list")
    parser.add_argument("--blocks", type=int, default=256, help="scattered pages")
    parser.add_argument("--paged", default="28x64", help="layers x blocks")
    parser.add_argument("--sub-batches", default="", help="further sizes of offcore's calls")
    parser.add_argument("--rounds", type=int, default=15, help="of which medians are taken")
    args = parser.parse_args()
    pages = parse_sizes(args.pages)
    sub_batches = [int(number) for number in args.sub_batches.split(",") if number]
    layers, blocks = (int(number) for number in args.paged.split("x"))
    room = max(4 * args.blocks, 2 * layers * blocks) * max(pages)
    try:
        bench = Bench(room)
    except offcore.Error as failure:
        print(f"{failure.code}: {failure}")
        return 1
    rng = np.random.default_rng(1)
    stamp = asdict(Stamp())
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    rows = []
    with JsonLines(str(folder / "cuda-batch.jsonl")) as lines:
        for page in pages:
            for entries in (scattered(page, args.blocks, rng), paged(page, layers, blocks, rng)):
                for load in (True, False):
                    found = measure(bench, entries, load, args.rounds, sub_batches)
                    for row in found:
                        lines.write(row | stamp)
                    rows += found
    bench.comm.close()
    show(rows)
    wrong = sum(row["wrong"] for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong bytes: {folder / 'cuda-batch.jsonl'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
