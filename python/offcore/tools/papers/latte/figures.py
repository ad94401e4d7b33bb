"""DMA-Latte's figures and tables as the calibrated model gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offcore import _core
from offcore.sizes import format_bytes
from offcore.tools.papers.latte import kv, power, rows
from offcore.tools.papers.latte.calibrated import ABSOLUTE, Calibrated
from offcore.tools.papers.latte.rows import best_ranges
from offcore.tools.papers.latte.sweep import (
    COPY_SIZES,
    OPS,
    SIZES,
    Key,
    Sweep,
    pair_of,
    programs,
    simulated,
    variants_of,
)
from offcore.tools.plot import COLOURS, draw_table, phases_figure, pyplot, size_axis

_RCCL = "#000000"
_XCD, _REST = "#D55E00", "#56B4E9"
_GREY = "#7F7F7F"


@dataclass(frozen=True)
class Results:
    """Everything that the page shows, computed once."""

    calibrated: Calibrated
    made: Mapping[Key, _core.Program]
    sweep: Sweep
    activities: Mapping[str, power.Activity]
    fetches: Mapping[tuple[str, str, int], kv.Fetch]


def results(calibrated: Calibrated) -> Results:
    machine = calibrated.machine
    made = programs(machine)
    found = simulated(machine, calibrated.rccl)
    return Results(
        calibrated, made, found, power.activities(machine, found, made), kv.fetches(machine)
    )


@dataclass(frozen=True)
class Figure:
    name: str  # of the files
    title: str
    caption: str
    draw: Callable[[Results], Any]


def _bare(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _speedup_axes(axes: Any) -> None:
    size_axis(axes, SIZES)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.115, 2)
    axes.set_yticks([0.125, 0.25, 0.5, 1, 2])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")
    axes.axhline(1, color=_RCCL, linewidth=1)
    axes.text(SIZES[0], 1.02, "RCCL", fontsize=8, va="bottom")
    axes.set_ylabel("times as fast as RCCL")
    _bare(axes)


def _figure_1(found: Results) -> Any:
    figure, axes = pyplot().subplots(figsize=(8.2, 4.4), layout="constrained")
    op, sweep = "all_gather", found.sweep
    lines = (
        ("baseline: pcpy", sweep.times[op, "pcpy"], COLOURS["pcpy"], "o"),
        ("best of all features", sweep.best(op, variants_of(op)), COLOURS["b2b"], "s"),
    )
    for label, times, colour, marker in lines:
        axes.plot(
            SIZES, sweep.rccl[op] / times, color=colour, marker=marker, markersize=4, label=label
        )
    _speedup_axes(axes)
    axes.set_title("All-gather by DMA engines beside RCCL, 8 x MI300X (model)", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def _figure_7(found: Results) -> Any:
    phases = [found.sweep.copies[size] for size in COPY_SIZES]
    told = [
        {
            f"{name}_us": getattr(one, f"{name}_ns") / 1e3
            for name in ("control", "schedule", "copy", "sync")
        }
        for one in phases
    ]
    return phases_figure(COPY_SIZES, told, "Phases of one copy between two MI300X (model)")


def _speedups(op: str) -> Callable[[Results], Any]:
    def draw(found: Results) -> Any:
        figure, axes = pyplot().subplots(figsize=(9.6, 4.8), layout="constrained")
        for variant in variants_of(op):
            kind = variant.removeprefix("prelaunch_")
            ahead = variant != kind
            axes.plot(
                SIZES,
                found.sweep.rccl[op] / found.sweep.times[op, variant],
                color=COLOURS[kind],
                linestyle="-" if ahead else "--",
                marker="o" if ahead else "^",
                markersize=4,
                markerfacecolor=COLOURS[kind] if ahead else "white",
                linewidth=1.5,
                label=variant,
            )
        for variant, published in rows.AT_512K.items() if op == "all_gather" else ():
            colour = COLOURS[variant.removeprefix("prelaunch_")]
            axes.plot(512 * 1024, published, "*", ms=13, mec="black", color=colour, zorder=3)
        if op == "all_gather":
            axes.plot([], [], "*", ms=10, mec="black", color="white", label="published, 512K")
        _speedup_axes(axes)
        axes.set_title(f"{op} by variant, 8 x MI300X (model)", fontsize=10)
        figure.legend(frameon=False, fontsize=9, loc="outside right upper")
        return figure

    return draw


def _figure_15(found: Results) -> Any:
    values = found.calibrated.power
    powers = {name: power.of_dma(one, values) for name, one in found.activities.items()}
    shown = (
        (-0.2, power.best_of(found.sweep, powers), "DMA", ""),
        (0.2, power.of_rccl(found.sweep.rccl[power.OP], values), "RCCL", "///"),
    )
    figure, axes = pyplot().subplots(figsize=(9.6, 4.4), layout="constrained")
    places = np.arange(len(SIZES))
    for shift, one, name, hatch in shown:
        style = {"width": 0.38, "edgecolor": "white", "linewidth": 0.4, "hatch": hatch}
        axes.bar(places + shift, one.xcd, color=_XCD, label=f"{name}: XCDs", **style)
        axes.bar(
            places + shift,
            one.rest,
            bottom=one.xcd,
            color=_REST,
            label=f"{name}: IODs, HBM, links",
            **style,
        )
    axes.set_xticks(places[::2], [format_bytes(size) for size in SIZES[::2]])
    axes.set_xlabel("total size (bytes, K = 1024)")
    axes.set_ylabel("power of one GPU (W)")
    axes.set_title(
        "All-gather: power by the fastest DMA variant (left) and by RCCL (right, hatched), model",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
    _bare(axes)
    return figure


def _bars(axes: Any, groups: Sequence[tuple[str, Sequence[float], str]], label: str) -> None:
    """Bars by model, one colour a group."""
    width = 0.8 / len(groups)
    places = np.arange(len(kv.MODELS))
    for i, (name, heights, colour) in enumerate(groups):
        at = places + (i - (len(groups) - 1) / 2) * width
        bars = axes.bar(at, heights, width=width * 0.94, color=colour, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(
        places, [model.name for model in kv.MODELS], rotation=25, ha="right", fontsize=8
    )
    axes.axhline(1, color=_RCCL, linewidth=0.8)
    axes.set_ylabel(label)
    axes.set_ylim(0, max(max(heights) for _, heights, _ in groups) * 1.12)
    _bare(axes)


def _by_length(
    found: Results, title: str, label: str, groups: Sequence[tuple[str, str, str, str, str]]
) -> Any:
    """groups: (name, slow, fast, field, colour); a panel for each prompt length."""
    answered = kv.requests(found.fetches, found.calibrated.kv)
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for axes, length in zip(panels, kv.LENGTHS, strict=True):
        drawn = [
            (
                name,
                [
                    getattr(answered[slow, model.name, length], field)
                    / getattr(answered[fast, model.name, length], field)
                    for model in kv.MODELS
                ],
                colour,
            )
            for name, slow, fast, field, colour in groups
        ]
        _bars(axes, drawn, label if axes is panels[0] else "")
        axes.set_title(f"{length} tokens", fontsize=10)
    panels[1].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def _figure_16(found: Results) -> Any:
    return _by_length(
        found,
        "Time to first token: KV blocks back to back on one engine, over a copy a block (model)",
        "times as fast",
        (
            ("TTFT_GPU", "each", "b2b", "gpu_us", COLOURS["b2b"]),
            ("TTFT_total", "each", "b2b", "total_us", COLOURS["pcpy"]),
        ),
    )


def _figure_17(found: Results) -> Any:
    return _by_length(
        found,
        "Throughput where every prompt is in host memory, over a copy a block (model)",
        "times the throughput",
        (
            ("b2b on one engine", "each", "b2b", "loaded_us", COLOURS["b2b"]),
            ("kernel", "each", "kernel", "loaded_us", _GREY),
        ),
    )


def table_rows(found: Results, op: str) -> list[tuple[str, str, str]]:
    """(sizes, the model's best, what the paper's text says of it)."""
    pair = pair_of(op)
    last = {"all_gather": "to 512 KB", "all_to_all": "to 2 MB"}[op]
    told = {
        "prelaunch_b2b": "the smallest sizes",
        f"prelaunch_{pair}": f"next, {last}",
        "prelaunch_pcpy": "next",
        "pcpy": "the largest sizes (nothing is gained by prelaunch)",
    }
    return [
        (
            f"{format_bytes(first)} - {format_bytes(last)}",
            variant,
            told.get(variant, "not in the paper"),
        )
        for variant, first, last in best_ranges(found.sweep, op)
    ]


def _table(op: str) -> Callable[[Results], Any]:
    def draw(found: Results) -> Any:
        figure, axes = pyplot().subplots(figsize=(8.2, 2.1), layout="constrained")
        cells = table_rows(found, op)
        columns = ["total size", "best variant (model)", "the paper's order"]
        drawn = draw_table(axes, columns, cells, [0.2, 0.25, 0.5], font=10, height=1.5)
        for (row, column), cell in drawn.get_celld().items():
            if row > 0 and column == 1:
                kind = cells[row - 1][1].removeprefix("prelaunch_")
                cell.set_facecolor((COLOURS[kind], 0.25))
        axes.set_title(f"{op}: which features matter where, 8 x MI300X (model)", fontsize=10)
        return figure

    return draw


_FACTOR = f"Absolute times: {ABSOLUTE.removeprefix('absolute times are ')}."
FIGURES = (
    Figure(
        "figure-1",
        "Figure 1",
        "All-gather: below 32 MB the baseline lags; the features close most of the gap.",
        _figure_1,
    ),
    Figure(
        "figure-7",
        "Figure 7",
        f"The phases of one copy between two GPUs; above each bar its time in us. {_FACTOR}",
        _figure_7,
    ),
    Figure(
        "figure-13",
        "Figure 13",
        "All-gather: each variant beside RCCL; filled marks are launched ahead.",
        _speedups(OPS[0]),
    ),
    Figure(
        "figure-14",
        "Figure 14",
        "All-to-all: each variant beside RCCL; filled marks are launched ahead.",
        _speedups(OPS[1]),
    ),
    Figure(
        "figure-15",
        "Figure 15",
        "Power of one GPU while all-gathers repeat; rates follow from the model's times.",
        _figure_15,
    ),
    Figure(
        "figure-16",
        "Figure 16",
        "Time to first token with all KV blocks in host memory, by model and prompt length.",
        _figure_16,
    ),
    Figure(
        "figure-17",
        "Figure 17",
        "Throughput with all KV blocks in host memory, by model and prompt length.",
        _figure_17,
    ),
    Figure("table-2", "Table 2", "All-gather: the best variant by size.", _table(OPS[0])),
    Figure("table-3", "Table 3", "All-to-all: the best variant by size.", _table(OPS[1])),
)
