"""ConCCL's published numbers, each beside what the interference model gives for it.

Shares of the ideal are those of mean speed-ups. A published ceiling ("up to", "at most") is met by
coming to as much, not by staying below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from offcore.overlap.kernels import Collective
from offcore.overlap.tables import Tables
from offcore.tools.overlap import sweep
from offcore.tools.overlap.cases import COMBINATIONS, GEMMS, KINDS, OPS
from offcore.tools.overlap.model import NEEDED, THRASH_FREE, TRAFFIC, WORKGROUPS, Load, Model
from offcore.tools.overlap.sweep import (
    Combination,
    Outcome,
    best_kernels_us,
    gemm_of,
    mean,
    share,
)
from offcore.tools.papers.conccl import fit
from offcore.tools.papers.findings import Basis, Finding, percent

POINTS = 0.05  # that a share over all combinations may be off
GROUP_POINTS = 0.10  # and one of the ends over groups
RATIO = 0.05  # that a mean speed-up or a ceiling may be off
LARGE = tuple(1 << power for power in range(27, 34))  # 128 MB and more
_STRATEGIES = {"base": "c3_base", "sp": "c3_sp", "rp": "c3_rp"}


@dataclass(frozen=True)
class Results:
    """What everything below reads, computed once."""

    model: Model
    outcomes: Sequence[Outcome]
    tables: Tables
    planned: Mapping[tuple[str, str], int]  # cores that the heuristic gives the collective

    def of(self, op: str, kind: str | None = None) -> list[Outcome]:
        return [
            one
            for one in self.outcomes
            if one.op == op and (kind is None or COMBINATIONS[one.tag] == kind)
        ]


def results(model: Model) -> Results:
    tables = sweep.characterise(model)
    found = fit.outcomes(model)
    planned = {}
    for one in found:
        plan = sweep.planned(model, tables, Combination(one.tag, one.op))
        name = next(k.name for k in plan.kernels if isinstance(k, Collective))
        planned[one.tag, one.op] = plan.choices["rp"].cores[name]
    return Results(model, found, tables, planned)


def _share_row(key: str, claim: str, told: float, ours: float, basis: Basis, off: float) -> Finding:
    return Finding(
        key=key,
        claim=claim,
        published=f"{100 * told:.0f} %",
        model=f"{100 * ours:.1f} %",
        difference=f"{100 * (ours - told):+.1f} points",
        basis=basis,
        met=abs(ours - told) <= off,
    )


def _ratio_row(
    key: str, claim: str, told: float, ours: float, basis: Basis, off: float | None = RATIO
) -> Finding:
    return Finding(
        key=key,
        claim=claim,
        published=f"{told:g}x",
        model=f"{ours:.2f}x",
        difference=percent(ours / told - 1),
        basis=basis,
        met=None if off is None else abs(ours / told - 1) <= off,
    )


def _plain_row(
    key: str, claim: str, published: str, model: str, basis: Basis, met: bool | None
) -> Finding:
    difference = "none" if met else "" if met is None else "differs"
    return Finding(key, claim, published, model, difference, basis, met)


def findings(found: Results) -> list[Finding]:
    return [
        *_isolated(found),
        *_types(found),
        *_ideals(found),
        *_strategies(found),
        *_groups(found),
        *_heuristics(found),
        *_engines(found),
    ]


def _isolated(found: Results) -> list[Finding]:
    """Figures 5 and 6."""
    model, every = found.model, found.model.cores.count

    def slowdown(tag: str, lost: int) -> float:
        kernel = gemm_of(model, tag)
        return model.alone_us(Load(kernel, every - lost)) / model.alone_us(Load(kernel, every))

    def traffic(tag: str) -> float:
        return model.traffic_share(Load(gemm_of(model, tag), every))

    bound = [tag for tag in GEMMS if tag.startswith("cb")]
    losses = [max(slowdown(tag, lost) for tag in bound) for lost in (32, 64)]
    memory = [slowdown(tag, lost) for tag in ("mb1", "mb2") for lost in (8, 16, 32, 64)]
    large = {
        op: model.traffic_share(Load(Collective(op, 1 << 30, model.ranks), WORKGROUPS[op]))
        for op in OPS
    }
    ballpark = [traffic(tag) / large["all_to_all"] for tag in bound]
    together = max(map(traffic, bound)) + large["all_to_all"]
    return [
        _share_row("F5a", "compute-bound GEMM: loss on 32 CUs fewer, the worst", 0.17,
                   losses[0] - 1, "predicted", POINTS),
        _share_row("F5a", "the same on 64 CUs fewer", 0.27, losses[1] - 1, "predicted", POINTS),
        _plain_row("F5a", f"memory-bound GEMM: faster on {THRASH_FREE} CUs fewer, no slower on 64",
                   "gains", f"{min(memory):.2f} to {max(memory):.2f} of its time", "fitted",
                   min(memory) < 1 and max(memory) <= 1),
        _plain_row("F5bc", "CUs that a collective needs: all_gather, all_to_all", "32, 64",
                   f"{NEEDED['all_gather']}, {NEEDED['all_to_all']} (its workgroups)",
                   "by construction", None),
        _share_row("F6", "all_gather's LLC bandwidth below all_to_all's", 0.14,
                   1 - TRAFFIC["all_gather"] / TRAFFIC["all_to_all"], "by construction", 0.001),
        _plain_row("F6", "memory-bound GEMMs' bandwidth dwarfs all others'", "dwarfs",
                   f"{traffic('mb1') / max(map(traffic, bound)):.1f}x the widest other",
                   "fitted", traffic("mb1") > 2 * max(map(traffic, bound))),
        _plain_row("F6", "compute-bound GEMMs during all_to_all: a similar ballpark", "similar",
                   f"{min(ballpark):.1f} to {max(ballpark):.1f} of it", "predicted", None),
        _plain_row("F6", "both leave headroom", "headroom", f"{100 * together:.0f} % of peak",
                   "predicted", together < 1),
    ]  # fmt: skip


def _types(found: Results) -> list[Finding]:
    """Tables I and II."""
    kinds = sum(one.kind == COMBINATIONS[one.tag] for one in found.outcomes)
    bounds = [
        tag for tag in GEMMS if found.model.cores.bound_of(gemm_of(found.model, tag)) == tag[:2]
    ]
    cb = sum(tag.startswith("cb") for tag in bounds)
    every = len(found.outcomes)
    return [
        _plain_row("T1", "compute-bound GEMMs by operations a byte", "5 tags", f"{cb} of 5",
                   "predicted", cb == 5),
        _plain_row("T1", "memory-bound GEMMs by operations a byte", "2 tags",
                   f"{len(bounds) - cb} of 2", "by construction", None),
        _plain_row("T2", "combinations' type by isolated times", f"{every} types",
                   f"{kinds} of {every}", "fitted", kinds == every),
    ]  # fmt: skip


def _ideals(found: Results) -> list[Finding]:
    """Figure 7. The types, which are fitted, leave the ends little room."""
    ideals = [one.ideal.published for one in found.outcomes]
    return [
        _ratio_row("F7", "mean ideal", fit.IDEAL, sum(ideals) / len(ideals), "fitted"),
        _ratio_row("F7", "least ideal", 1.1, min(ideals), "fitted"),
        _ratio_row("F7", "largest ideal (close to 2)", 2.0, max(ideals), "fitted"),
    ]


def _strategies(found: Results) -> list[Finding]:
    """Figures 8 and 10 over all combinations."""
    every = found.outcomes
    ideal = mean(every, lambda one: one.ideal.published)
    best = (mean(every, lambda one: one.serial_us / best_kernels_us(one)) - 1) / (ideal - 1)
    base = [one.speedup("base") for one in every]
    gain = max(one.times_us["rp"] / one.times_us["sp_rp"] for one in every) - 1

    def speedup(op: str, strategy: str) -> float:
        return mean(found.of(op), lambda one: one.speedup(strategy))

    engines = max(one.speedup(name) for one in every for name in ("ConCCL", "ConCCL_rp"))
    return [
        _share_row("F8", "c3_base, of the ideal", 0.21, share(every, "base"), "fitted", POINTS),
        _share_row("F8", "c3_sp", 0.42, share(every, "sp"), "fitted", POINTS),
        _share_row("F8", "c3_rp", 0.41, share(every, "rp"), "predicted", POINTS),
        _share_row("F8", "c3_best", 0.48, best, "predicted", POINTS),
        _plain_row("F8", "c3_sp_rp beyond c3_rp", "no further", f"{100 * gain:+.1f} %",
                   "by construction", None),
        _ratio_row("F8", "c3_base: mean speed-up (21 % of 1.6x in other units)", 1.13,
                   sum(base) / len(base), "circular", None),
        _ratio_row("F8", "c3_base: up to", 1.3, max(base), "predicted"),
        _ratio_row("F10", "c3_base: all_to_all, mean", 1.05, speedup("all_to_all", "base"),
                   "predicted"),
        _share_row("F10", "ConCCL, of the ideal", 0.66, share(every, "ConCCL"), "fitted", POINTS),
        _share_row("F10", "ConCCL_rp", 0.72, share(every, "ConCCL_rp"), "fitted", POINTS),
        _ratio_row("F10", "ConCCL: all_to_all, mean", 1.43, speedup("all_to_all", "ConCCL"),
                   "predicted"),
        _ratio_row("F10", "ConCCL: up to", 1.67, engines, "predicted"),
    ]  # fmt: skip


# The ends of the shares over the types, by collective and strategy.
GROUPS = {
    ("all_gather", "base"): (0.24, 0.46),
    ("all_to_all", "base"): (0.0, 0.13),
    ("all_gather", "sp"): (0.38, 0.67),
    ("all_to_all", "sp"): (0.27, 0.46),
}


def _groups(found: Results) -> list[Finding]:
    rows = []
    for (op, strategy), told in GROUPS.items():
        ours = [share(found.of(op, kind), strategy) for kind in KINDS]
        for end, published, value in zip(
            ("least", "largest"), told, (min(ours), max(ours)), strict=True
        ):
            claim = f"{op}: {_STRATEGIES[strategy]} over the types, {end}"
            rows.append(_share_row("F8", claim, published, value, "predicted", GROUP_POINTS))
    return rows


def _heuristics(found: Results) -> list[Finding]:
    """Section V-C."""
    right, losses, first = 0, [], 0
    for one in found.outcomes:
        cores = found.planned[one.tag, one.op]
        right += cores == one.rp_cores
        losses.append(one.rp_us[cores] / one.times_us["rp"] - 1)
        gemm, collective = Combination(one.tag, one.op).kernels(found.model)
        first += found.tables.workgroups_of(collective) < gemm.workgroups
    every = len(found.outcomes)
    return [
        _plain_row("V-C", "the heuristic's split is the sweep's", "24 of 30",
                   f"{right} of {every}", "predicted", right >= 24),
        _plain_row("V-C", "lost where it is not, at most", "1.5 %",
                   f"{100 * max(losses):.1f} %", "predicted", max(losses) <= 0.015),
        _plain_row("V-C", "fewest workgroups first is the collective first", "30 of 30",
                   f"{first} of {every}", "by construction", first == every),
    ]  # fmt: skip


def engines_speedup(model: Model, op: str, nbytes: int) -> float:
    """Figure 9: over the collective on cores."""
    kernel = Collective(op, nbytes, model.ranks)
    on_cores, on_engines = (model.alone_us(Load(kernel, c)) for c in (WORKGROUPS[op], None))
    return on_cores / on_engines


def _engines(found: Results) -> list[Finding]:
    """Figure 9."""

    def speedup(size: int) -> float:
        return engines_speedup(found.model, "all_gather", size)

    large = geometric_mean(map(speedup, LARGE))
    return [
        _ratio_row("F9", "all_gather below 32 MB: engines slower by up to", fit.SLOWEST,
                   1 / min(map(speedup, fit.SMALL)), "fitted"),
        _ratio_row("F9", "all_gather from 128 MB: engines by cores (at par)", 1.0, large,
                   "by construction"),
    ]  # fmt: skip
