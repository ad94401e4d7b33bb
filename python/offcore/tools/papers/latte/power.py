"""The power of a GPU while a collective repeats: DMA-Latte's section 5.2.9, rows P1 to P3.

XCDs (the dies with the CUs) idle or, under RCCL, wait and move bytes; everything else (IODs, HBM,
links) idles, runs engines, and spends energy on each byte read, and on each written and carried.
A rate is a call's bytes by its time. What the rows cannot tell apart is assumed (ASSUMED); four
numbers of theirs fit four parameters, so that they agree shows that the values that it takes are
sane, no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offcore import _core
from offcore.tools.papers.findings import Finding, percent
from offcore.tools.papers.latte.fit import Parameter, Values, Vector
from offcore.tools.papers.latte.sweep import RANKS, SIZES, Key, Sweep, Times, variants_of

OP = "all_gather"
PARAMETERS = (
    Parameter("xcd_idle_w", "W", "all XCDs, no CU at work", 20, 120, 60),
    Parameter("cu_pj", "pJ/B", "XCDs, a byte that CUs send", 50, 1500, 300),
    Parameter("engine_w", "W", "a DMA engine while it copies and signals", 0.3, 10, 2),
    Parameter(
        "read_pj", "pJ/B", "a byte read from HBM and brought to an engine or CU", 20, 500, 150
    ),
)
ASSUMED: Values = {
    "rest_idle_w": 90.0,  # IODs, HBM and links with nothing to do
    "cu_wait_w": 30.0,  # CUs that spin for a peer's data
    "carry_pj": 150.0,  # a byte over a link and into HBM
}
BOUND = 0.2
_LARGE = SIZES.index(64 << 20)
_SMALL = slice(SIZES.index(16 << 10), SIZES.index(64 << 10) + 1)
_MIDDLE = SIZES.index(1 << 20)


@dataclass(frozen=True)
class Activity:
    """What one call of a variant makes a GPU do, by size: the mean over GPUs."""

    engines: Times  # at work on average
    read: Times  # bytes a us
    carried: Times


def activities(
    machine: _core.Machine, sweep: Sweep, made: Mapping[Key, _core.Program]
) -> dict[str, Activity]:
    session = _core.Session("sim", machine, RANKS, phantom=True)
    found = {}
    for variant in variants_of(OP):
        busy, read = [], []
        for i, nbytes in enumerate(SIZES):
            time_us = float(sweep.times[OP, variant][i])
            # A broadcast reads once for two peers: as many reads as copy commands.
            copies = made[OP, variant, nbytes].counts().copies
            read.append(copies / RANKS * nbytes / RANKS / time_us)
            spans: dict[int, tuple[int, int]] = {}
            for command in session.run(made[OP, variant, nbytes]).commands:
                if command.phases.copy_ns == 0 and command.queue not in spans:
                    continue  # a poll before the copies, or a caller's
                start, end = spans.get(command.queue, (command.start_ns, 0))
                spans[command.queue] = min(start, command.start_ns), max(end, command.end_ns)
            engines = [end - start for start, end in spans.values()]
            busy.append(sum(engines) / RANKS / 1e3 / time_us)
        carried = _carried(sweep.times[OP, variant])
        found[variant] = Activity(np.array(busy), np.array(read), carried)
    return found


def _carried(times_us: Times) -> Times:
    return np.array(SIZES) * (RANKS - 1) / RANKS / times_us


@dataclass(frozen=True)
class Power:
    """W of a GPU by size."""

    xcd: Times
    rest: Times

    @property
    def total(self) -> Times:
        return self.xcd + self.rest


def of_dma(activity: Activity, values: Mapping[str, float]) -> Power:
    rest = (
        values["rest_idle_w"]
        + values["engine_w"] * activity.engines
        + (values["read_pj"] * activity.read + values["carry_pj"] * activity.carried) * 1e-6
    )
    return Power(np.full(len(SIZES), values["xcd_idle_w"]), rest)


def of_rccl(times_us: Times, values: Mapping[str, float]) -> Power:
    carried = _carried(times_us)
    xcd = values["xcd_idle_w"] + values["cu_wait_w"] + values["cu_pj"] * carried * 1e-6
    rest = values["rest_idle_w"] + (values["read_pj"] + values["carry_pj"]) * carried * 1e-6
    return Power(xcd, rest)


def best_of(sweep: Sweep, powers: Mapping[str, Power]) -> Power:
    """Of the variant that is fastest at each size."""
    names = variants_of(OP)
    fastest = np.argmin([sweep.times[OP, name] for name in names], axis=0)
    at = range(len(SIZES))
    return Power(
        np.array([powers[names[fastest[i]]].xcd[i] for i in at]),
        np.array([powers[names[fastest[i]]].rest[i] for i in at]),
    )


@dataclass(frozen=True)
class Shares:
    """What the rows ask: less total power by engines than by RCCL from 64 MB on, RCCL's XCD power
    as a multiple, less power by prelaunch_b2b at 16 to 64 KB, by prelaunch_bcst at 1 MB."""

    total_less: float
    xcd_times: float
    b2b_less: float
    bcst_less: float


def shares(sweep: Sweep, found: Mapping[str, Activity], values: Mapping[str, float]) -> Shares:
    powers = {variant: of_dma(activity, values) for variant, activity in found.items()}
    dma, rccl = best_of(sweep, powers), of_rccl(sweep.rccl[OP], values)
    pcpy = powers["prelaunch_pcpy"].total
    return Shares(
        total_less=1 - float(np.mean(dma.total[_LARGE:] / rccl.total[_LARGE:])),
        xcd_times=float(np.mean(rccl.xcd[_LARGE:] / dma.xcd[_LARGE:])),
        b2b_less=1 - float(np.mean(powers["prelaunch_b2b"].total[_SMALL] / pcpy[_SMALL])),
        bcst_less=1 - float(powers["prelaunch_bcst"].total[_MIDDLE] / pcpy[_MIDDLE]),
    )


# What is published: the ends of a range, or one number twice.
PUBLISHED = {
    "total_less": (0.32, 0.32),
    "xcd_times": (3.7, 3.7),
    "b2b_less": (0.03, 0.04),
    "bcst_less": (0.05, 0.10),
}


def beyond(one: Shares, name: str) -> float:
    """How far a number lies outside of what is published, as a share of the nearer end."""
    value, (low, high) = getattr(one, name), PUBLISHED[name]
    return float(value / low - 1 if value < low else max(0.0, value / high - 1))


def residuals(one: Shares) -> Vector:
    return np.array([beyond(one, name) for name in PUBLISHED])


def findings(one: Shares) -> list[Finding]:
    lines = (
        ("P1", "total_less", "power by engines, 64 MB and more", "32 % less"),
        ("P1", "xcd_times", "XCD power of RCCL by that of engines", "3.7x"),
        ("P2", "b2b_less", "prelaunch_b2b compared with prelaunch_pcpy, 16 - 64 KB", "3-4 % less"),
        ("P3", "bcst_less", "prelaunch_bcst compared with prelaunch_pcpy, 1 MB", "5-10 % less"),
    )
    found = []
    for key, name, claim, published in lines:
        value, outside = getattr(one, name), beyond(one, name)
        found.append(
            Finding(
                key=key,
                claim=f"all_gather: {claim}",
                published=published,
                model=f"{value:.2f}x" if name == "xcd_times" else f"{100 * value:.1f} % less",
                difference=percent(outside),
                basis="fitted",
                met=abs(outside) <= BOUND,
            )
        )
    return found
