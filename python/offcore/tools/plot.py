"""Plots of results: time, bandwidth or speedup over size, a line a variant; a copy's phases.

DMA-Latte's Figures 13 (all-gather) and 14 (all-to-all) show how many times as fast as the library
each variant is. The library is the fastest way that its kernels were run at that size, in the same
invocation: ratios of different runs are not drawn.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offcore import _core
from offcore.errors import error
from offcore.sizes import format_bytes
from offcore.tools.bench.baselines import BASELINES
from offcore.tools.records import check_records
from offcore.tools.report import Row, differing, has_choice, rows_of, title_of

_TICKS_MAX = 10
_PANELS_ACROSS = 2
PAGE_INCHES = 10.0  # no plot is wider than a page
# Colours that stay apart for colour-blind readers (Okabe and Ito); a kind keeps its colour.
COLOURS = {
    "pcpy": "#0072B2",
    "bcst": "#D55E00",
    "swap": "#CC79A7",
    "b2b": "#009E73",
    "fan": "#E69F00",
    "gloo": "#000000",
    "memcpy": "#7F7F7F",
    "nccl": "#000000",
    "nccl-ce": "#7F7F7F",
}
_LIBRARY = "nccl"
_REFERENCES = (_LIBRARY, "pcpy")  # what a speedup is over: the first that was run
FIGURES = {13: "all_gather", 14: "all_to_all"}
_METRIC_LABELS = {"time": "time (us)", "busbw": "busbw (1e9 bytes/s)"}
_WAYS = {"auto": "safe", "promise": "promised"}
_WAY_COLOURS = {
    "safe": "#D55E00",
    "promised": "#0072B2",
    "view": "#009E73",
    "barrier": "#CC79A7",
    "eager": "#E69F00",
    "credits": "#56B4E9",
}
_DASHES = (":", "-.", "-")
PHASE_COLOURS = {"control": "#E69F00", "schedule": "#56B4E9", "copy": "#0072B2", "sync": "#D55E00"}


def check_plot(path: Path) -> None:
    """Raises where a plot could not be written: before anything has been measured."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise error("invalid", f"cannot plot to '{path}': name a .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise error("invalid", f"cannot plot to '{path}': its folder does not exist")
    pyplot()


def pyplot() -> Any:
    """matplotlib's, which draws without a screen. Raises unavailable where there is none."""
    try:
        import matplotlib
    except ImportError:
        raise error("unavailable", "plots need matplotlib: pip install 'offcore[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw_table(
    axes: Any,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    widths: Sequence[float],
    *,
    font: float,
    height: float,
) -> Any:
    """Instead of axes: a table whose first row is bold. height: of a row, in lines."""
    axes.axis("off")
    drawn = axes.table(
        cellText=cells, colLabels=columns, colWidths=widths, cellLoc="left", loc="center"
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(font)
    drawn.scale(1, height)
    for (row, _), cell in drawn.get_celld().items():
        cell.set_linewidth(0.4)
        if row == 0:
            cell.set_text_props(weight="bold")
    return drawn


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    step = -(-len(sizes) // _TICKS_MAX)
    ticks = sizes[::step]
    axes.set_xticks(ticks, [format_bytes(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlabel("total size (bytes, K = 1024)")


def plain_log(axes: Any) -> None:
    """A logarithmic vertical axis with whole numbers: 1,000, not a power of ten."""
    axes.set_yscale("log")
    least, most = axes.get_ylim()

    def told(value: float, _: int) -> str:
        return f"{value:,.10g}"

    axes.yaxis.set_major_formatter(told)
    axes.yaxis.set_minor_formatter(told if most < 10 * least else lambda value, _: "")


def _style_of(label: str, way: int, expanded: bool) -> dict[str, Any]:
    """way: how many lines of its name, the label's first part, came before."""
    name, *settings = label.split(", ")
    kind = name.removeprefix("prelaunch_").split(":")[0]
    style: dict[str, Any] = {
        "color": COLOURS.get(kind, COLOURS["pcpy"]),
        "linestyle": "--" if name == kind and kind in _core.variants() else "-",
        "marker": "s" if name in BASELINES else "^" if name == kind else "o",
        "markersize": 3.5,
        "linewidth": 1.4,
    }
    if kind == "fan" and expanded:  # it runs as b2b does then: both are to be seen
        style |= {"linewidth": 4, "alpha": 0.45, "zorder": 1.5}
    if name == "offcore":  # what auto chose: a colour a way
        known = [_WAY_COLOURS[one] for one in settings if one in _WAY_COLOURS]
        style["color"] = known[0] if known else COLOURS["pcpy"]
        style |= {"linestyle": ":", "markerfacecolor": "white"} if "sm" in settings else {}
    elif way > 0:  # the same in another setting
        style |= {"linestyle": _DASHES[(way - 1) % len(_DASHES)], "markerfacecolor": "white"}
    return style


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the line that they belong to, which is called by its name and by the settings in
    which lines differ. What auto chose is one line, whatever it chose; else each variant is one."""
    chosen = not has_choice([*rows]) and not any(row.named for row in rows)
    modes = {row.mode for row in rows if row.impl == "offcore"}
    settings = differing(rows)
    of_own: dict[Any, set[str | None]] = {}  # by what else there is of a row, but for sizes
    for row in rows:
        others = (getattr(row, name) for name in settings if name != "own_copy")
        of_own.setdefault((row.name, row.bytes, *others), set()).add(row.own_copy)
    compared = any({"engine", "engines"} <= found for found in of_own.values())
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        told = [row.impl if chosen else row.name]
        for name in settings:
            value = getattr(row, name)
            if name == "own_copy" and value != "sm" and not (compared and value == "engine"):
                continue  # by copy engines, or none: as the operation needs it
            if value and not (row.impl == "offcore" and name == "mode" and len(modes) == 1):
                told.append(_WAYS.get(value, value))
        line = lines.setdefault(", ".join(told), [])
        if not line or line[-1].bytes < row.bytes:  # what was measured twice is drawn once
            line.append(row)
    return lines


def _reference(rows: Sequence[Row]) -> tuple[str, dict[int, float]]:
    """What a speedup is over, and its time by size. Raises invalid where none was run."""
    for name in _REFERENCES:
        found: dict[int, float] = {}
        for row in rows:
            if row.name == name:
                found[row.bytes] = min(row.time_us, found.get(row.bytes, row.time_us))
        if found:
            return name, found
    raise error("invalid", f"a speedup is over {' or '.join(_REFERENCES)}, not run here: no plot")


def _draw_lines(axes: Any, rows: list[Row], metric: str) -> None:
    over, reference = _reference(rows) if metric == "speedup" else ("", {})
    drawn = [r for r in rows if r.bytes > 0 and (metric != "speedup" or r.bytes in reference)]
    ways: dict[str, int] = {}
    for label, line in _lines(drawn).items():
        values = {
            "time": [row.time_us for row in line],
            "busbw": [row.busbw_gbps for row in line],
            "speedup": [reference.get(row.bytes, 0.0) / row.time_us for row in line],
        }
        name = label.split(",")[0]
        style = _style_of(label, ways.get(name, 0), any(row.native is False for row in line))
        ways[name] = ways.get(name, 0) + 1
        axes.plot([row.bytes for row in line], values[metric], label=label, **style)
    size_axis(axes, sorted({row.bytes for row in rows if row.bytes > 0}))
    axes.set_ylabel(_METRIC_LABELS.get(metric, f"times as fast as {over}"))
    if metric == "time":
        plain_log(axes)
    elif metric == "speedup":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")
        axes.axhline(1, color="#000000", linewidth=0.8, alpha=0.6)
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_rows(rows: list[Row], path: Path, metric: str | None = None) -> None:
    """Draws `rows_figure` into a file."""
    figure = rows_figure(rows, metric)
    figure.savefig(path, dpi=140)
    pyplot().close(figure)


def rows_figure(rows: list[Row], metric: str | None = None) -> Any:
    """One panel an operation and signal form, one line a variant.

    metric: time, busbw or speedup (over nccl, or pcpy; raises invalid where neither was run);
    None: speedup where nccl was run, else time. Raises invalid without rows.
    """
    if not rows:
        raise error("invalid", "there is no row to plot")
    metric = metric or ("speedup" if any(row.impl == _LIBRARY for row in rows) else "time")
    rows = [row for row in rows if row.timing == rows[0].timing]  # a call alone is another matter
    if any(row.named for row in rows):  # then what auto chose is one of them
        rows = [row for row in rows if row.named is not False]
    ops = list(dict.fromkeys(row.op for row in rows))
    forms = list(dict.fromkeys(row.signals for row in rows if row.signals)) or [""]
    wanted = list(itertools.product(forms, ops))
    across = min(len(wanted), _PANELS_ACROSS)
    down = -(-len(wanted) // across)
    figure, panels = pyplot().subplots(
        down,
        across,
        figsize=(PAGE_INCHES if across > 1 else 6.4, 3.8 * down + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for axes in panels.flat[len(wanted) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes, (form, op) in zip(panels.flat, wanted, strict=False):
        shown = [row for row in rows if row.op == op and row.signals in (form, "", None)]
        if not shown:
            axes.set_visible(False)
            continue
        _draw_lines(axes, shown, metric)
        title = title_of(shown) + (f", signals {form}" if len(forms) > 1 else "")
        axes.set_title(title, fontsize=9)
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=4 if across > 1 else 3,
        frameon=False,
        fontsize=8,
    )
    return figure


def figure_rows(records: Iterable[dict[str, Any]], number: int) -> list[Row]:
    """The rows of DMA-Latte's Figure 13 or 14: chains of one machine, with the library's in the
    same run and place. Several runs become one: times are scaled by the library's. Raises
    invalid."""
    op = FIGURES[number]
    cases: dict[tuple[str, bool], list[Row]] = {}
    for one in records:
        if one.get("op") == op and one.get("timing") == "chain":
            check_records([one], {"run": "str"})
            [row] = rows_of([one])
            cases.setdefault((one["run"], row.in_place), []).append(row)
    cases = {case: rows for case, rows in cases.items() if any(r.impl == _LIBRARY for r in rows)}
    # As the paper has them, where there is a choice: an all-gather in place.
    place = any(in_place for _, in_place in cases)
    runs = {run: rows for (run, in_place), rows in cases.items() if in_place == place}
    machines = sorted({row.machine for rows in runs.values() for row in rows})
    if len(machines) != 1:
        raise error(
            "invalid",
            f"figure {number} needs rows of {op} on one machine, and {_LIBRARY}'s of the same run; "
            f"there are {', '.join(machines) or 'none'}",
        )
    return _merged(list(runs.values()))


def _merged(runs: list[list[Row]]) -> list[Row]:
    """The median ratio to the library over runs, as rows whose library takes its median time."""
    if len(runs) == 1:
        return runs[0]
    known = [_reference(rows)[1] for rows in runs]
    sizes = {size for times in known for size in times}
    library = {size: statistics.median([t[size] for t in known if size in t]) for size in sizes}
    cases: dict[tuple[Any, ...], list[tuple[Row, float]]] = {}
    for rows, times in zip(runs, known, strict=True):
        for row in rows:
            if row.bytes in times:
                key = (row.bytes, row.in_place, row.impl, row.variant, row.mode, *row.setting)
                cases.setdefault(key, []).append((row, row.time_us / times[row.bytes]))
    return [
        replace(found[0][0], time_us=library[key[0]] * statistics.median(r for _, r in found))
        for key, found in cases.items()
    ]


def plot_figure(records: Iterable[dict[str, Any]], number: int, path: Path) -> None:
    """Draws it. Raises invalid where the rows are not there."""
    plot_rows(figure_rows(records, number), path, "speedup")


def plot_phases(
    sizes: Sequence[int], phases: Sequence[dict[str, float]], title: str, path: Path
) -> None:
    figure = phases_figure(sizes, phases, title)
    figure.savefig(path, dpi=140)
    pyplot().close(figure)


def phases_figure(sizes: Sequence[int], phases: Sequence[dict[str, float]], title: str) -> Any:
    """Each phase's share of a copy's time by size: DMA-Latte's figure 7."""
    figure, axes = pyplot().subplots(
        figsize=(min(max(6.4, 0.62 * len(sizes) + 2.4), PAGE_INCHES), 4.2), layout="constrained"
    )
    bottoms = [0.0] * len(sizes)
    totals = [sum(one.values()) for one in phases]
    # A phase that is a difference of measurements may come out below 0: it has no bar.
    wholes = [sum(max(0.0, value) for value in one.values()) for one in phases]
    for name, colour in PHASE_COLOURS.items():
        shares = [
            100 * max(0.0, one[f"{name}_us"]) / whole if whole > 0 else 0.0
            for one, whole in zip(phases, wholes, strict=True)
        ]
        axes.bar(range(len(sizes)), shares, bottom=bottoms, color=colour, label=name, width=0.72)
        bottoms = [low + share for low, share in zip(bottoms, shares, strict=True)]
    for position, total in enumerate(totals):
        axes.text(position, 101, f"{total:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(sizes)), [format_bytes(size) for size in sizes])
    axes.set_ylim(0, 110)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlabel("size of the copy (K = 1024); above each bar its time in us")
    axes.set_ylabel("share of the time (%)")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure
