"""`offcore gpu bench`: copies that running kernels ask for."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from offcore import defaults
from offcore.errors import error
from offcore.tools import report
from offcore.tools.bench import collectives
from offcore.tools.cli.options import (
    COUNT_MAX,
    BackendName,
    JsonOption,
    MachineOption,
    TimeoutOption,
    known_names,
)
from offcore.tools.driven import rows as driven
from offcore.tools.driven import sections
from offcore.tools.report import JsonLines, Stamp

app = typer.Typer(
    help="Measure copies requested by running kernels, compared with copies submitted by the host.",
    no_args_is_help=True,
)


@app.command("bench")
def bench_command(
    backend: Annotated[
        BackendName,
        typer.Option(
            metavar="NAME",
            help="cuda (two GPUs, cupy), host (threads push), sim (a machine's costs), or auto: "
            "sim if a machine is named, else the best available.",
        ),
    ] = BackendName.auto,
    machine: MachineOption = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="all|NAME,...",
            help=f"On host and sim of {', '.join(sections.HOST)}; on cuda of "
            f"{', '.join(sections.CUDA)}.",
        ),
    ] = "all",
    rounds: Annotated[
        int, typer.Option(min=1, max=COUNT_MAX, metavar="N", help="Round trips of a ping-pong.")
    ] = 500,
    timeout: TimeoutOption = 55.0,
    json: JsonOption = None,
) -> None:
    """Time ping-pongs, pushes and throughput of requests, and check every byte.

    On cuda, also times copies ordered by events, synchronisation and polling, NCCL's send and
    receive, kernels that read L2 or multiply during all-gathers of offcore and NCCL, and a soak:
    11 million requests, of which none may be lost, duplicated or torn. Each section runs in its own
    process, for at most --timeout seconds. On sim, GPU threads and engines are simulated in virtual
    time with the costs of a machine file: nothing is measured.

    \b
    offcore gpu bench --backend host --only ping-pong,push
    offcore gpu bench --backend cuda --json gpu-driven.jsonl
    offcore gpu bench --backend sim --machine v100-8
    """
    name = collectives.resolve_backend(backend.value, machine)
    if name not in ("cuda", "host", "sim"):
        raise error("unsupported", f"backend {name} has no requests; cuda, host and sim have")
    if machine is not None and name != "sim":
        raise error("invalid", f"--machine: backend {name} is this one; it is for sim")
    simulated = machine or defaults.machine("sim", 2) if name == "sim" else None
    known = list(sections.CUDA if name == "cuda" else sections.HOST)
    wanted = known if only == "all" else known_names(only, "--only", known)
    if name == "cuda":
        sections.check_cuda()
    console = report.console(stderr=json == "-")
    stamp = asdict(Stamp()) | {"backend": name}
    if simulated is not None:
        stamp |= {"machine": simulated, "simulated": True}
        name = f"{simulated}, simulated"
    failed = False
    with JsonLines(json) as lines:
        for section, (rows, failures) in zip(
            wanted, sections.run(stamp["backend"], wanted, rounds, timeout, simulated), strict=True
        ):
            for row in rows:
                lines.write(row | {"section": section} | stamp)
            if values := [row for row in rows if "value" in row]:
                console.print(driven.table(values, f"{section}, {name}"))
            for row in rows:
                if "note" in row:
                    console.print(row["note"], highlight=False, soft_wrap=True)
            for failure in failures:
                print(f"offcore: {failure}", file=sys.stderr)
            failed = failed or bool(failures)
    if failed:
        raise typer.Exit(1)
    console.print("every byte right", highlight=False)
