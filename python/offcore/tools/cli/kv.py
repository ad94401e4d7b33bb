"""`offcore kv bench` and `offcore kv plot`: KV-cache transfers between a GPU and host memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from offcore.tools import plot, report
from offcore.tools.bench import collectives
from offcore.tools.cli.options import (
    COUNT_MAX,
    BackendName,
    ItersOption,
    JsonOption,
    PlotOption,
    TimeoutOption,
    known_names,
)
from offcore.tools.kv import bench as kv_bench
from offcore.tools.kv import plot as kv_plot
from offcore.tools.kv.case import DIRECTIONS, LAYOUTS
from offcore.tools.kv.models import MODELS, geometry
from offcore.tools.kv.peers import PEERS
from offcore.tools.records import read_records
from offcore.tools.report import JsonLines, Stamp

app = typer.Typer(
    help="Measure transfers of KV-cache blocks between a GPU and host memory.",
    no_args_is_help=True,
)


LayoutOption = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="Layout of the cache: layers (outermost, one tensor), tensors (one per layer), "
        "kv-apart (the same, K and V apart in it), kv-tensors (one for K and one for V per layer), "
        "contiguous (over layers), page-first (kv-tensors; on the host, rows of K and of V apart: "
        "SGLang's page_first_direct), chunks (kv-apart; on the host, 256 tokens of a layer "
        "together: LMCache).",
    ),
]


@app.command("bench")
def bench_command(
    model: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"all, or names of {', '.join(MODELS)}.")
    ] = "qwen2.5-0.5b",
    layout: LayoutOption = LAYOUTS[0],
    tokens: Annotated[
        str, typer.Option(metavar="N,...", help="Tokens per request, 16 per block.")
    ] = "4096",
    direction: Annotated[
        str, typer.Option(metavar="NAME,...", help="load, store, both (concurrently).")
    ] = "load",
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Any of {', '.join(PEERS)}. Baselines that are missing here are listed.",
        ),
    ] = "loop",
    links: Annotated[
        str | None,
        typer.Option(metavar="all|N,...", help="GPUs whose links to the host may be used."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=COUNT_MAX, metavar="N", help="Concurrent requests.")
    ] = 1,
    with_gemm: Annotated[
        bool,
        typer.Option(
            "--with-gemm", metavar="", help="Measure how much matrix products slow down (torch)."
        ),
    ] = False,
    backend: Annotated[
        BackendName, typer.Option(metavar="NAME", help="cuda, host, or auto.")
    ] = BackendName.auto,
    iters: ItersOption = kv_bench.ROUNDS,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = None,
    plot_to: PlotOption = None,
) -> None:
    """Time loads and stores of scattered blocks, compare with baselines, and check every byte.

    GB/s means 1e9 bytes per second. Columns: %: of one contiguous copy in the same run; offcore:
    speedup of offcore; submit us: until the call returns; GEMM: slowdown of matrix products.

    \b
    offcore kv bench --model qwen2.5-0.5b,qwen2.5-1.5b --tokens 1024
    offcore kv bench --backend cuda --direction load,store --baseline loop,batch,kernel --with-gemm
    """
    if plot_to is not None:
        plot.check_plot(plot_to)
    names = list(MODELS) if model == "all" else known_names(model, "--model", list(MODELS))
    plan = kv_bench.Plan(
        backend=collectives.resolve_backend(backend.value, None),
        geometries=[geometry(name) for name in names],
        tokens=_numbers(tokens, 1, "--tokens"),
        layouts=known_names(layout, "--layout", LAYOUTS),
        directions=known_names(direction, "--direction", DIRECTIONS),
        peers=known_names(baseline, "--baseline", PEERS) if baseline else [],
        requests=requests,
        links=_links(links),
        rounds=iters,
        with_gemm=with_gemm,
        timeout_s=timeout,
    )
    rows = _measure(plan, json)
    if plot_to is not None:
        kv_plot.plot_rows(rows, plot_to)
        typer.echo(f"plot: {plot_to}", err=json == "-")
    if any(row["wrong"] for row in rows):
        raise typer.Exit(1)


def _numbers(text: str, least: int, option: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
        if min(numbers) < least:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"'{text}' is not a list of numbers of at least {least}", param_hint=option
        ) from None
    return numbers


def _links(text: str | None) -> list[int] | str | None:
    return text if text in (None, "all") else _numbers(text, 0, "--links")


def _measure(plan: kv_bench.Plan, json: str | None) -> list[dict[str, Any]]:
    console = report.console(stderr=json == "-")
    rows: list[dict[str, Any]] = []
    absent: list[str] = []
    stamp = asdict(Stamp())
    with JsonLines(json) as lines:
        try:
            for row in kv_bench.run(plan):
                lines.write(row | stamp)
                if "absent" in row:
                    absent.append(row["absent"])
                else:
                    rows.append(row)
        finally:
            if rows:
                console.print(kv_bench.table(rows))
            for line in absent:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    return rows


@app.command("plot")
def plot_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rows (--json).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The plot (.png, .svg, .pdf).")] = Path(
        "plot.png"
    ),
    figure: Annotated[
        int,
        typer.Option(
            metavar="16|17",
            help="DMA-Latte's figure: speedup over the loop, one request (16) or several (17).",
        ),
    ] = 16,
    json: JsonOption = None,
) -> None:
    """Plot rows of offcore kv bench like figures 16 and 17 of the paper.

    \b
    offcore kv plot kv.jsonl --figure 16 --out figure16.png
    """
    plot.check_plot(out)
    if figure not in kv_plot.FIGURES:
        raise typer.BadParameter("16 or 17", param_hint="--figure")
    records = [record for path in files for record in read_records(path)]
    kv_plot.plot_rows(records, out, figure)
    report.tell_plot(out, len(records), json)
