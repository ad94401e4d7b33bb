"""Combinations of a GEMM and a collective under each strategy, on the simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offcore.overlap import classify
from offcore.overlap.kernels import Collective, Compute
from offcore.overlap.plan import Plan
from offcore.overlap.tables import Tables
from offcore.tools.overlap.cases import COMBINATIONS, GEMMS, OPS, size_of, split_tag
from offcore.tools.overlap.model import Allot, Gpu, Load, Paces


def gemm_of(model: Gpu, tag: str) -> Compute:
    return model.gemm(*GEMMS[tag], tag, memory_bound=tag.startswith("mb"))


@dataclass(frozen=True)
class Combination:
    """One of Table II's, or of the same form."""

    tag: str
    op: str

    def kernels(self, model: Gpu) -> tuple[Compute, Collective]:
        gemm, size = self.tag.split("_")
        nbytes = size_of(size)
        return gemm_of(model, gemm), Collective(
            self.op, nbytes, model.ranks, model.workgroups[self.op]
        )


def combinations(text: str) -> list[Combination]:
    """`all`, or tags separated by commas, each with both collectives. Raises ValueError."""
    tags = list(COMBINATIONS) if text == "all" else text.split(",")
    for tag in tags:
        split_tag(tag)
    return [Combination(tag, op) for op in OPS for tag in tags]


@dataclass(frozen=True)
class Outcome:
    """One combination's times in us. `rp` is by the cores that the collective has."""

    tag: str
    op: str
    kind: str  # by our isolated times
    bound: str
    gemm_us: float
    kernel_us: float  # the collective alone, on cores
    engines_us: float  # and on engines
    times_us: Mapping[str, float]  # by strategy
    rp_us: Mapping[int, float]

    @property
    def serial_us(self) -> float:
        return self.gemm_us + self.kernel_us

    @property
    def ideal(self) -> classify.Ideal:
        serial = (self.gemm_us, self.kernel_us)
        return classify.ideal(serial, (self.gemm_us, min(self.kernel_us, self.engines_us)))

    def speedup(self, strategy: str) -> float:
        if strategy == "ideal":
            return self.ideal.published
        return self.serial_us / self.times_us[strategy]

    @property
    def rp_cores(self) -> int:
        return min(self.rp_us, key=self.rp_us.__getitem__)

    def rows(self, model: Gpu) -> Iterable[dict[str, Any]]:
        """One for each strategy, flat."""
        for strategy, time_us in self.times_us.items():
            cores = self.rp_cores if strategy in ("rp", "sp_rp") else None
            yield {
                "gemm": self.tag.split("_")[0],
                "op": self.op,
                "bytes": size_of(self.tag.split("_")[1]),
                "ranks": model.ranks,
                "backend": "sim",
                "machine": model.name,
                "kind": self.kind,
                "bound": self.bound,
                "strategy": strategy,
                "collective_cores": cores,
                "gemm_us": round(self.gemm_us, 3),
                "kernel_us": round(self.kernel_us, 3),
                "engines_us": round(self.engines_us, 3),
                "time_us": round(time_us, 3),
                "speedup": round(self.serial_us / time_us, 4),
            } | {f"ideal_{name}": round(value, 4) for name, value in asdict(self.ideal).items()}


def measure(model: Gpu, combination: Combination) -> Outcome:
    gemm, collective = combination.kernels(model)
    return outcome(model, combination, gemm, collective)


def outcome(model: Gpu, combination: Combination, gemm: Compute, collective: Collective) -> Outcome:
    """Of these kernels, whose isolated times may have been given."""
    every, default = model.cores.count, model.workgroups[collective.op]
    paces = {name: model.paces(name, gemm, collective) for name in ("sp", "rp", "sp_rp")}

    def play(allot: Allot, paces: Paces | None = None) -> float:
        return model.play((gemm, collective), allot, paces)

    def fixed(gemm_cores: int, cores: int | None, paces: Paces | None = None) -> float:
        return play(lambda _: {gemm.name: gemm_cores, collective.name: cores}, paces)

    def beside(cores: int) -> Allot:
        """So many cores for the collective while the GEMM runs, and all that is free after."""

        def allot(running: frozenset[str]) -> Mapping[str, int | None]:
            alone = len(running) < 2
            return {
                gemm.name: every if alone else every - cores,
                collective.name: default if alone else cores,
            }

        return allot

    rp_us = {cores: fixed(every - cores, cores, paces["rp"]) for cores in model.splits}
    split = min(rp_us, key=rp_us.__getitem__)
    gemm_us = model.isolated_us(Load(gemm, every))
    kernel_us = model.isolated_us(Load(collective, default))
    times = {
        "serial": gemm_us + kernel_us,
        "base": play(beside(max(1, round(model.starved * default)))),
        "sp": play(beside(default), paces["sp"]),
        "rp": rp_us[split],
        "sp_rp": fixed(every - split, split, paces["sp_rp"]),
        "ConCCL": fixed(every, None),
        "ConCCL_rp": min(fixed(cores, None) for cores in model.leaves(gemm)),
    }
    return Outcome(
        tag=combination.tag,
        op=combination.op,
        kind=classify.kind_of(gemm_us, kernel_us),
        bound=model.cores.bound_of(gemm),
        gemm_us=gemm_us,
        kernel_us=kernel_us,
        engines_us=model.isolated_us(Load(collective, None)),
        times_us=times,
        rp_us=rp_us,
    )


def mean(outcomes: Iterable[Outcome], value: Callable[[Outcome], float]) -> float:
    values = [value(one) for one in outcomes]
    return sum(values) / len(values)


def share(outcomes: Sequence[Outcome], strategy: str) -> float:
    """Of the ideal, of mean speed-ups, as ConCCL's 1.13x and 21 % of 1.6x fit together."""
    speedup = mean(outcomes, lambda one: one.speedup(strategy))
    return classify.share_of_ideal(speedup, mean(outcomes, lambda one: one.ideal.published))


def best_kernels_us(one: Outcome) -> float:
    """c3_best: the best of what runs collectives on cores."""
    return min(one.times_us[name] for name in ("base", "sp", "rp", "sp_rp"))


SIZES = {"latency": 64 << 10, "bandwidth": 1 << 30}
_STAND_INS = ("cb5", "mb1")  # the GEMM of each class that is measured
_SOURCE = "the calibrated model of docs/overlap.md, simulated: offcore overlap characterise"


def characterise(model: Gpu) -> Tables:
    """The tables of plans: of one GEMM of each class and two sizes of each collective."""
    gemms = [gemm_of(model, tag) for tag in _STAND_INS]
    rows = [*_gemm_rows(model, gemms)]
    for op in OPS:
        rows += [*_collective_rows(model, op), *_beside_rows(model, op, gemms)]
    return Tables(model.name, _SOURCE, model.cores, model.workgroups, tuple(rows))


def _slowdown(model: Gpu, kernel: Compute | Collective, cores: int, default: int) -> float:
    on, full = (model.alone_us(Load(kernel, count)) for count in (cores, default))
    return round(on / full, 4)


def _gemm_rows(model: Gpu, gemms: Sequence[Compute]) -> Iterable[dict[str, Any]]:
    every = model.cores.count
    counts = {one for cores in model.splits for one in (cores, every - cores)}
    for gemm in gemms:
        bound = model.cores.bound_of(gemm)
        for cores in sorted(counts, reverse=True):
            slowdown = _slowdown(model, gemm, cores, every)
            yield {"row": "slowdown", "kernel": bound, "cores": cores, "slowdown": slowdown}


def _collective_rows(model: Gpu, op: str) -> Iterable[dict[str, Any]]:
    for bound, nbytes in SIZES.items():
        kernel = Collective(op, nbytes, model.ranks)
        for cores in model.splits:
            place = {"row": "slowdown", "kernel": op, "bound": bound, "bytes": nbytes}
            slowdown = _slowdown(model, kernel, cores, model.workgroups[op])
            yield place | {"cores": cores, "slowdown": slowdown}
    small = Collective(op, SIZES["latency"], model.ranks)
    for workgroups in (model.workgroups[op], None):
        engines = workgroups is None
        place = {"row": "latency", "kernel": op, "engines": engines, "bytes": small.nbytes}
        yield place | {"time_us": round(model.alone_us(Load(small, workgroups)), 3)}


def _beside_rows(model: Gpu, op: str, gemms: Sequence[Compute]) -> Iterable[dict[str, Any]]:
    large = Collective(op, SIZES["bandwidth"], model.ranks)
    for gemm in gemms:
        for cores in (model.workgroups[op], None):
            loads = Load(gemm, model.cores.count - (cores or 0)), Load(large, cores)
            names = model.cores.bound_of(gemm), op
            for one in (0, 1):
                slowdown = round(model.slowdown(loads[one], [loads[1 - one]]), 4)
                yield (
                    {"row": "beside", "kernel": names[one], "other": names[1 - one]}
                    | {"engines": cores is None, "slowdown": slowdown}
                )


def planned(model: Gpu, tables: Tables, combination: Combination) -> Plan:
    """By shapes, measured traffic and rooflines alone."""
    return Plan(combination.kernels(model), tables)
