"""`offcore overlap advise | run | characterise | calibrate | plot`: compute beside collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from offcore import _core, folders, machines
from offcore.errors import error
from offcore.overlap import Plan, load
from offcore.overlap.plan import STRATEGIES
from offcore.tools import plot, report
from offcore.tools.cli.options import NUMBER_MAX, JsonOption, SimMachineOption, known_names, parsed
from offcore.tools.overlap import measured, sweep, tabled, text
from offcore.tools.overlap import model as models
from offcore.tools.overlap import plot as overlap_plot
from offcore.tools.overlap.cases import COMBINATIONS, OPS
from offcore.tools.overlap.measure import STRATEGIES as MEASURED
from offcore.tools.papers.conccl import fit
from offcore.tools.papers.latte.calibrated import caution
from offcore.tools.records import read_records
from offcore.tools.report import JsonLines, Stamp

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
    """Where run executes."""

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
    machine: SimMachineOption = models.NAME,
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

    Simulates the machine, or with --backend measures this one: each kernel alone, then each
    strategy with the most promising splits. On cuda this needs torch and two GPUs.

    \b
    offcore overlap run --json rows.jsonl
    offcore overlap run cb1_896M,mb1_4G
    offcore overlap run cb1_896M --backend host --strategies serial,base,ConCCL
    """
    if backend is Backend.sim:
        if (ranks, ops, strategies) != (0, ",".join(OPS), "all"):
            raise error("invalid", "--ranks, --ops and --strategies need --backend cuda or host")
        _simulated(parsed(sweep.combinations, combinations, "all|NAME,..."), machine, json)
        return
    tags = list(COMBINATIONS) if combinations == "all" else combinations.split(",")
    for tag in tags:
        parsed(measured.split_tag, tag, "all|NAME,...")
    names: Sequence[str] = MEASURED
    if strategies != "all":
        names = known_names(strategies, "--strategies", list(MEASURED))
    wanted = known_names(ops, "--ops", [*OPS, *measured.REDUCING])
    request = measured.Request(
        backend.value,
        ranks or (_core.gpus() if backend is Backend.cuda else 2),
        pairs=[(tag, op) for op in wanted for tag in tags],
        strategies=names,
        limit_s=limit,
    )
    _measured(request, json)


def _simulated(wanted: Sequence[sweep.Combination], machine: str, json: str | None) -> None:
    model, _ = models.load(machine)
    stamp = asdict(Stamp())
    found = [sweep.measure(model, one) for one in wanted]
    with JsonLines(json) as lines:
        for one in found:
            for row in one.rows(model):
                lines.write(row | stamp)
    console = report.console(stderr=json == "-")
    console.print(text.outcome_table(found, machine))
    console.print(caution(machine), highlight=False, soft_wrap=True)


def _measured(request: measured.Request, json: str | None) -> None:
    stamp = asdict(Stamp())
    rows = []
    with JsonLines(json) as lines:
        for row in measured.rows(request):
            for lost in ("skipped", "failed"):
                if lost in row:
                    typer.echo(f"{lost} {row[lost]}", err=True)
            if "step" not in row:
                lines.write(row | stamp)
                rows.append(row)
    if not any("strategy" in row for row in rows):
        raise error("unsupported", "nothing was measured: the reasons are above")
    machine = next((row["machine"] for row in rows if "machine" in row), request.backend)
    report.console(stderr=json == "-").print(text.measured_table(rows, machine))


@app.command("characterise")
def characterise_command(
    machine: SimMachineOption = models.NAME,
    rows: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows measured on GPUs (benchmarks/gpu_overlap.py); default: simulate.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The tables; default: in your machines folder."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Write the tables that advise reads: slowdowns by cores, latencies and mutual slowdowns.

    The tables are made from the simulated machine, or with --rows from measurements on GPUs. With
    --rows, plans are also checked on the combinations that are not part of the tables.

    \b
    offcore overlap characterise --out machines/overlap/mi300x-8.json
    offcore overlap characterise --rows benchmarks/results/overlap-h200-2.jsonl
    """
    tell = partial(typer.echo, err=json == "-")
    if rows is None:
        tables = sweep.characterise(models.load(machine)[0])
    else:
        found = read_records(rows)
        tables = tabled.tables_of(found, f"measured: {rows.name}")
        tell("\n".join(tabled.lines(tabled.judged(found, tables))))
        for name, points in tabled.errors(found, tables).items():
            if points:
                tell(
                    f"{name}: estimates are {fmean(points):.1f} points of the ideal off in the "
                    f"mean, {median(points):.1f} in the median, {max(points):.0f} at most"
                )
    path = out or folders.machines() / "overlap" / f"{tables.machine}.json"
    folders.prepare(path.parent)
    path.write_text(tables.to_json(), "utf-8")
    with JsonLines(json) as lines:
        lines.write({"tables": str(path), "rows": len(tables.rows), "source": tables.source})
    tell(f"tables: {path}, {len(tables.rows)} rows")


@app.command("calibrate")
def calibrate_command(
    machine: SimMachineOption = models.NAME,
    seed: Annotated[
        int, typer.Option(min=0, max=NUMBER_MAX, metavar="N", help="Seed of the search.")
    ] = fit.SEED,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Machines folder; default: yours.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit the interference model to ConCCL's published numbers (under a minute; needs scipy).

    \b
    offcore overlap calibrate --out machines
    """
    folder = out or folders.machines()
    folders.prepare(folder)
    record = fit.calibrate(machine, seed, partial(typer.echo, err=True))
    tell = partial(typer.echo, err=json == "-")
    for one in record["parameters"]:
        tell(f"{one['name']} {one['value']:g} {one['unit']}")
    tell(f"written: {fit.write(record, folder)}")
    with JsonLines(json) as lines:
        lines.write(record)


class FigureName(str, Enum):
    """What plot draws."""

    slowdowns = "5"
    ideals = "7"
    kernels = "8"
    engines = "10"


@app.command("plot")
def plot_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Rows of run (--json), or measured; for figure 5: tables."
        ),
    ],
    figure: Annotated[
        FigureName, typer.Option(metavar="5|7|8|10", help="ConCCL's figure.")
    ] = FigureName.engines,
    published: Annotated[
        bool, typer.Option("--published", help="Only ConCCL's 30 combinations of table II.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The plot (.png, .svg, .pdf).")] = Path(
        "overlap.png"
    ),
    json: JsonOption = None,
) -> None:
    """Draw one of ConCCL's figures 5, 7, 8 and 10.

    \b
    offcore overlap plot rows.jsonl --figure 8 --out figure8.png
    """
    plot.check_plot(out)
    drawn: Any
    if figure is FigureName.slowdowns:
        tables = load(file)
        count, drawn = len(tables.rows), overlap_plot.draw_slowdowns(tables)
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
