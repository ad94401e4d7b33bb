"""DMA-Latte's claims about collectives as rows: a published number and how a sweep tells ours.

Rows L4 to L16 are ratios of times, as geometric means over the powers of two of a range unless they
name one size. "14 % faster" and "30 % slower" are ratios of 1.14 and 1.3. L1, L19 and L20 are
orders, L2 and L3 shares, L17 and L18 counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from offcore import _core
from offcore.sizes import format_bytes
from offcore.tools.papers.findings import Finding, percent
from offcore.tools.papers.latte.sweep import (
    COPY_SIZES,
    OPS,
    RANKS,
    SIZES,
    Key,
    Sweep,
    Times,
    pair_of,
    variants_of,
)

K, M, G = 1 << 10, 1 << 20, 1 << 30
Range = tuple[int, int]
BELOW_32M, ABOVE_32M = (K, 16 * M), (32 * M, 4 * G)
UP_TO_4M, BELOW_1M, FROM_1M_TO_4M = (K, 4 * M), (K, 512 * K), (M, 4 * M)
WHOLE = (K, 4 * G)
LARGE = (32 * M, G)

RATIO_BOUND = 0.15
POINTS_BOUND = 5.0
TIE = 1.03  # at the largest sizes pcpy is as good as prelaunch_pcpy
# The last size at which the paper's text has the pair variant best; prelaunch_pcpy from the next.
LAST_OF_PAIR = {"all_gather": 512 * K, "all_to_all": 2 * M}
# b2b is best at the smallest sizes; the paper measures its power up to 64 KB (section 5.2.9).
B2B_SURELY = 16 * K


@dataclass(frozen=True)
class Row:
    """A published ratio. `value` tells ours."""

    key: str
    op: str
    claim: str
    published: float
    value: Callable[[Sweep], float]

    @property
    def name(self) -> str:
        return f"{self.key} {self.op}: {self.claim}"

    def residual(self, sweep: Sweep) -> float:
        return self.value(sweep) / self.published - 1


def _mean(slow: Times, fast: Times, sizes: Range) -> float:
    at = slice(SIZES.index(sizes[0]), SIZES.index(sizes[1]) + 1)
    return math.exp(float(np.mean(np.log(slow[at] / fast[at]))))


def _gap(op: str, variants: tuple[str, ...]) -> Callable[[Sweep], float]:
    """How many times as long as RCCL the best of these takes below 32 MB."""
    return lambda sweep: _mean(sweep.best(op, variants), sweep.rccl[op], BELOW_32M)


def _over(op: str, slow: tuple[str, ...], fast: str, sizes: Range) -> Callable[[Sweep], float]:
    return lambda sweep: _mean(sweep.best(op, slow), sweep.times[op, fast], sizes)


def _ahead(op: str, variants: tuple[str, ...], sizes: Range) -> Callable[[Sweep], float]:
    return lambda sweep: _mean(sweep.rccl[op], sweep.best(op, variants), sizes)


def _worst_gap(op: str) -> Callable[[Sweep], float]:
    below = SIZES.index(BELOW_32M[1]) + 1
    return lambda sweep: float(np.max((sweep.times[op, "pcpy"] / sweep.rccl[op])[:below]))


def _rows_of(op: str) -> Iterator[Row]:
    gather = op == "all_gather"
    pair, all_of = pair_of(op), variants_of(op)
    # (row, claim, published for the all-gather, for the all-to-all, ours)
    told: list[tuple[str, str, float, float, Callable[[Sweep], float]]] = [
        ("L4", "pcpy takes x times as long as RCCL below 32 MB", 4.5, 2.5, _gap(op, ("pcpy",))),
        ("L4", "the same at the worst size", 7, 3.6, _worst_gap(op)),
        ("L5", "pcpy ahead of RCCL from 32 MB", 1.14, 1.18, _ahead(op, ("pcpy",), ABOVE_32M)),
        ("L6", f"{pair} over pcpy up to 4 MB", 1.7, 1.7, _over(op, ("pcpy",), pair, UP_TO_4M)),
        ("L6", f"gap to RCCL below 32 MB with {pair}", 3, 1.6, _gap(op, ("pcpy", pair))),
        ("L8", "b2b over pcpy below 1 MB", 2.7, 2.5, _over(op, ("pcpy",), "b2b", BELOW_1M)),
        ("L9", f"b2b over {pair} below 1 MB", 1.5, 1.4, _over(op, (pair,), "b2b", BELOW_1M)),
        ("L10", f"{pair} over b2b, 1 to 4 MB", 1.4, 1.7, _over(op, ("b2b",), pair, FROM_1M_TO_4M)),
        ("L11", "gap to RCCL below 32 MB with b2b", 2.3, 1.3, _gap(op, ("pcpy", pair, "b2b"))),
    ]
    for kind, published in (("pcpy", 1.9), (pair, 1.5), ("b2b", 1.2)):
        value = _over(op, (kind,), f"prelaunch_{kind}", WHOLE)
        told.append(
            ("L12", f"prelaunch_{kind} over {kind}, all sizes", published, published, value)
        )
    sizes = (M, 256 * M) if gather else (4 * M, 512 * M)
    claim = f"prelaunch_pcpy over the best of pcpy and {pair}, "
    claim += " - ".join(map(format_bytes, sizes))
    told.append(("L13", claim, 1.5, 1.3, _over(op, ("pcpy", pair), "prelaunch_pcpy", sizes)))
    if gather:
        claim = "the best takes x times as long as RCCL below 32 MB"
        told.append(("L14", claim, 1.3, 1.3, _gap(op, all_of)))
    else:
        claim = "the best ahead of RCCL below 32 MB"
        told.append(("L14", claim, 1.2, 1.2, _ahead(op, all_of, BELOW_32M)))
    told.append(
        ("L15", "the best ahead of RCCL, 32 MB to 1 GB", 1.2, 1.2, _ahead(op, all_of, LARGE))
    )
    for variant, published in (("pcpy", 0.16), ("bcst", 0.31), ("prelaunch_bcst", 0.6)) * gather:
        claim = f"{variant} at 512 KB, speedup over RCCL"
        value = _ahead(op, (variant,), (512 * K, 512 * K))
        told.append(("L16", claim, published, published, value))
    for key, claim, of_gather, of_exchange, value in told:
        name = "L7" if key == "L6" and not gather else key
        yield Row(name, op, claim, of_gather if gather else of_exchange, value)


ROWS = tuple(row for op in OPS for row in _rows_of(op))
AT_512K = {  # L16: published speedups over RCCL of single variants
    row.claim.split()[0]: row.published for row in ROWS if row.key == "L16" and row.op == OPS[0]
}


def order_margins(sweep: Sweep) -> Iterator[float]:
    """What L1 to L3, L19 and L20 ask, as logarithms that have to be above 0."""
    for phases in sweep.copies.values():
        ns = (phases.copy_ns, phases.schedule_ns, phases.sync_ns, phases.control_ns)
        yield from (math.log(more / less) for more, less in pairwise(ns))
    for size, published in ((COPY_SIZES[0], 60), (M, 20)):
        yield (POINTS_BOUND - abs(100 * overhead(sweep.copies[size]) - published)) / 100
    for op in OPS:
        pair = pair_of(op)
        times = {kind: sweep.times[op, f"prelaunch_{kind}"] for kind in ("pcpy", pair, "b2b")}
        for i, size in enumerate(SIZES):
            kind = "b2b" if size <= B2B_SURELY else "pcpy" if size > LAST_OF_PAIR[op] else None
            kind = pair if size == LAST_OF_PAIR[op] else kind
            if kind is not None:
                others = min(times[other][i] for other in times if other != kind)
                yield math.log(others / times[kind][i])
        yield math.log(TIE * times["pcpy"][-1] / sweep.times[op, "pcpy"][-1])
        for kind, ahead in times.items():
            yield float(np.min(np.log(sweep.times[op, kind] / ahead))) + 1e-3  # never loses


def overhead(phases: _core.Phases) -> float:
    """The share of a copy's time that is not the copy phase."""
    return 1 - phases.copy_ns / phases.total_ns


def best_ranges(sweep: Sweep, op: str) -> list[tuple[str, int, int]]:
    """(variant, first size, last size), from small to large. Where pcpy is as good as
    prelaunch_pcpy, which has to be launched ahead, pcpy is meant (tables 2 and 3)."""
    found: list[tuple[str, int, int]] = []
    for i, size in enumerate(SIZES):
        times = {variant: sweep.times[op, variant][i] for variant in variants_of(op)}
        variant = min(times, key=lambda name: float(times[name]))
        if variant == "prelaunch_pcpy" and times["pcpy"] <= TIE * times[variant]:
            variant = "pcpy"
        if found and found[-1][0] == variant:
            found[-1] = (variant, found[-1][1], size)
        else:
            found.append((variant, size, size))
    return found


def _ratio(row: Row, sweep: Sweep) -> Finding:
    value, residual = row.value(sweep), row.residual(sweep)
    return Finding(
        key=row.key,
        claim=f"{row.op}: {row.claim}",
        published=f"{row.published:g}x",
        model=f"{value:.3g}x",
        difference=percent(residual),
        basis="fitted",
        met=abs(residual) <= RATIO_BOUND,
    )


def _copy_findings(sweep: Sweep) -> Iterator[Finding]:
    ordered = [
        phases.copy_ns > phases.schedule_ns > phases.sync_ns > phases.control_ns > 0
        for phases in sweep.copies.values()
    ]
    yield Finding(
        key="L1",
        claim="one copy, 4 KB to 2 MB: copy > schedule > sync > control",
        published="at every size",
        model=f"at {sum(ordered)} of {len(ordered)} sizes",
        difference="none" if all(ordered) else f"{ordered.count(False)} sizes",
        basis="fitted",
        met=all(ordered),
    )
    shares = (
        ("L2", "all but copy, 4 KB", COPY_SIZES[0], "up to 60 %", 60),
        ("L3", "all but copy, 1 MB (half of it at 2 MB)", M, "about 20 %", 20),
    )
    for key, claim, size, told, published in shares:
        share = 100 * overhead(sweep.copies[size])
        points = share - published
        yield Finding(
            key=key,
            claim=f"one copy: share of {claim}",
            published=told,
            model=f"{share:.1f} %",
            difference=f"{points:+.1f} points",
            basis="fitted",
            met=abs(points) <= POINTS_BOUND,
        )


def _count_findings(made: Mapping[Key, _core.Program]) -> Iterator[Finding]:
    """Counted in the programs; a swap pairs GPUs, so of its engines those of a GPU are counted."""

    def engines(op: str, variant: str) -> tuple[int, int, int]:
        """Engines and syncs of all GPUs, and the most engines that one GPU has."""
        program = made[op, variant, M]
        queues = [
            line.split()[1].split(".")
            for line in str(program).splitlines()
            if line.startswith("queue")
        ]
        ranks = [rank for rank, queue in queues if queue != "caller"]
        return len(ranks), program.counts().syncs, max(map(ranks.count, ranks))

    for op in OPS:
        pair = pair_of(op)
        (all_pcpy, syncs_pcpy, _), (_, _, pair_most), (all_b2b, syncs_b2b, b2b_most) = (
            engines(op, kind) for kind in ("pcpy", pair, "b2b")
        )
        fewer = (all_pcpy / all_b2b, syncs_pcpy / syncs_b2b, pair_most / b2b_most)
        yield Finding(
            key="L17",
            claim=f"{op}: b2b has x times fewer engines and syncs than pcpy, than {pair} on a GPU",
            published="7x, 7x, 4x",
            model=", ".join(f"{one:g}x" for one in fewer),
            difference="none" if fewer == (7, 7, 4) else "other counts",
            basis="by construction",
            met=fewer == (7, 7, 4),
        )
        yield Finding(
            key="L18",
            claim=f"{op}: engines of pcpy on {RANKS} GPUs",
            published="56",
            model=f"{all_pcpy}",
            difference=f"{all_pcpy - 56:+d}" if all_pcpy != 56 else "none",
            basis="by construction",
            met=all_pcpy == 56,
        )


def _order_finding(key: str, sweep: Sweep, op: str) -> Finding:
    pair = pair_of(op)
    ranges = best_ranges(sweep, op)
    names = [variant for variant, _, _ in ranges]
    wanted = ["prelaunch_b2b", f"prelaunch_{pair}", "prelaunch_pcpy", "pcpy"]
    last = {variant: last for variant, _, last in ranges}
    met = names == wanted and last[wanted[1]] == LAST_OF_PAIR[op]
    return Finding(
        key=key,
        claim=f"{op}: the best variant by size",
        published=f"{', '.join(wanted)}; {wanted[1]} to {format_bytes(LAST_OF_PAIR[op])}",
        model=", ".join(f"{name} to {format_bytes(last)}" for name, _, last in ranges),
        difference="none" if met else "another order",
        basis="fitted",
        met=met,
    )


def findings(sweep: Sweep, made: Mapping[Key, _core.Program]) -> list[Finding]:
    """All of L1 to L20."""
    found = [*_copy_findings(sweep), *(_ratio(row, sweep) for row in ROWS), *_count_findings(made)]
    found += [_order_finding(key, sweep, op) for key, op in zip(("L19", "L20"), OPS, strict=True)]
    return sorted(found, key=lambda one: int(one.key[1:]))
