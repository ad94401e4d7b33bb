"""What a section of `offcore gpu bench` has found, in rows that are kept as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from offcore.tools import tables

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB)  # of a ping-pong
MESSAGES = (KIB, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LIMIT_S = 5.0  # of a kernel's wait


class Rows:
    """A section's rows, in a file from which they are read when it has ended, however it ended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.failures: list[str] = []

    def add(self, what: str, engine: str, nbytes: int, value: float, unit: str) -> None:
        row = {"what": what, "engine": engine, "bytes": nbytes, "value": value, "unit": unit}
        self._write(row)

    def note(self, text: str) -> None:
        self._write({"note": text})

    def _write(self, row: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]], title: str) -> Table:
    made = tables.titled(title, ("what", "engine"), ("bytes", "value"))
    made.add_column("unit")
    for row in rows:
        cells = row["what"], row["engine"], f"{row['bytes']:,}", f"{row['value']:,.2f}"
        made.add_row(*cells, row["unit"])
    return made
