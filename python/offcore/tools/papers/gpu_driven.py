"""Paper 003's published numbers, each beside what was measured here, if it was, and beside a model
of its engines on its own machine (driven_model.py), if that gives it.

Ours are rows that `offcore gpu bench` recorded on 2 x H200; the paper's GPUs are V100 on PCIe. A
time or a rate is met by being no worse, a factor by being no smaller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offcore.errors import error
from offcore.tools.papers import driven_model
from offcore.tools.papers.findings import Finding, percent

FILE, TRAINING_FILE = "gpu-driven-h200-2.txt", "train-h200-2.txt"
KINDS = "ping-pong|throughput|push|step|kernel"
LINE = re.compile(rf"^({KINDS})\s+(\S.*?)\s+(\d+)\s+([\d.]+) ", re.MULTILINE)
KIB, MIB = 1 << 10, 1 << 20
# The proxy's ping-pong of a later commit, in a line of its own.
LATER = re.compile(r"^ping-pong, us one way, of 4 KiB ([\d.]+) ", re.MULTILINE)
LATER_PROXY = "proxy, f1a60bf"
WAITS = "two streams' waits"

Rows = dict[tuple[str, str, int], float]
# Runs of gpu_bert.py in its file, by the names of `Training`; NUMBER stands for a number.
RUNS = (
    r"At (?P<commit>\w+), .*gpu_bert.py.*\n"
    r" +step: alone (?P<alone_ms>NUMBER) ms, NCCL (?P<nccl_ms>NUMBER), "
    r"offcore (?P<offcore_ms>NUMBER) \((?P<speed>NUMBER) of .* alone NCCL (?P<nccl_alone>NUMBER),\n"
    r".* each layer of such a step (?P<nccl_beside>NUMBER) and (?P<offcore_beside>NUMBER),",
    r"gpu_bert.py.* at (?P<commit>\w+): a step alone (?P<alone_ms>NUMBER) ms, "
    r"with NCCL (?P<nccl_ms>NUMBER), offcore .* (?P<offcore_ms>NUMBER): (?P<speed>NUMBER)\.\n"
    r".*: NCCL (?P<nccl_alone>NUMBER) GB/s alone, (?P<nccl_beside>NUMBER) beside layers, "
    r".*; offcore NUMBER, (?P<offcore_beside>NUMBER) and",
)
# Not measured here: key, claim, published.
UNMEASURED = (
    ("I", "latency in frameworks that use the DMA engine", "hundreds of us"),
    ("T1", "polling gap, mutex", "58.3, 58.7 us"),
    ("T2", "an FPGA's stack: ALMs, block RAM", "14253 (3.34 %), 188 (6.93 %)"),
    ("T2", "an FPGA's PCIe: ALMs, block RAM", "1364 (0.32 %), 13 (0.48 %)"),
    ("II-B", "mutex, both threads on one core", "5 us"),
    ("II-B", "a busy CPU sees an event; a GPU's signal by the host", "3 us; 2 to 3 us"),
    ("II-B", "trigger of an event; waking a command", "4 us; 10 to 20 us"),
    ("II-C", "the kernel's reads of L2; FFMA among the other's instructions", "1.96 TB/s; 99.2 %"),
    ("II-C", "BERT-Large on 8 V100: computation during all-reduces", "-45.0 %"),
    ("II-C", "the same on 8 A100", "-14.3 %; 49.0 GB/s, 30.9 %"),
    ("III-B", "SR, SC and RC by MMIO", "2 to 3 us"),
    ("F5", "training of BERT-Large compared with Megatron-LM", "2.46x"),
    ("F5", "share of the gap that is communication", "64.5 %"),
)


@dataclass(frozen=True)
class Training:
    """A run of benchmarks/gpu_bert.py on 2 x H200: ms of a step without communication, over NCCL
    and over offcore; its speed beside NCCL's; GB/s of all-reduces of 32 MiB, alone and beside
    layers."""

    commit: str
    alone_ms: float
    nccl_ms: float
    offcore_ms: float
    speed: float
    nccl_alone: float
    nccl_beside: float
    offcore_beside: float


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        raise error("invalid", f"{path} is missing: install offcore again") from None


def trained(folder: Path) -> list[Training]:
    """The runs as recorded, the last one last. Raises invalid where they are not at hand."""
    text, runs = _text(folder / TRAINING_FILE), []
    for pattern in RUNS:
        found = re.search(pattern.replace("NUMBER", r"\d+(?:\.\d+)?"), text)
        if found is None:
            raise error("invalid", f"{folder / TRAINING_FILE} has no such run: {pattern[:40]}...")
        given = found.groupdict()
        runs.append(Training(given.pop("commit"), **{name: float(n) for name, n in given.items()}))
    return runs


def recorded(folder: Path) -> Rows:
    """Raises invalid where they are not at hand."""
    text = _text(folder / FILE)
    rows = {
        (what, engine, int(nbytes)): float(value)
        for what, engine, nbytes, value in LINE.findall(text)
    }
    if later := LATER.search(text):
        rows["ping-pong", LATER_PROXY, 4 * KIB] = float(later[1])
    return rows


def contiguous_peak(rows: Rows) -> float:
    """GB/s: what is taken for the link's rate."""
    return max(
        gb
        for (what, engine, _), gb in rows.items()
        if (what, engine) == ("throughput", "contiguous")
    )


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
    polled, row = rows["ping-pong", "polling", MIB], rows["throughput", "memcpy loop", MIB]
    total = f"{rows['ping-pong', 'polling', 4 * KIB]:.1f} us"
    told = (
        (
            "F1",
            "a message at a time, and copies in a row (ours: 1 MiB, polling)",
            "curves",
            f"{MIB / polled / 1e3:.1f}, {row:.1f} GB/s",
        ),
        ("T1", "all of them (ours: a way by polling, with its copy)", "151.6 us", total),
        ("T1", "trigger of an event, synchronisation of streams", "3.8, 11.6 us", events),
        ("T1", "kernel launch (ours: until the kernel runs)", "19.2 us", f"{step('launch')} us"),
        ("II-C", "a kernel that reads L2 during a 64 MB all-gather", "2.35x", slower("L2")),
        ("II-C", "a kernel of FFMA (2.02 instructions a cycle)", "2.00x", slower("FFMA")),
    )
    return [
        Finding(key, claim, published, ours, "", "measured", None)
        for key, claim, published, ours in told
    ]


def _trained(runs: Sequence[Training]) -> list[Finding]:
    """2 GPUs and DDP, not 8 and a system of its own. The last run counts."""

    def beside(run: Training) -> str:
        return f"{run.offcore_beside:.0f} GB/s, {run.offcore_beside / run.nccl_beside:.2f}x"

    *earlier, last = runs
    others = [f"{one.speed:.2f}x at {one.commit}" for one in earlier]
    speed = _factor(
        "training of BERT-Large compared with PT-TRT (ours: DDP, with NCCL)", 2.12, last.speed
    )
    reduce = _factor("all-reduce during training (ours: during layers)", 1.82,
                     last.offcore_beside / last.nccl_beside)  # fmt: skip
    told = ", ".join(f"{beside(one)} at {one.commit}" for one in earlier)
    share = (
        f"{last.nccl_beside:.0f} GB/s, {100 * last.nccl_beside / last.nccl_alone:.1f} % of alone"
    )
    return [
        Finding("II-C", "NCCL's all-reduce during BERT-Large (ours: during layers)",
                "5.0 GB/s, 53.6 %", share, "", "measured", None),
        replace(speed, key="F5", model=f"{speed.model} ({', '.join(others)})"),
        replace(reduce, key="F5", published="9.10 GB/s, 1.82x", model=f"{beside(last)} ({told})"),
    ]  # fmt: skip


def findings(rows: Rows, runs: Sequence[Training]) -> list[Finding]:
    ping = {
        engine: us
        for (what, engine, at), us in rows.items()
        if (what, at) == ("ping-pong", 4 * KIB)
    }
    rate = {
        (engine, at): value for (what, engine, at), value in rows.items() if what == "throughput"
    }
    peak = contiguous_peak(rows)
    full = min(
        at for (engine, at), gb in rate.items() if engine == "contiguous" and gb >= 0.9 * peak
    )
    events, host = f"events {ping['events']:.2f} us", f"the host {ping['host']:.2f} us"
    loop = rate["memcpy loop", 8 * KIB]
    found = [
        Finding("F4", "CPU-driven: one way", "39.3 us", f"{events}, {host}", "", "measured", None),
        _proxy(ping),
        _factor("software engine compared with CPU-driven by events", 3.5,
                ping["events"] / ping["proxy"]),
        _time("hardware engine: one way (ours: armed, fenced)", 4.32, ping["armed"]),
        _time("the same (ours: armed in copy order)", 4.32, ping["armed co"]),
        _factor("hardware engine compared with CPU-driven", 9.1, ping["events"] / ping["armed co"]),
        Finding("F4", "software engine: 90 % of its peak from", "4 MB", f"{full >> 10} KiB", "",
                "measured", full <= 4 * MIB),
        _factor("8 KB messages compared with a loop of memcpy: side by side", 3.87,
                rate["contiguous", 8 * KIB] / loop),
        _factor("8 KB messages compared with a loop of memcpy: apart", 3.87,
                rate["apart", 8 * KIB] / loop),
        Finding("III-A", "a request", "8 bytes", "8 bytes", "", "by construction", None),
        Finding("II-B", "a GPU thread reads 4 bytes of the host (ours: push and echo)", "2 us",
                f"{rows['push', 'to and fro', 8]:.2f} us", "", "measured", None),
    ]  # fmt: skip
    found += _beside(rows)
    found += _trained(runs)
    found += driven_model.findings(driven_model.Model())
    for key, claim, published in UNMEASURED:
        found.append(Finding(key, claim, published, "-", "", "not measured", None))
    return found
