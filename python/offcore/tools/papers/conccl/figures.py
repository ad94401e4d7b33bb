"""ConCCL's figures 5 to 10 and its tables as the interference model gives them, and their page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from offcore.overlap.kernels import Collective
from offcore.sizes import format_bytes
from offcore.tools.overlap import engines, plot
from offcore.tools.overlap.cases import COMBINATIONS, GEMMS, OPS, size_of
from offcore.tools.overlap.model import WORKGROUPS, Load
from offcore.tools.overlap.sweep import gemm_of
from offcore.tools.papers.conccl import fit, rows
from offcore.tools.papers.conccl.rows import Results, engines_speedup
from offcore.tools.papers.findings import Finding, tally
from offcore.tools.papers.latte.calibrated import ABSOLUTE
from offcore.tools.papers.latte.page import STYLE, at_limits, claims, figures
from offcore.tools.plot import draw_table, pyplot


@dataclass(frozen=True)
class Figure:
    name: str  # of the files
    title: str
    caption: str
    draw: Callable[[Results], Any]


def _rows(found: Results) -> list[dict[str, Any]]:
    return [row for one in found.outcomes for row in one.rows(found.model)]


def _draw_traffic(found: Results) -> Any:
    model = found.model
    figure, axes = pyplot().subplots(figsize=(7.4, 3.8), layout="constrained")
    bars = {
        tag: model.traffic_share(Load(gemm_of(model, tag), model.cores.count)) for tag in GEMMS
    } | {
        op: model.traffic_share(Load(Collective(op, 1 << 30, model.ranks), WORKGROUPS[op]))
        for op in OPS
    }
    top = max(bars.values())
    colours = [plot.COLOURS[name if name in OPS else name[:2]] for name in bars]
    drawn = axes.bar(range(len(bars)), [one / top for one in bars.values()], 0.6, color=colours)
    axes.bar_label(drawn, fmt="%.2f", fontsize=8, padding=1)
    axes.set_xticks(range(len(bars)), list(bars), fontsize=9)
    axes.set_ylabel("memory bandwidth used, of the widest (model)")
    plot.bare(axes)
    return figure


def _draw_engines(found: Results) -> Any:
    sizes = [1 << power for power in range(10, 35)]
    series = {op: {size: engines_speedup(found.model, op, size) for size in sizes} for op in OPS}
    title = "Collectives on engines beside cores, 8 x MI300X (model)"
    return engines.draw(series, title, published=True)


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[float]) -> Any:
    figure, axes = pyplot().subplots(figsize=(9, 0.5 + 0.27 * len(cells)), layout="constrained")
    draw_table(axes, columns, cells, widths, font=9, height=1.25)
    return figure


def _draw_table_1(found: Results) -> Any:
    model = found.model
    cells = []
    for tag, (m, n, k) in GEMMS.items():
        gemm = gemm_of(model, tag)
        time_us = model.alone_us(Load(gemm, model.cores.count))
        rate = f"{gemm.flops / time_us / 1e6:.0f}"
        bound = model.cores.bound_of(gemm)
        cells.append([tag, f"{m} x {n} x {k}", f"{gemm.op_to_byte:.0f}", bound, rate])
    columns = ("tag", "M x N x K", "op/B", "class (model)", "TFLOP/s (model)")
    return _table(columns, cells, (0.1, 0.3, 0.15, 0.2, 0.2))


def _draw_table_2(found: Results) -> Any:
    cells = []
    for tag, kind in COMBINATIONS.items():
        both = [one for one in found.outcomes if one.tag == tag]
        ours = ", ".join(dict.fromkeys(one.kind for one in both))
        ratio = both[0].gemm_us / both[0].kernel_us
        size = format_bytes(size_of(tag.split("_")[1]))
        cells.append([tag, size, kind, ours, f"{ratio:.2f}", f"{both[0].ideal.published:.2f}x"])
    columns = ("combination", "bytes", "published", "model", "GEMM / all_gather", "ideal")
    return _table(columns, cells, (0.2, 0.12, 0.15, 0.2, 0.2, 0.12))


FIGURES = (
    Figure(
        "figure-5",
        "Figure 5",
        "What cores are worth: GEMMs (one of each class) and collectives of 1 GiB, alone. "
        "Published: compute-bound GEMMs lose up to 17 % on 32 CUs fewer, 27 % on 64; an all-gather "
        "needs 32.",
        lambda found: plot.draw_slowdowns(found.tables),
    ),
    Figure("figure-6", "Figure 6", "Memory traffic of kernels that run alone.", _draw_traffic),
    Figure(
        "figure-7",
        "Figure 7",
        "Ideal speed-ups: both kernels alone, over the longer one. Published: 1.1 to 2, mean 1.6.",
        lambda found: plot.draw_ideals(_rows(found)),
    ),
    Figure(
        "figure-8",
        "Figure 8",
        "Collectives on cores: means by collective and type. best: of base, sp and rp. "
        "Published, of the ideal: base 21 %, sp 42 %, rp 41 %, best 48 %.",
        lambda found: plot.draw_speedups(_rows(found), 8),
    ),
    Figure(
        "figure-9",
        "Figure 9",
        "Collectives on engines, alone, by size. Published: up to 4x slower below 32 MB, then at "
        "par.",
        _draw_engines,
    ),
    Figure(
        "figure-10",
        "Figure 10",
        "Collectives on engines beside the best on cores. Published, of the ideal: ConCCL 66 %, "
        "ConCCL_rp 72 %; at most 1.67x.",
        lambda found: plot.draw_speedups(_rows(found), 10),
    ),
    Figure("table-1", "Table I", "GEMMs and their classes.", _draw_table_1),
    Figure("table-2", "Table II", "Combinations and their types.", _draw_table_2),
)


def parameters(record: Mapping[str, Any]) -> list[list[str]]:
    """name, unit, meaning, value, allowed, and how far it can go alone."""
    return [
        [
            one["name"],
            one["unit"],
            one["meaning"],
            f"{one['value']:g}",
            f"{one['low']:g} - {one['high']:g}",
            f"{one['least']:g} - {one['most']:g}" if "least" in one else "",
        ]
        for one in record["parameters"]
    ]


COLUMNS = ("parameter", "unit", "meaning", "value", "allowed", "as good alone")


def page(
    found: Sequence[Finding],
    record: Mapping[str, Any],
    drawn: Sequence[tuple[str, str, bytes]],
) -> str:
    """drawn: (title, caption, SVG). One HTML page that needs nothing else."""
    shown = figures(drawn)
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    cells = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in parameters(record)
    )
    limits = ", ".join(at_limits(record)) or "none"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ConCCL, reproduced by a model</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body>
<h1>Optimizing ML Concurrent Computation and Communication with GPU DMA Engines, reproduced by
offcore's model</h1>
<p class="note">No MI300X was measured here. Collectives on engines are the simulator's; how
kernels slow each other down is a model's, whose parameters were fitted to
{len(fit.SHARES) + 1} published numbers, the types of Table II and one number of Figure 9.
<strong>{escape(ABSOLUTE[0].upper() + ABSOLUTE[1:])}.</strong></p>
<p>Claims met: <strong>{escape(tally(found))}</strong>. A share over all combinations may differ
by {100 * rows.POINTS:.0f} points, an end of the shares over types by
{100 * rows.GROUP_POINTS:.0f}, a speed-up by {rows.RATIO:.0%}. "Up to" is a ceiling: ours has to
come to as much, and no more. "Fitted": a parameter was fitted to this very number. "Predicted":
none was, but the model's form was chosen with all of these numbers in sight.</p>
<h2>Claims</h2>
{claims(found)}
<h2>Figures and tables</h2>
{shown}
<h2>Parameters</h2>
<p>Fitted by <code>offcore overlap calibrate --seed {record["seed"]}</code>. "As good alone": how
far one parameter can go, the others kept, until the fit has lost about two points of a share. At
the limit of what is allowed: {escape(limits)}.</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div>
</body></html>
"""
