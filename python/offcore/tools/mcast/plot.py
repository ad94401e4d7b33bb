"""Plots of simulated and measured multicast collectives, a line an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offcore.tools.mcast.fat_tree import Row
from offcore.tools.plot import plain_log, pyplot, size_axis

# Okabe and Ito's, which stay apart for colour-blind readers.
COLOURS = {
    "multicast": "#0072B2",
    "ring": "#D55E00",
    "linear": "#CC79A7",
    "doubling": "#E69F00",
    "knomial": "#009E73",
    "binary_tree": "#CC79A7",
    "scatter_ring": "#D55E00",
    "in_network": "#56B4E9",
    "gloo": "#000000",
    "mpi": "#7F7F7F",
}


def tidy_axes(axes: Any) -> None:
    """A light grid and no frame."""
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Bandwidth received per leaf, and bytes through switch ports, by size."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    sizes = sorted({row.bytes for row in rows if row.bytes})
    names = list(dict.fromkeys(row.name for row in rows))
    for place, name in enumerate(names):
        line = sorted((row for row in rows if row.name == name), key=lambda row: row.bytes)
        style = {"color": COLOURS.get(line[0].algorithm, "#000000"), "marker": "o"}
        dash = "-" if name == line[0].algorithm else ("--", ":", "-.")[place % 3]
        values = ([row.goodput_gbps for row in line], [row.switch_bytes / 1e6 for row in line])
        for axes, heights in zip(panels, values, strict=True):
            axes.plot([row.bytes for row in line], heights, dash, label=name, **style)
    for axes, label in zip(panels, ("1e9 bytes/s per leaf", "MB, all switch ports"), strict=True):
        size_axis(axes, sizes)
        axes.set_ylabel(label)
        tidy_axes(axes)
    plain_log(panels[1])
    panels[0].legend(frameon=False, fontsize=9)
    first = rows[0]
    figure.suptitle(f"{first.op} on {first.hosts} hosts of {first.tree} (simulated)", fontsize=10)
    figure.savefig(path, dpi=140)
    plt.close(figure)
