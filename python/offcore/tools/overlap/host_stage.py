"""GEMMs by threads of this process beside copies of offcore's host backend, a process a rank.

The whole path of a measurement without a GPU. A collective on cores is a copy, by threads, of as
many bytes as the operation brings to a rank: no exchange through shared memory can be faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

import offcore
from offcore.overlap.kernels import Collective
from offcore.tools.overlap.stage import ENGINES, GEMM, LIBRARY_ENGINES, Part, Shape

ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_THREADS_MOST = 64


class HostStage:
    """sizes: the most bytes that each operation is run with. Matrices are of float32."""

    backend = "host"
    library = "memcpy"

    def __init__(self, rank: int, ranks: int, store: str, sizes: dict[str, int]) -> None:
        self._began = time.monotonic()
        self.rank, self.ranks = rank, ranks
        self.comm = offcore.Communicator(
            backend="host", store=store, rank=rank, world_size=ranks, timeout=30
        )
        self.machine = self.comm.machine
        self.cores = min(max(2, (os.cpu_count() or 1) // ranks), _THREADS_MOST)
        self._most = max((size for op, size in sizes.items() if op != GEMM), default=1)
        self._out, self._inp = (self.comm.empty(self._most) for _ in range(2))
        self._source = np.ones(self._most, np.uint8)
        self._target = np.zeros(self._most, np.uint8)
        self._told: Any = self.comm.empty(ranks, "float64")
        self._launches = ThreadPoolExecutor(2)
        self._threads = ThreadPoolExecutor(2 * self.cores)
        self._operands: tuple[Any, Any, Any] | None = None

    def prepare(self, shape: Shape) -> None:
        random = np.random.default_rng(self.rank)
        self._operands = (
            random.standard_normal((shape.m, shape.k), np.float32),
            random.standard_normal((shape.k, shape.n), np.float32),
            np.empty((shape.m, shape.n), np.float32),
        )

    def room(self, op: str) -> int:
        return self._most if self.ranks > 1 else 0

    def refusal(self, part: Part) -> str:
        return "NCCL has no engines on a host" if part.what == LIBRARY_ENGINES else ""

    def _in_threads(self, count: int, rows: int, work: Callable[[int, int], Any]) -> None:
        """Cuts rows into as many pieces."""
        cuts = [rows * one // count for one in range(count + 1)]
        pieces = [self._threads.submit(work, a, b) for a, b in pairwise(cuts)]
        for piece in pieces:
            piece.result()

    def _gemm(self, cores: int) -> None:
        assert self._operands is not None, "prepare() comes first"
        a, b, out = self._operands
        self._in_threads(cores, len(a), lambda i, j: np.matmul(a[i:j], b, out=out[i:j]))

    def _copy(self, part: Part) -> None:
        arriving = int(Collective(part.op, part.nbytes, self.ranks).wire_bytes)
        to, source = self._target, self._source

        def work(begin: int, end: int) -> None:
            np.copyto(to[begin:end], source[begin:end])

        for begin in range(0, arriving, self._most):  # all_reduce brings more than its size
            self._in_threads(part.cores or 1, min(self._most, arriving - begin), work)

    def _engines(self, part: Part) -> Any:
        comm, out, inp = self.comm, self._out[: part.nbytes], self._inp[: part.nbytes]
        if part.op == "all_gather":
            return comm.all_gather(out)
        if part.op == "all_to_all":
            return comm.all_to_all(out, inp)
        own = out[: part.nbytes // self.ranks]
        numbers = [one.view("float32") for one in (out, inp, own)]
        if part.op == "all_reduce":
            return comm.all_reduce(numbers[0], op="avg")
        return comm.reduce_scatter(numbers[2], numbers[1], "avg")

    def _launch(self, part: Part) -> Future[float]:
        """Begins the part: what tells when it has ended."""

        def ended(work: Callable[..., Any], *arguments: Any) -> float:
            work(*arguments)
            return time.perf_counter()

        if part.what == ENGINES:
            return self._launches.submit(ended, self._engines(part).wait)
        if part.what == GEMM:
            return self._launches.submit(ended, self._gemm, part.cores or self.cores)
        return self._launches.submit(ended, self._copy, part)

    def _slowest(self, value: float) -> float:
        self._told[self.rank] = value
        self.comm.all_gather(self._told).wait()
        return float(self._told.max())

    def ends_us(self, parts: Sequence[Part], warmup: int, measured: int) -> list[list[float]]:
        found = []
        for _ in range(warmup + measured):
            self._slowest(0.0)  # ranks meet
            start = time.perf_counter()
            launched: list[Future[float]] = []
            for part in parts:
                if part.behind:
                    launched[-1].result()
                launched.append(self._launch(part))
            ends = [one.result() for one in launched]
            found.append([self._slowest(end - start) * 1e6 for end in ends])
        return found[warmup:]

    def call_us(self, call: Callable[[], Any], warmup: int, measured: int) -> list[float]:
        times = []
        for _ in range(warmup + measured):
            self._slowest(0.0)  # ranks meet
            start = time.perf_counter()
            call()
            times.append(self._slowest(time.perf_counter() - start) * 1e6)
        return times[warmup:]

    def energy(self, parts: Sequence[Part], seconds: float) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {}

    def agreed(self, failure: str) -> str:
        failed = self._slowest(float(bool(failure)))
        return failure or ("another rank failed" if failed else "")

    def elapsed_s(self) -> float:
        return self._slowest(time.monotonic() - self._began)

    def close(self) -> None:
        self._launches.shutdown()
        self._threads.shutdown()
        self.comm.close()
