"""`offcore report --html`: one page about a machine and what was measured, to send to others.

The page is a single file: tables are HTML, plots are part of it, nothing is loaded from elsewhere.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

import offcore
from offcore import _core
from offcore.errors import error
from offcore.tools import doctor, plot, report
from offcore.tools.kv import bench as kv_bench
from offcore.tools.kv import plot as kv_plot
from offcore.tools.papers.latte.calibrated import caution
from offcore.tools.records import read_records

Record = dict[str, Any]
_ROWS_OPEN = 40

_STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; max-width: 62em; margin: 2em auto; padding: 0 1em; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2em; border-top: 1px solid #ccc; padding-top: .8em; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left; }
.rows td { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
.mark { background: #fff3cd; padding: .5em .8em; border-left: 4px solid #e0a800; }
"""


def check(out: Path) -> None:
    """Raises invalid where a page could not be written: before anything has been measured."""
    if not out.absolute().parent.is_dir():
        raise error("invalid", f"cannot write '{out}': its folder does not exist")


def write(out: Path, files: Sequence[Path], measured: Sequence[report.Row]) -> int:
    """Writes the page of these files of rows, and of rows just measured; how many rows it shows.

    Raises invalid where a file has no rows, or the page cannot be written.
    """
    parts: list[str] = []
    shown = 0
    for file in files:
        records = read_records(file)
        if not records:
            raise error("invalid", f"'{file}' has no rows")
        parts.append(_heading(file.name) + _origin(records) + "".join(_groups(records)))
        shown += len(records)
    if measured:
        parts.append(_heading("Measured for this page") + _collectives(measured))
        shown += len(measured)
    text = _page(parts)
    try:
        out.write_text(text, "utf-8")
    except OSError as failure:
        raise error("invalid", f"cannot write '{out}': {failure.strerror}") from None
    return shown


def _page(parts: Iterable[str]) -> str:
    stamp = report.Stamp()
    body = "".join(parts)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Offcore report</title><style>{_STYLE}</style></head><body>"
        f"<h1>Offcore report</h1><p>Offcore {offcore.__version__} ({html.escape(stamp.commit)}), "
        f"{stamp.date[:10]}. Page made on the machine below; each section names where its rows "
        f"were measured.</p>{_machine(stamp.versions)}{body}</body></html>\n"
    )


def _machine(versions: dict[str, str]) -> str:
    found = doctor.examine()
    rows = [(name, value) for name, value in versions.items()]
    rows += [("cores", str(found["cores"])), ("memory", f"{found['memory_bytes'] / 2**30:.0f} GiB")]
    rows += [
        (f"backend {one['name']}", "available" if one["available"] else one["reason"])
        for one in found["backends"]
    ]
    return _heading("This machine") + _html_table(("", ""), rows)


def _origin(records: Sequence[Record]) -> str:
    """Where, when and of what version the rows are."""
    told: list[tuple[str, str]] = []
    for name in ("commit", "date", "machine", "backend"):
        values = sorted({str(one[name])[:19] for one in records if one.get(name)})
        if values:
            told.append((name, values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"))
    versions: dict[str, str] = next((one["versions"] for one in records if one.get("versions")), {})
    return _html_table(("", ""), [*told, *versions.items()])


def _groups(records: Sequence[Record]) -> Iterator[str]:
    collectives = [one for one in records if _is_collective(one)]
    kv = [one for one in records if "page_bytes" in one and "absent" not in one and "gbps" in one]
    if collectives:
        yield _collectives(report.rows_of(collectives))
    if kv:
        yield "<h3>KV blocks</h3>" + _drawn(lambda: kv_plot.rows_figure(kv))
        yield _rich(kv_bench.table(kv))
    rest = [one for one in records if one not in collectives and one not in kv]
    if rest:
        yield _plain(rest)


def _is_collective(record: Record) -> bool:
    return {"impl", "op", "variant", "time_us", "protocol", "in_place"} <= record.keys()


def _collectives(rows: Sequence[report.Row]) -> str:
    """A table and a plot for each operation on each machine."""
    cases: dict[tuple[Any, ...], list[report.Row]] = {}
    for row in rows:
        cases.setdefault((row.op, row.machine, row.backend, row.ranks, row.timing), []).append(row)
    parts = []
    for (_, machine, backend, *_rest), of_case in cases.items():
        mark = caution(machine) if backend == "sim" else ""
        mark = mark or (f"{machine}, simulated" if backend == "sim" else "")
        parts.append(f"<p class='mark'>{html.escape(mark)}</p>" if mark else "")
        alone = ", one call at a time" if of_case[0].timing == "call" else ""
        parts.append(f"<h3>{html.escape(report.title_of(of_case) + alone)}</h3>")
        if len({row.bytes for row in of_case if row.bytes}) > 1:
            parts.append(_drawn(partial(plot.rows_figure, of_case)))
        parts.append(_rich(report.table(sorted(of_case, key=lambda row: row.bytes))))
        notes = report.footnotes(of_case, [])
        parts.append("".join(f"<p>{html.escape(note)}</p>" for note in notes))
    return "".join(parts)


def _plain(records: Sequence[Record]) -> str:
    """Rows of other kinds: their single values, as they stand."""
    by_keys: dict[tuple[str, ...], list[Record]] = {}
    for one in records:
        keys = [key for key, value in one.items() if not isinstance(value, dict | list)]
        keys = [key for key in keys if key not in ("run", "commit", "date")]
        by_keys.setdefault(tuple(keys), []).append(one)
    return "".join(
        _folded(
            _html_table(keys, [[_cell(one[key]) for key in keys] for one in of_keys], "rows"),
            len(of_keys),
        )
        for keys, of_keys in by_keys.items()
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _drawn(made: Callable[[], Any]) -> str:
    """A figure as part of the page, or why there is none."""
    try:
        figure = made()
    except _core.Error as failure:
        return f"<p>No plot: {html.escape(str(failure))}.</p>"
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    plot.pyplot().close(figure)
    text = buffer.getvalue()
    return f"<p>{text[text.index('<svg') :]}</p>"


def _heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def _rich(table: Table) -> str:
    heads = [str(column.header) for column in table.columns]
    cells = [[Text.from_markup(str(cell)).plain for cell in one.cells] for one in table.columns]
    return _folded(_html_table(heads, list(zip(*cells, strict=True)), "rows"), table.row_count)


def _folded(table: str, rows: int) -> str:
    """A long table, behind a click."""
    opened = " open" if rows <= _ROWS_OPEN else ""
    return f"<details{opened}><summary>{rows} rows</summary>{table}</details>"


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str = "facts") -> str:
    numbers = [
        all(cell[:1].isdigit() or cell == "-" for cell in column)
        for column in zip(*rows, strict=True)
    ]
    parts = [f"<div class='wide'><table class='{name}'>"]
    if any(heads):
        parts.append("<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>")
    for row in rows:
        cells = (
            f"<td{' class=number' if number else ''}>{html.escape(cell)}</td>"
            for cell, number in zip(row, numbers, strict=True)
        )
        parts.append("<tr>" + "".join(cells) + "</tr>")
    return "".join(parts) + "</table></div>"
