"""Measured choices: `offcore tune` times every variant and keeps the fastest of each size.

A table (machines/tuned/NAME.json, see machines.py) has a row for each measured size; its range ends
half way, by ratio, to the next ones. What lies within the noise of the fastest counts as fast as
it, and the one with fewer commands is taken. All variants are timed in the way that is always safe
(protocol auto), through slots (eager), as buffers outside windows go, and without an entry round
(promise), and enqueued ahead, because that is what a table is asked for.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from offcore import folders, machines
from offcore.errors import error
from offcore.sizes import format_bytes
from offcore.tools.bench import collectives
from offcore.tools.records import check_records, read_records
from offcore.tools.report import JsonLines, Row, Stamp, collect, format_us, to_json

# Those with a choice: reduce_scatter and reduce have one variant.
OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather", "all_reduce")
SIZES = "1K:64M:4"
GPU_SIZES = "1K:64K:4,128K:4M,16M:1G:4"  # every power of two where variants change places
PROTOCOLS = "auto,eager,promise"

_BYTES_MAX = 2**63 - 1
_FORMS = {  # of the keys of a row that are looked at
    **dict.fromkeys(("impl", "op", "machine", "timing", "date", "commit"), "str"),
    **dict.fromkeys(("ranks", "bytes"), "int"),
    **dict.fromkeys(("time_us", "time_us_min"), "float"),
    **dict.fromkeys(("variant", "protocol", "asked", "signals"), "str | None"),
    **{"in_place": "bool", "staged": "bool | None", "commands": "int | None"},
}
_OPTIONAL = ("asked", "signals", "staged", "timing")
# Nearer than this to the fastest is as fast: at least this share, at most that one.
_NOISE_MIN = 0.02
_NOISE_MAX = 0.10


def requests(template: collectives.Request, ops: Sequence[str]) -> list[collectives.Request]:
    """What to measure: each operation out of place, and in place where it has such a form. Bytes
    are checked where that does not take longer than measuring."""
    places = [
        (op, in_place)
        for op in ops
        for in_place in (False, True)
        if (op, in_place) not in (("scatter", True), ("gather", True), ("broadcast", False))
    ]
    limit = collectives.PHANTOM_ABOVE_BYTES
    parts = [
        replace(template, sizes=sizes, check=check)
        for check in (True, False)
        if (sizes := [size for size in template.sizes if (size <= limit) == check])
    ]
    asked = []
    for op, place in places:
        for part in parts:
            part = replace(part, op=op, in_place=place)
            if op == "all_reduce":  # a promise changes nothing
                variants = collectives.variants_known(op)
                part = replace(part, variants=variants, protocols=["auto", "eager"])
            asked.append(part)
    return asked


def measure(asked: Sequence[collectives.Request], json_to: str | None) -> list[dict[str, Any]]:
    """The rows, as JSON would have them. Raises verify for wrong bytes."""
    rows: list[Row] = []
    stamp = Stamp()
    steps = sum(request.steps for request in asked)
    with JsonLines(json_to) as lines:
        run = partial(collectives.run_processes, asked)
        collect(run, steps, "tune", lines, stamp, rows, [], said=True)
    if wrong := next((row for row in rows if row.wrong), None):
        raise error("verify", f"{wrong.variant} at {wrong.bytes} bytes: {wrong.wrong} wrong bytes")
    return [to_json(row, stamp) for row in rows]


def read(path: Path) -> list[dict[str, Any]]:
    """Recorded rows. Raises invalid."""
    records = read_records(path)
    check_records(records, _FORMS, _OPTIONAL)
    return records


def noise(record: dict[str, Any]) -> float:
    """Microseconds by which a time may be off: from the least batch to the median, in bounds."""
    time_us = float(record["time_us"])
    spread = time_us - float(record["time_us_min"])
    return min(max(spread, _NOISE_MIN * time_us), _NOISE_MAX * time_us)


def winner(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest; among those within its noise the one with the fewest commands."""
    best = min(records, key=lambda one: float(one["time_us"]))
    limit_us = best["time_us"] + noise(best)
    tied = [one for one in records if one["time_us"] <= limit_us]
    return min(tied, key=lambda one: (one.get("commands") or 0, one["time_us"]))


def _counts(record: dict[str, Any]) -> bool:
    """Whether a table may use the row: right bytes, measured in one of the ways that it knows."""
    return bool(
        record.get("impl") == "offcore"
        and record.get("variant")
        and not record.get("wrong")
        and record.get("timing", "chain") == "chain"
        and record.get("asked", record.get("protocol")) in PROTOCOLS.split(",")
    )


def _way(record: dict[str, Any]) -> tuple[bool, bool]:
    """Through slots or not, and with an entry round or not."""
    return bool(record.get("staged")), record.get("protocol") == "barrier"


def pick(records: Iterable[dict[str, Any]], prelaunch: bool = False) -> list[dict[str, Any]]:
    """The table of rows of one machine. Raises invalid where there is nothing to pick from."""
    cases: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = {}
    for one in records:
        if _counts(one) and (prelaunch or not one["variant"].startswith("prelaunch_")):
            case = (one["op"], one["ranks"], one["in_place"], *_way(one), one.get("signals"))
            cases.setdefault(case, {}).setdefault(one["bytes"], []).append(one)
    if not cases:
        raise error(
            "invalid",
            "no row to tune from: rows of offcore, protocols auto, eager or promise, are needed",
        )
    return [
        row
        for case in sorted(cases, key=lambda case: (*case[:5], str(case[5])))
        for row in _ranges({size: winner(of_size) for size, of_size in cases[case].items()})
    ]


def _ranges(winners: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    sizes = sorted(winners)
    ends = [math.isqrt(one * more) for one, more in itertools.pairwise(sizes)]
    table = []
    for size, first, last in zip(
        sizes, [0, *(end + 1 for end in ends)], [*ends, _BYTES_MAX], strict=True
    ):
        found = winners[size]
        row = {"op": found["op"], "ranks": found["ranks"], "in_place": found["in_place"]}
        row |= {"bytes_min": first, "bytes_max": last, "bytes": size}
        row |= {"variant": found["variant"], "time_us": found["time_us"]}
        staged, entry = _way(found)
        row |= {"signals": found.get("signals"), "entry": entry, "staged": staged}
        row |= {"date": found["date"], "commit": found["commit"]}
        table.append(row)
    return table


def kept(table: Sequence[dict[str, Any]], machine: str) -> list[dict[str, Any]]:
    """Rows of the table in force that this one does not replace: other operations and ranks."""
    path = machines.tables().get(machine)
    if path is None:
        return []
    measured = {(row["op"], row["ranks"]) for row in table}
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return [row for row in rows if (row["op"], row["ranks"]) not in measured]


def told(others: Sequence[dict[str, Any]]) -> str:
    return f"; kept: {len(others)} rows of other operations or ranks" if others else ""


def machine_of(records: Iterable[dict[str, Any]]) -> str:
    """The one machine that all rows name. Raises invalid."""
    names = sorted({str(one.get("machine")) for one in records if one.get("impl") == "offcore"})
    if len(names) != 1:
        raise error(
            "invalid", f"rows of one machine are needed, not of {', '.join(names) or 'none'}"
        )
    return names[0]


def write(table: Sequence[dict[str, Any]], path: Path) -> None:
    """A row a line, which reads well in a diff. Raises invalid."""
    text = "[\n" + ",\n".join("  " + json.dumps(row) for row in table) + "\n]\n"
    folders.prepare(path.parent)
    try:
        path.write_text(text, "utf-8")
    except OSError as failure:
        raise error("invalid", f"cannot write '{path}': {failure.strerror}") from None


def _place(row: dict[str, Any]) -> str:
    place = "in-place" if row["in_place"] else "out-of-place"
    return place + (", staged" if row["staged"] else "" if row["entry"] else ", promise")


def shown(table: Sequence[dict[str, Any]], machine: str) -> Table:
    result = Table(title=f"tuned for {machine}", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("operation", "place", "signals"):
        result.add_column(name)
    result.add_column("up to", justify="right")
    result.add_column("variant")
    result.add_column("us", justify="right")
    for row in table:
        result.add_row(
            row["op"],
            _place(row),
            row["signals"] or "-",
            "-" if row["bytes_max"] == _BYTES_MAX else format_bytes(row["bytes_max"]),
            row["variant"],
            f"{format_us(row['time_us'])} at {format_bytes(row['bytes'])}",
        )
    return result
