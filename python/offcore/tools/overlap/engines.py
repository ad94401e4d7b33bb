"""ConCCL's figure 9: collectives on engines beside the library's kernels, each alone, by size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from offcore.errors import error
from offcore.tools.overlap import plot
from offcore.tools.overlap.cases import OPS
from offcore.tools.overlap.stage import ENGINES, KERNEL
from offcore.tools.plot import pyplot, size_axis

Row = Mapping[str, Any]
Series = dict[str, dict[int, float]]  # by operation, then bytes: times as fast as the kernels
_Times = dict[tuple[str, int], dict[str, list[float]]]  # by operation and bytes, then by what

SLOWEST, SMALL, PAR = 4.0, 32 << 20, 128 << 20  # published: 4x slower below; at par from there on
_KERNELS = "nccl"
_FAR = 16  # times as large: no neighbour


def speedups(rows: Sequence[Row], file: object = "these rows") -> Series:
    """Of rows of `overlap run`, measured or simulated, or of `offcore bench`. Raises invalid where
    none has both times; it names `file`.

    Rows of bench: ours are calls enqueued ahead as they are by default, the fastest variant, and
    without copies by SMs; the library is the fastest way that its kernels were run in that run.
    """
    benched = [row for row in rows if "impl" in row]
    found = _of_bench(benched) if benched else _of_overlap(rows)
    if not found:
        raise error("invalid", f"{file}: none has times of both engines and the library's kernels")
    return {op: dict(sorted(found[op].items())) for op in OPS if op in found}


def _case(times: _Times, row: Row) -> dict[str, list[float]]:
    return times.setdefault((row["op"], row["bytes"]), {KERNEL: [], ENGINES: []})


def _of_overlap(rows: Iterable[Row]) -> Series:
    times: _Times = {}
    for row in rows:
        if row.get("op") not in OPS:
            continue
        if row.get("measure") == "collective" and row["cores"] is None:
            _case(times, row)[row["what"]].append(row["time_us"])
        elif "kernel_us" in row and "engines_us" in row:
            for what, found in _case(times, row).items():
                found.append(row[f"{what}_us"])
    return _ratios(times, statistics.median)


def _of_bench(rows: Iterable[Row]) -> Series:
    times: _Times = {}
    for row in rows:
        if row["op"] not in OPS or row.get("timing") != "chain":
            continue
        if row["impl"] == _KERNELS:
            _case(times, row)[KERNEL].append(row["time_us"])
        elif (
            (row["impl"], row["mode"], row.get("asked")) == ("offcore", "eager", "auto")
            and row.get("own_copy") != "sm"
            and row.get("signals") in (None, "fenced")
        ):
            _case(times, row)[ENGINES].append(row["time_us"])
    return _ratios(times, min)


def _ratios(times: _Times, pick: Callable[[Iterable[float]], float]) -> Series:
    found: Series = {}
    for (op, nbytes), case in times.items():
        if case[KERNEL] and case[ENGINES]:
            found.setdefault(op, {})[nbytes] = pick(case[KERNEL]) / pick(case[ENGINES])
    return found


def draw(series: Series, title: str, *, published: bool) -> Any:
    figure, axes = pyplot().subplots(figsize=(8.2, 3.8), layout="constrained")
    sizes = sorted({size for points in series.values() for size in points})
    for op, points in series.items():
        axes.plot(*_joined(points), marker="o", markersize=4, color=plot.COLOURS[op], label=op)
    if published:
        worst, least = "published: up to 4x slower", min(sizes[0], SMALL)
        axes.plot([least, SMALL], [1 / SLOWEST] * 2, color="#555555", linestyle=":", label=worst)
        band = {"color": "#BBBBBB", "linewidth": 6, "solid_capstyle": "butt", "zorder": 0.5}
        most = max(PAR, sizes[-1])
        axes.plot([PAR, most], [1, 1], **band, label="published: all_gather at par")
    size_axis(axes, _ticks(sizes))
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylim(0)
    axes.set_ylabel("engines: times as fast as kernels")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    plot.bare(axes)
    return figure


def _joined(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Points of a line that breaks where sizes between two were not measured."""
    sizes: list[int] = []
    values: list[float] = []
    for size, value in points.items():
        if sizes and size > _FAR * sizes[-1]:
            sizes.append(size)
            values.append(math.nan)
        sizes.append(size)
        values.append(value)
    return sizes, values


def _ticks(sizes: Sequence[int]) -> list[int]:
    """Powers of two, over sizes that lie anywhere."""
    return [1 << power for power in range(sizes[0].bit_length() - 1, sizes[-1].bit_length())]
