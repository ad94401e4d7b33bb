"""Paper 003's published numbers, each beside what was measured here, if it was, and beside a model
of its engines on its own machine (driven_model.py), if that gives it.

Ours are rows that `offcore gpu bench` recorded on 2 x H200; the paper's GPUs are V100 on PCIe. A
time or a rate is met by being no worse, a factor by being no smaller.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from offcore.errors import error
from offcore.tools import plot
from offcore.tools.papers import driven_model
from offcore.tools.papers.findings import Finding, percent, tally

FILE = "gpu-driven-h200-2.txt"
KINDS = "ping-pong|throughput|push|step|kernel"
LINE = re.compile(rf"^({KINDS})\s+(\S.*?)\s+(\d+)\s+([\d.]+) ", re.MULTILINE)
KIB, MIB = 1 << 10, 1 << 20
# The proxy's ping-pong of a later commit, in a line of its own.
LATER = re.compile(r"^ping-pong, us one way, of 4 KiB ([\d.]+) ", re.MULTILINE)
LATER_PROXY = "proxy, f1a60bf"
WAITS = "two streams' waits"
TITLE = "GPU-driven copies: published and measured"

Rows = dict[tuple[str, str, int], float]
# Not measured here: key, claim, published.
UNMEASURED = (
    ("I", "latency in frameworks that use the DMA engine", "hundreds of us"),
    ("F1", "rate by size of a message, ideal and by TensorFlow", "curves"),
    ("T1", "polling gap, mutex", "58.3, 58.7 us"),
    ("T1", "all of them", "151.6 us"),
    ("T2", "an FPGA's stack: ALMs, block RAM", "14253 (3.34 %), 188 (6.93 %)"),
    ("T2", "an FPGA's PCIe: ALMs, block RAM", "1364 (0.32 %), 13 (0.48 %)"),
    ("II-B", "mutex, both threads on one core", "5 us"),
    ("II-B", "a busy CPU sees an event; a GPU's signal by the host", "3 us; 2 to 3 us"),
    ("II-B", "trigger of an event; waking a command", "4 us; 10 to 20 us"),
    ("II-C", "the kernel's reads of L2; FFMA among the other's instructions", "1.96 TB/s; 99.2 %"),
    ("II-C", "BERT-Large on 8 V100: computation; all-reduce", "-45.0 %; 5.0 GB/s, 53.6 %"),
    ("II-C", "the same on 8 A100", "-14.3 %; 49.0 GB/s, 30.9 %"),
    ("III-B", "SR, SC and RC by MMIO", "2 to 3 us"),
    ("F5", "training of BERT-Large by Megatron-LM, PT-TRT", "2.46x, 2.12x"),
    ("F5", "share of the gap that is communication", "64.5 %"),
    ("F5", "all-reduce beside training", "9.10 GB/s, 1.82x"),
)


def recorded(folder: Path) -> Rows:
    """Raises invalid where they are not at hand."""
    try:
        text = (folder / FILE).read_text("utf-8")
    except OSError:
        raise error("invalid", f"{folder / FILE} is missing: install offcore again") from None
    rows = {
        (what, engine, int(nbytes)): float(value)
        for what, engine, nbytes, value in LINE.findall(text)
    }
    if later := LATER.search(text):
        rows["ping-pong", LATER_PROXY, 4 * KIB] = float(later[1])
    return rows


def _time(claim: str, published: float, ours: float) -> Finding:
    off = percent(ours / published - 1)
    met = ours <= published
    return Finding("F4", claim, f"{published:g} us", f"{ours:.2f} us", off, "measured", met)


def _proxy(ping: dict[str, float]) -> Finding:
    """The later run counts; the earlier one, of the other rows' commit, stands beside it."""
    found = _time("software engine: one way (ours: proxy, 4 KiB)", 11.2, ping[LATER_PROXY])
    return replace(found, model=f"{found.model} ({ping['proxy']:.2f} us at 71dc787)")


def _factor(claim: str, published: float, ours: float) -> Finding:
    off = percent(ours / published - 1)
    met = ours >= published
    return Finding("F4", claim, f"{published:g}x", f"{ours:.2f}x", off, "measured", met)


def _beside(rows: Rows) -> list[Finding]:
    """Table I's steps, and kernels beside an all-gather: other GPUs, so nothing to be met."""

    def step(name: str, nbytes: int = 4 * KIB) -> str:
        return f"{rows['step', name, nbytes]:.1f}"

    def slower(kernel: str) -> str:
        by = {who: rows["kernel", f"{kernel} + {who}", 64 * MIB] for who in ("NCCL", "offcore")}
        return f"NCCL {by['NCCL']:.2f}x, offcore {by['offcore']:.2f}x"

    events = f"{step('event seen')}, {step(WAITS, 0)} us"
    told = (
        ("T1", "trigger of an event, synchronisation of streams", "3.8, 11.6 us", events),
        ("T1", "kernel launch (ours: until the kernel runs)", "19.2 us", f"{step('launch')} us"),
        ("II-C", "a kernel that reads L2 beside a 64 MB all-gather", "2.35x", slower("L2")),
        ("II-C", "a kernel of FFMA (2.02 instructions a cycle)", "2.00x", slower("FFMA")),
    )
    return [
        Finding(key, claim, published, ours, "", "measured", None)
        for key, claim, published, ours in told
    ]


def findings(rows: Rows) -> list[Finding]:
    ping = {
        engine: us
        for (what, engine, at), us in rows.items()
        if (what, at) == ("ping-pong", 4 * KIB)
    }
    rate = {
        (engine, at): value for (what, engine, at), value in rows.items() if what == "throughput"
    }
    peak = max(rate["contiguous", at] for engine, at in rate if engine == "contiguous")
    full = min(
        at for (engine, at), gb in rate.items() if engine == "contiguous" and gb >= 0.9 * peak
    )
    events, host = f"events {ping['events']:.2f} us", f"the host {ping['host']:.2f} us"
    loop = rate["memcpy loop", 8 * KIB]
    found = [
        Finding("F4", "CPU-driven: one way", "39.3 us", f"{events}, {host}", "", "measured", None),
        _proxy(ping),
        _factor("software engine beside CPU-driven by events", 3.5, ping["events"] / ping["proxy"]),
        _time("hardware engine: one way (ours: armed, fenced)", 4.32, ping["armed"]),
        _time("the same (ours: armed in copy order)", 4.32, ping["armed co"]),
        _factor("hardware engine beside CPU-driven", 9.1, ping["events"] / ping["armed co"]),
        Finding("F4", "software engine: 90 % of its peak from", "4 MB", f"{full >> 10} KiB", "",
                "measured", full <= 4 * MIB),
        _factor("8 KB messages beside a loop of memcpy: side by side", 3.87,
                rate["contiguous", 8 * KIB] / loop),
        _factor("8 KB messages beside a loop of memcpy: apart", 3.87,
                rate["apart", 8 * KIB] / loop),
        Finding("III-A", "a request", "8 bytes", "8 bytes", "", "by construction", None),
        Finding("II-B", "a GPU thread reads 4 bytes of the host (ours: push and echo)", "2 us",
                f"{rows['push', 'to and fro', 8]:.2f} us", "", "measured", None),
    ]  # fmt: skip
    found += _beside(rows)
    found += driven_model.findings(driven_model.Model())
    for key, claim, published in UNMEASURED:
        found.append(Finding(key, claim, published, "-", "", "not measured", None))
    return found


def draw(rows: Rows) -> Any:
    """Figure 4's left half: throughput of many messages, by their size; and the model's."""
    figure, (axes, modelled) = plot.pyplot().subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    model, sizes = driven_model.Model(), driven_model.SIZES
    for name, rate in (("hardware engine", model.hardware), ("software engine", model.software)):
        modelled.plot(sizes, [rate(size) for size in sizes], marker="o", label=name)
    modelled.set_title("the paper's engines, modelled")
    axes.set_title("2 x H200, measured")
    for name in ("contiguous", "apart", "memcpy loop"):
        points = sorted(
            (at, gb)
            for (what, engine, at), gb in rows.items()
            if (what, engine) == ("throughput", name)
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    for one in (axes, modelled):
        one.set_xscale("log", base=2)
        one.set_xlabel("bytes of a message")
        one.set_ylabel("GB/s")
        one.legend()
    return figure


def page(found: Sequence[Finding], svg: bytes) -> str:
    image = base64.b64encode(svg).decode()
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
        for cells in (
            (f.key, f.claim, f.published, f.model, f.difference, f.basis, f.verdict) for f in found
        )
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title></head><body>
<h1>{TITLE}</h1>
<p>The paper's: V100 on PCIe. Ours: 2 x H200, as recorded; rows that begin with "model": its engines
on its own machine, simulated. Claims met: {escape(tally(found))}.</p>
<table><tr><th>row<th>claim<th>published<th>ours<th>difference<th>basis<th></tr>
{body}</table>
<img alt="Throughput by the size of a message" src="data:image/svg+xml;base64,{image}">
</body></html>
"""
