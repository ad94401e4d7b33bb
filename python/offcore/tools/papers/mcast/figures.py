"""Paper 004's figures 2, 7, 10 to 13 and its speedup S, drawn, and one page of all.

The numbers and the claims are those of claims.py. What was measured on this project's testbed
of namespaces is drawn beside them where rows of it were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from offcore.sizes import format_bytes
from offcore.tools.mcast.plot import COLOURS, tidy_axes
from offcore.tools.papers.findings import Finding, tally
from offcore.tools.papers.latte.page import STYLE, claims, figures
from offcore.tools.papers.mcast.claims import (
    BOUND,
    CHUNK,
    DATAPATHS,
    GIB,
    KIB,
    LLC_BYTES,
    PHASE_HOSTS,
    SPEEDUP_HOSTS,
    THREADS,
    TRAFFIC_HOSTS,
    Results,
    share_of,
)
from offcore.tools.plot import pyplot
from offcore.tools.records import read_records


@dataclass(frozen=True)
class Figure:
    name: str  # of the files
    title: str
    caption: str
    draw: Callable[[Results, Sequence[Mapping[str, Any]]], Any]
    recorded: str = ""  # said besides where rows of the testbed are drawn
    draws: Callable[[Mapping[str, Any]], bool] = lambda row: False  # such rows

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The caption, given the rows that there are."""
        return (
            f"{self.caption} {self.recorded}".strip()
            if any(map(self.draws, rows))
            else self.caption
        )


def _port_row(row: Mapping[str, Any]) -> bool:
    """Whether figure 12 has a place for it."""
    return row.get("hosts") == 188 and row.get("bytes") == 188 * 64 * KIB


def _beside_row(row: Mapping[str, Any]) -> bool:
    """Whether it is of appendix B, between hosts that are limited in what they send alone."""
    return row.get("beside") == "reduce_scatter" and set(row.get("faults", ())) == {"send_mbit"}


def draw_traffic(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    for name, values in found.traffic.items():
        dash = "--" if name == "doubling" else "-"  # as much as linear: both are to be seen
        axes.plot(TRAFFIC_HOSTS, values, dash, marker="o", color=COLOURS[name], label=name)
    axes.axhline(2, color="#000000", linewidth=0.9, linestyle=":", label="published: 2x")
    axes.set_xscale("log", base=2)
    axes.set_xticks(TRAFFIC_HOSTS, [str(hosts) for hosts in TRAFFIC_HOSTS])
    axes.set_ylim(0)
    axes.set_xlabel("nodes (simulated: radix 32, full bandwidth)")
    axes.set_ylabel("bytes on all links, times multicast's")
    axes.legend(frameon=False, fontsize=9)
    tidy_axes(axes)
    return figure


def draw_bitmap(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    bits = list(range(14, 33))
    axes.plot(
        bits, [2**n * CHUNK for n in bits], color="#0072B2", label="receive buffer, 4 KiB chunks"
    )
    axes.plot(bits, [2**n / 8 for n in bits], color="#D55E00", label="bitmap")
    for height, text in ((LLC_BYTES, "SmartNIC's cache, 1.5 MB"), (80e9, "a GPU's memory, 80 GB")):
        axes.axhline(height, color="#7F7F7F", linewidth=0.8, linestyle="--")
        axes.text(bits[0], height * 1.25, text, fontsize=8)
    axes.plot([23.55], [50e9], "k*", markersize=10, label="published: about 50 GB")
    axes.set_yscale("log", base=2)
    ticks = [1 << n for n in range(11, 45, 4)]
    axes.set_yticks(ticks, [format_bytes(tick) for tick in ticks])
    axes.set_xticks(bits[::2])
    axes.set_xlabel("bits of the PSN")
    axes.set_ylabel("bytes (K = 1024)")
    axes.legend(frameon=False, fontsize=9)
    tidy_axes(axes)
    return figure


def draw_phases(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    colours = {
        "barrier": "#E69F00",
        "multicast": "#0072B2",
        "fetch": "#D55E00",
        "handshake": "#56B4E9",
    }
    figure, panels = pyplot().subplots(1, 3, figsize=(10, 3.9), sharey=True, layout="constrained")
    for axes, (block, line) in zip(panels, found.phases.items(), strict=True):
        bottoms = [0.0] * len(line)
        for phase, colour in colours.items():
            shares = [100 * share_of(row, phase) for row in line]
            axes.bar(
                range(len(line)), shares, bottom=bottoms, color=colour, label=phase, width=0.72
            )
            bottoms = [low + share for low, share in zip(bottoms, shares, strict=True)]
        axes.axhline(99, color="#000000", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(line)), [str(hosts) for hosts in PHASE_HOSTS])
        axes.set_title(f"{format_bytes(block)} a rank (simulated)", fontsize=10)
        axes.set_xlabel("nodes")
        tidy_axes(axes)
    panels[0].set_ylabel("share of the time (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def draw_throughput(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    palette = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axes, (op, lines) in zip(panels, found.throughput.items(), strict=True):
        scale = 188 if op == "all_gather" else 1
        for colour, (name, line) in zip(palette, lines.items(), strict=False):
            sizes = [row.bytes // scale for row in line]
            axes.plot(
                sizes, [row.goodput_gbps for row in line], marker="o", color=colour, label=name
            )
        axes.axhline(7, color="#7F7F7F", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        ticks = sizes[::2]
        axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"{op}, 188 nodes (simulated)", fontsize=10)
        axes.set_xlabel("bytes of a sender (K = 1024)")
        axes.set_ylabel("received per leaf (1e9 bytes/s)")
        axes.legend(frameon=False, fontsize=8)
        tidy_axes(axes)
    return figure


def draw_ports(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4.0), layout="constrained")
    names = {"multicast": "offcore", "ring": "ring"}
    for axes, (op, bars) in zip(panels, found.ports.items(), strict=True):
        own = bars["multicast"]
        axes.bar(range(len(bars)), [one / 1e6 for one in bars.values()], 0.6,
                 color=[COLOURS[name] for name in bars])  # fmt: skip
        for place, (name, one) in enumerate(bars.items()):
            axes.text(place, one / 1e6, f"{one / own:.2f}x", ha="center", va="bottom", fontsize=9)
            measured = [
                row["switch_bytes"] / 1e6
                for row in rows
                if _port_row(row) and row.get("op") == op and row.get("impl") == names.get(name)
            ]  # fmt: skip
            if measured:
                axes.plot([place], measured[-1:], "kD", label="namespaces, kernel's counters")
        axes.set_xticks(range(len(bars)), list(bars))
        axes.set_ylabel("MB through all switch ports")
        axes.set_title(f"{op}, 64 KiB a sender, 188 nodes (simulated)", fontsize=10)
        tidy_axes(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            axes.legend(handles[:1], labels[:1], frameon=False, fontsize=9)
    return figure


def draw_threads(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    for (name, values), colour in zip(found.threads.items(), ("#0072B2", "#D55E00"), strict=True):
        axes.plot(
            THREADS,
            values,
            marker="o",
            color=colour,
            label=f"{name}, {DATAPATHS[name]:.0f} ns a datagram",
        )
    axes.plot([1, 1], [11.9, 5.2], "k*", markersize=10, label="published: one thread (table I)")
    axes.axhline(200 / 8 * 1e9 / GIB, color="#7F7F7F", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(THREADS, [str(threads) for threads in THREADS])
    axes.set_ylim(0)
    axes.set_xlabel("receive threads (simulated: 8 MiB, 4 KiB chunks, 200 Gbit/s)")
    axes.set_ylabel("GiB/s")
    axes.legend(frameon=False, fontsize=9)
    tidy_axes(axes)
    return figure


def draw_speedup(found: Results, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    smooth = list(range(2, 189))
    axes.plot(smooth, [2 - 2 / hosts for hosts in smooth], "k:", label="published: 2 - 2/P")
    for (chains, values), colour in zip(found.speedup.items(), ("#D55E00", "#0072B2"), strict=True):
        name = f"simulated, {chains} chain{'s' if chains > 1 else ''}"
        axes.plot(SPEEDUP_HOSTS, values, marker="o", color=colour, label=name)
    times_us: dict[int, dict[str, float]] = {}
    for row in filter(_beside_row, rows):
        times_us.setdefault(row["hosts"], {})[row["impl"]] = row["time_us"]
    if times_us:
        values = [one["ring"] / one["offcore"] for one in times_us.values()]
        axes.plot(list(times_us), values, "kD", label="namespaces, measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SPEEDUP_HOSTS, [str(hosts) for hosts in SPEEDUP_HOSTS])
    axes.set_ylim(0, 2.1)
    axes.set_xlabel("nodes")
    axes.set_ylabel("times as fast as two rings")
    axes.legend(frameon=False, fontsize=9)
    tidy_axes(axes)
    return figure


FIGURES = (
    Figure(
        "figure2",
        "Figure 2: traffic",
        "All-gather on a fat-tree of switches with 32 ports: bytes on all links, each direction "
        "once.",
        draw_traffic,
    ),
    Figure(
        "figure7",
        "Figure 7: bitmap and buffer",
        "What a PSN of so many bits addresses, and the bitmap that goes with it. For 16 GB that is "
        "512 KiB at 4 KiB a chunk; the paper's text (III-D) has 64 KiB.",
        draw_bitmap,
    ),
    Figure(
        "figure10",
        "Figure 10: critical path",
        "Means over the nodes of a simulated all-gather; dotted: the published 99 %.",
        draw_phases,
    ),
    Figure(
        "figure11",
        "Figure 11: throughput at 188 nodes",
        "Simulated, 56 Gbit/s; dashed: the link. What the paper's libraries lose in software is "
        "not modelled.",
        draw_throughput,
    ),
    Figure(
        "figure12",
        "Figure 12: bytes through switch ports",
        "Sent and received, of 18 switches.",
        draw_ports,
        "Diamonds: this project's all-gather on a tree of namespaces with one spine, with packet "
        "headers.",
        _port_row,
    ),
    Figure(
        "figure13",
        "Figure 13: receive threads",
        "Threads with the paper's cycles for a datagram (table I) that do not slow each other "
        "down.",
        draw_threads,
    ),
    Figure(
        "speedup",
        "Appendix B: S",
        "All-gather and reduce-scatter at once, 256 KiB a rank: multicast and in-network reduction "
        "over two rings. One chain shares its root's link with the reduction.",
        draw_speedup,
        "Diamonds: between namespaces that are limited in what they send, 1 MiB a rank; there "
        "hosts reduce, and receive as many bytes as with rings.",
        _beside_row,
    ),
)


def page(found: Sequence[Finding], drawn: Sequence[tuple[str, str, bytes]]) -> str:
    """drawn: (title, caption, SVG). One HTML page that needs nothing else."""
    shown = figures(drawn)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Multicast all-gather, reproduced</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body>
<h1>Network-Offloaded Bandwidth-Optimal Broadcast and Allgather, reproduced by a simulator</h1>
<p class="note">The paper's 188 nodes were not measured here. Times are a simulator's of its
network; bytes are counted, in the simulator and, where marked, by a kernel.</p>
<p>Claims met: <strong>{escape(tally(found))}</strong>. A number may differ by {BOUND:.0%}, a share
by a point. "Up to" is a ceiling: the best case here has to come to as much, and no more. A larger
factor is no better result. It says that the rivals here are not the paper's: what its libraries
cost a host and its single receive thread are not modelled.</p>
<p>Figure 13, UC: the simulator is given the cycles of a datagram from table I, and the throughput
in table I is the same measurement in other units. Their agreement is circular and not counted. UD's
throughput is lower than its cycles alone would allow, which the simulator does not explain: its
rows are counted.</p>
<h2>Claims</h2>
{claims(found)}
<h2>Figures</h2>
{shown}
</body></html>
"""


def recorded(folder: Path) -> list[Mapping[str, Any]]:
    """Rows of `offcore mcast bench` in a folder of results; none where it is not there."""
    return [
        row
        for kind in ("testbed", "beside")
        for path in sorted(folder.glob(f"mcast-{kind}-*.jsonl"))
        for row in read_records(path)
    ]
