"""Where kernels are run side by side and timed: a GPU, or threads of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

WARMUP, MEASURED = 6, 9  # runs, as ConCCL has them
GEMM, KERNEL, ENGINES, LIBRARY_ENGINES = "gemm", "kernel", "engines", "nccl-ce"


@dataclass(frozen=True)
class Shape:
    """A GEMM: m x k times k x n."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Part:
    """One of the kernels that run at once.

    what: GEMM, or what runs the collective: KERNEL, cores (NCCL's kernels on GPUs, a copy by
    threads on a host); ENGINES, offcore; LIBRARY_ENGINES, NCCL's copy engines.
    cores: that it may take, SMs or threads; None: as it is by default. urgent: in a stream of high
    priority. behind: begins when the part before it has ended.
    """

    what: str
    op: str = ""
    nbytes: int = 0
    cores: int | None = None
    urgent: bool = False
    behind: bool = False


class Stage(Protocol):
    """One rank's view. Every call is collective: all ranks make the same ones."""

    backend: str
    machine: str
    rank: int
    ranks: int
    cores: int  # SMs, or threads a rank
    library: str  # whose kernels KERNEL is
    comm: Any  # offcore's; None on a single GPU

    def prepare(self, shape: Shape) -> None:
        """Operands of the GEMM that is run from now on."""

    def room(self, op: str) -> int:
        """The most bytes that the collective can be run with; 0: not at all."""

    def refusal(self, part: Part) -> str:
        """Why this way of running it cannot be had or proven; empty: it can."""

    def ends_us(self, parts: Sequence[Part], warmup: int, measured: int) -> list[list[float]]:
        """Of each measured run, when each part of the slowest rank had ended. Parts are launched in
        their order."""

    def call_us(self, call: Callable[[], Any], warmup: int, measured: int) -> list[float]:
        """The same of a call, in the current stream where there is one."""

    def energy(self, parts: Sequence[Part], seconds: float) -> dict[str, float]:
        """Joules a run of the parts in an endless loop; empty where nothing counts them."""

    def facts(self) -> dict[str, Any]:
        """Clocks and power as they were in the last run."""

    def agreed(self, failure: str) -> str:
        """What went wrong on some rank; empty: nothing on any."""

    def elapsed_s(self) -> float:
        """Since the stage was made; the same on all."""

    def close(self) -> None: ...
