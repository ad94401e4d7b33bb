"""The model of a machine whose GPUs were measured: isolated times and a few pairs of kernels.

The form is that of every model (model.py): each kernel at its isolated rate, slowed down by the
others' memory traffic, until one ends. Isolated rates come from measured curves. Two things are
more: a kernel that is launched second does not get all of its partition, and power. A GPU at its
power limit lowers the clock of GEMMs until a run and the pause after it take no more than the limit
on average, so that a GEMM in front of a long collective is faster than run after run alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from offcore.errors import error
from offcore.overlap.kernels import TILE, Collective, Compute, Kernel
from offcore.overlap.tables import Cores
from offcore.tools.overlap import model
from offcore.tools.overlap.model import ITEM_BYTES, Allot, Gpu, Load, Paces

SPLITS = (8, 16, 32)  # cores of a collective's kernel that the benchmark tries
IDLE = (0, 8, 16, 32)  # cores that it leaves idle beside engines
_STEPS = 30  # of the search of a clock
_LEAST_CLOCK = 0.3

# By (name of a kernel, whether engines run it), in us.
Isolated = Mapping[tuple[str, bool], float]


def traffic_of(collective: Collective) -> float:
    """Bytes of a rank's memory, read and written. An all-gather is in place; an all-to-all also
    copies a rank's own part."""
    gathers = collective.op == "all_gather"
    return 2 * (collective.wire_bytes if gathers else collective.nbytes)


class GpuModel(Gpu):
    """record: what `offcore overlap calibrate --rows` wrote. isolated: measured isolated times, for
    kernels that have one; others are predicted."""

    def __init__(self, record: Mapping[str, Any], isolated: Isolated | None = None) -> None:
        values = {one["name"]: float(one["value"]) for one in record["parameters"]}
        peaks = (values[name] for name in ("tflops", "memory_gbps", "network_gbps"))
        cores = Cores(int(values["cores"]), int(values["cores_least"]), *peaks)
        super().__init__(record["machine"], cores)
        self.record = record
        self.workgroups = record["workgroups"]
        self._values = values
        self._curves = {
            name: {int(cores): float(one) for cores, one in curve.items()}
            for name, curve in record["curves"].items()
        }
        self._isolated = isolated or {}
        self._scales: dict[str, float] = {}

    def with_isolated(self, isolated: Isolated) -> GpuModel:
        """The same machine, which keeps what was simulated."""
        other = GpuModel.__new__(GpuModel)
        other.__dict__ = self.__dict__ | {"_isolated": isolated, "_scales": {}}
        return other

    @property
    def splits(self) -> Sequence[int]:
        return SPLITS

    @property
    def starved(self) -> float:
        return self._values["starved"]

    def leaves(self, gemm: Compute) -> Sequence[int]:
        return [self.cores.count - one for one in IDLE]

    def gemm(self, m: int, n: int, k: int, name: str, *, memory_bound: bool = False) -> Compute:
        """memory_bound is not used: classes follow from bytes."""
        flops = 2.0 * m * n * k
        least = ITEM_BYTES * (m * k + k * n + m * n)
        traffic = max(least, flops / self._values["op_byte"])
        return Compute(name, flops, traffic, math.ceil(m / TILE) * math.ceil(n / TILE))

    def alone_us(self, load: Load) -> float:
        """At the full clock."""
        kernel = load.kernel
        if isinstance(kernel, Compute):
            slower = self._slower(self.cores.bound_of(kernel), load.cores or self.cores.count)
            return self._full_us(kernel) * self._scale(kernel) * slower
        given = self._isolated.get((kernel.name, load.cores is None))
        if load.cores is None:
            return given or self._on_engines_us(kernel)
        fixed = self._values[f"{kernel.op}.fixed_us"]
        moved = self._moved_us(kernel) if given is None else max(given - fixed, 0.0)
        if load.cores < self.workgroups[kernel.op]:
            moved *= self._values["few_cores"]
        return fixed + moved * self._slower(kernel.op, load.cores)

    def _full_us(self, kernel: Compute) -> float:
        compute_us = kernel.flops / self._values["gemm_tflops"] / 1e6
        return max(compute_us, kernel.memory_bytes / self._values["gemm_gbps"] / 1e3)

    def _scale(self, kernel: Compute) -> float:
        """Of its time at the full clock: the measured isolated time by the predicted one. Where
        power limits a GEMM, its isolated time then changes by less than was measured, because a
        slower GEMM draws less: how warm the GPU was when it ran alone says little about others."""
        given = self._isolated.get((kernel.name, False))
        if given is None:
            return 1.0
        if kernel.name not in self._scales:
            self._scales[kernel.name] = 1.0
            predicted = self.isolated_us(Load(kernel, self.cores.count))
            self._scales[kernel.name] = given / predicted
        return self._scales[kernel.name]

    def _moved_us(self, kernel: Collective) -> float:
        return kernel.wire_bytes / self._values[f"{kernel.op}.gbps"] / 1e3

    def _on_engines_us(self, kernel: Collective) -> float:
        """The program in the simulator, and what else a rank's own part takes."""
        own = self._values[f"{kernel.op}.own_part"]
        return self.engines_us(kernel.op, kernel.nbytes) * own

    def _slower(self, curve: str, cores: int) -> float:
        """Between two measured counts on a straight line; on fewer than any, by their number."""
        found = self._curves[curve]
        least, most = min(found), max(found)
        if cores <= least:
            return found[least] * least / cores
        if cores >= most:
            return found[most]
        low = max(one for one in found if one <= cores)
        high = min(one for one in found if one >= cores)
        part = (cores - low) / max(high - low, 1)
        return found[low] + (found[high] - found[low]) * part

    def isolated_us(self, load: Load) -> float:
        if isinstance(load.kernel, Compute):
            return self.play((load.kernel,), lambda _: {load.name: load.cores})
        return self.alone_us(load)

    def traffic(self, load: Load) -> float:
        kernel = load.kernel
        return kernel.memory_bytes if isinstance(kernel, Compute) else traffic_of(kernel)

    def contention(self, load: Load, other: Load) -> float:
        if load.cores is None:
            return self._values["engines_contention"]
        by = self._values["memory_contention"]
        return by if other.cores is None else by + self._values["l2_contention"]

    def paces(self, strategy: str, gemm: Compute, collective: Collective) -> Paces:
        bound = self.cores.bound_of(gemm)
        if strategy == "rp":
            return {collective.name: self._values["behind"]}
        if strategy == "sp_rp":
            return {gemm.name: 1 / self._values[f"scattered_{bound}"]}
        if strategy == "sp" and bound == "mb":
            return {gemm.name: 1 / self._values["rounds_mb"]}
        return {}

    def joules(self, load: Load, clock: float) -> float:
        kernel, values = load.kernel, self._values
        if isinstance(kernel, Collective):
            what = "engines" if load.cores is None else "kernel"
            full = load if load.cores is None else Load(kernel, self.workgroups[kernel.op])
            return values[f"{kernel.op}.{what}_w"] * self.alone_us(full) * 1e-6
        cores = load.cores or self.cores.count
        rate = clock * kernel.flops / self.alone_us(load) / 1e6
        speed = rate / values["energy_tflops"] * self.cores.count / cores
        each: float = values["gemm_joules"] * speed ** values["energy_exponent"]
        return kernel.flops / 1e12 * each

    def play(self, kernels: Sequence[Kernel], allot: Allot, paces: Paces | None = None) -> float:
        """Until the last kernel ends, run after run, at the highest clock that power allows."""
        values = self._values

        def fits(clock: float) -> tuple[bool, float]:
            time_us, joules = self._played(kernels, allot, paces or {}, clock)
            joules += (values["awake_w"] * time_us + values["idle_w"] * values["pause_us"]) * 1e-6
            limit = values["cap_w"] * (time_us + values["pause_us"]) * 1e-6
            return joules <= limit, time_us

        fit, time_us = fits(1.0)
        low, high = _LEAST_CLOCK, 1.0
        for _ in range(0 if fit else _STEPS):
            clock = (low + high) / 2
            fit, time_us = fits(clock)
            low, high = (clock, high) if fit else (low, clock)
        return time_us


def load(name: str) -> GpuModel:
    """Raises `Error`: unsupported for a machine without measured parameters, invalid for a record
    that is not one."""
    record = model.record_of(name)
    if "curves" not in record:
        raise error("unsupported", f"the model of {name} is not of measured rows")
    try:
        return GpuModel(record)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise error("invalid", f"{name}: not a calibration ({cause!r})") from cause


def any_of(name: str) -> Gpu:
    """The model of that machine, whichever it has."""
    measured = "curves" in model.record_of(name)
    return load(name) if measured else model.load(name)[0]
