"""Tables of plans from measured rows, and how plans made from them do on other combinations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offcore.errors import error
from offcore.overlap import Plan
from offcore.overlap.classify import share_of_ideal
from offcore.overlap.kernels import Collective, gemm
from offcore.overlap.tables import Cores, Tables
from offcore.sizes import format_bytes
from offcore.tools.overlap.cases import OPS
from offcore.tools.overlap.stage import ENGINES, GEMM, KERNEL
from offcore.tools.overlap.summary import by_combination

# TFLOP/s of dense bf16, GB/s of HBM, GB/s out of a GPU by NVLink, of data sheets. Rooflines are at
# 70 % of these.
PEAKS = {"h200": (989.0, 4800.0, 450.0), "h100": (989.0, 3350.0, 450.0)}
_LEAST = {"cuda": 8, "host": 1}  # cores that a partition can have
GEMMS = {"cb": "cb1", "mb": "m64_mb1"}  # that stand for their classes
WEIGHED = ("serial", "sp", "rp", "sp_rp", "ConCCL", "ConCCL_rp")
NEAR = 1.01  # of the least time: as good as the best

Row = Mapping[str, Any]
_Case = dict[str, Row]


def cores_of(machine: str, backend: str, count: int, peaks: Sequence[float] = ()) -> Cores:
    """Of a machine with so many cores a rank. peaks: as in PEAKS; default: of the data sheet.
    Raises `Error`: invalid for a machine whose data sheet is not known."""
    known = peaks or PEAKS.get(machine.partition("-")[0], ())
    if not known:
        named = machine or "an unnamed machine"
        raise error("invalid", f"no peaks of {named} are known: give --peaks")
    tflops, memory_gbps, network_gbps = known
    return Cores(count, _LEAST[backend], tflops, memory_gbps, network_gbps)


def tables_of(rows: Sequence[Row], source: str, peaks: Sequence[float] = ()) -> Tables:
    """From the curves of one GEMM of each class and of two sizes of each collective, and from the
    combinations of these GEMMs. peaks: see cores_of. Raises `Error`: invalid where the rows lack
    them."""
    first: Row = next((row for row in rows if "machine" in row), {})
    machine = first.get("machine", "")
    count = next((row["stage"]["cores"] for row in rows if "stage" in row), 0)
    cores = cores_of(machine, first.get("backend", "cuda"), count, peaks)
    made: list[Row] = []
    for bound, tag in GEMMS.items():
        found = [row for row in rows if row.get("measure") == "gemm" and row["gemm"] == tag]
        if not found:
            raise error("invalid", f"rows lack the curve of {tag}: measure with step curve")
        made += [
            {"row": "slowdown", "kernel": bound}
            | {name: row[name] for name in ("cores", "slowdown")}
            for row in found
        ]
    workgroups = {}
    for op in OPS:
        found = [row for row in rows if row.get("measure") == "collective" and row["op"] == op]
        if len({row["bytes"] for row in found}) < 2:
            raise error("invalid", f"rows lack two sizes of {op}: measure with step collectives")
        workgroups[op] = max(row["cores"] or 0 for row in found)
        made += _collective_rows(op, found)
    for (op, tag, _), case in by_combination(rows).items():
        bound = next((one for one in GEMMS if GEMMS[one] == tag), "")
        if bound and op in OPS:
            made += _beside_rows(op, bound, case, made, cores.count - workgroups[op])
    return Tables(machine, source, cores, workgroups, tuple(made))


def _collective_rows(op: str, found: Sequence[Row]) -> Iterator[Row]:
    least, most = (pick(row["bytes"] for row in found) for pick in (min, max))
    for bound, nbytes in (("latency", least), ("bandwidth", most)):
        times = {
            (row["what"], row["cores"]): row["time_us"] for row in found if row["bytes"] == nbytes
        }
        full = times[KERNEL, None]
        for (what, cores), time_us in times.items():
            if what == KERNEL and cores:
                place = {"row": "slowdown", "kernel": op, "bound": bound, "bytes": nbytes}
                yield place | {"cores": cores, "slowdown": round(time_us / full, 4)}
        for what in (KERNEL, ENGINES):
            place = {"row": bound, "kernel": op, "engines": what == ENGINES, "bytes": nbytes}
            yield place | {"time_us": times[what, None]}


def _beside_rows(op: str, bound: str, case: _Case, made: Sequence[Row], left: int) -> Iterator[Row]:
    """left: cores that a GEMM has beside the collective's kernel."""
    fewer = next(
        row["slowdown"]
        for row in made
        if row["kernel"] == bound and row["row"] == "slowdown" and row["cores"] == left
    )
    for strategy, what in (("sp", KERNEL), ("ConCCL", ENGINES)):
        if strategy not in case:
            continue
        row = case[strategy]
        ends, alone = row["ends_us"], {GEMM: row["gemm_us"], what: row[f"{what}_us"]}
        both_us = min(ends.values())
        for one, other in ((GEMM, what), (what, GEMM)):
            # Full speed after the other has ended; before, as much slower as to end when it did.
            done_us = alone[one] - (ends[one] - both_us)
            slowdown = both_us / done_us if done_us > 0 else 1.0
            slowdown /= fewer if one == GEMM and what == KERNEL else 1.0
            names = {GEMM: bound, what: op}
            yield (
                {"row": "beside", "kernel": names[one], "other": names[other]}
                | {"engines": what == ENGINES, "slowdown": round(max(1.0, slowdown), 4)}
            )


_Choice = tuple[str, int]  # a strategy and what the collective, or nobody, has of the cores


@dataclass(frozen=True)
class Judged:
    """A plan beside the exhaustive sweep. lost: of the least time measured; infinite where the
    plan's split was not measured."""

    name: str
    chosen: _Choice
    best: _Choice
    lost: float

    @property
    def right(self) -> bool:
        return self.lost <= NEAR - 1


def judged(rows: Iterable[Row], tables: Tables) -> list[Judged]:
    """Plans by shapes and sizes alone, for all combinations of GEMMs that the tables are not of."""
    found = []
    every = tables.cores.count
    for (op, tag, nbytes), case in by_combination(rows).items():
        if op not in OPS or tag in GEMMS.values() or any(one not in case for one in WEIGHED):
            continue
        first = case["serial"]
        product = gemm(first["m"], first["n"], first["k"], name=tag)
        plan = Plan((product, Collective(op, nbytes, first["ranks"])), tables, allowed=WEIGHED)
        times = _times(case, every)
        best = min(times, key=times.__getitem__)
        chosen = _choice(plan.strategy, every - plan.cores.get(tag, every))
        lost = times.get(chosen, math.inf) / times[best] - 1
        found.append(Judged(f"{op} {tag} {format_bytes(nbytes)}", chosen, best, lost))
    return found


def _choice(name: str, cores: int) -> _Choice:
    """Of ConCCL_rp that leaves no core idle: ConCCL."""
    return ("ConCCL" if name == "ConCCL_rp" and not cores else name), cores


def _times(case: _Case, every: int) -> dict[_Choice, float]:
    """Medians of all runs of a choice. Splits that lost were tried with two runs after one, which
    are often faster than nine after six: their times are the winner's by the ratio of what was
    tried."""
    runs: dict[_Choice, list[float]] = {}
    scaled: dict[_Choice, float] = {}
    for name in WEIGHED:
        row = case[name]
        runs.setdefault(_choice(name, every - (row["gemm_cores"] or every)), []).extend(
            row["runs_us"]
        )
        tried = {int(cores) or every: time_us for cores, time_us in row["tried_us"].items()}
        for cores, time_us in tried.items():
            scale = row["time_us"] / tried[row["gemm_cores"] or every]
            scaled[_choice(name, every - cores)] = time_us * scale
    return scaled | {choice: statistics.median(all_us) for choice, all_us in runs.items()}


def lines(found: Sequence[Judged]) -> list[str]:
    right = sum(one.right for one in found)
    exact = sum(one.chosen == one.best for one in found)
    told = [
        f"plans within 1 % of the best measured choice: {right} of {len(found)} (the very same "
        f"choice: {exact})"
    ]
    for one in found:
        if not one.right:
            lost = "which was not measured" if one.lost == math.inf else f"{one.lost:.1%} lost"
            told.append(f"{one.name}: {_told(one.chosen)} instead of {_told(one.best)}, {lost}")
    return told


def _told(choice: _Choice) -> str:
    return f"{choice[0]} {choice[1]}" if choice[1] else choice[0]


def errors(rows: Iterable[Row], tables: Tables) -> dict[str, list[float]]:
    """By strategy, how far estimates from the tables and measured isolated times are from the
    measured share of the ideal, in points of a hundred; for the combinations that judged takes."""
    found: dict[str, list[float]] = {name: [] for name in ("sp", "sp_rp", "ConCCL")}
    for (op, tag, nbytes), case in by_combination(rows).items():
        if op not in OPS or tag in GEMMS.values() or any(one not in case for one in WEIGHED):
            continue
        first = case["serial"]
        kernels = (
            gemm(first["m"], first["n"], first["k"], name=tag, time_us=first["gemm_us"]),
            Collective(op, nbytes, first["ranks"], time_us=first["kernel_us"]),
        )
        serial_us = first["gemm_us"] + first["kernel_us"]
        choices = Plan(kernels, tables, allowed=WEIGHED).choices
        for name, points in found.items():
            speedup = serial_us / choices[name].time_us
            points.append(
                100 * abs(share_of_ideal(speedup, first["ideal_published"]) - case[name]["share"])
            )
    return found
