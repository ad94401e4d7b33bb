"""Plots of KV rows, after DMA-Latte's Figures 16 and 17: per model, how many times as fast as a
copy for each page each way is. 16 is of one request alone, a latency; 17 of several under way at
once, a throughput. The paper times whole inferences, which hold much besides fetching: here are the
fetches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offcore.errors import error
from offcore.plot import pyplot
from offcore.records import check_records
from offcore.sizes import format_bytes

FIGURES = {16: "one request", 17: "several requests at once"}
_REFERENCE = "loop"
_COLOURS = {
    "offcore": "#009E73",
    "batch": "#0072B2",
    "vllm": "#56B4E9",
    "triton": "#E69F00",
    "kernel": "#D55E00",
}


def _geometry(row: dict[str, Any]) -> str:
    model: str = row["model"] or f"{row['layers']} x {format_bytes(row['page_bytes'])}"
    return model


def _extent(row: dict[str, Any]) -> str:
    return f"{row['tokens']}" if row["tokens"] else f"{row['blocks']} blocks"


_FORMS = {  # of the keys that are looked at
    **dict.fromkeys(("impl", "direction", "layout"), "str"),
    **dict.fromkeys(("layers", "page_bytes", "blocks", "requests"), "int"),
    **{"model": "str | None", "tokens": "int | None", "time_us": "float > 0"},
}

# What a case is told by besides its geometry, where rows differ in it.
_PARTS: tuple[Callable[[dict[str, Any]], str], ...] = (
    lambda row: row["direction"],
    lambda row: row["layout"],
    _extent,
)


def speedups(records: Sequence[dict[str, Any]], figure: int | None) -> dict[str, dict[str, float]]:
    """By case ("qwen2.5-7b, 4096"), then by way: the loop's time over its own, in the same run.
    Raises `Error`: invalid where rows of the loop are missing, or where one is none."""
    rows = [row for row in records if "absent" not in row]
    check_records(rows, _FORMS)
    if figure is not None:
        rows = [row for row in rows if (row["requests"] > 1) == (figure == 17)]
    several = [part for part in _PARTS if len({part(row) for row in rows}) > 1]
    found: dict[str, dict[str, float]] = {}
    for loop in (row for row in rows if row["impl"] == _REFERENCE):
        label = "\n".join([_geometry(loop), *(part(loop) for part in several)])
        for row in rows:
            same = (
                "run",
                "step",
                "model",
                "layers",
                "page_bytes",
                "direction",
                "layout",
                "blocks",
                "requests",
            )
            if row["impl"] in _COLOURS and all(row.get(one) == loop.get(one) for one in same):
                ways = found.setdefault(label, {})
                ways[row["impl"]] = loop["time_us"] / row["time_us"]
    if not found:
        wanted = "" if figure is None else f" of {FIGURES[figure]}"
        raise error(
            "invalid", f"no rows{wanted} with the loop's in the same run: add --baseline loop"
        )
    return found


def plot_rows(records: Sequence[dict[str, Any]], path: Path, figure: int | None = None) -> None:
    """A group of bars a case, a bar a way. Raises as `speedups` does."""
    found = speedups(records, figure)
    plt = pyplot()
    names = [name for name in _COLOURS if any(name in ways for ways in found.values())]
    width = 0.8 / len(names)
    drawn, axes = plt.subplots(
        figsize=(max(5.0, 1.1 * len(found) + 2.5), 4.2), layout="constrained"
    )
    for place, name in enumerate(names):
        at = [group + (place - (len(names) - 1) / 2) * width for group in range(len(found))]
        heights = [ways.get(name, 0.0) for ways in found.values()]
        bars = axes.bar(at, heights, width, color=_COLOURS[name], label=name)
        axes.bar_label(bars, fmt=lambda value: f"{value:.1f}" if value else "", fontsize=7)
    axes.set_xticks(range(len(found)), list(found), fontsize=8)
    axes.axhline(1, color="#000000", linewidth=0.8, alpha=0.6)
    axes.set_ylabel(f"times as fast as the {_REFERENCE}")
    axes.set_title("KV blocks" + ("" if figure is None else f": {FIGURES[figure]}"), fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawn.legend(loc="outside right upper", frameon=False, fontsize=9)
    drawn.savefig(path, dpi=140)
    plt.close(drawn)
