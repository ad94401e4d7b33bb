"""Fits the interference model to numbers that ConCCL publishes (docs/overlap.md).

Six parameters of the model against five numbers and the types of Table II's combinations; a
seventh, what a small collective takes on cores, follows from one number of Figure 9. All other
claims are left to be predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import log
from pathlib import Path
from typing import Any

from offcore.errors import error
from offcore.overlap.classify import LONGER
from offcore.overlap.kernels import Collective
from offcore.tools.overlap import sweep
from offcore.tools.overlap.cases import COMBINATIONS, OPS
from offcore.tools.overlap.model import RECORD, Interference, Model
from offcore.tools.overlap.sweep import Combination, Outcome, mean, share
from offcore.tools.papers.latte.fit import Parameter

# Published shares of the ideal, by strategy, and the mean ideal: what is fitted.
SHARES = {"base": 0.21, "sp": 0.42, "ConCCL": 0.66, "ConCCL_rp": 0.72}
IDEAL = 1.6
SLOWEST = 4.0  # Figure 9: engines by cores, below 32 MB
SMALL = tuple(1 << power for power in range(10, 25))
PARAMETERS = (
    Parameter("core_tflops", "TFLOP/s", "one core within a GEMM; its peak is 4.3", 1.5, 4.0, 3.0),
    Parameter(
        "mb_op_byte", "op/B", "a memory-bound GEMM's operations for a byte of memory", 50, 240, 100
    ),
    Parameter(
        "starved",
        "share",
        "of a collective's workgroups that run while an earlier GEMM does",
        0.05,
        1,
        0.3,
    ),
    Parameter(
        "memory_contention",
        "ratio",
        "slowdown beside traffic as wide as the memory",
        0.05,
        3,
        0.8,
    ),
    Parameter(
        "l2_contention", "ratio", "more of it between two kernels that are on cores", 0.05, 3, 0.8
    ),
    Parameter(
        "thrash", "share", "of a memory-bound GEMM's traffic that idle cores save", 0.005, 0.3, 0.1
    ),
)
LATENCY = Parameter("kernel_latency_us", "us", "a collective of few bytes on cores", 3, 40, 10)
SEED = 1
_STEPS = 60
_POINT, _IDEAL, _KIND = 0.01, 0.02, 1e3  # a residual this large is one unit; per log of a ratio
_INSIDE = 0.02  # of the border between two types


def outcomes(model: Model) -> list[Outcome]:
    """Of the 30 combinations."""
    every = [Combination(tag, op) for op in OPS for tag in COMBINATIONS]
    return [sweep.measure(model, one) for one in every]


def latency_us(model: Model) -> float:
    """That makes engines slower by what is published at the worst of the small all-gathers."""
    none = model.with_values(_values({**_guesses(), LATENCY.name: 0.0}))
    gbps = none.kernel_gbps("all_gather")

    def slowest(latency: float) -> float:
        return max(
            none.engines_us("all_gather", size)
            / (latency + Collective("all_gather", size, none.ranks).wire_bytes / gbps / 1e3)
            for size in SMALL
        )

    low, high = LATENCY.low, LATENCY.high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if slowest(middle) > SLOWEST else (low, middle)
    return (low + high) / 2


def _guesses() -> dict[str, float]:
    return {one.name: one.guess for one in (*PARAMETERS, LATENCY)}


def _values(values: Mapping[str, float]) -> Interference:
    return Interference(**{one.name: values[one.name] for one in fields(Interference)})


def misplaced(found: Sequence[Outcome]) -> float:
    """How far isolated times lie outside of their published types, in logs of their ratio."""
    border, missed = log(LONGER), 0.0
    for one in found:
        ratio = log(one.gemm_us / one.kernel_us)
        missed += {
            "G-long": max(0.0, border + _INSIDE - ratio),
            "C-long": max(0.0, ratio + border + _INSIDE),
            "GC-equal": max(0.0, abs(ratio) - border + _INSIDE),
        }[COMBINATIONS[one.tag]]
    return missed


def cost(model: Model) -> float:
    found = outcomes(model)
    total = sum(((share(found, name) - told) / _POINT) ** 2 for name, told in SHARES.items())
    ideal = mean(found, lambda one: one.ideal.published)
    return total + ((ideal - IDEAL) / _IDEAL) ** 2 + _KIND * misplaced(found)


def calibrate(name: str, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The record of machines/calibrated/NAME-overlap.json. Raises `Error`: unavailable without
    scipy, unsupported for a machine whose cores are not modelled."""
    try:
        from scipy.optimize import differential_evolution
    except ImportError:
        raise error("unavailable", "a fit needs scipy: pip install 'offcore[fit]'") from None
    model = Model(name, _values(_guesses()))
    latency = float(f"{latency_us(model):.4g}")

    def of(values: Sequence[float]) -> dict[str, float]:
        named = {one.name: float(v) for one, v in zip(PARAMETERS, values, strict=True)}
        return named | {LATENCY.name: latency}

    def told(_: Any, convergence: float) -> None:
        say(f"converged: {min(convergence, 1):.0%}")

    best: Any = differential_evolution(
        lambda values: cost(model.with_values(_values(of(values)))),
        [(one.low, one.high) for one in PARAMETERS],
        maxiter=_STEPS,
        popsize=8,
        seed=seed,
        polish=False,
        callback=told,
    )
    values = {one: float(f"{value:.4g}") for one, value in of(best.x).items()}
    least = cost(model.with_values(_values(values)))
    return {
        "machine": name,
        "seed": seed,
        "parameters": [
            {"name": one.name, "unit": one.unit, "meaning": one.meaning}
            | {"low": one.low, "high": one.high, "value": values[one.name]}
            | _within(model, values, one, least)
            for one in (*PARAMETERS, LATENCY)
        ],
    }


def _within(
    model: Model, values: Mapping[str, float], one: Parameter, least: float
) -> dict[str, float]:
    """How far one parameter alone can go until the fit is worse by about two points of a share."""
    if one is LATENCY:
        return {}
    found = {}
    for name, limit in (("least", one.low), ("most", one.high)):
        near, far = values[one.name], limit
        for _ in range(12):
            middle = (near + far) / 2
            worse = cost(model.with_values(_values({**values, one.name: middle}))) > least + 4
            near, far = (near, middle) if worse else (middle, far)
        found[name] = float(f"{near:.3g}")
    return found


def write(record: Mapping[str, Any], folder: Path) -> Path:
    """Into folder/calibrated. The folder has been prepared."""
    path = folder / "calibrated" / f"{RECORD.format(record['machine'])}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return path
