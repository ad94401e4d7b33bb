"""The host's share of a KV transfer, beside the planning of the same pages as a batch.

    python benchmarks/kv_host.py [--repetitions N] [--json FILE]

It wants a GPU, or the stand-in driver of the tests (`OFFCORE_LIBCUDA`), which copies beside the
caller as a GPU does. `transfer`: from the call until all is enqueued (`wait_stream`), of 1,008
pages: 36 scattered blocks of 28 layers, in one tensor that has all layers, or in a tensor a layer,
each an allocation of its own. The driver's calls are included; `enqueue_us` is the least time from
a part's program until it is enqueued, and the rest makes the commands. `plan_batch`: the same pages
as a batch of copies, planned and checked, without a call of the driver. `call`: a call of load or
store that names 256 scattered blocks, in rows of their own or that 16 of them share, or two calls,
for K and for V, whose rows lie apart; cold: after other work has emptied the processor's caches, as
between two calls of an engine's; asleep: so is the transfer's thread, which the call wakes. Least
and median of the repetitions, in microseconds for all pages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint64
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from gpu_batch import Driver

from offcore import _core, kv, machines
from offcore.tools.report import JsonLines, Stamp

LAYERS, BLOCKS, NAMED = 28, 72, 36
HOST = -1  # in the place of a rank
PAGES = (8 << 10, 16 << 10, 64 << 10)
PAUSE_S = 0.002  # in which the transfer's thread falls asleep
CALLED = 256  # blocks of a call
SPAN = 2 * CALLED * 64  # bytes of a layer
COLD_BYTES = 96 << 20  # more than caches hold
AWAKE_S = 1.0
ROOM = 1 << 40  # bytes: nothing waits to be enqueued
Row = dict[str, Any]


class Gpu:
    """Memory of a GPU as a contiguous array of bytes."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def allocated(driver: Driver, nbytes: int) -> int:
    address = c_uint64()
    driver("cuMemAlloc", byref(address), c_size_t(nbytes))
    return address.value


def layouts(driver: Driver, page: int) -> Iterator[tuple[str, kv.Layout]]:
    whole = allocated(driver, LAYERS * BLOCKS * page)
    yield "one tensor", kv.Layout(Gpu(whole, (LAYERS, BLOCKS, page)), block_axis=1, layer_axis=0)
    each = [allocated(driver, BLOCKS * page + layer) for layer in range(LAYERS)]
    yield "a tensor a layer", kv.Layout([Gpu(at, (BLOCKS, page)) for at in each])


def times(work: Callable[[], object], finish: Callable[[], object], repetitions: int) -> Row:
    taken_us = []
    for _ in range(repetitions):
        start_ns = time.perf_counter_ns()
        work()
        taken_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        finish()
    return {"least_us": min(taken_us), "median_us": statistics.median(taken_us)}


def transfers(driver: Driver, page: int, repetitions: int) -> Iterator[Row]:
    rng = np.random.default_rng(1)
    for name, layout in layouts(driver, page):
        pool = kv.HostPool(layout.block_bytes, BLOCKS, backend="cuda")
        slots = rng.permutation(pool.allocate(BLOCKS, timeout=60))[:NAMED]
        blocks = rng.permutation(BLOCKS)[:NAMED]
        with (
            pool,
            kv.BlockTransfer(
                layout,
                pool,
                linger=0,
                ahead_bytes=ROOM,
                ahead_commands=1 << 20,
                crossing_bytes=0,
                policy="zero_sm",
            ) as transfer,
        ):
            for direction in ("load", "store"):
                jobs: list[Any] = []
                start = partial(getattr(transfer, direction), blocks, slots)

                def enqueue(start: Callable[[], Any] = start, jobs: list[Any] = jobs) -> None:
                    jobs.append(start())
                    jobs[-1].wait_stream(driver.stream)

                def end(jobs: list[Any] = jobs) -> None:
                    jobs[-1].wait(60)
                    time.sleep(PAUSE_S)

                found = times(enqueue, end, repetitions)
                results = [job.wait(60) for job in jobs]
                result = results[-1]
                found["enqueue_us"] = min(one.enqueue_us for one in results)
                yield {
                    "metric": "transfer",
                    "layout": name,
                    "direction": direction,
                    "path": result.path,
                    "commands": result.commands,
                } | found


def calls(driver: Driver, repetitions: int) -> Iterator[Row]:
    """Of pages of 64 bytes: what the caller does is the same for all."""
    rng = np.random.default_rng(1)
    other = np.zeros(COLD_BYTES, np.uint8)
    each = [Gpu(allocated(driver, SPAN + layer), (2 * CALLED, 64)) for layer in range(LAYERS)]
    for name, shared, caches in (
        ("1 block a row", 1, [each]),
        ("16 blocks a row", 16, [each]),
        ("K and V in rows apart", 1, [each[::2], each[1::2]]),
    ):
        layouts = [kv.Layout(tensors, row_blocks=shared) for tensors in caches]
        rows = 2 * CALLED // shared
        blocks = rng.permutation(2 * CALLED)[:CALLED]
        slots = rng.permutation(rows)[: CALLED // shared, np.newaxis] * shared + np.arange(shared)
        for cold, linger in ((False, AWAKE_S), (True, AWAKE_S), (True, 0.0)):
            pools = [kv.HostPool(one.row_bytes, rows, backend="cuda") for one in layouts]
            for pool in pools:
                pool.allocate(rows, timeout=60)
            with kv.BlockTransfer(layouts, pools, linger=linger) as transfer:
                for direction in ("load", "store"):
                    start = partial(getattr(transfer, direction), blocks, slots.ravel())
                    jobs: list[Any] = []

                    def call(
                        start: Callable[..., Any] = start,
                        jobs: list[Any] = jobs,
                        groups: range = range(len(pools)),
                    ) -> None:
                        jobs.extend([start(group=group) for group in groups])

                    def end(jobs: list[Any] = jobs, cold: bool = cold) -> None:
                        while jobs:
                            jobs.pop().wait(60)
                        time.sleep(PAUSE_S)
                        if cold:
                            np.add(other, 1, out=other)

                    state = "asleep" if linger == 0 else "cold" if cold else "warm"
                    yield {
                        "metric": "call",
                        "layout": name,
                        "direction": direction,
                        "state": state,
                    } | times(call, end, repetitions)
            for pool in pools:
                pool.close()


def plans(page: int, repetitions: int) -> Iterator[Row]:
    """By the places that both layouts have, where one allocation has all of them."""
    rng = np.random.default_rng(1)
    blocks, slots = rng.permutation(BLOCKS)[:NAMED], rng.permutation(BLOCKS)[:NAMED]
    row = LAYERS * page
    buffers = [("cache", "local", LAYERS * BLOCKS * page), ("rows", "host", BLOCKS * row)]
    moves = [
        (
            (1, 0, (layer * BLOCKS + int(block)) * page),
            (2, HOST, int(slot) * row + layer * page),
            page,
        )
        for block, slot in zip(blocks, slots, strict=True)
        for layer in range(LAYERS)
    ]
    listed = _core.moves_listed(1, buffers, moves)
    machine = machines.load("h200-2")
    for fold in (True, False):
        policy = _core.BatchPolicy(fold=fold, timed=False)
        work = partial(_core.plan_batch, listed, [], policy, machine)
        yield {
            "metric": "plan_batch",
            "layout": "one tensor" if fold else "a tensor a layer",
            "commands": str(work().program).count("\n  copy "),
        } | times(work, lambda: None, repetitions)


def tell(lines: JsonLines, what: Row, found: Row, stamp: Row) -> None:
    numbers = {k: round(found.pop(k), 1) for k in list(found) if k.endswith("_us")}
    lines.write(what | found | numbers | stamp)
    if not lines.to_stdout:
        names = " ".join(str(value) for value in found.values())
        size = what.get("page_bytes", "")
        print(f"{size:>6} {names:52}", *(f"{value:8.1f}" for value in numbers.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there; - is stdout")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--only", choices=("call", "pages"), help="one of the two parts")
    given = parser.parse_args()
    stamp = asdict(Stamp())
    driver = Driver(0)
    with JsonLines(given.json) as lines:
        for page in PAGES if given.only != "call" else ():
            sizes = {"page_bytes": page, "pages": LAYERS * NAMED}
            for found in (
                *transfers(driver, page, given.repetitions),
                *plans(page, given.repetitions),
            ):
                tell(lines, {"impl": "offcore"} | sizes, found, stamp)
        for found in calls(driver, given.repetitions) if given.only != "pages" else ():
            tell(lines, {"impl": "offcore", "blocks": CALLED}, found, stamp)


if __name__ == "__main__":
    main()
