"""What `offcore kv bench` measures: loads and stores of scattered KV blocks, beside peers.

All that is measured takes turns, so that what disturbs the machine disturbs all alike; times are
medians, by the host's clock: from the call until its caller has seen the end. `ceiling_gbps` is one
contiguous copy of pinned memory, in the same run, and `ceiling_gemm_slowdown` how much products of
matrices slow down during such copies.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from offcore import _core, kv
from offcore.errors import Error, error
from offcore.sizes import format_bytes
from offcore.tools.kv.case import Case, memory_of, torch_with_gpu
from offcore.tools.kv.models import Geometry
from offcore.tools.kv.peers import Way, open_way
from offcore.tools.report import format_us

ROUNDS = 9
WARMUP = 2
_CEILING_BYTES = {"cuda": 256 << 20, "host": 32 << 20}
_PRODUCT = 8192  # of a GEMM's matrices, bf16
_PRODUCTS = 48  # a measurement of them
_PRODUCT_ROUNDS = 8


@dataclass(frozen=True)
class Plan:
    """One invocation of the benchmark."""

    backend: str
    geometries: Sequence[Geometry]
    blocks: Sequence[int] = ()  # of a request; none: as `tokens` take
    tokens: Sequence[int] = (4096,)
    layouts: Sequence[str] = ("layers",)
    directions: Sequence[str] = ("load",)
    peers: Sequence[str] = ()
    requests: int = 1
    rounds: int = ROUNDS
    with_gemm: bool = False
    links: Sequence[int] | str | None = None  # of other GPUs, for offcore alone
    timeout_s: float = 30.0
    ceiling_bytes: int = 0  # of the copy that bounds all ways; 0: the usual ones

    def cases(self) -> Iterator[tuple[Geometry, str, int, int | None]]:
        for geometry, layout in itertools.product(self.geometries, self.layouts):
            for blocks in self.blocks:
                yield geometry, layout, blocks, None
            for tokens in () if self.blocks else self.tokens:
                yield geometry, layout, geometry.blocks(tokens), tokens


@dataclass
class Taken:
    """The times of one way."""

    times_us: list[float] = field(default_factory=list)
    submit_us: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Clock:
    """Times what a way does, in streams of a GPU if it needs some."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._watches = [_core.GpuTimer(0) for _ in range(2)] if backend == "cuda" else []

    def measure(self, way: Way, direction: str) -> tuple[float, float, dict[str, Any]]:
        """The whole, the caller's share of it, and facts."""
        parts = ("load", "store") if direction == "both" else (direction,)
        watches = self._watches[: len(parts)] if way.streamed else []
        for watch in watches:
            watch.start()
        streams = [watch.stream for watch in watches] or [0, 0]
        began_ns = time.perf_counter_ns()
        submit_us = sum(
            way.enqueue(part, stream) for part, stream in zip(parts, streams, strict=False)
        )
        for watch in watches:
            watch.stop()
        for watch in watches:
            watch.elapsed_us(self._timeout_s)
        way.settle()
        return (time.perf_counter_ns() - began_ns) / 1e3, submit_us, way.facts()


class Contiguous:
    """Two buffers of pinned memory and two in the cache's kind of memory: what bounds all ways."""

    streamed = True

    def __init__(self, backend: str, nbytes: int) -> None:
        self._backend = backend
        self.nbytes = nbytes or _CEILING_BYTES[backend]
        self._pool = kv.HostPool(self.nbytes, 2, backend=backend, chunk_bytes=self.nbytes)
        self._rows = [self._pool.row(slot) for slot in self._pool.allocate(2, timeout=60.0)]
        self._memory = memory_of(backend, 2 * self.nbytes)

    def enqueue(self, direction: str, stream: int) -> float:
        load = direction == "load"
        cache = np.array([self._memory.address + (0 if load else self.nbytes)], np.uint64)
        host = np.array([self._rows[not load].ctypes.data], np.uint64)
        dsts, srcs = (cache, host) if load else (host, cache)
        if self._backend == "cuda":
            _core.copy_by_loop(dsts, srcs, self.nbytes, 0, stream)
        else:
            _core.copy_by_hand(dsts, srcs, self.nbytes)
        return 0.0

    def settle(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def leave(self) -> None:
        pass

    def fetch(self) -> None:
        pass

    def close(self) -> None:
        del self._rows
        self._pool.close()


class Products:
    """Matrix products in a stream of their own, which copies may slow down."""

    def __init__(self) -> None:
        torch = torch_with_gpu()
        if torch is None:
            raise error("unsupported", "--with-gemm needs a GPU and torch: pip install torch")
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._a = torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device="cuda:0")
        self._c = torch.empty_like(self._a)
        torch.cuda.synchronize()
        self._run(None)  # the first ones load what they need

    def slowdown(self, clock: Clock, way: Way, direction: str) -> float:
        """How many times as long they take while that goes on."""

        def beside() -> None:
            clock.measure(way, direction)

        ratios = []
        for turn in range(_PRODUCT_ROUNDS):  # in turn: a GPU slows down as it grows warm
            order = (False, True) if turn % 2 else (True, False)
            taken = {busy: self._run(beside if busy else None) for busy in order}
            ratios.append(taken[True] / taken[False])
        return round(statistics.median(ratios), 4)

    def _run(self, beside: Any) -> float:
        torch = self._torch
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            first.record()
            for _ in range(_PRODUCTS):
                torch.mm(self._a, self._a, out=self._c)
            last.record()
        while not last.query():
            if beside is not None:
                beside()
        torch.cuda.synchronize()
        elapsed: float = first.elapsed_time(last)
        return elapsed


def check(plan: Plan) -> None:
    """Raises where the plan cannot be: before anything has been measured."""
    if plan.backend not in ("cuda", "host"):
        raise error("unsupported", f"kv bench runs on cuda and host, not on {plan.backend}")
    if plan.with_gemm and (plan.backend != "cuda" or torch_with_gpu() is None):
        raise error("unsupported", "--with-gemm needs a GPU and torch: pip install torch")


def run(plan: Plan) -> Iterator[dict[str, Any]]:
    """A row a way, direction and case, as soon as it is known; and one with `absent`, and why, for
    each peer that cannot run here."""
    check(plan)
    with ExitStack() as stack:
        clock = Clock(plan.backend, plan.timeout_s)
        contiguous = stack.enter_context(closing(Contiguous(plan.backend, plan.ceiling_bytes)))
        products = Products() if plan.with_gemm else None
        ceilings = {one: _ceiling(clock, contiguous, one, products) for one in plan.directions}
        absent: set[str] = set()
        for geometry, layout, blocks, tokens in plan.cases():
            case = stack.enter_context(
                closing(
                    Case(
                        plan.backend,
                        geometry,
                        layout,
                        blocks,
                        requests=plan.requests,
                        both="both" in plan.directions,
                        gpus=_core.gpus() if plan.backend == "cuda" and plan.links else 1,
                    )
                )
            )
            with ExitStack() as opened:
                ways: dict[str, Way] = {}
                for name in dict.fromkeys(("offcore", *plan.peers)):
                    try:
                        ways[name] = opened.enter_context(
                            closing(open_way(name, case, plan.timeout_s, plan.links))
                        )
                    except Error as failure:
                        if name == "offcore" or failure.code not in ("unavailable", "unsupported"):
                            raise
                        if name not in absent:
                            yield {"impl": name, "absent": str(failure)}
                        absent.add(name)
                place = {"backend": plan.backend, "tokens": tokens, "requests": plan.requests}
                for direction in plan.directions:
                    for row in _measure(plan, case, ways, direction, clock, products):
                        yield place | row | ceilings[direction]
            case.close()


def _ceiling(
    clock: Clock, contiguous: Contiguous, direction: str, products: Products | None
) -> dict[str, Any]:
    """The rate of one contiguous copy, and how much products slow down meanwhile."""
    times = [clock.measure(contiguous, direction)[0] for _ in range(WARMUP + ROUNDS)][WARMUP:]
    nbytes = contiguous.nbytes * (2 if direction == "both" else 1)
    slower = None if products is None else products.slowdown(clock, contiguous, direction)
    rate = round(nbytes / statistics.median(times) / 1e3, 3)
    return {"ceiling_gbps": rate, "ceiling_gemm_slowdown": slower}


def _measure(
    plan: Plan,
    case: Case,
    ways: dict[str, Way],
    direction: str,
    clock: Clock,
    products: Products | None,
) -> Iterator[dict[str, Any]]:
    taken = {name: Taken() for name in ways}
    order = list(ways.items())
    for turn in range(WARMUP + plan.rounds):
        random.Random(turn).shuffle(order)  # else what a way leaves behind disturbs always the same
        for name, way in order:
            whole_us, submit_us, facts = clock.measure(way, direction)
            if turn >= WARMUP:
                taken[name].times_us.append(whole_us)
                taken[name].submit_us.append(submit_us)
            taken[name].facts = facts
    nbytes = case.nbytes * (2 if direction == "both" else 1)
    for turn, (name, way) in enumerate(ways.items()):
        found = taken[name]
        time_us = statistics.median(found.times_us)
        slowdown = products.slowdown(clock, way, direction) if products is not None else None
        case.refresh(turn + 1)
        before = case.rows()
        way.leave()
        clock.measure(way, direction)
        if direction != "load":
            way.fetch()
        yield {
            "impl": name,
            "model": case.geometry.model,
            "direction": direction,
            "layout": case.layout,
            "page_bytes": case.geometry.page_bytes,
            "layers": case.geometry.layers,
            "blocks": case.blocks,
            "bytes": nbytes,
            "time_us": round(time_us, 2),
            "time_us_min": round(min(found.times_us), 2),
            "time_us_max": round(max(found.times_us), 2),
            "gbps": round(nbytes / time_us / 1e3, 3),
            "submit_us": round(statistics.median(found.submit_us), 2),
            "gemm_slowdown": slowdown,
            "wrong": case.wrong(direction, before),
            **found.facts,
        }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows as a table: how each way compares with offcore in its case."""
    result = Table(
        title=f"KV blocks on {rows[0]['backend']}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    for name in ("model", "layout", "direction", "impl", "path"):
        result.add_column(name)
    names = ("page", "layers", "blocks", "time us", "GB/s", "%", "offcore", "submit us", "GEMM")
    for name in (*names, "#wrong"):
        result.add_column(name, justify="right")
    own: dict[str, Any] = {}
    for row in rows:
        own = row if row["impl"] == "offcore" else own
        slower = row["gemm_slowdown"]
        share = row["gbps"] / row["ceiling_gbps"]
        result.add_row(
            *(str(row[name] or "-") for name in ("model", "layout", "direction", "impl", "path")),
            format_bytes(row["page_bytes"]),
            str(row["layers"]),
            str(row["blocks"]),
            format_us(row["time_us"]),
            f"{row['gbps']:.2f}",
            f"{100 * share:.0f}" if share < 10 else ">1k",  # the copy alone met other work
            f"{row['time_us'] / own['time_us']:.2f}x",
            format_us(row["submit_us"]),
            "-" if slower is None else f"{slower:.3f}x",
            str(row["wrong"]),
            style="bold red" if row["wrong"] else None,
        )
    return result
