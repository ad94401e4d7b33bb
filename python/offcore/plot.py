"""Plots of results: time, bandwidth or speedup over size, a line a variant; a copy's phases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offcore.baselines import BASELINES
from offcore.errors import error
from offcore.report import Row, has_choice, title_of
from offcore.sizes import format_bytes

_TICKS_MAX = 12
# Colours that stay apart for colour-blind readers (Okabe and Ito); a kind keeps its colour.
_COLOURS = {
    "pcpy": "#0072B2",
    "bcst": "#D55E00",
    "swap": "#CC79A7",
    "b2b": "#009E73",
    "fan": "#E69F00",
    "gloo": "#000000",
    "memcpy": "#7F7F7F",
}
_REFERENCE = "pcpy"  # what a speedup is over: the paper's baseline
_METRIC_LABELS = {
    "time": "time (us)",
    "busbw": "busbw (1e9 bytes/s)",
    "speedup": f"times as fast as {_REFERENCE}",
}
_PHASE_COLOURS = {"control": "#E69F00", "schedule": "#56B4E9", "copy": "#0072B2", "sync": "#D55E00"}


def check_plot(path: Path) -> None:
    """Raises where a plot could not be written: before anything has been measured."""
    _pyplot()
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise error("invalid", f"cannot plot to '{path}': name a .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise error("invalid", f"cannot plot to '{path}': its folder does not exist")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise error("unavailable", "plots need matplotlib: pip install 'offcore[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _size_axis(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    step = -(-len(sizes) // _TICKS_MAX)
    ticks = sizes[::step]
    axes.set_xticks(ticks, [format_bytes(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlabel("total size (bytes, K = 1024)")


def _style_of(name: str) -> dict[str, Any]:
    kind = name.removeprefix("prelaunch_").split(":")[0]
    offcore = name not in BASELINES
    style: dict[str, Any] = {
        "color": _COLOURS.get(kind, _COLOURS["pcpy"]),
        "linestyle": "--" if offcore and name == kind and kind in _COLOURS else "-",
        "marker": "s" if not offcore else "^" if name == kind else "o",
        "markersize": 3.5,
        "linewidth": 1.4,
    }
    if kind == "fan":  # where it has to be expanded it runs as b2b does: both are to be seen
        style |= {"linewidth": 4, "alpha": 0.45, "zorder": 1.5}
    return style


def _draw_lines(axes: Any, rows: list[Row], metric: str) -> None:
    # One variant a size, chosen by size, is one line; else each variant is one.
    chosen = not has_choice(rows)
    reference = {row.bytes: row.time_us for row in rows if row.name == _REFERENCE}
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        if row.bytes > 0 and (metric != "speedup" or row.bytes in reference):
            lines.setdefault(row.impl if chosen else row.name, []).append(row)
    for name, line in lines.items():
        values = {
            "time": [row.time_us for row in line],
            "busbw": [row.busbw_gbps for row in line],
            "speedup": [reference.get(row.bytes, 0.0) / row.time_us for row in line],
        }
        axes.plot([row.bytes for row in line], values[metric], label=name, **_style_of(name))
    _size_axis(axes, sorted({row.bytes for row in rows if row.bytes > 0}))
    axes.set_ylabel(_METRIC_LABELS[metric])
    if metric == "time":
        axes.set_yscale("log")
    elif metric == "speedup":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_rows(rows: list[Row], path: Path, metric: str = "time") -> None:
    """One panel an operation, one line a variant.

    metric: time, busbw or speedup (over pcpy; raises invalid where pcpy was not run).
    """
    if metric == "speedup" and not any(row.name == _REFERENCE for row in rows):
        raise error("invalid", f"a speedup is over {_REFERENCE}, which was not run: no plot")
    plt = _pyplot()
    ops = list(dict.fromkeys(row.op for row in rows))
    figure, panels = plt.subplots(
        1, len(ops), figsize=(6.4 * len(ops) + 1.6, 4.6), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for axes, op in zip(panels[0], ops, strict=True):
        of_op = [row for row in rows if row.op == op]
        _draw_lines(axes, of_op, metric)
        axes.set_title(title_of(of_op), fontsize=10)
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)


def plot_phases(
    sizes: Sequence[int], phases: Sequence[dict[str, float]], title: str, path: Path
) -> None:
    """Each phase's share of a copy's time by size: DMA-Latte's figure 7."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        figsize=(max(6.4, 0.62 * len(sizes) + 2.4), 4.2), layout="constrained"
    )
    bottoms = [0.0] * len(sizes)
    totals = [sum(one.values()) for one in phases]
    for name, colour in _PHASE_COLOURS.items():
        shares = [
            100 * one[f"{name}_us"] / total if total else 0.0
            for one, total in zip(phases, totals, strict=True)
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
    figure.savefig(path, dpi=140)
    plt.close(figure)
