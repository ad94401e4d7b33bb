"""`offcore report`: a page about this machine and what was measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from offcore.tools import page, report
from offcore.tools.bench import collectives
from offcore.tools.cli.options import JsonOption
from offcore.tools.cli.request import request_of
from offcore.tools.report import JsonLines, Row, Stamp

OPS = ("all_gather", "all_to_all")
SIZES = "4K:4M:4"


def report_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE...]", help="Rows (--json). Default: short runs on this machine."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--html", metavar="FILE", help="The page, a single file.")
    ] = Path("report.html"),
    json: JsonOption = None,
) -> None:
    """Write a page to share: this machine, versions, what ran, tables and plots.

    Without files, measures all-gathers and all-to-alls between two processes on this machine.

    \b
    offcore report --html report.html
    offcore report rows.jsonl --html report.html
    """
    page.check(out)
    rows = [] if files else _measured_here()
    shown = page.write(out, files or [], rows)
    with JsonLines(json) as lines:
        lines.write({"page": str(out), "rows": shown})
    typer.echo(f"page: {out}, {shown} rows", err=json == "-")


def _measured_here() -> list[Row]:
    rows: list[Row] = []
    for op in OPS:
        request = request_of(
            op, "host", None, 2, SIZES, "all", "auto", None, "chain",
            batches=5, calls=20, warmup=collectives.WARMUP_CALLS, timeout_s=30.0,
        )  # fmt: skip
        measure = partial(collectives.run, request)
        report.collect(measure, request.steps, op, JsonLines(None), Stamp(), rows, [])
    return rows
