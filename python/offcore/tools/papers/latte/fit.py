"""Fitting a model's parameters to published ratios.

Parameters are fitted as logarithms within their ranges. A row counts by the twelfth power of its
residual, so that the worst rows count most; orders count where their margin is too small. Ratios
alone leave the scale free (twice the times at half the bandwidths give the same ratios), so every
parameter is drawn a little to its guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import _core
from offcore.errors import error
from offcore.tools.papers.latte import rows as claims
from offcore.tools.papers.latte.sweep import OPS, Curve, Key, Sweep, estimated

Vector = NDArray[np.float64]
Values = dict[str, float]

_UNIT_ROW = 0.1  # a residual this large is one unit, to whatever power
_ORDER_WEIGHT = 30.0
_ORDER_MARGIN = 0.005
_PULL = 2e-2
_STEP = 1e-4


@dataclass(frozen=True)
class Parameter:
    name: str
    unit: str
    meaning: str
    low: float
    high: float
    guess: float

    def pull(self, value: float) -> float:
        return math.log(value / self.guess) / math.log(self.high / self.low)


# What is free. fetch_ns and trigger_ns stay at 100 ns and overlap at 8: no row tells them apart
# from issue_ns, poll_ns and a collective's seven copies.
COSTS = (
    Parameter("control_ns", "ns", "the host writes one command into a queue", 30, 500, 100),
    Parameter("doorbell_ns", "ns", "the host rings one queue", 100, 1000, 300),
    Parameter(
        "doorbell_growth",
        "share",
        "each further queue of a call costs so much more",
        1e-4,
        0.05,
        0.01,
    ),
    Parameter("wake_ns", "ns", "from the doorbell until the engine fetches", 500, 5000, 2000),
    Parameter("setup_ns", "ns", "a copy's first byte: translation, read, write", 1000, 5000, 2500),
    Parameter("issue_ns", "ns", "between the starts of two overlapped copies", 10, 500, 150),
    Parameter("sync_ns", "ns", "a signal, until its word is visible", 500, 4000, 2000),
    Parameter(
        "poll_ns", "ns", "from a word's change until an engine's poll passes", 200, 6000, 1500
    ),
    Parameter("host_poll_ns", "ns", "the host notices one word", 30, 300, 100),
    Parameter("engine_gbps", "GB/s", "one engine's copy over a link", 46, 64, 48),
    Parameter("bcst_gbps", "GB/s", "bytes written by one engine's broadcast", 30, 96, 48),
    Parameter("swap_gbps", "GB/s", "bytes written by one engine's swap", 30, 96, 64),
)
CURVES = tuple(
    Parameter(f"rccl.{op}.{field}", unit, f"RCCL's {meaning}, {op}", low, high, guess)
    for op in OPS
    for field, unit, meaning, low, high, guess in (
        ("latency_us", "us", "time for no bytes", 3, 40, 10),
        ("gbps", "GB/s", "bandwidth out of a GPU", 200, 448, 290),
    )
)


def set_costs(machine: _core.Machine, values: Mapping[str, float]) -> None:
    for part in (cost := machine.cost, links := machine.links):
        for name in values:
            if hasattr(part, name):
                setattr(part, name, values[name])
    machine.cost, machine.links = cost, links


def curves_of(values: Mapping[str, float]) -> dict[str, Curve]:
    return {op: Curve(values[f"rccl.{op}.latency_us"], values[f"rccl.{op}.gbps"]) for op in OPS}


class Objective:
    """The residuals of all rows but those of `without`, of the orders, and the pulls."""

    parameters = (*COSTS, *CURVES)

    def __init__(
        self,
        machine: _core.Machine,
        made: Mapping[Key, _core.Program],
        without: str = "",
        pull: float = _PULL,
    ) -> None:
        self.machine = machine
        self.made = made
        self._rows = [row for row in claims.ROWS if row.key != without]
        self._pull = pull
        self._known: tuple[tuple[float, ...], Sweep] | None = None

    def sweep(self, values: Mapping[str, float]) -> Sweep:
        costs = tuple(values[one.name] for one in COSTS)
        if self._known is None or self._known[0] != costs:
            set_costs(self.machine, dict(zip((one.name for one in COSTS), costs, strict=True)))
            self._known = costs, estimated(self.machine, curves_of(values), self.made)
        rccl = {op: curve.times_us() for op, curve in curves_of(values).items()}
        return Sweep(self._known[1].times, rccl, self._known[1].copies)

    def vector(self, values: Mapping[str, float], power: int = 6) -> Vector:
        """Least squares of these: a row's residual to the 2 x power."""
        sweep = self.sweep(values)
        logs = [math.log(row.value(sweep) / row.published) / _UNIT_ROW for row in self._rows]
        margins = [min(0.0, margin - _ORDER_MARGIN) for margin in claims.order_margins(sweep)]
        pulls = [one.pull(values[one.name]) for one in self.parameters]
        return np.array(
            [math.copysign(abs(log) ** power, log) * _UNIT_ROW for log in logs]
            + [_ORDER_WEIGHT * margin for margin in margins]
            + [self._pull * pull for pull in pulls]
        )

    def cost(self, values: Mapping[str, float]) -> float:
        return float(np.sum(self.vector(values) ** 2))

    def worst(self, values: Mapping[str, float]) -> float:
        """Of the rows asked for, as a share."""
        sweep = self.sweep(values)
        return max(abs(row.residual(sweep)) for row in self._rows)


def solve(
    parameters: Sequence[Parameter],
    vector: Callable[[Values], Vector],
    start: Mapping[str, float],
    steps: int,
) -> Values:
    """The least squares of `vector`, from `start`, within the parameters' ranges."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise error("unavailable", "a fit needs scipy: pip install 'offcore[fit]'") from None
    low = np.log([one.low for one in parameters])
    high = np.log([one.high for one in parameters])
    first = np.log([start[one.name] for one in parameters])

    def values(logs: Vector) -> Values:
        return {one.name: float(value) for one, value in zip(parameters, np.exp(logs), strict=True)}

    found: Any = least_squares(
        lambda logs: vector(values(logs)),
        np.clip(first, low + 1e-6, high - 1e-6),
        bounds=(low, high),
        x_scale="jac",
        max_nfev=steps,
        diff_step=_STEP,
    )
    return values(found.x)
