"""Measured combinations as the model of the machine predicts them, and how far it is off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from offcore.overlap.classify import share_of_ideal
from offcore.overlap.kernels import Collective, Compute
from offcore.tools.overlap import sweep
from offcore.tools.overlap.cases import OPS
from offcore.tools.overlap.gpu_model import GpuModel
from offcore.tools.overlap.summary import by_combination
from offcore.tools.overlap.sweep import Combination
from offcore.tools.tables import titled

PREDICTED = ("base", "sp", "rp", "sp_rp", "ConCCL", "ConCCL_rp")
LARGE = 1.3  # an ideal; at 1.1x, 1 % of the time is ten points
ISOLATED = GIVEN, COMPUTED = "measured", "predicted"  # isolated times

Row = Mapping[str, Any]
_Case = tuple[str, str, int]  # operation, GEMM, bytes


@dataclass(frozen=True)
class Prediction:
    """points: of the measured combination's ideal, as ConCCL counts, predicted less measured.
    percent: of the time. fitted: whether the model's parameters are of this combination."""

    op: str
    gemm: str
    bytes: int
    strategy: str
    isolated: str
    fitted: bool
    serial_us: float
    ideal: float
    measured_us: float
    predicted_us: float
    points: float
    percent: float


def predictions(rows: Sequence[Row], model: GpuModel, isolated: str) -> list[Prediction]:
    """isolated: GIVEN: the isolated times of a combination's GEMM and collective are those measured
    beside it; COMPUTED: they are the model's too."""
    known = {(op, gemm, nbytes) for op, gemm, nbytes in model.record["combinations"]}
    found = []
    for case, measured in by_combination(rows).items():
        if case[0] not in OPS:
            continue
        times = _times(model, case, next(iter(measured.values())), isolated)
        for name in PREDICTED:
            if row := measured.get(name):
                fitted = case in known and row["run"] == model.record["run"]
                found.append(_prediction(case, row, isolated, fitted, times[name]))
    return found


def _times(model: GpuModel, case: _Case, row: Row, isolated: str) -> Mapping[str, float]:
    op, tag, nbytes = case
    gemm = model.gemm(row["m"], row["n"], row["k"], tag)
    collective = Collective(op, nbytes, row["ranks"], model.workgroups[op])
    if isolated == GIVEN:
        model = model.with_isolated(_isolated(row, gemm, collective))
    return sweep.outcome(model, Combination(f"{tag}_{nbytes}", op), gemm, collective).times_us


def _isolated(row: Row, gemm: Compute, collective: Collective) -> dict[tuple[str, bool], float]:
    return {
        (gemm.name, False): row["gemm_us"],
        (collective.name, False): row["kernel_us"],
        (collective.name, True): row["engines_us"],
    }


def _prediction(case: _Case, row: Row, isolated: str, fitted: bool, time_us: float) -> Prediction:
    share = share_of_ideal((row["gemm_us"] + row["kernel_us"]) / time_us, row["ideal_published"])
    return Prediction(
        *case,
        strategy=row["strategy"],
        isolated=isolated,
        fitted=fitted,
        serial_us=row["gemm_us"] + row["kernel_us"],
        ideal=row["ideal_published"],
        measured_us=row["time_us"],
        predicted_us=round(time_us, 3),
        points=round(100 * (share - row["share"]), 2),
        percent=round(100 * (time_us / row["time_us"] - 1), 2),
    )


def table(found: Sequence[Prediction], title: str) -> Table:
    """By collective and strategy: the share of the ideal of mean speed-ups, as measured and as
    predicted, and errors."""
    made = titled(
        title,
        ("collective", "strategy"),
        ("rows", "measured", "predicted", "mean", "median", "most", "% of time"),
    )
    for op in OPS:
        for name in PREDICTED:
            some = [one for one in found if (one.op, one.strategy) == (op, name)]
            if some:
                made.add_row(op, name, *_cells(some, shares(some)))
    made.add_section()
    made.add_row("all", "", *_cells(found, ("", "")))
    return made


def shares(found: Sequence[Prediction]) -> tuple[str, str]:
    """Of the ideal, of mean speed-ups: as measured, and as predicted."""
    ideal = fmean(one.ideal for one in found)
    speedups = (
        fmean(one.serial_us / time_us for one, time_us in zip(found, times, strict=True))
        for times in ([one.measured_us for one in found], [one.predicted_us for one in found])
    )
    measured, predicted = (str(round(100 * share_of_ideal(one, ideal))) for one in speedups)
    return measured, predicted


def _cells(found: Sequence[Prediction], shares: tuple[str, str]) -> list[str]:
    points = [abs(one.points) for one in found]
    percents = [abs(one.percent) for one in found]
    return [
        str(len(found)),
        *shares,
        f"{fmean(points):.1f}",
        f"{median(points):.1f}",
        f"{max(points):.0f}",
        f"{fmean(percents):.1f}",
    ]


def repeated(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Of combinations in which ConCCL_rp leaves no core idle, and so is ConCCL once more: the
    difference of both in points and in percent of the time. No model can be much closer."""
    found = []
    for case, one in by_combination(rows).items():
        rows_ = [one[name] for name in ("ConCCL", "ConCCL_rp") if name in one]
        if case[0] in OPS and len(rows_) == 2 and not rows_[1]["gemm_cores"]:
            first, again = rows_
            points = 100 * abs(first["share"] - again["share"])
            found.append((points, 100 * abs(again["time_us"] / first["time_us"] - 1)))
    return found


def lines(found: Sequence[Prediction], rows: Sequence[Row]) -> list[str]:
    """The sums, a line each."""
    told = []
    for isolated in ISOLATED:
        for fitted in (False, True):
            some = [one for one in found if (one.isolated, one.fitted) == (isolated, fitted)]
            if some:
                kind = "fitted" if fitted else "predicted"
                told.append(f"isolated times {isolated}, rows {kind}: {_told(some)}")
                large = [one for one in some if one.ideal >= LARGE]
                if not fitted and large:
                    told.append(f"  of these with an ideal of {LARGE}x or more: {_told(large)}")
    if again := repeated(rows):
        points, percents = ([pair[at] for pair in again] for at in (0, 1))
        told.append(
            f"the same measured twice ({len(again)} pairs): {fmean(points):.1f} points in the "
            f"mean, {median(points):.1f} in the median, {max(points):.0f} at most; "
            f"{fmean(percents):.1f} % of the time"
        )
    return told


def _told(found: Sequence[Prediction]) -> str:
    points = [abs(one.points) for one in found]
    percents = [abs(one.percent) for one in found]
    return (
        f"{len(found)} are off by {fmean(points):.1f} points of the ideal on average, "
        f"{median(points):.1f} in the median, {max(points):.0f} at most; {fmean(percents):.1f} % "
        "of the time on average"
    )
