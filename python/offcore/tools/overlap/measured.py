"""Measurements of overlap by one process a rank: what is asked for, and the rows that come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offcore.errors import Error, error
from offcore.sizes import format_bytes
from offcore.tools.bench.rank_processes import RankProcesses
from offcore.tools.overlap import dependent, gpu_stage, host_stage
from offcore.tools.overlap import model as models
from offcore.tools.overlap.cases import COMBINATIONS, GEMMS, OPS, size_of
from offcore.tools.overlap.measure import STRATEGIES
from offcore.tools.overlap.stage import GEMM, MEASURED, WARMUP
from offcore.tools.overlap.sweep import Combination
from offcore.tools.overlap.sweep import measure as simulate

MODULE = "offcore.tools.overlap.rank"
CORES = {"cuda": (8, 16, 32), "host": (1,)}
SMS = (124, 116, 108, 100, 92, 84, 76, 68, 64, 32, 16, 8)  # that curves of GEMMs are taken at
IDLE = {"cuda": (8, 16, 32), "host": (1,)}
SHRUNK = {"cuda": 1, "host": 16}
REDUCING = ("reduce_scatter", "all_reduce")
STEPS = ("curve", "collectives", "run", "matmul", "energy")
_RESTARTS = 3  # of the processes, after one died or hung
_RESTART_S = 25.0  # which is the least that a restart needs
_ITEM_BYTES = 2
_MATCHED_MOST = 30 << 30  # bytes of a size that is chosen by its time
# GEMMs of few rows, which memory bounds on any machine; n and k as of ConCCL's.
FEW_ROWS = {f"m{m}_{tag}": (m, *GEMMS[tag][1:]) for tag in ("mb1", "cb1") for m in (64, 128, 256)}
SHAPES = GEMMS | FEW_ROWS
_BESIDE = ("cb1_896M", "m64_mb1_128M")  # what tables take slowdowns by neighbours from
_CURVE_SIZES = 64 << 10, 256 << 20  # latency- and bandwidth-bound


@dataclass(frozen=True)
class Request:
    """What to measure.

    backend: "cuda" or "host". pairs, energy: GEMM_SIZE and an operation each. energy_alone: an
    operation and bytes each. matched: sizes whose
    time has the ratio to the GEMM's that it has on 8 MI300X, as the calibrated model gives it.
    shrink: divides the GEMMs' dimensions, and its square the sizes; 0: the backend's default.
    steps: of STEPS, in the order wanted. limit_s: after which nothing is begun. runs: warm-up, and
    measured. step_s: what is given up when it takes four times as long.
    """

    backend: str
    ranks: int
    pairs: Sequence[tuple[str, str]] = ()
    strategies: Sequence[str] = STRATEGIES
    steps: Sequence[str] = ("run",)
    matched: bool = False
    shrink: int = 0
    limit_s: float = 3600.0
    runs: tuple[int, int] = (WARMUP, MEASURED)
    step_s: float = 60.0
    cores: Sequence[int] = ()
    curve_gemms: Sequence[str] = tuple(GEMMS)
    curve_ops: Sequence[str] = OPS
    curve_sizes: Sequence[int] = ()
    dependents: Sequence[str] = dependent.NAMES
    energy: Sequence[tuple[str, str]] = ()
    energy_alone: Sequence[tuple[str, int]] = ()
    energy_s: float = 6.0
    trials: int = 5
    loops: Sequence[str] = ("base", "rp", "ConCCL")
    environment: dict[str, str] = field(default_factory=dict)

    def settled(self) -> Request:
        if self.backend not in SHRUNK:
            raise error("invalid", f"overlap is measured on cuda or host, not {self.backend}")
        if unknown := set(self.steps) - set(STEPS):
            raise error("invalid", f"unknown steps {sorted(unknown)}: {', '.join(STEPS)}")
        return replace(
            self,
            shrink=self.shrink or SHRUNK[self.backend],
            cores=self.cores or CORES[self.backend],
        )


def for_tables(backend: str, ranks: int, gemms: Sequence[str], limit_s: float) -> Request:
    """What tables are made of (see tabled.py): curves of GEMMs and, with two ranks or more, of
    collectives, and GEMMs beside collectives. gemms: whose curves are taken."""
    request = Request(backend, ranks, steps=("curve",), limit_s=limit_s, curve_gemms=gemms)
    if ranks < 2:
        return request
    small, large = _CURVE_SIZES
    return replace(
        request,
        steps=("run", "curve", "collectives"),
        pairs=[(tag, op) for op in OPS for tag in _BESIDE],
        strategies=("sp", "ConCCL"),
        curve_sizes=(small, large // SHRUNK[backend] ** 2),
    )


def shape_of(tag: str, shrink: int) -> tuple[int, int, int]:
    """Raises ValueError for a tag that no GEMM has."""
    if tag not in SHAPES:
        raise ValueError(f"'{tag}': known GEMMs are {', '.join(SHAPES)}")
    m, n, k = (max(1, one // shrink) for one in SHAPES[tag])
    return m, n, k


def split_tag(tag: str) -> tuple[str, int]:
    """`m64_mb1_896M` as a GEMM's tag and bytes. Raises ValueError."""
    gemm, _, size = tag.rpartition("_")
    if gemm not in SHAPES:
        raise ValueError(f"'{tag}': write GEMM_SIZE, where GEMM is one of {', '.join(SHAPES)}")
    return gemm, size_of(size)


def bound_by_name(tag: str) -> str:
    """The class that a GEMM's name stands for: ConCCL's, or mb where it has few rows."""
    return "mb" if tag in FEW_ROWS else tag[:2]


def _ratio(op: str, tag: str) -> float:
    """Of the times of a collective and a GEMM of table II, on the paper's machine."""
    model, _ = models.load()
    outcome = simulate(model, Combination(tag, op))
    return outcome.kernel_us / outcome.gemm_us


def _cases(request: Request, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    found = []
    unit = request.ranks << 12
    for tag, op in pairs:
        gemm, nbytes = split_tag(tag)
        size = max(nbytes // request.shrink**2 // unit, 1) * unit
        case = {"gemm": gemm, "shape": shape_of(gemm, request.shrink), "op": op}
        if request.matched and tag in COMBINATIONS and op in OPS:
            found.append(case | {"nbytes": 0, "ratio": _ratio(op, tag)})
        else:
            found.append(case | {"nbytes": size})
    return sorted(found, key=lambda one: one["shape"])  # operands are made once a GEMM


def _sizes(request: Request, cases: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The most bytes of each operation, and of a GEMM's operands."""
    sizes: dict[str, int] = {}
    for one in cases:
        nbytes = one["nbytes"] or _MATCHED_MOST // request.shrink**2
        sizes[one["op"]] = max(sizes.get(one["op"], 0), nbytes)
    for op in request.curve_ops if request.curve_sizes else ():
        sizes[op] = max(sizes.get(op, 0), *request.curve_sizes)
    shapes = [one["shape"] for one in cases]
    if "curve" in request.steps:
        shapes += [shape_of(tag, request.shrink) for tag in request.curve_gemms]
    operands = (m * k + k * n + m * n for m, n, k in shapes)
    return sizes | {GEMM: _ITEM_BYTES * max(operands, default=0)}


def _job(request: Request, begin: int) -> dict[str, Any]:
    cases, energy = (_cases(request, pairs) for pairs in (request.pairs, request.energy))
    alone = {"gemm": "", "shape": (1, 1, 1)}
    energy += [alone | {"op": op, "nbytes": nbytes} for op, nbytes in request.energy_alone]
    counts = SMS if request.backend == "cuda" else range(1, os.cpu_count() or 2)
    return {
        "backend": request.backend,
        "ranks": request.ranks,
        "steps": list(request.steps),
        "cases": cases,
        "energy": energy,
        "sizes": _sizes(request, [*cases, *energy]),
        "ops": list(request.curve_ops),
        "strategies": list(request.strategies),
        "cores": list(request.cores),
        "idle": list(IDLE[request.backend]),
        "limit_s": request.limit_s,
        "started": time.time(),
        "runs": list(request.runs),
        "begin": begin,
        "shapes": {tag: shape_of(tag, request.shrink) for tag in request.curve_gemms},
        "gemm_cores": list(counts),
        "dependent": dependent.cases_of(request.dependents, request.ranks, request.shrink),
        "curve_sizes": list(request.curve_sizes),
        "energy_s": request.energy_s,
        "trials": request.trials,
        "loops": list(request.loops),
        "energy_cores": max(request.cores[:-1] or request.cores),
    }


def rows(request: Request) -> Iterator[dict[str, Any]]:
    """As they are found; among them {"skipped": why}, {"failed": why}, {"step": name} where one
    begins, and {"stage": what runs them}.

    Processes that die or hang are started anew, for what comes after what they were at. Raises
    `Error`: invalid, and peer, timeout, or what the ranks raise, where that cannot be done.
    """
    request = request.settled()
    began = time.monotonic()
    steps, begin, restarts = list(request.steps), 0, 0
    row: dict[str, Any]
    while steps:
        step, told, row = "", 0, {}
        left_s = request.limit_s - (time.monotonic() - began)
        try:
            for row in _started(replace(request, steps=steps, limit_s=left_s), begin):
                if "step" in row:
                    begin = begin if row["step"] == steps[0] else 0
                    step, told = row["step"], 0
                    steps = steps[steps.index(step) :]
                elif step:
                    told += 1
                yield row
            return
        except Error as failure:
            restarts += 1
            late = time.monotonic() - began + _RESTART_S > request.limit_s
            if not step or late or restarts > _RESTARTS:
                raise
            yield {"failed": f"{step}, row {begin + told}: {failure.code}: {failure}"}
            if step == "run":
                begin += told + ("failed" not in row)  # what failed was told
            else:
                steps = steps[1:]


def _started(request: Request, begin: int) -> Iterator[dict[str, Any]]:
    job = _job(request, begin)
    stages = {"cuda": gpu_stage.ENVIRONMENT, "host": host_stage.ENVIRONMENT}
    environment = stages[request.backend] | request.environment
    with RankProcesses(request.ranks, job, request.step_s, environment, MODULE) as processes:
        for told in processes.outcomes(lambda _: None):
            yield told[0]["row"]


def label(row: dict[str, Any]) -> str:
    """`cb1_896M`."""
    return f"{row['gemm']}_{format_bytes(row['bytes'])}"
