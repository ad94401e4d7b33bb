"""Offcore beside NCCL as a table of text: of documents, and at the end of a measurement.

Times are microseconds a call, enqueued ahead. Where rows of several variants are there, those that
`auto` chose count; where it was not asked, the fastest. Copies within a GPU are by spare engines,
the default, where a size has such rows; those by one engine then have columns of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offcore.sizes import format_bytes, parse_sizes
from offcore.tools.records import read_records
from offcore.tools.report import format_us

Record = dict[str, Any]


def _own(asked: str, signals: str) -> Record:
    return {"impl": "offcore", "asked": asked, "signals": signals}


# Head, and what a row of that column holds. `co`: signals="copy_order"; `engine`, `sm`: own_copy.
COLUMNS: tuple[tuple[str, Record], ...] = (
    ("view", _own("view", "fenced")),
    ("promised", _own("promise", "fenced")),
    ("safe", _own("auto", "fenced")),
    ("view,co", _own("view", "copy_order")),
    ("promised,co", _own("promise", "copy_order")),
    ("safe,co", _own("auto", "copy_order")),
    ("promised,engine", _own("promise", "fenced") | {"own_copy": "engine"}),
    ("safe,engine", _own("auto", "fenced") | {"own_copy": "engine"}),
    ("promised,sm", _own("promise", "fenced") | {"own_copy": "sm"}),
    ("safe,sm", _own("auto", "fenced") | {"own_copy": "sm"}),
    ("nccl", {"impl": "nccl", "mode": "graph"}),
    ("nccl,eager", {"impl": "nccl", "mode": "eager"}),
    ("nccl-ce", {"impl": "nccl-ce", "mode": "graph"}),
    ("nccl-ce,eager", {"impl": "nccl-ce", "mode": "eager"}),
)


def _value(record: Record, name: str) -> Any:
    """A field; rows of the first measurements had no field for what was asked."""
    return record.get("protocol") if name == "asked" and "asked" not in record else record.get(name)


def _copied_by(rows: Sequence[Record], own_copy: str | None) -> list[Record]:
    """By SMs (`sm`), by one engine where spare engines help by default (`engine`), or by default. A
    variant that leaves spare engines idle has rows of one engine by default, too."""

    def kind(row: Record) -> tuple[Any, ...]:
        return row["bytes"], row.get("variant") if row.get("named") else None

    helped = {kind(one) for one in rows if one.get("own_copy") == "engines"}

    def copied(row: Record) -> str | None:
        by = row.get("own_copy")
        return by if by == "sm" or (by == "engine" and kind(row) in helped) else None

    return [one for one in rows if copied(one) == own_copy]


def times_of(
    records: Sequence[Record], op: str, ranks: int, in_place: bool, timing: str = "chain"
) -> dict[str, dict[int, float]]:
    """Microseconds by column and size; columns without a row are left out."""
    place: Record = {"op": op, "ranks": ranks, "in_place": in_place}
    found: dict[str, dict[int, float]] = {}
    for head, wanted in COLUMNS:
        alike = place | wanted
        own_copy = alike.pop("own_copy", None)
        rows = [
            one
            for one in records
            if one.get("timing", "chain") == timing
            and not one.get("armed_ahead")
            and all(_value(one, name) == value for name, value in alike.items())
        ]
        rows = _copied_by(rows, own_copy)
        for size in sorted({one["bytes"] for one in rows}):
            of_size = [one for one in rows if one["bytes"] == size]
            chosen = [one for one in of_size if one.get("named") is False] or of_size
            found.setdefault(head, {})[size] = min(one["time_us"] for one in chosen)
    return found


def lines(
    records: Sequence[Record],
    op: str,
    ranks: int,
    in_place: bool,
    timing: str = "chain",
    sizes: Sequence[int] = (),
    columns: Sequence[str] = (),
) -> list[str]:
    """The table, a line each: a head and a row a size. sizes, columns: only these; none: all."""
    times = times_of(records, op, ranks, in_place, timing)
    times = {head: column for head, column in times.items() if not columns or head in columns}
    known = sorted({size for column in times.values() for size in column})
    width = {head: max(8, len(head) + 2) for head in times}
    table = ["     size" + "".join(f"{head:>{width[head]}}" for head in times)]
    for size in [size for size in known if not sizes or size in sizes]:
        cells = [
            f"{format_us(column[size]) if size in column else '-':>{width[head]}}"
            for head, column in times.items()
        ]
        table.append(f"{format_bytes(size):>9}" + "".join(cells))
    return table


# <!-- compare FILE OPERATION RANKS in_place|out_of_place SIZES [COLUMN;...] -->, and the table that
# follows it.
_ANNOUNCED = re.compile(
    r"(?P<head><!-- compare (?P<file>\S+) (?P<op>\w+) (?P<ranks>\d+) "
    r"(?P<place>in_place|out_of_place) (?P<sizes>\S+)(?:\s(?P<columns>\S+))? -->\n\n)"
    r"(?: {5,}.*\n)*"
)


def filled(text: str, folder: Path) -> str:
    """A document with each table that a comment announces made from the rows of its file in that
    folder. Raises invalid for a file that is not there or holds other things."""

    def table(found: re.Match[str]) -> str:
        made = lines(
            read_records(folder / found["file"]),
            found["op"],
            int(found["ranks"]),
            found["place"] == "in_place",
            sizes=parse_sizes(found["sizes"]),
            columns=found["columns"].split(";") if found["columns"] else (),
        )
        return found["head"] + "".join(line + "\n" for line in made)

    return _ANNOUNCED.sub(table, text)
