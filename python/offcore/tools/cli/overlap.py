"""`offcore overlap advise | run | characterise | calibrate | plot`: compute and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from offcore import _core, folders, machines
from offcore.errors import error
from offcore.overlap import Plan, Tables, load
from offcore.overlap.plan import STRATEGIES
from offcore.tools import plot, report
from offcore.tools.cli.options import (
    NUMBER_MAX,
    JsonOption,
    MachineOption,
    SimMachineOption,
    known_names,
    parsed,
)
from offcore.tools.overlap import (
    counters,
    engines,
    gpu_fit,
    gpu_model,
    measured,
    predict,
    summary,
    sweep,
    tabled,
    text,
)
from offcore.tools.overlap import model as models
from offcore.tools.overlap import plot as overlap_plot
from offcore.tools.overlap.cases import COMBINATIONS, OPS
from offcore.tools.overlap.measure import STRATEGIES as MEASURED
from offcore.tools.papers.conccl import fit
from offcore.tools.papers.latte.calibrated import caution
from offcore.tools.records import read_records
from offcore.tools.report import JsonLines, Stamp

PEAKS = "TFLOPS,MEMORY,NETWORK"
HEAD = "% of the ideal, errors in points of it"
PARAMETERS = "docs/measurements/model.md; errors: offcore overlap predict"

app = typer.Typer(
    help="Plan, simulate and measure the overlap of GEMMs and collectives (ConCCL).",
    no_args_is_help=True,
)


@app.command("advise")
def advise_command(
    kernels: Annotated[list[str], typer.Argument(metavar="KERNEL...", help=f"{text.FORM}.")],
    machine: SimMachineOption = models.NAME,
    allowed: Annotated[
        str, typer.Option(metavar="all|NAME,...", help=f"Any of {', '.join(STRATEGIES)}.")
    ] = "all",
    json: JsonOption = None,
) -> None:
    """Plan how to run independent kernels concurrently: strategy, order, cores, engines.

    Reads the machine's tables (overlap/MACHINE.json in a machines folder). Runs nothing.

    \b
    offcore overlap advise 8192x8192x8192 all_gather:896M
    offcore overlap advise 8192x57344x8192@63G all_to_all:4G --allowed serial,sp,rp
    """
    tables = load(machine)
    ranks = int(machines.load(tables.machine).ranks)
    wanted = [parsed(partial(text.kernel_of, ranks=ranks), one, "KERNEL") for one in kernels]
    names = None if allowed == "all" else known_names(allowed, "--allowed", list(STRATEGIES))
    plan = Plan(wanted, tables, allowed=names)
    with JsonLines(json) as lines:
        lines.write(text.plan_record(plan))
    if json != "-":
        console = report.console()
        console.print(text.plan_table(plan))
        console.print(f"tables: {tables.source}", highlight=False, soft_wrap=True)


class Backend(str, Enum):
    """Where run and characterise execute."""

    sim = "sim"
    host = "host"
    cuda = "cuda"


@app.command("run")
def run_command(
    combinations: Annotated[
        str,
        typer.Argument(
            metavar="all|NAME,...",
            help="GEMM_SIZE, such as cb1_896M; all: the 30 of ConCCL's table II.",
        ),
    ] = "all",
    machine: MachineOption = None,
    backend: Annotated[
        Backend,
        typer.Option(help="sim: simulate; cuda: measure on GPUs; host: on CPUs, smaller sizes."),
    ] = Backend.sim,
    ranks: Annotated[
        int,
        typer.Option(min=0, max=64, metavar="N", help="Ranks of a measurement; 0: all GPUs, or 2."),
    ] = 0,
    ops: Annotated[
        str, typer.Option(metavar="NAME,...", help="Measured; also reduce_scatter, all_reduce.")
    ] = ",".join(OPS),
    strategies: Annotated[
        str, typer.Option(metavar="all|NAME,...", help="Measured strategies.")
    ] = "all",
    limit: Annotated[
        int, typer.Option(min=1, max=86400, metavar="SECONDS", help="Time limit of a measurement.")
    ] = 600,
    json: JsonOption = None,
) -> None:
    """Run GEMMs concurrent with all-gathers and all-to-alls under every strategy.

    Simulates the machine (default mi300x-8), or with --backend measures this one: each kernel
    alone, then each strategy with the most promising splits. On cuda: torch and two GPUs.

    \b
    offcore overlap run --json rows.jsonl
    offcore overlap run cb1_896M,mb1_4G
    offcore overlap run cb1_896M --backend host --strategies serial,base,ConCCL
    """
    if backend is Backend.sim:
        if (ranks, ops, strategies) != (0, ",".join(OPS), "all"):
            raise error("invalid", "--ranks, --ops and --strategies need --backend cuda or host")
        wanted = parsed(sweep.combinations, combinations, "all|NAME,...")
        _simulated(wanted, machine or models.NAME, json)
        return
    if machine:
        raise error("invalid", "--machine is simulated: no --backend")
    tags = list(COMBINATIONS) if combinations == "all" else combinations.split(",")
    for tag in tags:
        parsed(measured.split_tag, tag, "all|NAME,...")
    names: Sequence[str] = MEASURED
    if strategies != "all":
        names = known_names(strategies, "--strategies", list(MEASURED))
    asked = known_names(ops, "--ops", [*OPS, *measured.REDUCING])
    request = measured.Request(
        backend.value,
        ranks or (_core.gpus() if backend is Backend.cuda else 2),
        pairs=[(tag, op) for op in asked for tag in tags],
        strategies=names,
        limit_s=limit,
    )
    _measured(request, json)


def _simulated(wanted: Sequence[sweep.Combination], machine: str, json: str | None) -> None:
    model = gpu_model.any_of(machine)
    stamp = asdict(Stamp())
    found = [sweep.measure(model, one) for one in wanted]
    with JsonLines(json) as lines:
        for one in found:
            for row in one.rows(model):
                lines.write(row | stamp)
    console = report.console(stderr=json == "-")
    console.print(text.outcome_table(found, machine))
    told = caution(machine) or f"{machine}: parameters are partly fitted: {PARAMETERS}"
    console.print(told, highlight=False, soft_wrap=True)


def _measured(request: measured.Request, json: str | None) -> None:
    with JsonLines(json) as lines:
        rows = _collected(measured.rows(request), lines)
    if not any("strategy" in row for row in rows):
        raise error("unsupported", "nothing was measured: the reasons are above")
    machine = next((row["machine"] for row in rows if "machine" in row), request.backend)
    report.console(stderr=json == "-").print(text.measured_table(rows, machine))


def _collected(rows: Iterable[dict[str, Any]], lines: JsonLines) -> list[dict[str, Any]]:
    """Writes each as it comes, and tells on stderr what was skipped or failed."""
    stamp = asdict(Stamp())
    found = []
    for row in rows:
        for lost in ("skipped", "failed"):
            if lost in row:
                typer.echo(f"{lost} {row[lost]}", err=True)
        if "step" not in row:
            lines.write(row | stamp)
            found.append(row)
    return found


def _peaks(text: str) -> tuple[float, ...]:
    values = tuple(float(one) for one in text.split(",")) if text else ()
    if text and (len(values) != len(PEAKS.split(",")) or not all(0 < v < inf for v in values)):
        raise ValueError(f"'{text}': write {PEAKS}, such as 989,4800,450")
    return values


@app.command("characterise")
def characterise_command(
    machine: MachineOption = None,
    backend: Annotated[
        Backend,
        typer.Option(help="sim: simulate; cuda: measure this machine's GPUs; host: its CPUs."),
    ] = Backend.sim,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows that were measured before; measures nothing."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The tables; default: in your machines folder."),
    ] = None,
    counted: Annotated[
        bool,
        typer.Option("--counters", help="cuda: count bytes of GEMMs in L2 and memory instead."),
    ] = False,
    gemms: Annotated[
        str, typer.Option(metavar="NAME,...", help="GEMMs, such as cb1; default: all needed.")
    ] = "",
    ranks: Annotated[
        int, typer.Option(min=0, max=64, metavar="N", help="Ranks; 0: all GPUs, or 2.")
    ] = 0,
    peaks: Annotated[
        str,
        typer.Option(metavar=PEAKS, help="For CPUs, GPUs other than H100 and H200: TFLOP/s, GB/s."),
    ] = "",
    limit: Annotated[
        int, typer.Option(min=1, max=86400, metavar="SECONDS", help="Time limit of measurements.")
    ] = 600,
    json: JsonOption = None,
) -> None:
    """Write the tables that advise reads: slowdowns by cores, latencies and mutual slowdowns.

    The tables are made from the simulated machine, with --backend from measurements of this one, or
    with --rows from earlier ones; plans are then checked on held-out combinations. --json also gets
    the measured rows. With one GPU, only rows are written: tables need two.

    \b
    offcore overlap characterise --out machines/overlap/mi300x-8.json
    offcore overlap characterise --backend cuda --out h200-2.json --json rows.jsonl
    offcore overlap characterise --rows benchmarks/results/overlap-h200-2.jsonl
    offcore overlap characterise --backend cuda --counters --json rows.jsonl
    """
    given, known = parsed(_peaks, peaks, "--peaks"), list(measured.SHAPES)
    if backend is Backend.sim and (counted or gemms or ranks):
        raise error("invalid", "--counters, --gemms and --ranks need --backend cuda or host")
    if backend is not Backend.sim and rows is not None:
        raise error("invalid", "--rows are measured already: leave out --backend")
    if machine and (rows is not None or backend is not Backend.sim):
        raise error("invalid", "--machine is simulated: no --rows, --backend")
    if peaks and rows is None and backend is Backend.sim:
        raise error("invalid", "--peaks need --rows, or --backend cuda or host")
    if counted and ranks:
        raise error("invalid", "--counters are of one GPU: no --ranks")
    with JsonLines(json) as lines:
        if counted:
            names = known_names(gemms or ",".join(known), "--gemms", known)
            _counted(backend, names, given, limit, out, lines)
        elif backend is not Backend.sim:
            needed = ",".join(tabled.GEMMS.values())
            names = known_names(f"{needed},{gemms}", "--gemms", known)
            count = ranks or (_core.gpus() if backend is Backend.cuda else 2)
            request = measured.for_tables(backend.value, count, names, limit)
            _characterised(request, given, out, lines)
        elif rows is None:
            _written(sweep.characterise(models.load(machine or models.NAME)[0]), out, lines)
        else:
            _tabled(read_records(rows), f"measured: {rows.name}", given, out, lines)


def _tabled(
    rows: Sequence[dict[str, Any]],
    source: str,
    peaks: Sequence[float],
    out: Path | None,
    lines: JsonLines,
) -> None:
    """Tables of measured rows, and how plans made from them do."""
    tell = partial(typer.echo, err=lines.to_stdout)
    tables = tabled.tables_of(rows, source, peaks)
    if judged := tabled.judged(rows, tables):
        tell("\n".join(tabled.lines(judged)))
    for name, points in tabled.errors(rows, tables).items():
        if points:
            tell(
                f"{name}: estimates are {fmean(points):.1f} points of the ideal off in the "
                f"mean, {median(points):.1f} in the median, {max(points):.0f} at most"
            )
    _written(tables, out, lines)


def _written(tables: Tables, out: Path | None, lines: JsonLines) -> None:
    path = out or folders.machines() / "overlap" / f"{tables.machine}.json"
    folders.prepare(path.parent)
    path.write_text(tables.to_json(), "utf-8")
    lines.write({"tables": str(path), "rows": len(tables.rows), "source": tables.source})
    typer.echo(f"tables: {path}, {len(tables.rows)} rows", err=lines.to_stdout)


def _characterised(
    request: measured.Request, peaks: Sequence[float], out: Path | None, lines: JsonLines
) -> None:
    alone = request.ranks < 2
    if alone and out is not None:
        raise error("unsupported", "tables need two ranks: on one use --json FILE, without --out")
    if not alone:  # before minutes of measurements
        cuda = request.backend == "cuda"
        name = machines.for_gpus(request.ranks) if cuda else f"host-{request.ranks}"
        tabled.cores_of(name, request.backend, 1, peaks)
    found = _collected(measured.rows(request), lines)
    curves = summary.curve_lines(found)
    if not curves:
        raise error("unsupported", "nothing was measured: the reasons are above")
    typer.echo("\n".join(curves), err=lines.to_stdout)
    if alone:
        typer.echo(
            "no tables: collectives are part of them, which need two ranks or more", err=True
        )
    else:
        source = f"measured: offcore overlap characterise --backend {request.backend}"
        _tabled(found, f"{source}, {Stamp().date}", peaks, out, lines)


def _counted(
    backend: Backend,
    gemms: Sequence[str],
    peaks: Sequence[float],
    limit: int,
    out: Path | None,
    lines: JsonLines,
) -> None:
    if backend is not Backend.cuda or out is not None:
        raise error("invalid", "--counters needs --backend cuda, and --json FILE instead of --out")
    found = _collected(counters.rows(gemms, limit, peaks), lines)
    if not any(row.get("measure") == "counters" for row in found):
        raise error("unsupported", "nothing was counted: the reasons are above")
    report.console(stderr=lines.to_stdout).print(text.counters_table(found))


@app.command("calibrate")
def calibrate_command(
    machine: MachineOption = None,
    seed: Annotated[
        int, typer.Option(min=0, max=NUMBER_MAX, metavar="N", help="Seed of the search.")
    ] = fit.SEED,
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Rows measured on GPUs: compute the parameters from a few of them."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Machines folder; default: yours.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit the interference model to ConCCL's published numbers, or compute it from measured rows.

    The fit takes under a minute and needs scipy. With --rows, the machine is that of the rows.

    \b
    offcore overlap calibrate --out machines
    offcore overlap calibrate --rows benchmarks/results/overlap-h200-2.jsonl --out machines
    """
    folder = out or folders.machines()
    if rows is not None and (machine or seed != fit.SEED):
        raise error(
            "invalid", "--rows name their machine, and need no search: no --machine, --seed"
        )
    if rows is None:
        record = fit.calibrate(machine or models.NAME, seed, partial(typer.echo, err=True))
    else:
        record = gpu_fit.record_of(read_records(rows), rows.name)
    folders.prepare(folder)
    tell = partial(typer.echo, err=json == "-")
    for one in record["parameters"]:
        tell(f"{one['name']} {one['value']:g} {one['unit']}")
    tell(f"written: {fit.write(record, folder)}")
    with JsonLines(json) as lines:
        lines.write(record)


@app.command("predict")
def predict_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rows measured on GPUs (gpu_overlap.py).")
    ],
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model's machine; default: from the rows.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict measured combinations with the machine's model, and print how far it is off.

    Errors of every all-gather and all-to-all concurrent with a GEMM, under every strategy, in
    points of the measured ideal and in percent of the time: with isolated times of the two kernels
    as measured, and as predicted. Calibration rows are reported separately.

    \b
    offcore overlap predict benchmarks/results/overlap-h200-2-matched.jsonl
    """
    rows = read_records(file)
    named = next((str(row["machine"]) for row in rows if "machine" in row), "")
    model = gpu_model.load(machine or named)
    found = {isolated: predict.predictions(rows, model, isolated) for isolated in predict.ISOLATED}
    every = [one for some in found.values() for one in some]
    if not every:
        raise error("invalid", f"{file}: no measured combinations of two kernels")
    with JsonLines(json) as lines:
        for one in every:
            lines.write(asdict(one))
    console = report.console(stderr=json == "-")
    for isolated, some in found.items():
        held_out = [one for one in some if not one.fitted]
        if held_out:
            console.print(predict.table(held_out, f"isolated times {isolated}: {HEAD}"))
    source = f"parameters of {model.name}: {model.record['source']}"
    console.print("\n".join([*predict.lines(every, rows), source]), highlight=False, soft_wrap=True)


class FigureName(str, Enum):
    """What plot draws."""

    slowdowns = "5"
    bandwidths = "6"
    ideals = "7"
    kernels = "8"
    alone = "9"
    engines = "10"


@app.command("plot")
def plot_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Rows of run; figure 5: tables; 6: rows of --counters."
        ),
    ],
    figure: Annotated[
        FigureName, typer.Option(metavar="5|6|7|8|9|10", help="ConCCL's figure.")
    ] = FigureName.engines,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Only ConCCL's 30 combinations of table II; figure 9: its values, too.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The plot (.png, .svg, .pdf).")] = Path(
        "overlap.png"
    ),
    json: JsonOption = None,
) -> None:
    """Draw one of ConCCL's figures 5, 6, 7, 8, 9 and 10.

    Figure 9, engines compared with the library's kernels by size, also reads rows of offcore bench.

    \b
    offcore overlap plot rows.jsonl --figure 8 --out figure8.png
    """
    plot.check_plot(out)
    drawn: Any
    if figure is FigureName.slowdowns:
        tables = load(file)
        count, drawn = len(tables.rows), overlap_plot.draw_slowdowns(tables)
    elif figure is FigureName.bandwidths:
        rows = [row for row in read_records(file) if row.get("measure") == "counters"]
        if not rows:
            raise error("invalid", f"{file}: no rows of characterise --counters")
        count, drawn = len(rows), overlap_plot.draw_bandwidths(rows)
    elif figure is FigureName.alone:
        rows = [row for row in read_records(file) if "op" in row]
        series = engines.speedups(rows, file)
        count = sum(map(len, series.values()))
        drawn = engines.draw(series, overlap_plot.source(rows), published=published)
    else:
        # Measured files have rows of other kinds too: curves, joules, what failed.
        rows = [row for row in read_records(file) if "strategy" in row and "speedup" in row]
        rows = overlap_plot.of_table_ii(rows) if published else rows
        if not rows:
            raise error("invalid", f"{file}: no rows of run")
        count = len(rows)
        if figure is FigureName.ideals:
            drawn = overlap_plot.draw_ideals(rows)
        else:
            drawn = overlap_plot.draw_speedups(rows, int(figure.value))
    drawn.savefig(out, dpi=140)
    report.tell_plot(out, count, json)
