"""Figures of overlap from rows of `offcore overlap run`, and from tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from offcore.errors import error
from offcore.overlap.tables import Tables
from offcore.sizes import format_bytes
from offcore.tools.overlap.cases import COMBINATIONS, OPS, split_tag
from offcore.tools.plot import pyplot

COLOURS = {
    "base": "#7F7F7F",
    "sp": "#E69F00",
    "rp": "#56B4E9",
    "best": "#0072B2",
    "ConCCL": "#D55E00",
    "ConCCL_rp": "#009E73",
    "cb": "#D55E00",
    "mb": "#0072B2",
    "all_gather": "#0072B2",
    "all_to_all": "#D55E00",
}
_MARKERS = "os^vDP*X<>hd"
_KERNELS = ("base", "sp", "rp", "sp_rp")
_SHOWN = {8: ("base", "sp", "rp", "best"), 10: ("base", "best", "ConCCL", "ConCCL_rp")}
_NEEDED = ("op", "gemm", "bytes", "kind", "strategy", "speedup", "ideal_published")

Row = Mapping[str, Any]
_Case = tuple[str, str, int]  # operation, GEMM, bytes


def bare(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(axes: Any, columns: int) -> None:
    """Above the plot, where no bar is."""
    axes.legend(
        frameon=False,
        fontsize=9,
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderpad=0,
    )


def source(rows: Sequence[Row]) -> str:
    """Where the rows come from: "mi300x-8, simulated"."""
    names = {f"{row.get('machine', '')}, {row.get('backend', '')}" for row in rows}
    return (
        "; ".join(sorted(names))
        .replace(", sim", ", simulated")
        .replace(", cuda", ", measured")
        .strip(", ")
    )


def cases(rows: Sequence[Row]) -> dict[_Case, dict[str, float]]:
    """Speed-ups by strategy of each combination, `best` and `ideal` among them. Raises invalid."""
    found: dict[_Case, dict[str, float]] = {}
    for row in rows:
        if missing := [name for name in _NEEDED if name not in row]:
            raise error("invalid", f"no row of offcore overlap run: it has no {missing[0]}")
        one = found.setdefault((row["op"], row["gemm"], row["bytes"]), {})
        one |= {row["strategy"]: row["speedup"], "ideal": row["ideal_published"]}
    for one in found.values():
        one["best"] = max((one[name] for name in _KERNELS if name in one), default=1.0)
    return found


def of_table_ii(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ConCCL's 30 combinations."""
    published = {split_tag(tag) for tag in COMBINATIONS}
    return [row for row in rows if row["op"] in OPS and (row["gemm"], row["bytes"]) in published]


def draw_ideals(rows: Sequence[Row]) -> Any:
    """Figure 7: a bar a combination."""
    found = cases(rows)
    names = list(dict.fromkeys((gemm, nbytes) for _, gemm, nbytes in found))
    ops = list(dict.fromkeys(op for op, _, _ in found))
    figure, axes = pyplot().subplots(figsize=(9.6, 3.8), layout="constrained")
    width = 0.8 / len(ops)
    for i, op in enumerate(ops):
        at = np.arange(len(names)) + (i - (len(ops) - 1) / 2) * width
        heights = [found.get((op, *name), {}).get("ideal", 0) for name in names]
        axes.bar(at, heights, width * 0.94, color=COLOURS.get(op), label=op)
    labels = [f"{gemm} {format_bytes(nbytes)}" for gemm, nbytes in names]
    axes.set_xticks(range(len(names)), labels, rotation=40, ha="right", fontsize=8)
    axes.set_ylim(1, 2.05)
    axes.set_ylabel("ideal speed-up")
    axes.set_title(source(rows), fontsize=9, loc="right")
    _legend(axes, len(ops))
    bare(axes)
    return figure


def draw_speedups(rows: Sequence[Row], figure: int) -> Any:
    """Figures 8 and 10: mean speed-ups by collective and type, and the ideal above them."""
    found = cases(rows)
    kind_of = {(row["op"], row["gemm"], row["bytes"]): row["kind"] for row in rows}
    groups = list(dict.fromkeys((case[0], kind_of[case]) for case in found))
    shown = [name for name in _SHOWN[figure] if all(name in one for one in found.values())]
    if not shown:
        raise error("invalid", f"no strategy of figure {figure} was run for every combination")
    drawn, axes = pyplot().subplots(figsize=(9.6, 4.2), layout="constrained")
    width = 0.8 / len(shown)
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # of the ideal's line
    every = [1.0, 2.1]
    for i, name in enumerate(shown):
        places = np.arange(len(groups)) + (i - (len(shown) - 1) / 2) * width
        speeds = np.array([_mean(found, kind_of, group, name) for group in groups])
        every += [*(speeds * 1.03)[speeds > 1], *(speeds - 0.06)[speeds < 1]]
        bars = axes.bar(places, speeds - 1, width * 0.94, 1, color=COLOURS[name], label=name)
        texts = [f"{speed:.2f}" for speed in speeds]
        axes.bar_label(bars, texts, fontsize=7, padding=1.5, zorder=3, bbox=clear)
    for at, group in enumerate(groups):
        ideal = _mean(found, kind_of, group, "ideal")
        label = "ideal" if at == 0 else None
        axes.hlines(ideal, at - 0.42, at + 0.42, color="black", linewidth=1.4, label=label)
    axes.set_xticks(range(len(groups)), [f"{op}\n{kind}" for op, kind in groups], fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylim(min(every), max(every))
    axes.set_ylabel("speed-up over one after the other")
    axes.set_title(source(rows), fontsize=9, loc="right")
    _legend(axes, len(shown) + 1)
    bare(axes)
    return drawn


def _mean(
    found: Mapping[_Case, Mapping[str, float]],
    kind_of: Mapping[_Case, str],
    group: tuple[str, str],
    name: str,
) -> float:
    values = [one[name] for case, one in found.items() if (case[0], kind_of[case]) == group]
    return sum(values) / len(values)


def draw_slowdowns(tables: Tables) -> Any:
    """Figure 5: GEMMs by the cores that they lack, collectives by those that they have."""
    figure, panels = pyplot().subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    every = tables.cores.count
    for row_of, axes, name, at in (
        ("cb", panels[0], "compute-bound", lambda cores: every - cores),
        ("mb", panels[0], "memory-bound", lambda cores: every - cores),
        ("all_gather", panels[1], "all_gather", lambda cores: cores),
        ("all_to_all", panels[1], "all_to_all", lambda cores: cores),
    ):
        _line(tables, row_of, axes, name, at)
    panels[0].set_xlabel("cores that a GEMM lacks")
    panels[1].set_xlabel("cores that a collective has")
    panels[1].set_xscale("log", base=2)
    most = panels[1].dataLim.x1
    powers = [2**power for power in range(3, every.bit_length()) if 2**power <= most]
    panels[1].set_xticks(powers, [str(power) for power in powers])
    for axes in panels:
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel("times as long")
        axes.legend(frameon=False, fontsize=9)
        bare(axes)
    how = "measured" if tables.source.startswith("measured") else "simulated"
    panels[1].set_title(f"{tables.machine}, {how}", fontsize=9, loc="right")
    return figure


def _line(tables: Tables, name: str, axes: Any, label: str, at: Callable[[int], int]) -> None:
    points = sorted(
        (at(row["cores"]), row["slowdown"])
        for row in tables.rows
        if row["row"] == "slowdown" and row["kernel"] == name and row.get("bound") != "latency"
    )
    near = points
    if name in ("cb", "mb"):
        near = [(0, 1.0), *(one for one in points if one[0] <= tables.cores.count / 2)]
    axes.plot(*zip(*near, strict=True), marker="o", color=COLOURS[name], label=label)


def draw_bandwidths(rows: Sequence[Row]) -> Any:
    """Figure 6: bandwidths of the last-level cache and of memory by GEMMs, by the SMs they lack."""
    figure, panels = pyplot().subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    tags = list(dict.fromkeys(row["gemm"] for row in rows))
    drawn: Counter[str] = Counter()
    for tag in tags:
        own = sorted((row for row in rows if row["gemm"] == tag), key=lambda row: -row["sms"])
        bound = own[0]["bound"]
        style = {"color": COLOURS[bound], "marker": _MARKERS[drawn[bound] % len(_MARKERS)]}
        drawn[bound] += 1
        lacking = [row["every"] - row["sms"] for row in own]
        for axes, name in zip(panels, ("l2_gbps", "dram_gbps"), strict=True):
            values = [row[name] / 1e3 for row in own]
            axes.plot(lacking, values, **style, linewidth=1, markersize=5, label=f"{tag} ({bound})")
    peak = rows[0]["peak_gbps"] / 1e3
    panels[1].axhline(peak, color="black", linewidth=0.8, linestyle="--", label="peak of HBM")
    for axes, title in zip(panels, ("L2", "HBM"), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("SMs that a GEMM lacks")
        axes.set_ylabel("TB/s")
        axes.set_ylim(0)
        bare(axes)
    figure.legend(*panels[1].get_legend_handles_labels(), frameon=False, fontsize=8,
                  loc="outside right upper")  # fmt: skip
    panels[1].set_title(source(rows), fontsize=9, loc="right")
    return figure
