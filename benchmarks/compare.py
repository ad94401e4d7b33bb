"""Compares two files of benchmark rows: `python benchmarks/compare.py OLD.jsonl NEW.jsonl`.

Rows match when they ran the same thing in the same way. Where a file holds several rows of the
same kind (runs appended to each other), the fastest counts. Copies within a GPU by SMs are a kind
of their own; of those by copy engines, where a file has both, spare engines (`engines`, the
default) count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

KEY = ("impl", "op", "backend", "machine", "ranks", "bytes", "in_place", "variant", "protocol")
# What rows of older versions do not tell: they ran eagerly, a chain, and so on.
MORE = {"mode": "eager", "timing": "chain", "asked": None, "named": None, "signals": None}


def read_rows(path: Path) -> dict[tuple[Any, ...], float]:
    """The least time of each kind of row. Raises SystemExit for a file that holds no rows."""
    best: dict[tuple[Any, ...], tuple[bool, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, time_us = tuple(row[name] for name in KEY), float(row["time_us"])
            key += tuple(row.get(name, value) for name, value in MORE.items())
            key += ("sm" if row.get("own_copy") == "sm" else None,)
        except (ValueError, KeyError, TypeError) as failure:
            raise SystemExit(f"{path}, line {number}: no benchmark row: {failure!r}") from None
        ranked = row.get("own_copy") != "engines", time_us
        best[key] = min(ranked, best.get(key, ranked))
    return {key: time_us for key, (_, time_us) in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.10, help="slower by this is a failure")
    options = parser.parse_args()
    old, new = read_rows(options.old), read_rows(options.new)
    common = [key for key in old if key in new]
    slower = 0
    heads = ("impl", "op", "bytes", "variant", "by", "old us", "new us", "ratio")
    print("{:8} {:12} {:>12} {:16} {:3} {:>12} {:>12} {:>7}".format(*heads))
    for key in common:
        named = dict(zip((*KEY, *MORE, "own_copy"), key, strict=True))
        ratio = new[key] / old[key] if old[key] else 1.0
        worse = ratio > 1 + options.threshold
        slower += worse
        print(
            f"{named['impl']:8} {named['op']:12} {named['bytes']:12} {named['variant'] or '-':16} "
            f"{named['own_copy'] or '-':3} {old[key]:12.2f} {new[key]:12.2f} {ratio:7.3f}"
            f"{'  slower' if worse else ''}"
        )
    print(
        f"{len(common)} rows in both, {slower} slower by more than {options.threshold:.0%}, "
        f"{len(old) - len(common)} only in the old file, {len(new) - len(common)} only in the new"
    )
    return 1 if slower or not common else 0


if __name__ == "__main__":
    sys.exit(main())
