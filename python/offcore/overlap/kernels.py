"""Kernels to overlap: GEMMs, other computations, and collectives."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offcore.errors import error
from offcore.operands import dtype_name
from offcore.sizes import format_bytes

TILE = 256  # rows and columns of a GEMM's workgroup, where their number is not given
WARMUP, MEASURED = 6, 9
# Bytes that leave a rank, as shares of S (n-1)/n.
_WIRE = {"all_gather": 1, "all_to_all": 1, "reduce_scatter": 1, "all_reduce": 2}
_MOVE_ALONE = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Compute:
    """A computation on cores.

    name: in plans.
    flops, memory_bytes: of one run; bytes as measured behind the caches. With neither it is treated
        as compute-bound.
    workgroups: blocks, CTAs.
    time_us: measured isolated time on all cores; default: a roofline's.
    """

    name: str
    flops: float = 0
    memory_bytes: float = 0
    workgroups: int = 1
    time_us: float | None = None

    def __post_init__(self) -> None:
        if self.workgroups < 1 or min(self.flops, self.memory_bytes) < 0:
            raise error(
                "invalid", f"{self.name}: workgroups must be 1 or more, amounts not below 0"
            )
        if self.time_us is None and self.flops == self.memory_bytes == 0:
            raise error("invalid", f"{self.name}: give its time_us, or its flops and memory_bytes")
        if self.time_us is not None and not 0 < self.time_us < math.inf:
            raise error("invalid", f"{self.name}: time_us is {self.time_us}; it must be above 0")

    @classmethod
    def of(
        cls,
        function: Callable[[], Any],
        name: str,
        *,
        workgroups: int,
        flops: float = 0,
        memory_bytes: float = 0,
    ) -> Compute:
        """Measures the time of a function that returns when its work is done: the median of 9 calls
        after 6 warm-up calls."""
        times = []
        for _ in range(WARMUP + MEASURED):
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e6)
        measured = max(statistics.median(times[WARMUP:]), 1e-3)
        return cls(name, flops, memory_bytes, workgroups, measured)

    @property
    def op_to_byte(self) -> float:
        """Operations per byte of memory."""
        return self.flops / self.memory_bytes if self.memory_bytes else math.inf


def gemm(
    m: int,
    n: int,
    k: int,
    dtype: Any = "bfloat16",
    *,
    name: str = "",
    memory_bytes: float | None = None,
    workgroups: int | None = None,
    time_us: float | None = None,
) -> Compute:
    """The product of an m x k and a k x n matrix.

    memory_bytes: measured; default: each matrix once, which a kernel exceeds if its operands do not
        stay in caches.
    workgroups: default: tiles of 256 x 256.
    Raises `Error`: invalid.
    """
    if min(m, n, k) < 1:
        raise error("invalid", f"a GEMM of {m} x {n} x {k}: all must be 1 or more")
    bits = dtype_name(dtype).lstrip("abcdefghijklmnopqrstuvwxyz").split("_")[0]
    if not bits.isdigit():
        raise error("invalid", f"a GEMM needs a dtype such as bfloat16, not {dtype_name(dtype)}")
    least = (m * k + k * n + m * n) * int(bits) / 8
    return Compute(
        name or f"gemm {m}x{n}x{k}",
        2.0 * m * n * k,
        least if memory_bytes is None else memory_bytes,
        math.ceil(m / TILE) * math.ceil(n / TILE) if workgroups is None else workgroups,
        time_us,
    )


@dataclass(frozen=True)
class Collective:
    """A collective over `ranks` of `nbytes`, the total array (see offcore.sizes).

    workgroups: of the kernel that runs it on cores; None: from the tables.
    time_us: measured isolated time on cores.
    """

    op: str
    nbytes: int
    ranks: int
    workgroups: int | None = None
    time_us: float | None = None

    def __post_init__(self) -> None:
        if self.op not in _WIRE:
            raise error("invalid", f"unknown collective {self.op!r}: known are {', '.join(_WIRE)}")
        if self.nbytes < 1 or self.ranks < 2:
            raise error("invalid", f"{self.op}: needs 1 byte or more, and 2 ranks or more")

    @property
    def name(self) -> str:
        """Name in plans: `all_gather 896M`."""
        return f"{self.op} {format_bytes(self.nbytes)}"

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave a rank."""
        return _WIRE[self.op] * self.nbytes * (self.ranks - 1) / self.ranks

    @property
    def on_engines(self) -> bool:
        """Whether engines can run it; they do not reduce."""
        return self.op in _MOVE_ALONE


Kernel = Compute | Collective
