"""What the modules that make tables of documents share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Record = dict[str, Any]


def table(head: Sequence[str], body: Iterator[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def kib(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB"
