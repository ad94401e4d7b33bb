"""Combinations of a GEMM and a collective under each strategy, measured on a stage.

Every time is the median of 9 runs after 6, of the slowest rank. A strategy that has a choice (a
split of cores) is tried with a few runs each, and the best one measured. Speed-ups are over the
isolated times of the GEMM and of the library's kernels, one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from offcore.errors import Error, error
from offcore.overlap import classify
from offcore.tools.overlap.stage import (
    ENGINES,
    GEMM,
    KERNEL,
    LIBRARY_ENGINES,
    MEASURED,
    WARMUP,
    Part,
    Shape,
    Stage,
)

_TRIED = 1, 2  # warm-up and measured runs of a split
_NEAR_S = 2.0  # which a step may take, at the limit
# Which strategies are measured in one go, the ones that matter most first: a limit of time then
# costs the last ones.
PASSES = (
    ("serial", "base", "sp", "ConCCL"),
    ("rp", "sp_rp"),
    ("ConCCL_rp",),
    (LIBRARY_ENGINES,),
)
STRATEGIES = tuple(name for names in PASSES for name in names)
_UNIT = 1 << 12  # bytes of a rank, of which sizes are multiples
_PROBED = 256 << 20  # bytes whose time leads to a size
_TOLD = 300  # characters of a failure
_FAILED_MOST = 3  # in a row, until the processes are taken for broken


@dataclass
class Case:
    """A GEMM beside a collective. ratio: of times, collective by GEMM, that nbytes is chosen for;
    0: nbytes is given. Times in us."""

    gemm: str
    shape: Shape
    op: str
    nbytes: int
    ratio: float = 0.0
    alone: dict[str, float] = field(default_factory=dict)

    @property
    def serial(self) -> tuple[float, float]:
        return self.alone[GEMM], self.alone[KERNEL]

    def ideal(self) -> classify.Ideal:
        shortest = min(time for what, time in self.alone.items() if what != GEMM)
        return classify.ideal(self.serial, (self.alone[GEMM], shortest))


@dataclass(frozen=True)
class Found:
    """One strategy as it ran."""

    parts: Sequence[Part]
    ends_us: Sequence[Sequence[float]]  # by run, then by part
    facts: Mapping[str, Any]
    tried_us: Mapping[int, float] = field(
        default_factory=dict
    )  # by the GEMM's cores, of what was tried

    @property
    def runs_us(self) -> list[float]:
        return [max(ends) for ends in self.ends_us]

    @property
    def time_us(self) -> float:
        return statistics.median(self.runs_us)

    def end_us(self, what: str) -> float:
        """When that part ended."""
        at = next(place for place, part in enumerate(self.parts) if part.what == what)
        return statistics.median(ends[at] for ends in self.ends_us)


def run(stage: Stage, parts: Sequence[Part], runs: tuple[int, int] = (WARMUP, MEASURED)) -> Found:
    return Found(parts, stage.ends_us(parts, *runs), stage.facts())


def too_large(stage: Stage, op: str, nbytes: int) -> str:
    """Why the collective cannot be run; empty: it can."""
    room = stage.room(op)
    return "" if nbytes <= room else f"{nbytes} bytes do not fit: there is room for {room}"


def attempted(stage: Stage, label: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What work returns, or {"failed": why} where it failed on any rank. Raises `Error`: timeout,
    since what hangs goes on in the GPU: only new processes can go on."""
    row: dict[str, Any] = {}
    failure = ""
    try:
        row = work()
    except Exception as cause:  # whatever libraries raise: the others can be measured
        if isinstance(cause, Error) and cause.code == "timeout":
            raise
        failure = f"{type(cause).__name__}: {str(cause)[:_TOLD]}"
    # A rank that waits for one that failed does not come here: its peer gives up in time.
    told = stage.agreed(failure)
    return {"failed": f"{label}: {told}"} if told else row


class Sweep:
    """cores: that a collective's kernel is given in turn; idle: that a GEMM leaves beside engines.
    limit_s: after which no step is begun. runs: warm-up, and measured."""

    def __init__(
        self,
        stage: Stage,
        cores: Sequence[int],
        idle: Sequence[int],
        limit_s: float,
        runs: tuple[int, int] = (WARMUP, MEASURED),
    ) -> None:
        self._stage = stage
        self._cores, self._idle = cores, idle
        self._limit_s = limit_s
        self._runs = runs
        self._shape: Shape | None = None
        self._gemm_us: dict[Shape, float] = {}
        self._alone: dict[Part, float] = {}
        self._splits: dict[tuple[str, str, int], int] = {}

    def late(self) -> bool:
        return self._stage.elapsed_s() + _NEAR_S > self._limit_s

    def rows(
        self, cases: Sequence[Case], strategies: Sequence[str], begin: int = 0
    ) -> Iterator[dict[str, Any]]:
        """A row a combination and strategy, from the one of number `begin` on; or
        {"skipped": why}, {"failed": why}. Raises `Error`: where nothing succeeds any more."""
        wanted = [
            (case, name)
            for names in PASSES
            for case in cases
            for name in names
            if name in strategies
        ]
        failed = 0
        for case, name in wanted[begin:]:
            if self.late():
                yield {"skipped": f"no time is left for {name} and what follows"}
                return
            row = self._row(case, name)
            yield row
            failed = failed + 1 if "failed" in row else 0
            if failed == _FAILED_MOST:
                raise error("peer", f"{failed} failures in a row; the last: {row['failed']}")

    def _row(self, case: Case, name: str) -> dict[str, Any]:
        label = f"{case.op} {case.gemm} {case.nbytes} {name}"
        row = attempted(self._stage, label, lambda: self._measured(case, name, label))
        if "failed" in row:
            self._forget()
        return row

    def _forget(self) -> None:
        """Ranks may have failed at different places: all measure again what is kept."""
        self._shape = None
        self._gemm_us.clear()
        self._alone.clear()
        self._splits.clear()

    def _measured(self, case: Case, name: str, label: str) -> dict[str, Any]:
        if reason := self._prepared(case) or self._refusal(case, name):
            return {"skipped": f"{label}: {reason}"}
        return self._record(case, name, self._strategy(case, name))

    def _refusal(self, case: Case, name: str) -> str:
        part = Part(LIBRARY_ENGINES, case.op, case.nbytes)
        return self._stage.refusal(part) if name == LIBRARY_ENGINES else ""

    def _prepared(self, case: Case) -> str:
        """Sizes, operands and isolated times; or why the combination cannot be run."""
        stage = self._stage
        if self._shape != case.shape:
            stage.prepare(case.shape)
            self._shape = case.shape
        if case.shape not in self._gemm_us:
            self._gemm_us[case.shape] = self._time([Part(GEMM)]).time_us
        case.alone[GEMM] = self._gemm_us[case.shape]
        if case.nbytes == 0:
            case.nbytes = self._size_for(case)
        if reason := too_large(stage, case.op, case.nbytes):
            return reason
        for what in (KERNEL, ENGINES):
            self._add_alone(case, Part(what, case.op, case.nbytes))
        return ""

    def _add_alone(self, case: Case, part: Part) -> None:
        if part not in self._alone:
            self._alone[part] = self._time([part]).time_us
        case.alone[part.what] = self._alone[part]

    def _size_for(self, case: Case) -> int:
        """Whose time has the wanted ratio to the GEMM's: by the speed of a size near it."""
        unit = _UNIT * self._stage.ranks
        room = self._stage.room(case.op) // unit * unit
        nbytes = min(_PROBED, room)
        for _ in range(2):
            if not 0 < nbytes <= room:
                break
            took_us = self._time([Part(KERNEL, case.op, nbytes)], _TRIED).time_us
            scale = case.ratio * case.alone[GEMM] / took_us
            nbytes = max(round(nbytes * scale / unit), 1) * unit
        return nbytes

    def _time(self, parts: Sequence[Part], runs: tuple[int, int] | None = None) -> Found:
        return run(self._stage, parts, runs or self._runs)

    def _strategy(self, case: Case, name: str) -> Found:
        gemm = Part(GEMM)
        kernel, engines = (Part(what, case.op, case.nbytes) for what in (KERNEL, ENGINES))
        if name == "serial":
            return self._time([gemm, replace(kernel, behind=True)])
        if name == "base":
            return self._time([gemm, kernel])
        if name == "sp":
            return self._time([replace(kernel, urgent=True), gemm])
        if name == "ConCCL":
            return self._time([gemm, replace(engines, urgent=True)])
        if name == LIBRARY_ENGINES:
            part = Part(LIBRARY_ENGINES, case.op, case.nbytes)
            self._add_alone(case, part)
            return self._time([gemm, replace(part, urgent=True)])
        if name == "ConCCL_rp":
            every = self._stage.cores
            urgent = replace(engines, urgent=True)
            fewer = [[replace(gemm, cores=every - one), urgent] for one in self._idle]
            return self._best([[gemm, urgent], *fewer])
        return self._split(case, kernel, first=name == "sp_rp")

    def _split(self, case: Case, kernel: Part, *, first: bool) -> Found:
        """The best for the order in which the GEMM is first is taken for the other order too."""
        key = case.gemm, case.op, case.nbytes
        every = self._stage.cores

        def parts(cores: int) -> list[Part]:
            one = replace(kernel, cores=cores, urgent=first)
            two = Part(GEMM, cores=every - cores)
            return [one, two] if first else [two, one]

        if key in self._splits:
            return self._time(parts(self._splits[key]))
        found = self._best([parts(cores) for cores in self._cores])
        self._splits[key] = next(one.cores or 0 for one in found.parts if one.what == KERNEL)
        return found

    def _best(self, choices: Sequence[Sequence[Part]]) -> Found:
        tried = [self._time(parts, _TRIED) for parts in choices]
        best = min(tried, key=lambda one: one.time_us)
        return replace(self._time(best.parts), tried_us=_by_cores(tried))

    def _record(self, case: Case, name: str, found: Found) -> dict[str, Any]:
        cores = {part.what: part.cores for part in found.parts}
        serial, ideal = sum(case.serial), case.ideal()
        stage = self._stage
        return {
            "gemm": case.gemm,
            "m": case.shape.m,
            "n": case.shape.n,
            "k": case.shape.k,
            "op": case.op,
            "bytes": case.nbytes,
            "wanted_ratio": round(case.ratio, 4) or None,
            "ranks": stage.ranks,
            "backend": stage.backend,
            "machine": stage.machine,
            "library": stage.library,
            "kind": classify.kind_of(*case.serial),
            "strategy": name,
            "collective_cores": cores.get(KERNEL),
            "gemm_cores": cores.get(GEMM),
            **{f"{what.replace('-', '_')}_us": round(t, 3) for what, t in case.alone.items()},
            "time_us": round(found.time_us, 3),
            "ends_us": {part.what: round(found.end_us(part.what), 1) for part in found.parts},
            "tried_us": {cores: round(one, 1) for cores, one in found.tried_us.items()},
            "runs_us": [round(one, 1) for one in found.runs_us],
            "speedup": round(serial / found.time_us, 4),
            "share": round(classify.share_of_ideal(serial / found.time_us, ideal.published), 4),
            **{f"ideal_{one}": round(value, 4) for one, value in asdict(ideal).items()},
            **found.facts,
        }


def _by_cores(tried: Sequence[Found]) -> dict[int, float]:
    """Times by the cores that the GEMM had; 0: all."""
    cores = (next(part.cores or 0 for part in one.parts if part.what == GEMM) for one in tried)
    return dict(zip(cores, (one.time_us for one in tried), strict=True))


def gemm_curve(
    stage: Stage, shapes: Mapping[str, Shape], counts: Iterable[int]
) -> Iterator[dict[str, Any]]:
    """Figure 5a: each GEMM on all cores and on fewer; or {"failed": why}."""
    every = stage.cores
    fewer = sorted({one for one in counts if 0 < one < every}, reverse=True)
    for name, shape in shapes.items():
        full = 0.0
        for cores in (None, *fewer):
            label = f"{name} on {cores or every} cores"
            row = attempted(stage, label, partial(_curve_row, stage, name, shape, cores, full))
            yield row
            if "failed" in row and not full:
                break  # operands do not fit: there is nothing to compare with
            full = full or row["time_us"]


def _curve_row(
    stage: Stage, name: str, shape: Shape, cores: int | None, full_us: float
) -> dict[str, Any]:
    """full_us: on all cores; 0: this is the first row of the GEMM."""
    if not full_us:
        stage.prepare(shape)
    found = run(stage, [Part(GEMM, cores=cores)])
    return {
        "measure": "gemm",
        "gemm": name,
        **asdict(shape),
        "cores": cores or stage.cores,
        "time_us": round(found.time_us, 3),
        "slowdown": round(found.time_us / (full_us or found.time_us), 4),
        "tflops": round(shape.flops / found.time_us / 1e6, 1),
        "machine": stage.machine,
        "backend": stage.backend,
        **found.facts,
    }


def collective_curve(
    stage: Stage, op: str, sizes: Iterable[int], counts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Figures 5b, 5c and 9: a collective on cores, by their number, and on engines."""
    for nbytes in sizes:
        if reason := too_large(stage, op, nbytes):
            yield {"skipped": f"{op} {nbytes}: {reason}"}
            continue
        parts = [Part(KERNEL, op, nbytes, cores) for cores in (None, *counts)]
        for part in (*parts, Part(ENGINES, op, nbytes)):
            yield {
                "measure": "collective",
                "op": op,
                "bytes": nbytes,
                "what": part.what,
                "cores": part.cores,
                "time_us": round(run(stage, [part]).time_us, 3),
                "ranks": stage.ranks,
                "machine": stage.machine,
                "backend": stage.backend,
            }
