"""What serving.py and serving_vllm.py share: prompts, which tokens agree, and the table."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

USUAL = ("recompute", "gpu", "engine", "ours", "separate", "packed")
PEERS = ("loop", "batch", "kernel")
ARMS = (*USUAL, *PEERS)
COPYING = ARMS[2:]
OWN = ("ours", "separate", "packed", "zero_sm", "layered")  # offcore's
Row = dict[str, Any]


def prompts_of(seed: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def agreement(tokens: list[Any], reference: list[Any]) -> float:
    """The share of requests that have the same tokens."""
    pairs = list(zip(chain(*tokens), chain(*reference), strict=True))
    return float(sum(one == other for one, other in pairs) / len(pairs))


def failed(why: Exception) -> Row:
    return {"error": f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"}


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
        if "same_tokens" in row and arm not in ("recompute", "gpu"):
            same = min(same, row["same_tokens"])
    return f"{place[0]:<8} {place[1]:6} {place[2]:5} {place[3]!s:>4} {cells} {same:5.2f}"


def speedups(rows: list[Row], peers: Sequence[str] = PEERS) -> list[str]:
    """How many times as fast offcore's arms are as each peer: TTFT, tokens/s; and the most."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if "ttft_ms" in row and row["hit"] not in ("-", "swap"):
            place = tuple(row[name] for name in ("model", "prompt", "batch", "hit"))
            cases.setdefault(place, {})[row["arm"]] = row
    lines, most = [], dict.fromkeys(peers, (0.0, 0.0))
    for place, arms in cases.items():
        own = [arm for arm in OWN if arm in arms]
        cells = []
        for peer in (one for one in peers if one in arms and own):
            for arm in own:
                ttft = arms[peer]["ttft_ms"] / arms[arm]["ttft_ms"]
                rate = arms[arm]["tokens_s"] / arms[peer]["tokens_s"]
                cells.append(f"{arm}/{peer} {ttft:.2f} {rate:.2f}")
                most[peer] = (max(most[peer][0], ttft), max(most[peer][1], rate))
        if cells:
            lines.append(f"{place[0]} {place[1]} x {place[2]}, {place[3]} %: " + ", ".join(cells))
    if lines:
        told = [f"{peer} {a:.2f} {b:.2f}" for peer, (a, b) in most.items() if a]
        lines.append("at most: " + ", ".join(told))
        lines.insert(0, "times as fast, TTFT and tokens/s:")
    return lines


def table_of(rows: list[Row], known: Sequence[str] = ARMS, peers: Sequence[str] = PEERS) -> str:
    """A line for each length, batch and hit rate, a column for each arm; then decodes, errors."""
    served = [row for row in rows if row["hit"] != "beside"]
    arms = [arm for arm in known if any(row["arm"] == arm for row in served)]
    lines = []
    if served:
        lines.append("TTFT in ms (median of requests), tokens/s; same: share of equal requests")
        head = "".join(f"{arm:>17}" for arm in arms)
        lines.append(f"model    prompt batch  hit {head}  same")
    places = ((r["model"], r["prompt"], r["batch"], r["hit"]) for r in served if r["hit"] != "-")
    lines += [line_of(place, served, arms) for place in dict.fromkeys(places)]
    lines += speedups(served, peers)
    for row in rows:
        if row["hit"] == "beside" and "error" not in row:
            lines.append(
                f"{row['model']:<8} decode {row['alone_ms']:7.3f} ms alone, beside loads by "
                f"{row['arm']:<8} {row['beside_ms']:7.3f} ms ({row['slowdown']:.3f}x), "
                f"{row['loads_gb_s']:.1f} GB/s"
            )
    lines += [f"failed: {json.dumps(row)}" for row in rows if "error" in row]
    return "\n".join(lines)
