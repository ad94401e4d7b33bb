"""The commands about the calibrated model: `offcore calibrate | reproduce | explain`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import offcore
from offcore import calibrate, explain, report, reproduce
from offcore.latte.calibrated import NAME
from offcore.options import (
    InPlaceOption,
    JsonOption,
    OpArgument,
    ProtocolName,
    ProtocolOption,
    RanksOption,
    SimMachineOption,
    parsed,
)
from offcore.report import JsonLines
from offcore.sizes import parse_bytes


def calibrate_command(
    machine: SimMachineOption = NAME,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of the random starts.")
    ] = calibrate.SEED,
    starts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Fits from random places.")
    ] = calibrate.STARTS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For MACHINE.json; by default where it lies."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Fit a machine's costs to DMA-Latte's published ratios, and write them (about 2 minutes).

    Prints every parameter with its range, the residual of each row, also as the fit without that
    row predicts it, and what the ratios leave open. Needs scipy.
    """
    record = calibrate.calibrate(machine, seed, starts, partial(typer.echo, err=True))
    console = report.console(stderr=json == "-")
    calibrate.show(record, console)
    for path in calibrate.write(record, out or offcore.machines.path_of(machine).parent):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    with JsonLines(json) as lines:
        lines.write(record)


def reproduce_command(
    paper: Annotated[str | None, typer.Argument(metavar="[PAPER]", help="latte")] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For the page and the figures.")
    ] = Path("reproduce-out"),
    json: JsonOption = None,
) -> None:
    """Draw a paper's figures and print each of its claims beside what offcore gives for it.

    Without a name, list the papers. Ends with status 1 where a claim is not met.
    """
    if paper is None:
        for line in reproduce.known():
            typer.echo(line)
        return
    findings = reproduce.run(paper, out, report.console(stderr=json == "-"))
    with JsonLines(json) as lines:
        for one in findings:
            lines.write({"paper": paper} | one.to_json())
    if not all(one.met for one in findings):
        raise typer.Exit(1)


def explain_command(
    op: OpArgument,
    nbytes: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Total bytes (K = 1024).")],
    machine: SimMachineOption = NAME,
    ranks: RanksOption = None,
    in_place: InPlaceOption = False,
    protocol: ProtocolOption = ProtocolName.promise,
    json: JsonOption = None,
) -> None:
    """Say why a variant is chosen at this size: phase by phase, beside the runner-up (simulated).

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
    )
    with JsonLines(json) as lines:
        lines.write(why.to_json())
    if json != "-":
        explain.show(why, report.console())


COMMANDS: dict[str, Callable[..., Any]] = {
    "explain": explain_command,
    "calibrate": calibrate_command,
    "reproduce": reproduce_command,
}
