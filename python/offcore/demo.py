"""`make demo`: the paper's machine simulated, then real collectives between two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

import offcore
from offcore import bench, plot, report
from offcore.baselines import check_baseline
from offcore.errors import error
from offcore.report import JsonLines, Row, Skip, Stamp
from offcore.sizes import parse_sizes

OPS = ("all_gather", "all_to_all")
MACHINE = "mi300x-8"
MACHINE_RANKS = 8
SIM_SIZES = "1K:4G"
HOST_SIZES = "1K:64M:4"
HOST_RANKS = 2


def run(folder: Path, host_sizes: list[int], lines: JsonLines, console: Console) -> None:
    """Writes its plots into `folder`. Raises where a byte was wrong."""
    stamp = Stamp()
    start_s = time.monotonic()
    simulated: list[Row] = []
    for op in OPS:
        requests = [_simulation(op, list(bench.VARIANTS), in_place=False)]
        if op == "all_to_all":
            # Only in place can it be a series of swaps (section 4.3).
            requests.append(_simulation(op, ["swap", "prelaunch_swap"], in_place=True))
        label = f"{op} on simulated {MACHINE}"
        simulated += _measure(requests, label, lines, stamp, console, report.matrix)
    console.print(f"simulated in {time.monotonic() - start_s:.1f} s\n")

    real: list[Row] = []
    baselines = _baselines(console)
    for op in OPS:
        request = bench.Request(
            op=op,
            backend="host",
            machine=None,
            ranks=HOST_RANKS,
            sizes=host_sizes,
            variants=["auto"],
            baselines=baselines,
        )
        label = f"{op} between {HOST_RANKS} processes"
        real += _measure([request], label, lines, stamp, console, report.table)

    _plot(simulated, folder / f"{MACHINE}.png", "time", console)
    _plot(real, folder / "host.png", "time", console)
    _conclude(simulated + real, console)


def _simulation(op: str, variants: list[str], in_place: bool) -> bench.Request:
    return bench.Request(
        op=op,
        backend="sim",
        machine=MACHINE,
        ranks=MACHINE_RANKS,
        sizes=parse_sizes(SIM_SIZES),
        variants=variants,
        in_place=in_place,
        protocol="promise",
    )


def _measure(
    requests: list[bench.Request],
    label: str,
    lines: JsonLines,
    stamp: Stamp,
    console: Console,
    form: Callable[[list[Row]], Table],
) -> list[Row]:
    rows: list[Row] = []
    skips: list[Skip] = []
    for request in requests:
        measure = partial(bench.run, request)
        report.collect(measure, request.steps, label, lines, stamp, rows, skips)
    had = {row.name for row in rows}
    skips = [skip for skip in skips if skip.name not in had]
    report.print_rows(rows, skips, console, form)
    console.print()
    return rows


def _baselines(console: Console) -> list[str]:
    try:
        check_baseline("gloo")
    except offcore.Error as failure:
        console.print(f"shown without gloo: {failure}\n", highlight=False, markup=False)
        return ["memcpy"]
    return ["gloo", "memcpy"]


def _plot(rows: list[Row], path: Path, metric: str, console: Console) -> None:
    plot.plot_rows(rows, path, metric)
    console.print(f"plot: {path}", highlight=False)


def _conclude(rows: list[Row], console: Console) -> None:
    wrong = sum(row.wrong or 0 for row in rows)
    if wrong:
        raise error("driver", f"{wrong} bytes are wrong: this is a bug, please report it")
    checked = sum(row.wrong is not None for row in rows)
    console.print(f"{len(rows)} rows, {checked} of them checked byte by byte: no byte is wrong")
