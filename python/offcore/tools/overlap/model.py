"""How kernels slow each other down on one simulated GPU (docs/overlap.md).

Every kernel runs at the rate that its cores, or its engines, give it, as if it were alone, divided
by one more than what the others' memory traffic costs it. Rates hold until a kernel ends. A
collective on engines takes the time that its program takes in the simulator, the very program that
other backends run; on cores it moves bytes at a rate that rises with its cores. A GEMM computes
in waves of tiles, or waits for memory, whichever is longer. Where isolated times were measured, a
model of the same form takes them from there (gpu_model.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offcore import _core, machines
from offcore.comm.programs import program_of
from offcore.errors import error
from offcore.overlap.kernels import TILE, Collective, Compute, Kernel
from offcore.overlap.tables import EFFICIENCY, Cores

NAME = "mi300x-8"
RECORD = "{}-overlap"  # of machines/calibrated
# Facts of the machine and of the paper's libraries.
CORES = {NAME: Cores(count=304, least=8, tflops=1307.4, memory_gbps=5300, network_gbps=448)}
DIES = 8  # each has an L2 of its own and so reads both operands itself
ITEM_BYTES = 2
WORKGROUPS = {"all_gather": 64, "all_to_all": 56}  # by default
# Cores that a collective's kernel can make use of: a core a workgroup, or what links take.
NEEDED = {"all_gather": 32, "all_to_all": 56}
# Memory traffic of a byte that leaves a rank: read, and written where it arrives.
TRAFFIC = {"all_gather": 2 * 0.86, "all_to_all": 2.0}
THRASH_FREE = 8  # idle cores from which on a memory-bound GEMM's operands fit into the caches
_LARGE = 4 << 30


@dataclass(frozen=True)
class Interference:
    """What is fitted (python/offcore/tools/papers/conccl/fit.py)."""

    core_tflops: float  # of one core within a GEMM
    mb_op_byte: float  # that a memory-bound GEMM computes for a byte of memory
    starved: float  # share of its workgroups that run while a GEMM that was first does
    memory_contention: float  # slowdown by traffic of the whole memory bandwidth
    l2_contention: float  # more of it between kernels that are both on cores
    thrash: float  # share of a memory-bound GEMM's traffic that fewer cores save
    kernel_latency_us: float  # of a collective on cores


@dataclass(frozen=True)
class Load:
    """A kernel where it runs: on so many cores, or (None) on engines."""

    kernel: Kernel
    cores: int | None

    @property
    def name(self) -> str:
        return self.kernel.name


# By the names of the kernels that still run: how many cores each has, None for engines.
Allot = Callable[[frozenset[str]], Mapping[str, int | None]]
# By names of kernels: the share of its rate that one keeps while another runs that was first.
Paces = Mapping[str, float]


class Gpu:
    """What models of all machines share. Times in us.

    workgroups: of a collective's kernel, by default. splits: cores that strategies with partitions
    try for it. starved: the share of its workgroups that run while a GEMM that was first does.
    """

    workgroups: Mapping[str, int] = WORKGROUPS

    def __init__(self, name: str, cores: Cores) -> None:
        self.name = name
        self.cores = cores
        self._machine = machines.load(name)
        self._session = _core.Session("sim", self._machine, self._machine.ranks, phantom=True)
        self._engines: dict[tuple[str, int], float] = {}

    @property
    def ranks(self) -> int:
        return int(self._machine.ranks)

    @property
    def splits(self) -> Sequence[int]:
        return self.cores.splits()

    @property
    def starved(self) -> float:
        raise NotImplementedError

    def gemm(self, m: int, n: int, k: int, name: str, *, memory_bound: bool) -> Compute:
        """A GEMM of 16-bit elements, with the memory traffic that it has on all cores."""
        raise NotImplementedError

    def alone_us(self, load: Load) -> float:
        raise NotImplementedError

    def isolated_us(self, load: Load) -> float:
        """Alone, run after run, which power may limit."""
        return self.alone_us(load)

    def traffic(self, load: Load) -> float:
        """Bytes of memory."""
        raise NotImplementedError

    def contention(self, load: Load, other: Load) -> float:
        """Slowdown of one by the other's traffic, where it took the whole memory bandwidth."""
        raise NotImplementedError

    def leaves(self, gemm: Compute) -> Sequence[int]:
        """Cores that a GEMM is given beside engines where it may leave some idle."""
        raise NotImplementedError

    def paces(self, strategy: str, gemm: Compute, collective: Collective) -> Paces:
        """Of the kernel that the strategy launches second."""
        return {}

    def engines_us(self, op: str, nbytes: int) -> float:
        """One engine a peer: the program that the simulator and every backend runs."""
        if (op, nbytes) not in self._engines:
            inside = op == "all_gather"
            program = program_of(self._machine, op, self.ranks, nbytes, "pcpy", inside, "promise")
            self._engines[op, nbytes] = self._session.run(program).time_ns / 1e3
        return self._engines[op, nbytes]

    def traffic_share(self, load: Load) -> float:
        """Of the memory's bandwidth, while the kernel runs as if alone."""
        return self.traffic(load) / self.alone_us(load) / 1e3 / self.cores.memory_gbps

    def slowdown(self, load: Load, others: Sequence[Load]) -> float:
        """By the others' memory traffic."""
        cost = 1.0
        for other in others:
            cost += self.contention(load, other) * self.traffic_share(other)
        return cost

    def play(self, kernels: Sequence[Kernel], allot: Allot, paces: Paces | None = None) -> float:
        """Until the last kernel ends."""
        return self._played(kernels, allot, paces or {}, 1.0)[0]

    def _played(
        self, kernels: Sequence[Kernel], allot: Allot, paces: Paces, clock: float
    ) -> tuple[float, float]:
        """The time, and the joules beyond those of a GPU that runs something. clock: of GEMMs."""
        left = {one.name: 1.0 for one in kernels}
        now = joules = 0.0
        while left:
            cores = allot(frozenset(left))
            loads = [Load(one, cores[one.name]) for one in kernels if one.name in left]
            rates = {
                one.name: 1
                / self.alone_us(one)
                / self.slowdown(one, [other for other in loads if other is not one])
                for one in loads
            }
            if len(loads) > 1:
                rates = {name: rate * paces.get(name, 1.0) for name, rate in rates.items()}
            if clock < 1:
                for one in loads:
                    rates[one.name] *= clock if isinstance(one.kernel, Compute) else 1.0
            step = min(left[name] / rate for name, rate in rates.items())
            now += step
            joules += sum(step * rates[one.name] * self.joules(one, clock) for one in loads)
            left = {n: share - step * rates[n] for n, share in left.items()}
            left = {n: share for n, share in left.items() if share > 1e-9}
        return now, joules

    def joules(self, load: Load, clock: float) -> float:
        """Of one run, beyond those of a GPU that runs something; 0 where power is not modelled."""
        return 0.0


class Model(Gpu):
    """Of a machine whose isolated times are computed."""

    def __init__(self, name: str, values: Interference) -> None:
        if name not in CORES:
            known = ", ".join(CORES)
            raise error("unsupported", f"no published numbers of {name}'s cores: known are {known}")
        super().__init__(name, CORES[name])
        self.values = values

    @property
    def starved(self) -> float:
        return self.values.starved

    def with_values(self, values: Interference) -> Model:
        """The same machine, which keeps what was simulated."""
        other = Model.__new__(Model)
        other.__dict__ = self.__dict__ | {"values": values}
        return other

    def gemm(self, m: int, n: int, k: int, name: str, *, memory_bound: bool) -> Compute:
        """A GEMM of 16-bit elements, with the memory traffic that it has on all cores."""
        flops = 2.0 * m * n * k
        traffic: float = ITEM_BYTES * (DIES * (m * k + k * n) + m * n)
        if memory_bound:
            traffic = flops / self.values.mb_op_byte
        return Compute(name, flops, traffic, math.ceil(m / TILE) * math.ceil(n / TILE))

    def alone_us(self, load: Load) -> float:
        kernel, cores = load.kernel, load.cores
        if isinstance(kernel, Compute):
            return self._compute_us(kernel, cores or self.cores.count)
        if cores is None:
            return self.engines_us(kernel.op, kernel.nbytes)
        share = min(1.0, cores / NEEDED[kernel.op])
        moved_us = kernel.wire_bytes / self.kernel_gbps(kernel.op) / 1e3
        return self.values.kernel_latency_us + moved_us / share

    def _compute_us(self, kernel: Compute, cores: int) -> float:
        waves = math.ceil(kernel.workgroups / cores)
        tile_us = kernel.flops / kernel.workgroups / self.values.core_tflops / 1e6
        return max(waves * tile_us, self._memory_us(kernel, cores))

    def _memory_us(self, kernel: Compute, cores: int) -> float:
        gbps = EFFICIENCY * self.cores.memory_gbps
        return self._memory_bytes(kernel, cores) / gbps / 1e3

    def _memory_bytes(self, kernel: Compute, cores: int) -> float:
        fits = cores <= self.cores.count - THRASH_FREE
        thrashes = self.cores.bound_of(kernel) == "mb" and fits
        return kernel.memory_bytes * (1 - self.values.thrash * thrashes)

    def kernel_gbps(self, op: str) -> float:
        """On cores large collectives are as fast as on engines (section VI-C)."""
        wire = Collective(op, _LARGE, self.ranks).wire_bytes
        return wire / self.engines_us(op, _LARGE) / 1e3

    def traffic(self, load: Load) -> float:
        kernel = load.kernel
        if isinstance(kernel, Compute):
            return self._memory_bytes(kernel, load.cores or self.cores.count)
        return TRAFFIC[kernel.op] * kernel.wire_bytes

    def contention(self, load: Load, other: Load) -> float:
        by = self.values.memory_contention
        if load.cores is not None and other.cores is not None:
            by += self.values.l2_contention
        return by

    def leaves(self, gemm: Compute) -> Sequence[int]:
        bound = self.cores.bound_of(gemm)
        return [self.cores.count - THRASH_FREE if bound == "mb" else self.cores.count]


def record_of(name: str) -> dict[str, Any]:
    """What `offcore overlap calibrate` wrote. Raises `Error`: unsupported for a machine without it,
    invalid for a file that is none."""
    path = machines.calibration_of(RECORD.format(name))
    if path is None:
        told = "offcore overlap calibrate --rows FILE, of benchmarks/gpu_overlap.py without --quick"
        raise error("unsupported", f"overlap on {name} is not calibrated: {told}")
    try:
        record = json.loads(path.read_text("utf-8"))
        names = [one["name"] for one in record["parameters"]]
        if record["machine"] != name or len(set(names)) < len(names):
            raise ValueError("it is of another machine, or names a parameter twice")
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise error("invalid", f"{path}: not a calibration ({cause!r})") from cause
    return dict(record)


def load(name: str = NAME) -> tuple[Model, dict[str, Any]]:
    """The model that is fitted to published numbers, and its record. Raises `Error`: unsupported
    for a machine without one, invalid for a record that is not one."""
    record = record_of(name)
    if "curves" in record:
        raise error("unsupported", f"the model of {name} is of measured rows, not of published")
    try:
        values = {one["name"]: float(one["value"]) for one in record["parameters"]}
        return Model(name, Interference(**values)), record
    except (ValueError, KeyError, TypeError) as cause:
        raise error("invalid", f"{name}: not a calibration ({cause!r})") from cause
