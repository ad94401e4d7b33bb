"""The table of serving.py."""

from __future__ import annotations

import json
from typing import Any

ARMS = ("recompute", "gpu", "engine", "ours", "separate", "packed")
COPYING = ("engine", "ours", "separate", "packed")
Row = dict[str, Any]


def line_of(place: tuple[Any, ...], rows: list[Row], arms: list[str]) -> str:
    """The cells of all arms for a model, length, batch and hit rate."""
    cells, same = "", 1.0
    for arm in arms:
        here = {
            r["hit"]: r
            for r in rows
            if (r["model"], r["prompt"], r["batch"]) == place[:3] and r["arm"] == arm
        }
        other = 0 if arm == "recompute" and place[3] != "swap" else place[3]
        row = here.get(place[3], here.get(other))
        if row is None or "error" in row:
            cells += f"{'error' if row or '-' in here else '':>17}"
            continue
        ttft = f"{row['ttft_ms']:8.1f}" if "ttft_ms" in row else " " * 8
        cells += f"{ttft} {row['tokens_s']:8.0f}"
        if arm in COPYING:
            same = min(same, row.get("same_tokens", 1.0))
    return f"{place[0]:<8} {place[1]:6} {place[2]:5} {place[3]!s:>4} {cells} {same:5.2f}"


def table_of(rows: list[Row]) -> str:
    """A line for each length, batch and hit rate, a column for each arm; then decodes, errors."""
    served = [row for row in rows if row["hit"] != "beside"]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in served)]
    lines = []
    if served:
        lines.append("TTFT in ms (median of requests), tokens/s; same: share of equal requests")
        head = "".join(f"{arm:>17}" for arm in arms)
        lines.append(f"model    prompt batch  hit {head}  same")
    places = ((r["model"], r["prompt"], r["batch"], r["hit"]) for r in served if r["hit"] != "-")
    lines += [line_of(place, served, arms) for place in dict.fromkeys(places)]
    for row in rows:
        if row["hit"] == "beside" and "error" not in row:
            lines.append(
                f"{row['model']:<8} decode {row['alone_ms']:7.3f} ms alone, beside loads by "
                f"{row['arm']:<8} {row['beside_ms']:7.3f} ms ({row['slowdown']:.3f}x), "
                f"{row['loads_gb_s']:.1f} GB/s"
            )
    lines += [f"failed: {json.dumps(row)}" for row in rows if "error" in row]
    return "\n".join(lines)
