"""Plots of KV rows, after DMA-Latte's Figures 16 and 17: per model, how many times as fast as a
copy for each page each way is. 16 is of one request alone, a latency; 17 of several under way at
once, a throughput. The paper times whole inferences, which hold much besides fetching: here are the
fetches alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offcore.errors import error
from offcore.sizes import format_bytes
from offcore.tools.plot import PAGE_INCHES, pyplot
from offcore.tools.records import check_records

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

_SAME = [
    "run",
    "step",
    "model",
    "layers",
    "page_bytes",
    "direction",
    "layout",
    "blocks",
    "requests",
]
_CASES_MAX = 10  # beside each other

Cases = dict[str, dict[str, float]]  # by label, then by way


def speedups(records: Sequence[dict[str, Any]], figure: int | None) -> dict[str, Cases]:
    """By direction and layout ("load"), then by case ("qwen2.5-7b, 4096"), then by way: the loop's
    time over its own, in the same run. Raises `Error`: invalid where rows of the loop are missing,
    or where one is none."""
    rows = [row for row in records if "absent" not in row]
    check_records(rows, _FORMS)
    if figure is not None:
        rows = [row for row in rows if (row["requests"] > 1) == (figure == 17)]
    layouts = len({row["layout"] for row in rows}) > 1
    extents = len({_extent(row) for row in rows}) > 1
    found: dict[str, Cases] = {}
    for loop in (row for row in rows if row["impl"] == _REFERENCE):
        panel = loop["direction"] + (f", {loop['layout']}" if layouts else "")
        label = _geometry(loop) + (f"\n{_extent(loop)}" if extents else "")
        for row in rows:
            if row["impl"] in _COLOURS and all(row.get(one) == loop.get(one) for one in _SAME):
                ways = found.setdefault(panel, {}).setdefault(label, {})
                ways[row["impl"]] = loop["time_us"] / row["time_us"]
    if not found:
        wanted = "" if figure is None else f" of {FIGURES[figure]}"
        raise error(
            "invalid", f"no rows{wanted} with the loop's in the same run: add --baseline loop"
        )
    return found


def plot_rows(records: Sequence[dict[str, Any]], path: Path, figure: int | None = None) -> None:
    """Draws `rows_figure` into a file."""
    drawn = rows_figure(records, figure)
    drawn.savefig(path, dpi=140)
    pyplot().close(drawn)


def rows_figure(records: Sequence[dict[str, Any]], figure: int | None = None) -> Any:
    """A panel a direction, a group of bars a case, a bar a way. Raises as `speedups` does."""
    found = speedups(records, figure)
    known = {way for cases in found.values() for ways in cases.values() for way in ways}
    names = [name for name in _COLOURS if name in known]
    panels = [(title, part) for title, cases in found.items() for part in _parts(cases)]
    most = max(len(cases) for _, cases in panels)
    drawn, all_axes = pyplot().subplots(
        len(panels),
        figsize=(min(max(5.0, 1.1 * most + 2.5), PAGE_INCHES), 1.0 + 3.2 * len(panels)),
        squeeze=False,
        layout="constrained",
    )
    for axes, (title, cases) in zip(all_axes[:, 0], panels, strict=True):
        _draw_cases(axes, cases, names, most)
        axes.set_title(title, fontsize=10, loc="left")
    what = "KV blocks" if figure is None else f"KV blocks: {FIGURES[figure]}"
    drawn.suptitle(f"{what}, {_where(records)}", fontsize=11)
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    return drawn


def _where(records: Sequence[dict[str, Any]]) -> str:
    """The GPUs of all rows, or the backends where there was none."""
    names = {
        row.get("versions", {}).get("gpus", "").split(",")[0]
        if row.get("backend") == "cuda"
        else row.get("backend", "")
        for row in records
    }
    return "; ".join("simulated" if name == "sim" else name for name in sorted(names))


def _parts(cases: Cases) -> Iterator[Cases]:
    """As few rows of a figure as the cases need, of equal length."""
    rows = -(-len(cases) // _CASES_MAX)
    each = -(-len(cases) // rows)
    for first in range(0, len(cases), each):
        yield dict(list(cases.items())[first : first + each])


def _draw_cases(axes: Any, cases: Cases, names: Sequence[str], most: int) -> None:
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        at = [group + (place - (len(names) - 1) / 2) * width for group in range(len(cases))]
        heights = [ways.get(name, 0.0) for ways in cases.values()]
        bars = axes.bar(at, heights, width, color=_COLOURS[name], label=name)
        axes.bar_label(bars, fmt=lambda value: f"{value:.1f}" if value else "", fontsize=7)
    axes.set_xticks(range(len(cases)), list(cases), fontsize=8)
    axes.set_xlim(-0.5, most - 0.5)  # bars of all panels are alike
    axes.axhline(1, color="#000000", linewidth=0.8, alpha=0.6)
    axes.set_ylabel(f"times as fast as the {_REFERENCE}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
