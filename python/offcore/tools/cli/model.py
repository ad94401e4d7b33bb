"""The commands about models: `offcore breakdown | explain | calibrate | reproduce`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import offcore
from offcore import folders
from offcore.errors import error
from offcore.sizes import parse_bytes, parse_sizes
from offcore.tools import explain, plot, report
from offcore.tools.bench import breakdown, collectives
from offcore.tools.cli.options import (
    COUNT_MAX,
    NUMBER_MAX,
    SIZES_METAVAR,
    BackendName,
    BackendOption,
    DtypeOption,
    InPlaceOption,
    JsonOption,
    MachineOption,
    OpArgument,
    PlotOption,
    ProtocolName,
    ProtocolOption,
    RanksOption,
    ReductionOption,
    SimMachineOption,
    parsed,
)
from offcore.tools.papers import calibrate, reproduce
from offcore.tools.papers.latte.calibrated import NAME, caution
from offcore.tools.report import JsonLines, Stamp


def calibrate_command(
    machine: SimMachineOption = NAME,
    seed: Annotated[
        int, typer.Option(min=0, max=NUMBER_MAX, metavar="N", help="Seed of the random starts.")
    ] = calibrate.SEED,
    starts: Annotated[
        int,
        typer.Option(min=1, max=COUNT_MAX, metavar="N", help="Number of fits from random starts."),
    ] = calibrate.STARTS,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for MACHINE.json; default: your machines folder."
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit a machine's costs to DMA-Latte's published ratios, and write them (about 12 minutes).

    Prints every parameter with its range, each row's residual in the fit and in fits without that
    row, and the quantities that the ratios leave undetermined. Needs scipy.

    \b
    offcore calibrate --out machines
    """
    folder = out or folders.machines()
    folders.prepare(folder)
    record = calibrate.calibrate(machine, seed, starts, partial(typer.echo, err=True))
    console = report.console(stderr=json == "-")
    calibrate.show(record, console)
    for path in calibrate.write(record, folder):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    with JsonLines(json) as lines:
        lines.write(record)


def reproduce_command(
    paper: Annotated[
        str | None, typer.Argument(metavar="[PAPER]", help=", ".join(reproduce.PAPERS))
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the page and the figures.")
    ] = Path("reproduce-out"),
    json: JsonOption = None,
) -> None:
    """Draw a paper's figures and print each of its claims next to offcore's number.

    Each number is marked as predicted, fitted to the published one, or true by construction.
    Without a name, lists the papers. The exit status is 1 if a claim is not met, as with
    conccl, mcast and gpu-driven.

    \b
    offcore reproduce latte --out latte
    """
    if paper is None:
        for line in reproduce.known():
            typer.echo(line)
        return
    findings = reproduce.run(paper, out, report.console(stderr=json == "-"))
    with JsonLines(json) as lines:
        for one in findings:
            lines.write({"paper": paper} | one.to_json())
    if any(one.met is False for one in findings):
        raise typer.Exit(1)


def explain_command(
    op: OpArgument,
    nbytes: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Total bytes (K = 1024).")],
    machine: SimMachineOption = NAME,
    ranks: RanksOption = None,
    in_place: InPlaceOption = False,
    protocol: ProtocolOption = ProtocolName.promise,
    dtype: DtypeOption = None,
    reduction: ReductionOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the variant chosen for a size with the runner-up, phase by phase (simulated).

    \b
    offcore explain all_gather --bytes 64K --machine mi300x-8 --in-place
    """
    why = explain.explain(
        op.value,
        machine=machine,
        ranks=ranks or offcore.machines.load(machine).ranks,
        nbytes=parsed(parse_bytes, nbytes, "--bytes"),
        in_place=in_place,
        protocol=protocol.value,
        dtype=dtype,
        reduction=reduction and reduction.value,
    )
    with JsonLines(json) as lines:
        lines.write(why.to_json())
    if json != "-":
        explain.show(why, report.console())


def breakdown_command(
    backend: BackendOption = BackendName.auto,
    machine: MachineOption = None,
    sizes: Annotated[
        str, typer.Option(metavar=SIZES_METAVAR, help="Bytes of the copy (K = 1024).")
    ] = breakdown.SIZES,
    json: JsonOption = None,
    plot_to: PlotOption = None,
) -> None:
    """Print the phases of a single copy by size (DMA-Latte section 3.2).

    Simulated by default. With --backend cuda, phases are differences between submissions.

    \b
    offcore breakdown --machine mi300x-8
    offcore breakdown --backend cuda
    """
    if plot_to is not None:
        plot.check_plot(plot_to)
    wanted = parsed(parse_sizes, sizes, "--sizes")
    where = "sim" if backend is BackendName.auto else backend.value
    collectives.check_backend(where)
    if where == "sim":
        machine = machine or NAME
        found = breakdown.copies(machine, wanted)
    elif where == "cuda":
        machine = machine or offcore.machines.for_gpus(2)
        found = breakdown.measured(machine, wanted)
    else:
        raise error("unsupported", f"there is no breakdown of {where}: sim and cuda have engines")
    stamp = vars(Stamp())
    with JsonLines(json) as lines:
        for copy in found:
            place = {"op": "copy", "backend": where, "machine": machine}
            lines.write(place | copy.to_json() | stamp)
    console = report.console(stderr=json == "-")
    console.print(breakdown.table(machine, where, found))
    for note in breakdown.NOTES if where == "cuda" else filter(None, [caution(machine)]):
        console.print(note, highlight=False, soft_wrap=True)
    if plot_to is not None:
        title = f"Phases of one copy between two ranks of {machine} ({where})"
        plot.plot_phases(wanted, [copy.phases for copy in found], title, plot_to)
        typer.echo(f"plot: {plot_to}", err=json == "-")


COMMANDS: dict[str, Callable[..., Any]] = {
    "breakdown": breakdown_command,
    "explain": explain_command,
    "calibrate": calibrate_command,
    "reproduce": reproduce_command,
}
