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
from offcore.tools.overlap.model import THRASH_FREE, WORKGROUPS, Allot, Load, Model


def gemm_of(model: Model, tag: str) -> Compute:
    return model.gemm(*GEMMS[tag], tag, memory_bound=tag.startswith("mb"))


@dataclass(frozen=True)
class Combination:
    """One of Table II's, or of the same form."""

    tag: str
    op: str

    def kernels(self, model: Model) -> tuple[Compute, Collective]:
        gemm, size = self.tag.split("_")
        nbytes = size_of(size)
        return gemm_of(model, gemm), Collective(self.op, nbytes, model.ranks, WORKGROUPS[self.op])


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

    def rows(self, model: Model) -> Iterable[dict[str, Any]]:
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


def measure(model: Model, combination: Combination) -> Outcome:
    gemm, collective = combination.kernels(model)
    every = model.cores.count

    def play(allot: Allot) -> float:
        return model.play((gemm, collective), allot)

    def fixed(gemm_cores: int, cores: int | None) -> float:
        return play(lambda _: {gemm.name: gemm_cores, collective.name: cores})

    def beside(cores: int) -> Allot:
        """So many cores for the collective while the GEMM runs, and all that is free after."""

        def allot(running: frozenset[str]) -> Mapping[str, int | None]:
            alone = len(running) < 2
            return {
                gemm.name: every if alone else every - cores,
                collective.name: WORKGROUPS[collective.op] if alone else cores,
            }

        return allot

    default = WORKGROUPS[collective.op]
    rp_us = {cores: fixed(every - cores, cores) for cores in model.cores.splits()}
    bound = model.cores.bound_of(gemm)
    fewer = every - THRASH_FREE if bound == "mb" else every
    gemm_us = model.alone_us(Load(gemm, every))
    kernel_us = model.alone_us(Load(collective, default))
    times = {
        "serial": gemm_us + kernel_us,
        "base": play(beside(max(1, round(model.values.starved * default)))),
        "sp": play(beside(default)),
        "rp": min(rp_us.values()),
        # Whoever has cores of its own starves nobody, in whatever order.
        "sp_rp": min(rp_us.values()),
        "ConCCL": fixed(every, None),
        "ConCCL_rp": fixed(fewer, None),
    }
    return Outcome(
        tag=combination.tag,
        op=combination.op,
        kind=classify.kind_of(gemm_us, kernel_us),
        bound=bound,
        gemm_us=gemm_us,
        kernel_us=kernel_us,
        engines_us=model.alone_us(Load(collective, None)),
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


def characterise(model: Model) -> Tables:
    """The tables of plans: of one GEMM of each class and two sizes of each collective."""
    gemms = [gemm_of(model, tag) for tag in _STAND_INS]
    rows = [*_gemm_rows(model, gemms)]
    for op in OPS:
        rows += [*_collective_rows(model, op), *_beside_rows(model, op, gemms)]
    return Tables(model.name, _SOURCE, model.cores, WORKGROUPS, tuple(rows))


def _slowdown(model: Model, kernel: Compute | Collective, cores: int, default: int) -> float:
    on, full = (model.alone_us(Load(kernel, count)) for count in (cores, default))
    return round(on / full, 4)


def _gemm_rows(model: Model, gemms: Sequence[Compute]) -> Iterable[dict[str, Any]]:
    every = model.cores.count
    counts = {one for cores in model.cores.splits() for one in (cores, every - cores)}
    for gemm in gemms:
        bound = model.cores.bound_of(gemm)
        for cores in sorted(counts, reverse=True):
            slowdown = _slowdown(model, gemm, cores, every)
            yield {"row": "slowdown", "kernel": bound, "cores": cores, "slowdown": slowdown}


def _collective_rows(model: Model, op: str) -> Iterable[dict[str, Any]]:
    for bound, nbytes in SIZES.items():
        kernel = Collective(op, nbytes, model.ranks)
        for cores in model.cores.splits():
            place = {"row": "slowdown", "kernel": op, "bound": bound, "bytes": nbytes}
            slowdown = _slowdown(model, kernel, cores, WORKGROUPS[op])
            yield place | {"cores": cores, "slowdown": slowdown}
    small = Collective(op, SIZES["latency"], model.ranks)
    for workgroups in (WORKGROUPS[op], None):
        engines = workgroups is None
        place = {"row": "latency", "kernel": op, "engines": engines, "bytes": small.nbytes}
        yield place | {"time_us": round(model.alone_us(Load(small, workgroups)), 3)}


def _beside_rows(model: Model, op: str, gemms: Sequence[Compute]) -> Iterable[dict[str, Any]]:
    large = Collective(op, SIZES["bandwidth"], model.ranks)
    for gemm in gemms:
        for cores in (WORKGROUPS[op], None):
            loads = Load(gemm, model.cores.count - (cores or 0)), Load(large, cores)
            names = model.cores.bound_of(gemm), op
            for one in (0, 1):
                slowdown = round(model.slowdown(loads[one], [loads[1 - one]]), 4)
                yield (
                    {"row": "beside", "kernel": names[one], "other": names[1 - one]}
                    | {"engines": cores is None, "slowdown": slowdown}
                )


def planned(model: Model, tables: Tables, combination: Combination) -> Plan:
    """By shapes, measured traffic and rooflines alone."""
    return Plan(combination.kernels(model), tables)
