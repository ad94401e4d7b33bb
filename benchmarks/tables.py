"""The tables of the documents, made from what was recorded: `python benchmarks/tables.py`.

A comment `<!-- table NAME -->` announces a table, which is written anew from the rows of
benchmarks/results, from a calibration or from the simulator. Tests hold the documents to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import kv_tables
from markdown_cells import RESULTS, Record, kib, table

from offcore.sizes import format_bytes
from offcore.tools.mcast.fat_tree import Load, Tree, Wire, measure
from offcore.tools.overlap import model as overlap_model
from offcore.tools.papers import gpu_driven
from offcore.tools.papers.conccl import rows as conccl_rows
from offcore.tools.papers.findings import Finding, tally
from offcore.tools.papers.latte import calibrated, figures, kv, power, rows
from offcore.tools.papers.mcast import claims as mcast_claims
from offcore.tools.records import read_records

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "docs/performance.md",
    "docs/measurements/kv.md",
    "docs/measurements/mcast.md",
    "docs/measurements/model.md",
    "docs/papers.md",
)
SIMGRID = {"ring": "ring", "linear": "all pairs", "knomial": "binomial tree"}
MULTICAST = (
    ("all_gather-4", "all-gather, 4 hosts"),
    ("all_gather-8", "all-gather, 8 hosts"),
    ("all_gather-4-lossy", "all-gather, 4 hosts, 1 % lost"),
    ("all_gather-4-lossy-plain", "the same without offloads, 4 chains"),
    ("broadcast-4", "broadcast, 4 hosts"),
    ("broadcast-8", "broadcast, 8 hosts"),
    ("broadcast-4-jumbo", "broadcast, 4 hosts, MTU 9000"),
    ("broadcast-8-jumbo", "broadcast, 8 hosts, MTU 9000"),
    ("broadcast-4-lossy", "broadcast, 4 hosts, 1 % lost"),
)


def claims(found: Sequence[Finding], ours: str) -> list[str]:
    head = ("row", "claim", "paper", ours, "difference", "basis", "")
    body = (
        (one.key, one.claim, one.published, one.model, one.difference, one.basis, one.verdict)
        for one in found
    )
    return table(head, body)


@cache
def latte() -> list[Finding]:
    found = figures.results(calibrated.load())
    values = found.calibrated
    spent = power.shares(found.sweep, found.activities, values.power)
    return [
        *rows.findings(found.sweep, found.made),
        *power.findings(spent),
        *kv.findings(values.machine, found.fetches, values.kv),
    ]


@cache
def conccl() -> list[Finding]:
    model, _ = overlap_model.load()
    return [*conccl_rows.findings(conccl_rows.results(model))]


@cache
def driven() -> list[Finding]:
    return [*gpu_driven.findings(gpu_driven.recorded(RESULTS), gpu_driven.trained(RESULTS))]


@cache
def mcast() -> list[Finding]:
    return [*mcast_claims.findings(mcast_claims.results())]


def papers() -> list[str]:
    """Each paper, and how many of the claims that its command counts are met."""
    named = (
        ("001", "DMA-Latte: Expanding the Reach of DMA Offloads to Latency-bound ML Communication",
         latte, "latte", "dma-latte-all-numbers-of-its-evaluation-compared-with-the-model"),
        ("002", "Optimizing ML Concurrent Computation and Communication with GPU DMA Engines "
         "(ConCCL)", conccl, "conccl", "overlap-of-compute-and-communication-conccl"),
        ("003", "Towards GPU-driven Code Execution for Distributed Deep Learning",
         driven, "gpu-driven", "gpu-driven-copies-paper-003"),
        ("004", "Network-Offloaded Bandwidth-Optimal Broadcast and Allgather for Distributed AI",
         mcast, "mcast", "multicast-broadcast-and-all-gather-paper-004"),
    )  # fmt: skip
    body = (
        (f"[{number}](#{anchor})", title, tally(found()), f"`offcore reproduce {command}`")
        for number, title, found, command, anchor in named
    )
    return table(("paper", "title", "claims met", "command"), body)


def residuals() -> list[str]:
    """Of the fit, and of fits that have not seen the row."""
    head = ("row", "claim", "published", "model", "residual", "without the row")
    engines = calibrated.load().record["engines"]
    body = (
        (
            row["key"],
            f"{row['op']}: {row['claim']}",
            f"{row['published']:g}",
            f"{row['model']:.2f}",
            f"{100 * row['residual']:+.1f} %",
            calibrated.span(row["left_out"]),
        )
        for row in engines["rows"]
    )
    return table(head, body)


def simgrid_differences() -> dict[tuple[str, int], float]:
    """By algorithm and bytes of a rank, how much longer the fat-tree simulator takes than SimGrid,
    as a share: calibrated with its time of one message to a near and to a far host, no more."""
    rows = read_records(RESULTS / "simgrid-188.jsonl")
    known = {(row["algorithm"], row["bytes_per_rank"]): row["time_us"] for row in rows}
    near, far = known["near", 4096], known["far", 4096]
    hop_ns = (far - near) / 2 * 1e3
    wire = Wire(hop_ns=hop_ns, message_ns=near * 1e3 - 2 * hop_ns - 4096 / 7)
    tree = Tree("simgrid", 188, 16, 18, 18)
    found = {}
    for (name, nbytes), theirs in known.items():
        if name in SIMGRID:
            load = Load("broadcast", name, nbytes, radix=2)
            load = load if name == "knomial" else Load("all_gather", name, nbytes * tree.hosts)
            found[name, nbytes] = measure(tree, wire, [load])[0].time_us / theirs - 1
    return found


def simgrid_beside() -> list[str]:
    found = simgrid_differences()
    sizes = sorted({nbytes for _, nbytes in found})
    body = (
        (kib(nbytes), *(f"{100 * found[name, nbytes]:+.1f} %" for name in SIMGRID))
        for nbytes in sizes
    )
    return table(("bytes of a rank", *SIMGRID.values()), body)


def multicast() -> list[str]:
    """How many times as fast as gloo and as offcore's own ring multicast is."""

    def cells(name: str) -> tuple[str, ...]:
        by_size: dict[int, dict[str, float]] = {}
        for row in read_records(RESULTS / f"mcast-{name}.jsonl"):
            by_size.setdefault(row["bytes"], {})[row["impl"]] = row["time_us"]
        ratios = (
            ", ".join(f"{of[peer] / of['offcore']:.2f}x" for of in by_size.values())
            for peer in ("gloo", "ring")
        )
        return (", ".join(map(format_bytes, by_size)), *ratios)

    head = ("rows (mcast-NAME.jsonl)", "bytes of the array", "over gloo", "over our own ring")
    return table(head, ((f"{what} (`{name}`)", *cells(name)) for name, what in MULTICAST))


def loopback() -> list[str]:
    """What one or more receive workers take, and what a MAC costs them."""
    head = (
        "measure",
        "receive workers",
        "bytes of a datagram",
        "array",
        "GSO and GRO",
        "MAC",
        "Gbit/s",
    )
    body = (
        (
            row["measure"],
            str(row["workers"]),
            f"{row['datagram_bytes']:,}",
            format_bytes(row["bytes"]),
            "on" if row["gro"] else "off",
            "on" if row.get("sealed") else "off",
            f"{row['gbitps']:.1f}",
        )
        for row in read_records(RESULTS / "mcast-loopback.jsonl")
        if "gbitps" in row
    )
    return table(head, body)


def many_hosts() -> list[str]:
    """Seconds of calls between hundreds of hosts."""
    head = ("hosts", "bytes of a rank", "way", "calls", "least", "median", "90 %", "most", "GB")
    made = []
    for hosts in (188, 1024):
        for row in read_records(RESULTS / f"mcast-testbed-{hosts}.jsonl"):
            times = (row.get(f"time_us{end}") for end in ("_min", "", "_p90", "_max"))
            told = (f"{one / 1e6:.2f}" if one else "-" for one in times)
            way = {"offcore": "multicast"}.get(row["impl"], row["impl"])
            size = format_bytes(row["bytes"] // hosts)
            ports = f"{row['switch_bytes'] / 1e9:.2f}"
            made.append((str(hosts), size, way, str(row["calls"]), *told, ports))
    return table(head, iter(made))


def beside() -> list[str]:
    """An all-gather and a reduce-scatter at the same time: multicast and a ring beside shares."""
    head = ("hosts", "Mbit/s out, in", "bytes of a rank", "chains", "2 - 2/P", "bytes sent")
    made = []
    for name in ("beside-4-send", "beside-8-send", "beside-4-links", "beside-4"):
        found: dict[int, dict[str, Record]] = {}
        for row in read_records(RESULTS / f"mcast-{name}.jsonl"):
            found.setdefault(row["bytes"], {})[row["impl"]] = row
        for nbytes, impls in found.items():
            own, ring = impls["offcore"], impls["ring"]
            hosts, limits = own["hosts"], own["faults"]
            sent, carried, time = (
                f"{ring[key] / own[key]:.2f}x"
                for key in ("host_sent_bytes", "switch_bytes", "time_us")
            )
            rates = (str(limits.get(key, "-")) for key in ("send_mbit", "rate_mbit"))
            gloo = impls.get("gloo")
            made.append(
                (str(hosts), ", ".join(rates), format_bytes(nbytes // hosts), str(own["chains"]),
                 f"{2 - 2 / hosts:.2f}", sent, carried, time,
                 f"{gloo['time_us'] / own['time_us']:.2f}x" if gloo else "-")
            )  # fmt: skip
    return table((*head, "through ports", "time", "gloo's time"), iter(made))


TABLES: dict[str, Callable[[], list[str]]] = {
    "papers": papers,
    "latte": lambda: claims(latte(), "ours (model)"),
    "conccl": lambda: claims(conccl(), "ours (model)"),
    "gpu-driven": lambda: claims(driven(), "ours"),
    "mcast": lambda: claims(mcast(), "ours"),
    "residuals": residuals,
    "simgrid": simgrid_beside,
    "kv": lambda: kv_tables.pages("pages", ("load", "store", "both")),
    "kv-scattered": lambda: kv_tables.pages("scattered", ("load", "store")),
    "kv-short": kv_tables.short,
    "kv-zero-sm": kv_tables.zero_sm,
    "kv-calls": kv_tables.calls,
    "kv-layouts": lambda: kv_tables.layouts("H200 c"),
    "kv-layouts-h100": lambda: kv_tables.layouts("H100 a"),
    "kv-gemms": kv_tables.gemms,
    "served": kv_tables.served,
    "vllm": kv_tables.vllm,
    "multicast": multicast,
    "loopback": loopback,
    "many-hosts": many_hosts,
    "beside": beside,
}
_ANNOUNCED = re.compile(r"(<!-- table (\S+) -->\n\n)(?:\|.*\n)*\n?")


@cache
def made(name: str) -> str:
    return "".join(line + "\n" for line in TABLES[name]())


def filled(text: str) -> str:
    """A document with its announced tables made anew."""
    return _ANNOUNCED.sub(lambda found: f"{found[1]}{made(found[2])}\n", text)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
