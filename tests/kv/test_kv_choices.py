"""What `auto` packs, against what was measured: benchmarks/results/cuda-kv-layouts-h100.jsonl."""

import json
from pathlib import Path
from typing import Any

from offcore import machines

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cuda-kv-layouts-h100.jsonl"
NEAR = 0.95  # of the faster one: medians of nine turns


def cases() -> dict[tuple[Any, ...], dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in RESULTS.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row.get("step") not in ("alone", "segments") or row.get("direction") == "both":
            continue
        names = ("step", "layout", "page_bytes", "layers", "blocks", "direction")
        found.setdefault(tuple(row[name] for name in names), {})[row["impl"]] = row
    return found


def test_auto_takes_what_was_measured_to_be_faster() -> None:
    """Where copies go page by page, and where they take several pages; and that is what ran."""
    pages = machines.load("h100-2").pages
    seen = set()
    for (step, layout, page, layers, *_), ways in cases().items():
        row = page * layers if layout == "contiguous" else page
        row //= 2 if layout.startswith("kv") else 1
        folded = layout == "layers" or step == "segments"
        packs = row < (pages.pack_strided_below if folded else pages.pack_plain_below)
        assert (ways["offcore"]["path"] == "packed") == packs, (layout, page)
        fastest = max(ways["packed"]["gbps"], ways["zero-sm"]["gbps"])
        assert ways["packed" if packs else "zero-sm"]["gbps"] > NEAR * fastest, (layout, page)
        seen.add((folded, packs))
    assert len(seen) == 4
