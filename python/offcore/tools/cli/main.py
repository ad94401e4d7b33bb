"""The command line: `offcore bench | kv | gpu | tune | plot | breakdown | show | explain | ...`.

Results go to stdout, everything else to stderr. A failure is one line, `offcore: CODE: message`,
and exit status 1; a wrong call is status 2; wrong bytes are a failure.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import offcore
from offcore import folders
from offcore.comm import signal_forms
from offcore.errors import error
from offcore.sizes import parse_bytes, parse_sizes
from offcore.tools import demo, doctor, nccl_shim, plot, report
from offcore.tools.bench import collectives, tune
from offcore.tools.cli import gpu as gpu_commands
from offcore.tools.cli import kv as kv_commands
from offcore.tools.cli import mcast as mcast_commands
from offcore.tools.cli import overlap as overlap_commands
from offcore.tools.cli import sdma as sdma_commands
from offcore.tools.cli.model import COMMANDS
from offcore.tools.cli.options import (
    COUNT_MAX,
    SIZES_METAVAR,
    VARIANT_HELP,
    BackendName,
    BackendOption,
    BaselineOption,
    CallsOption,
    CheckOption,
    DtypeOption,
    InPlaceOption,
    ItersOption,
    JsonOption,
    MachineOption,
    MetricOption,
    OpArgument,
    OwnCopyOption,
    PlotOption,
    ProtocolName,
    ProtocolOption,
    ProtocolsOption,
    RanksOption,
    ReductionOption,
    SignalsOption,
    SimMachineOption,
    SizesOption,
    SmsOption,
    StressOption,
    TimeoutOption,
    TimingOption,
    VariantsOption,
    WarmupOption,
    fold_help,
    known_names,
    names_of,
    parsed,
)
from offcore.tools.cli.report import report_command
from offcore.tools.cli.request import SIM_MACHINE, request_of
from offcore.tools.papers.latte.calibrated import assumed, caution
from offcore.tools.records import read_records
from offcore.tools.report import JsonLines, Row, Skip, Stamp

app = typer.Typer(
    help="GPU communication on copy (DMA) engines instead of SMs and CUs.",
    epilog="Exit codes: 0 success; 1 error (offcore: CODE: message), wrong bytes, or a claim that "
    "is not met; 2 invalid command line; 130 Ctrl-C. --json writes one object per line.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(sdma_commands.app, name="sdma")
app.add_typer(kv_commands.app, name="kv")
app.add_typer(gpu_commands.app, name="gpu")
app.add_typer(mcast_commands.app, name="mcast")
app.add_typer(overlap_commands.app, name="overlap")


@app.command("bench")
def bench_command(
    op: OpArgument,
    backend: BackendOption = BackendName.auto,
    machine: MachineOption = None,
    ranks: RanksOption = None,
    sizes: SizesOption = None,
    variants: VariantsOption = "all",
    in_place: InPlaceOption = False,
    protocol: ProtocolsOption = "auto",
    signals: SignalsOption = None,
    own_copy: OwnCopyOption = collectives.OWN_COPIES[0],
    dtype: DtypeOption = None,
    reduction: ReductionOption = None,
    sms: SmsOption = None,
    timing: TimingOption = "chain",
    iters: ItersOption = collectives.BATCHES,
    calls: CallsOption = collectives.CALLS,
    warmup: WarmupOption = collectives.WARMUP_CALLS,
    check: CheckOption = True,
    baseline: BaselineOption = None,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = None,
    plot_to: PlotOption = None,
    metric: MetricOption = None,
) -> None:
    """Time a collective by size and variant, and check every byte.

    Columns are those of nccl-tests. GB/s means 1e9 bytes per second. Sizes are of the whole array.

    \b
    offcore bench all_gather --machine mi300x-8 --sizes 1K:4G:4
    offcore bench all_to_all --machine mi300x-8 --in-place
    offcore bench all_gather --backend host --ranks 2 --baseline gloo,memcpy
    offcore bench all_gather --backend cuda --in-place --baseline nccl,nccl-ce
    offcore bench all_reduce --backend cuda --dtype bfloat16 --sms 8 --baseline nccl,nccl-sms
    """
    request = request_of(
        op.value,
        backend.value,
        machine,
        ranks,
        sizes,
        variants,
        protocol,
        signals,
        timing,
        own_copy,
        dtype,
        reduction,
        sms,
        in_place=in_place,
        batches=iters,
        calls=calls,
        warmup=warmup,
        check=check,
        baselines=names_of(baseline, "--baseline") if baseline else [],
        timeout_s=timeout,
    )
    request = _with_present_baselines(request)
    if plot_to is not None:
        plot.check_plot(plot_to)
    rows = _measure(request, json)
    if plot_to is not None:
        plot.plot_rows(rows, plot_to, metric.value if metric else None)
        typer.echo(f"plot: {plot_to}", err=json == "-")
    if any(row.wrong for row in rows):
        raise typer.Exit(1)


def _with_present_baselines(request: collectives.Request) -> collectives.Request:
    absent = collectives.check_baselines(request)
    for name, why in absent.items():
        typer.echo(f"baseline {name}: unavailable: {why}", err=True)
    present = [name for name in request.baselines if name not in absent]
    return replace(request, baselines=present)


def _measure(request: collectives.Request, json: str | None) -> list[Row]:
    rows: list[Row] = []
    skips: list[Skip] = []

    def show() -> None:
        if rows:
            rows.sort(key=lambda row: row.bytes)  # what came last may be of any size
            console = report.console(stderr=json == "-")
            report.print_rows(rows, skips, console)
            if request.backend == "sim":
                machine = request.machine or SIM_MACHINE
                for note in filter(None, (caution(machine), assumed(machine, request.op))):
                    console.print(note, highlight=False, soft_wrap=True)

    try:
        with JsonLines(json) as lines:
            measure = partial(collectives.run, request)
            report.collect(measure, request.steps, request.op, lines, Stamp(), rows, skips)
    except BrokenPipeError:  # the reader of the rows has had enough
        raise
    except BaseException:
        show()  # what is known, also when a later size failed
        raise
    show()
    if not rows:
        raise error("unsupported", "; ".join(dict.fromkeys(skip.reason for skip in skips)))
    return rows


@app.command("tune")
def tune_command(
    backend: BackendOption = BackendName.auto,
    machine: MachineOption = None,
    ranks: RanksOption = None,
    ops: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Operations: {', '.join(tune.OPS)}.")
    ] = "all_gather,all_to_all",
    sizes: SizesOption = None,
    signals: SignalsOption = None,
    prelaunch: Annotated[
        bool, typer.Option("--prelaunch", metavar="", help="Include prelaunched variants.")
    ] = False,
    iters: ItersOption = collectives.BATCHES,
    calls: CallsOption = collectives.CALLS,
    timeout: TimeoutOption = 30.0,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Use recorded rows (--json)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table; default: in your machines folder."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure every variant and write the table that auto selects from.

    The table is tuned/MACHINE.json in your machines folder (OFFCORE_MACHINES, by default
    ~/.config/offcore/machines) and takes precedence over offcore's own. Rows of operations not
    measured are kept, unless --out is given. offcore doctor lists tables. --json keeps the rows.

    \b
    offcore tune --backend cuda --signals fenced,copy_order
    offcore tune --from rows.jsonl --out machines/tuned/h200-4.json
    """
    if source is not None:
        records = tune.read(source)
    else:
        kinds = collectives.VARIANTS if prelaunch else collectives.KINDS
        names = known_names(ops, "--ops", tune.OPS)
        resolved = collectives.resolve_backend(backend.value, machine)
        if resolved == "sim":
            raise error("unsupported", "times on sim are a model's: tune on --backend host or cuda")
        sizes = sizes or (tune.GPU_SIZES if resolved == "cuda" else tune.SIZES)
        template = request_of(
            names[0],
            resolved,
            machine,
            ranks,
            sizes,
            "all",
            tune.PROTOCOLS,
            signals,
            "chain",
            batches=iters,
            calls=calls,
            timeout_s=timeout,
        )
        template = replace(template, variants=list(kinds))
        folders.prepare(out.parent if out else folders.machines() / "tuned")
        records = tune.measure(tune.requests(template, names), json)
    name = tune.machine_of(records)
    table = tune.pick(records, prelaunch)
    path = out or offcore.machines.tuned_path(name)
    others = tune.kept(table, name) if out is None else []
    tune.write([*table, *others], path)
    console = report.console(stderr=json == "-")
    console.print(tune.shown(table, name))
    console.print(f"table: {path}{tune.told(others)}", highlight=False, soft_wrap=True)


@app.command("plot")
def plot_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rows (--json).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The plot (.png, .svg, .pdf).")] = Path(
        "plot.png"
    ),
    figure: Annotated[
        int | None,
        typer.Option(
            metavar="13|14",
            help="DMA-Latte's figure: speedup over nccl, all-gather (13) or all-to-all (14).",
        ),
    ] = None,
    metric: MetricOption = None,
    json: JsonOption = None,
) -> None:
    """Plot recorded rows: one panel per operation, or a figure of the paper.

    \b
    offcore plot rows.jsonl --figure 13 --out figure13.png
    """
    plot.check_plot(out)
    records = [record for path in files for record in read_records(path)]
    if figure is None:
        rows = report.rows_of(records)
        plot.plot_rows(rows, out, metric.value if metric else None)
    elif figure in plot.FIGURES:
        plot.plot_figure(records, figure, out)
    else:
        raise typer.BadParameter("13 or 14", param_hint="--figure")
    report.tell_plot(out, len(records), json)


@app.command()
def show(
    op: OpArgument,
    machine: SimMachineOption = SIM_MACHINE,
    ranks: RanksOption = None,
    nbytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Total bytes (K = 1024).")
    ] = "1M",
    variant: Annotated[
        str, typer.Option(metavar="NAME", help=f"auto, or one of {VARIANT_HELP}.")
    ] = "auto",
    in_place: InPlaceOption = False,
    protocol: ProtocolOption = ProtocolName.auto,
    dtype: DtypeOption = None,
    reduction: ReductionOption = None,
    json: JsonOption = None,
) -> None:
    """Print the program of DMA commands of a collective.

    \b
    offcore show all_gather --ranks 4 --bytes 64K --variant bcst
    """
    program = offcore.show_program(
        op.value,
        machine=machine,
        ranks=ranks or offcore.machines.load(machine).ranks,
        nbytes=parsed(parse_bytes, nbytes, "--bytes"),
        variant=variant,
        in_place=in_place,
        protocol=protocol.value,
        dtype=dtype,
        reduction=reduction and reduction.value,
    )
    with JsonLines(json) as lines:
        lines.write(_program_record(program) | {"text": str(program)})
    if json != "-":
        sys.stdout.write(str(program))


def _program_record(program: Any) -> dict[str, Any]:
    counts = program.counts()
    return {
        "op": program.op,
        "machine": program.machine,
        "ranks": program.ranks,
        "variant": program.variant,
        "protocol": program.protocol,
        "native": program.native,
        "commands": counts.commands,
        "copies": counts.copies,
        "engines": counts.engines,
        "syncs": counts.syncs,
        "bytes": counts.bytes,
    }


@app.command()
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A program's text.")],
    json: JsonOption = None,
) -> None:
    """Check a program's text: form, bounds, hazards, unmatched polls, deadlock.

    \b
    offcore show all_gather --variant b2b | offcore verify -
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as failure:
        raise error("invalid", f"cannot read '{file}': {failure.strerror}") from None
    except UnicodeDecodeError:
        raise error("invalid", f"cannot read '{file}': it is not text") from None
    with JsonLines(json) as lines:
        try:
            program = offcore.Program.parse(text)
            offcore.verify(program)
        except offcore.Error as failure:
            lines.write({"ok": False, "code": failure.code, "message": str(failure)})
            raise
        record = _program_record(program)
        lines.write({"ok": True} | record)
    if json != "-":
        typer.echo(
            f"ok: {record['op']} of {record['ranks']} ranks: {record['commands']} commands on "
            f"{record['engines']} engines, {record['syncs']} syncs, {record['bytes']} bytes"
        )


@app.command("doctor")
def doctor_command(
    stressed: StressOption = False,
    operations: Annotated[
        int,
        typer.Option(
            min=signal_forms.OPERATIONS_MIN,
            max=COUNT_MAX,
            metavar="N",
            help="Operations per trial.",
        ),
    ] = signal_forms.OPERATIONS,
    json: JsonOption = None,
) -> None:
    """Show which backends are available here, and what the others need.

    With --stress, test which signal forms keep flags behind their data on these GPUs, and store the
    result.

    \b
    offcore doctor
    offcore doctor --json -
    offcore doctor --stress
    """
    console = report.console(stderr=json == "-")
    with JsonLines(json) as lines:
        if stressed:
            return doctor.stressed(operations, lines, console)
        found = doctor.examine()
        lines.write(found)
    if json != "-":
        doctor.render(found, console)


@app.command("nccl-shim")
def nccl_shim_command(json: JsonOption = None) -> None:
    """Print the path of the NCCL shim, and its usage on stderr.

    \b
    offcore nccl-shim
    """
    found = nccl_shim.path()
    typer.echo(nccl_shim.USE, err=True)
    with JsonLines(json) as lines:
        lines.write({"path": str(found)})
    if json != "-":
        typer.echo(found)


@app.command("demo")
def demo_command(
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder for plots and rows.")
    ] = Path("demo-out"),
    host_sizes: Annotated[
        str, typer.Option(metavar=SIZES_METAVAR, help="Sizes of the runs between processes.")
    ] = demo.HOST_SIZES,
    json: JsonOption = None,
) -> None:
    """Run collectives on the simulated MI300X machine, then between processes on this machine.

    \b
    offcore demo --out demo-out
    """
    sizes = parsed(parse_sizes, host_sizes, "--host-sizes")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise error("invalid", f"cannot write to '{folder}': {failure.strerror}") from None
    with JsonLines(json or str(folder / "results.jsonl")) as lines:
        demo.run(folder, sizes, lines, report.console(stderr=json == "-"))


for name, command in {**COMMANDS, "report": report_command}.items():
    app.command(name)(command)
fold_help(app)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"offcore {report.versions().get('offcore', 'unknown')} ({report.commit()})")
        raise typer.Exit


def main() -> None:
    try:
        app()
    except offcore.Error as failure:
        sys.stdout.flush()
        print(f"offcore: {failure.code}: {failure}", file=sys.stderr)
        sys.exit(1)
    except MemoryError:
        sys.stdout.flush()
        print("offcore: memory: the host's memory ran out", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has left (offcore show ... | head): nothing is left to tell.
        sys.stderr.close()
        sys.exit(1)
