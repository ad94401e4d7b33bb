"""Paper 003's figures 1, 4 and 5 beside what was measured on 2 x H200 and what the model of its own
machine gives (gpu_driven.py, driven_model.py), and their page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from offcore.tools.driven import simulated
from offcore.tools.papers import driven_model
from offcore.tools.papers.findings import Finding, tally
from offcore.tools.papers.gpu_driven import LATER_PROXY, Rows, Training, contiguous_peak
from offcore.tools.papers.latte.page import STYLE, claims, figures
from offcore.tools.plot import COLOURS, PAGE_INCHES, plain_log, pyplot, size_axis

TITLE = "GPU-driven copies: published and measured"
TABLE_I_US = 151.6
GPUS, PAPER = "2 x H200, measured", "8 x V100, PCIe 3.0, modelled"
# Okabe and Ito's; an engine keeps its colour over all figures.
CPU, SOFTWARE, HARDWARE, OTHER = "#D55E00", "#0072B2", "#009E73", "#7F7F7F"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Results:
    rows: Rows
    training: Sequence[Training]
    model: driven_model.Model


@dataclass(frozen=True)
class Figure:
    name: str  # of the files
    title: str
    caption: str
    draw: Callable[[Results], Any]


def _panels(widths: Sequence[float] = (1, 1)) -> tuple[Any, Any]:
    figure, axes = pyplot().subplots(
        1,
        len(widths),
        figsize=(PAGE_INCHES, 4.2),
        layout="constrained",
        width_ratios=widths,
    )
    return figure, axes


def _bare(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(axes: Any, sizes: Sequence[int], values: Sequence[float], label: str, **look: Any) -> Any:
    return axes.plot(sizes, values, label=label, **({"marker": "o", "markersize": 4} | look))


def _by_size(rows: Rows, what: str, engine: str) -> tuple[list[int], list[float]]:
    found = sorted((at, value) for (kind, name, at), value in rows.items()
                   if (kind, name) == (what, engine))  # fmt: skip
    return [at for at, _ in found], [value for _, value in found]


def _rates(axes: Any, title: str, sizes: Sequence[int]) -> None:
    size_axis(axes, sizes)
    plain_log(axes)
    axes.set_xlabel("bytes of a message (K = 1024)")
    axes.set_ylabel("GB/s")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _bare(axes)


ONE_AT_A_TIME = (
    ("polling", "CPU: polling", CPU, ":"),
    ("host", "CPU: synchronisation", CPU, "--"),
    ("events", "CPU: two events", CPU, "-"),
    ("proxy", "GPU: proxy", SOFTWARE, "-"),
    ("armed co", "GPU: armed, copy order", HARDWARE, "-"),
)


def _draw_rates(found: Results) -> Any:
    """Solid: a message at a time, with what it takes to say so; dashed: without."""
    figure, (ours, modelled) = _panels()
    ideal = {"color": OTHER, "linestyle": "--", "marker": "s"}
    for engine, label, colour, style in ONE_AT_A_TIME:
        sizes, times = _by_size(found.rows, "ping-pong", engine)
        rates = [size / us / 1e3 for size, us in zip(sizes, times, strict=True)]
        _line(ours, sizes, rates, label, color=colour, linestyle=style)
    sizes, rates = _by_size(found.rows, "throughput", "memcpy loop")
    _line(ours, sizes, rates, "ideal: cudaMemcpyAsync in a row", **ideal)
    peak = contiguous_peak(found.rows)
    ours.axhline(peak, color=OTHER, linestyle=":", linewidth=1, label="the link, as reached")
    ours.set_ylim(0.01, 2 * peak)
    _rates(ours, GPUS, sizes)
    model = found.model
    sizes = [size for size in driven_model.SIZES if size >= 4 * KIB]
    ideals = [simulated.loop_gbps(model.machine, size) for size in sizes]
    ways: tuple[tuple[str, str, str, Callable[[int], float]], ...] = (
        ("TensorFlow: table I's 151.6 us", CPU, ":", _tensorflow_us(model)),
        (
            "CPU: two events (C-Drv)",
            CPU,
            "-",
            lambda size: simulated.events_us(model.machine, size),
        ),
        ("software engine (G-Drv-S)", SOFTWARE, "-", lambda size: model.way_us("proxy", size)),
        ("hardware engine (G-Drv-H)", HARDWARE, "-", lambda size: model.way_us("device", size)),
    )
    for label, colour, style, us in ways:
        values = [size / us(size) / 1e3 for size in sizes]
        _line(modelled, sizes, values, label, color=colour, linestyle=style)
    _line(modelled, sizes, ideals, "ideal: cudaMemcpy in a row", **ideal)
    _rates(modelled, PAPER, sizes)
    return figure


def _tensorflow_us(model: driven_model.Model) -> Callable[[int], float]:
    return lambda size: TABLE_I_US + size / simulated.loop_gbps(model.machine, size) / 1e3


def _draw_throughput(found: Results) -> Any:
    figure, (ours, modelled) = _panels()
    lines = (
        ("contiguous", "proxy, side by side", SOFTWARE, "-"),
        ("apart", "proxy, apart", SOFTWARE, "--"),
        ("memcpy loop", "cudaMemcpyAsync in a loop", OTHER, "-"),
    )
    for engine, label, colour, style in lines:
        sizes, rates = _by_size(found.rows, "throughput", engine)
        _line(ours, sizes, rates, label, color=colour, linestyle=style)
    _rates(ours, GPUS, sizes)
    model, sizes = found.model, [*driven_model.SIZES]
    for label, rate, colour in (
        ("hardware engine (G-Drv-H)", model.hardware, HARDWARE),
        ("software engine (G-Drv-S)", model.software, SOFTWARE),
    ):
        _line(modelled, sizes, [rate(size) for size in sizes], label, color=colour)
    _rates(modelled, PAPER, sizes)
    for axes in (ours, modelled):
        axes.set_yscale("linear")
    return figure


def _draw_latency(found: Results) -> Any:
    figure, all_axes = _panels((1, 1, 1.9))
    ping = {name: us for (what, name, at), us in found.rows.items()
            if (what, at) == ("ping-pong", 4 * KIB)}  # fmt: skip
    named = {"C-Drv": CPU, "G-Drv-S": SOFTWARE, "G-Drv-H": HARDWARE}
    ours = (
        ("polling", ping["polling"], CPU),
        ("host", ping["host"], CPU),
        ("events", ping["events"], CPU),
        ("proxy", ping[LATER_PROXY], SOFTWARE),
        ("armed,\nfenced", ping["armed"], HARDWARE),
        ("armed,\ncopy order", ping["armed co"], HARDWARE),
    )
    groups = (
        ("8 x V100, published", [(n, driven_model.ONE_WAY_US[n], c) for n, c in named.items()]),
        (PAPER, [(n, us, named[n]) for n, us in found.model.one_way_us().items()]),
        (f"{GPUS}, 4 KiB", ours),
    )
    for axes, (title, bars) in zip(all_axes, groups, strict=True):
        _bars(axes, bars, "%.1f")
        axes.set_ylim(0, 50)
        axes.set_title(title, fontsize=10)
    all_axes[0].set_ylabel("us one way")
    return figure


def _bars(axes: Any, bars: Sequence[tuple[str, float, str]], form: str) -> None:
    names, values, colours = zip(*bars, strict=True)
    drawn = axes.bar(range(len(bars)), values, 0.62, color=colours)
    axes.bar_label(drawn, fmt=form, fontsize=8, padding=2)
    axes.set_xticks(range(len(bars)), names, fontsize=8)
    _bare(axes)


PUBLISHED_SPEED = (
    ("Megatron\n-LM", 1.0, CPU),
    ("PT-TRT", 2.46 / 2.12, CPU),
    ("G-Drv-S", 2.46, SOFTWARE),
)
PUBLISHED_REDUCE = (("NCCL", 5.0, CPU), ("G-Drv-S", 9.10, SOFTWARE))


def _draw_training(found: Results) -> Any:
    figure, (speed, steps, published, ours) = _panels((1, 1, 0.8, 1.3))
    _bars(speed, PUBLISHED_SPEED, "%.2fx")
    speed.set_title("8 x V100, published:\nthroughput", fontsize=10)
    speed.set_ylim(0, 2.9)
    last = found.training[-1]
    names = ("alone", "NCCL", "offcore")
    times = (last.alone_ms, last.nccl_ms, last.offcore_ms)
    steps.bar(range(3), [last.alone_ms] * 3, 0.62, color=COLOURS["memcpy"], label="computation")
    more = [ms - last.alone_ms for ms in times]
    drawn = steps.bar(range(3), more, 0.62, bottom=last.alone_ms, color=CPU, label="communication")
    shares = [f"{ms:.1f}\n{part / ms:.0%}" if part else f"{ms:.1f}"
              for ms, part in zip(times, more, strict=True)]  # fmt: skip
    steps.bar_label(drawn, shares, fontsize=8, padding=2)
    steps.set_xticks(range(3), names, fontsize=8)
    steps.set_ylim(0, 80)
    steps.set_ylabel("ms a step")
    steps.legend(frameon=False, fontsize=8, loc="upper left")
    steps.set_title("2 x H200, measured:\na step of DDP", fontsize=10)
    _bare(steps)
    _bars(published, PUBLISHED_REDUCE, "%.1f")
    published.set_title("8 x V100, published:\nall-reduce beside training", fontsize=10)
    published.set_ylabel("GB/s")
    bars = [(f"{name}\n{one.commit}", rate, colour) for one in found.training
            for name, rate, colour in (("NCCL", one.nccl_beside, CPU),
                                       ("offcore", one.offcore_beside, SOFTWARE))]  # fmt: skip
    _bars(ours, bars, "%.0f")
    ours.tick_params(axis="x", labelsize=7)
    ours.set_title("2 x H200, measured:\nall-reduce beside layers", fontsize=10)
    return figure


FIGURES = (
    Figure(
        "figure-1",
        "Figure 1: one message at a time",
        "Solid: a message at a time, with what it takes to tell that data is ready and has come. "
        "Dashed: copies in a row, without. Left: ping-pongs as recorded; dotted: the link's rate "
        "as reached. Right: the model of the paper's machine; TensorFlow: the constant 151.6 us of "
        "table I and a copy. The paper's curves are not published as numbers.",
        _draw_rates,
    ),
    Figure(
        "figure-4",
        "Figure 4, left: many messages",
        "Left: as recorded. Right: the paper's engines, modelled.",
        _draw_throughput,
    ),
    Figure(
        "figure-4-right",
        "Figure 4, right: one way of a ping-pong",
        "Left: as published, of few bytes. Middle: the model of the same machine; G-Drv-S is "
        "fitted. Right: as recorded, of 4 KiB.",
        _draw_latency,
    ),
    Figure(
        "figure-5",
        "Figure 5: training of BERT-Large",
        "Published: throughput of 8 V100 to Megatron-LM's, and all-reduces of NCCL and G-Drv-S "
        "beside training. Measured: DDP on 2 x H200, an encoder of BERT-Large's size, over NCCL "
        "and over Offcore, with the share of a step by which communication makes it longer; and "
        "all-reduces of 32 MiB beside each layer, of two commits, whose runs differ. Neither "
        "Megatron-LM nor PT-TRT was run, and no number of GPUs but 2.",
        _draw_training,
    ),
)


def page(found: Sequence[Finding], drawn: Sequence[tuple[str, str, bytes]]) -> str:
    """drawn: (title, caption, SVG). One HTML page that needs nothing else."""
    shown = figures(drawn)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body>
<h1>{TITLE}</h1>
<p class="note">The paper's: V100 on PCIe. Ours: 2 x H200, as recorded; rows that begin with
"model": its engines on its own machine, simulated.</p>
<p>Claims met: <strong>{escape(tally(found))}</strong>.</p>
<h2>Claims</h2>
{claims(found)}
<h2>Figures</h2>
{shown}
</body></html>
"""
