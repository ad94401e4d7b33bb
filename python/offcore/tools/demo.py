"""`make demo`: the paper's machine simulated, then real collectives between two processes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

import offcore
from offcore.errors import error
from offcore.sizes import format_bytes, parse_sizes
from offcore.tools import plot, report
from offcore.tools.bench import collectives
from offcore.tools.bench.baselines import absence
from offcore.tools.papers import reproduce
from offcore.tools.papers.findings import Finding
from offcore.tools.papers.latte import calibrated, sweep
from offcore.tools.papers.latte.rows import findings
from offcore.tools.report import JsonLines, Row, Skip, Stamp

OPS = ("all_gather", "all_to_all")
MACHINE = "mi300x-8"
MACHINE_RANKS = 8
SIM_SIZES = "1K:4G"
HOST_SIZES = "1K:64M:4"
HOST_RANKS = 2
LARGE_BYTES = 1 << 20
_BUSY_FACTOR = 1.5  # times the cores: the build before a first demo alone does not count
NOT_MEASURED = "a model's times: no GPU was measured"


def run(folder: Path, host_sizes: list[int], lines: JsonLines, console: Console) -> None:
    """Writes its plots, where matplotlib is here, into `folder`. Raises where a byte was wrong."""
    stamp = Stamp()
    drawing = _can_draw(console)
    baselines = _baselines(console)
    start_s = time.monotonic()
    simulated: list[Row] = []
    for op in OPS:
        # The paper's set-ups: seven copies a GPU, and a series of swaps (sections 4.1 and 4.3).
        requests = [_simulation(op, list(collectives.VARIANTS), in_place=op == "all_gather")]
        if op == "all_to_all":
            requests.append(_simulation(op, ["swap", "prelaunch_swap"], in_place=True))
        label = f"{op} on simulated {MACHINE}"
        simulated += _measure(requests, label, lines, stamp, console, report.matrix)
    console.print(reproduce.table(_claims()))
    took_s = time.monotonic() - start_s

    real: list[Row] = []
    busy = _busy()
    for op in OPS:
        request = collectives.Request(
            op=op,
            backend="host",
            machine=None,
            ranks=HOST_RANKS,
            sizes=host_sizes,
            variants=["auto"],
            in_place=op == "all_gather",
            baselines=baselines,
        )
        label = f"{op} between {HOST_RANKS} processes"
        real += _measure([request], label, lines, stamp, console, report.table)

    plots = {folder / f"{MACHINE}.png": (simulated, "speedup"), folder / "host.png": (real, "time")}
    plots = plots if drawing else {}
    for path, (rows, metric) in plots.items():
        plot.plot_rows(rows, path, metric)
    _say(console, f"{MACHINE_RANKS} x MI300X, simulated in {took_s:.0f} s ({NOT_MEASURED})")
    for op in OPS:
        _say(console, *_best(op, [row for row in simulated if row.op == op]))
    _say(console, f"\nthis machine, {HOST_RANKS} processes, real time")
    for op in OPS:
        _say(console, f"  {op}  " + _beside_baselines([row for row in real if row.op == op]))
    if busy:
        _say(console, f"  {busy}")
    if plots:
        _say(console, "", f"plots: {', '.join(map(str, plots))}")
    _conclude(simulated + real, console)


def _claims() -> list[Finding]:
    """DMA-Latte's, about collectives. RCCL's times in them are a curve's."""
    model = calibrated.load(MACHINE)
    return findings(sweep.simulated(model.machine, model.rccl), sweep.programs(model.machine))


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _best(op: str, rows: list[Row]) -> list[str]:
    """Which variant is best where, with and without the one that is not the paper's."""
    papers = [row for row in rows if "fan" not in row.name]
    lines = [f"  {op}  best: " + ", ".join(report.best_ranges(rows))]
    if (ranges := report.best_ranges(papers)) != report.best_ranges(rows):
        lines.append(f"  {'':{len(op)}}  among the paper's variants: " + ", ".join(ranges))
    return lines


def _beside_baselines(rows: list[Row]) -> str:
    """Geometric means of the ratios to the baselines, over the sizes where bandwidth counts."""
    times = {(row.impl, row.bytes): row.time_us for row in rows}
    small, large = min(row.bytes for row in rows), [r.bytes for r in rows if r.bytes >= LARGE_BYTES]
    parts = [f"{report.format_us(times['offcore', small])} us at {format_bytes(small)}"]
    for impl, text in (("gloo", "{:.1f} x as fast as gloo"), ("memcpy", "{:.0%} of plain memcpy")):
        ratios = [times[impl, n] / times["offcore", n] for n in large if (impl, n) in times]
        # Out of place, offcore also copies each rank's own part, which memcpy leaves out.
        if ratios and (rows[0].in_place or impl != "memcpy"):
            parts.append(text.format(statistics.geometric_mean(ratios)))
    where = f" ({format_bytes(LARGE_BYTES)} and above)" if len(parts) > 1 else ""
    return "; ".join(parts) + where


def _simulation(op: str, variants: list[str], in_place: bool) -> collectives.Request:
    return collectives.Request(
        op=op,
        backend="sim",
        machine=MACHINE,
        ranks=MACHINE_RANKS,
        sizes=parse_sizes(SIM_SIZES),
        variants=variants,
        in_place=in_place,
        protocols=["promise"],
    )


def _measure(
    requests: list[collectives.Request],
    label: str,
    lines: JsonLines,
    stamp: Stamp,
    console: Console,
    form: Callable[[list[Row]], Table],
) -> list[Row]:
    rows: list[Row] = []
    skips: list[Skip] = []
    for request in requests:
        measure = partial(collectives.run, request)
        report.collect(measure, request.steps, label, lines, stamp, rows, skips)
    had = {row.name for row in rows}
    skips = [skip for skip in skips if skip.name not in had]
    report.print_rows(rows, skips, console, form)
    console.print()
    return rows


def _can_draw(console: Console) -> bool:
    """Whether there will be plots; says what they lack."""
    try:
        plot.pyplot()
    except offcore.Error as failure:
        _say(console, f"without plots: {failure}")
        return False
    return True


def _baselines(console: Console) -> list[str]:
    """What to measure beside; says what is absent."""
    if why := absence("gloo"):
        _say(console, f"without gloo: {why}")
        return ["memcpy"]
    return ["gloo", "memcpy"]


def _busy() -> str:
    """Said where others use this machine so much that real times tell little."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= _BUSY_FACTOR * cores:
        return ""
    return f"these times are not the machine's best: it was busy (load {load:.1f}, {cores} cores)"


def _conclude(rows: list[Row], console: Console) -> None:
    wrong = sum(row.wrong or 0 for row in rows)
    if wrong:
        raise error("driver", f"{wrong} bytes are wrong: this is a bug, please report it")
    checked = sum(row.wrong is not None for row in rows)
    _say(console, f"{len(rows)} rows, {checked} of them checked byte by byte: no byte is wrong")
