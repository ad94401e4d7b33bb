"""`offcore reproduce NAME`: a paper's figures and claims, and what offcore gives for them."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from offcore.errors import error
from offcore.tools import plot
from offcore.tools.overlap import model as overlap_model
from offcore.tools.papers import calibrate, driven_figures, driven_model, gpu_driven
from offcore.tools.papers.conccl import figures as conccl_figures
from offcore.tools.papers.conccl import rows as conccl_rows
from offcore.tools.papers.findings import Finding, tally
from offcore.tools.papers.latte import calibrated, figures, kv, page, power, rows
from offcore.tools.papers.mcast import claims as mcast_claims
from offcore.tools.papers.mcast import figures as mcast_figures

# Writes into the folder, prints to the console, and gives what it found.
Reproduction = Callable[[Path, Console], list[Finding]]

_DPI = 140
# Of a checkout: what was measured is drawn where it is at hand.
RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results"


def latte(folder: Path, console: Console) -> list[Finding]:
    """DMA-Latte's figures 1, 7, 13 to 17 and tables 2 and 3, of the simulated 8 x MI300X"""
    plot.pyplot()  # before anything is computed
    found = figures.results(calibrated.load())
    model = found.calibrated
    spent = power.shares(found.sweep, found.activities, model.power)
    findings = [
        *rows.findings(found.sweep, found.made),
        *power.findings(spent),
        *kv.findings(model.machine, found.fetches, model.kv),
    ]
    drawn = []
    for one in figures.FIGURES:
        svg = _save(one.draw(found), folder / one.name)
        drawn.append((one.title, one.caption, svg))
    html = folder / "latte.html"
    html.write_text(page.page(findings, model.record, drawn), "utf-8")
    calibrate.show(model.record, console)
    console.print(table(findings))
    console.print(calibrated.held_out(model.record), highlight=False, soft_wrap=True)
    console.print(f"{calibrated.ABSOLUTE}: compare ratios", highlight=False, soft_wrap=True)
    console.print(f"page: {html}", highlight=False, soft_wrap=True)
    return findings


def mcast(folder: Path, console: Console) -> list[Finding]:
    """Paper 004's figures 2, 7, 10 to 13 and S: multicast broadcast and all-gather, simulated"""
    plot.pyplot()
    found = mcast_claims.results()
    findings = mcast_claims.findings(found)
    rows = mcast_figures.recorded(RESULTS)
    drawn = [
        (one.title, one.told(rows), _save(one.draw(found, rows), folder / one.name))
        for one in mcast_figures.FIGURES
    ]
    html = folder / "mcast.html"
    html.write_text(mcast_figures.page(findings, drawn), "utf-8")
    console.print(table(findings))
    console.print(f"page: {html}", highlight=False, soft_wrap=True)
    return findings


def conccl(folder: Path, console: Console) -> list[Finding]:
    """ConCCL's figures 5 to 10 and tables I and II, of the simulated 8 x MI300X"""
    plot.pyplot()
    model, record = overlap_model.load()
    found = conccl_rows.results(model)
    findings = conccl_rows.findings(found)
    drawn = [
        (one.title, one.caption, _save(one.draw(found), folder / one.name))
        for one in conccl_figures.FIGURES
    ]
    html = folder / "conccl.html"
    html.write_text(conccl_figures.page(findings, record, drawn), "utf-8")
    fitted = Table(title="parameters", box=box.SIMPLE_HEAD, title_justify="left")
    for name in conccl_figures.COLUMNS:
        fitted.add_column(name)
    for row in conccl_figures.parameters(record):
        fitted.add_row(*row)
    console.print(fitted)
    console.print(table(findings))
    console.print(f"{calibrated.ABSOLUTE}: compare ratios", highlight=False, soft_wrap=True)
    console.print(f"page: {html}", highlight=False, soft_wrap=True)
    return findings


def driven(folder: Path, console: Console) -> list[Finding]:
    """Paper 003's figures 1, 4, 5 and numbers: as recorded on 2 x H200, and by a model of it"""
    plot.pyplot()
    kept = Path(__file__).with_name("recorded")
    rows, runs = gpu_driven.recorded(kept), gpu_driven.trained(kept)
    findings = gpu_driven.findings(rows, runs)
    found = driven_figures.Results(rows, runs, driven_model.Model())
    drawn = [
        (one.title, one.caption, _save(one.draw(found), folder / one.name))
        for one in driven_figures.FIGURES
    ]
    html = folder / "gpu-driven.html"
    html.write_text(driven_figures.page(findings, drawn), "utf-8")
    console.print(table(findings))
    console.print(f"page: {html}", highlight=False, soft_wrap=True)
    return findings


def _save(figure: Any, path: Path) -> bytes:
    """As PNG and SVG; the SVG's bytes, the same each time."""
    plt = plot.pyplot()
    buffer = BytesIO()
    with plt.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=_DPI)
    plt.close(figure)
    path.with_suffix(".svg").write_bytes(buffer.getvalue())
    return buffer.getvalue()


PAPERS: dict[str, Reproduction] = {
    "latte": latte,
    "conccl": conccl,
    "mcast": mcast,
    "gpu-driven": driven,
}


def known() -> list[str]:
    """A line for each paper."""
    return [f"{name}: {(run.__doc__ or '').strip()}" for name, run in PAPERS.items()]


def run(name: str, folder: Path, console: Console) -> list[Finding]:
    """Raises invalid for an unknown name or a folder that cannot be made."""
    if name not in PAPERS:
        raise error("invalid", f"unknown paper '{name}': known are {', '.join(PAPERS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise error("invalid", f"cannot write to '{folder}': {failure.strerror}") from None
    return PAPERS[name](folder, console)


def table(findings: list[Finding]) -> Table:
    result = Table(
        title=f"claims and what this gives for them; met: {tally(findings)}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    for name in ("row", "claim", "published", "model"):
        result.add_column(name)
    result.add_column("difference", justify="right")
    result.add_column("basis")
    result.add_column("")
    for one in findings:
        colour = {True: "green", False: "bold red", None: "dim"}[one.met]
        cells = (one.key, one.claim, one.published, one.model, one.difference, one.basis)
        result.add_row(*cells, f"[{colour}]{one.verdict}[/]")
    return result
