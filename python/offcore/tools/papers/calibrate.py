"""`offcore calibrate`: fits the MI300X's costs to DMA-Latte's published ratios (docs/model.md).

Random starts, the same for the same seed, are fitted without a pull to the parameters' guesses:
those that end as good as the best of them show what the ratios leave open. The best one is then
fitted with the pull. Each row is also told as fits without it predict it: they start at random
places of their own, because a fit that starts from the fitted costs has already seen the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from offcore import _core, machines
from offcore.errors import error
from offcore.sizes import format_bytes
from offcore.tools.papers.latte import calibrated, kv, power, rows, sweep
from offcore.tools.papers.latte.fit import (
    COSTS,
    Objective,
    Parameter,
    Values,
    Vector,
    curves_of,
    set_costs,
    solve,
)
from offcore.tools.tables import titled

SEED = 1
STARTS = 12
HELD_OUT_STARTS = 6  # of each fit without a row
EQUALLY_GOOD = 0.01  # the worst row is worse by no more than one point
_STEPS = (40, 60, 200)  # first coarse, then by the worst rows, and the last fit
_COARSE, _WORST = 2, 6  # the powers of a residual
_SMALL_PULL = 0.01
_SHOWN = (
    ("all_gather", "pcpy", 4 << 10),
    ("all_gather", "prelaunch_b2b", 4 << 10),
    ("all_gather", "prelaunch_bcst", 512 << 10),
    ("all_gather", "prelaunch_pcpy", 4 << 20),
    ("all_to_all", "prelaunch_swap", 1 << 20),
    ("all_gather", "pcpy", 1 << 30),
)
KEYS = tuple(dict.fromkeys(row.key for row in rows.ROWS))  # what is left out together
_SOURCE = "published MI300X ratios (DMA-Latte section 5): offcore calibrate; scale within 25 %"

Say = Callable[[str], None]


def calibrate(name: str, seed: int, starts: int, say: Say) -> dict[str, Any]:
    """The record of machines/calibrated/NAME.json."""
    machine = machines.load(name)
    if machine.ranks < sweep.RANKS or not machine.native.swap:
        raise error("unsupported", f"the published rows are those of 8 x MI300X, not of {name}")
    made = sweep.programs(machine)
    free = Objective(machine, made, pull=0)
    guesses = {one.name: one.guess for one in free.parameters}
    places = [guesses, *_places(free.parameters, np.random.default_rng(seed), starts - 1)]
    good = _equally_good(free, places, say)
    pulled = Objective(machine, made)
    best = solve(pulled.parameters, partial(pulled.vector, power=_WORST), good[0], _STEPS[2])
    best = {one: float(f"{value:.4g}") for one, value in best.items()}
    say(f"fitted: worst row {pulled.worst(best):.1%}")
    engines = _engines(pulled, best, good, held_out(machine, made, seed, say))
    set_costs(machine, best)
    return {
        "machine": name,
        "seed": seed,
        "starts": starts,
        "engines": engines,
        "power": _power(machine, best, made),
        "kv": _kv(machine),
    }


def _places(
    parameters: Sequence[Parameter], random: np.random.Generator, count: int
) -> Iterable[Values]:
    """Random places of the parameters' ranges."""
    for _ in range(count):
        shares = random.random(len(parameters))
        yield {
            one.name: float(one.low * (one.high / one.low) ** share)
            for one, share in zip(parameters, shares, strict=True)
        }


def _equally_good(objective: Objective, starts: Iterable[Values], say: Say) -> list[Values]:
    """Where these starts end, the best first, less those that end worse by more than a point."""
    fits = []
    for number, start in enumerate(starts):
        values = solve(
            objective.parameters, partial(objective.vector, power=_COARSE), start, _STEPS[0]
        )
        values = solve(
            objective.parameters, partial(objective.vector, power=_WORST), values, _STEPS[1]
        )
        fits.append((_merit(objective, values), values))
        say(f"start {number + 1}: worst row {objective.worst(values):.1%}")
    fits.sort(key=lambda fit: fit[0])
    return [values for merit, values in fits if merit <= fits[0][0] + EQUALLY_GOOD]


def held_out(
    machine: _core.Machine,
    made: Mapping[sweep.Key, _core.Program],
    seed: int,
    say: Say,
    keys: Sequence[str] = KEYS,
) -> dict[str, tuple[float, float]]:
    """By a row's name, the least and the most that fits of the other rows miss it by.

    A key's rows are left out together. The fits know neither the fitted costs nor the guesses.
    """
    found: dict[str, tuple[float, float]] = {}
    for key in keys:
        without = Objective(machine, made, without=key, pull=0)
        random = np.random.default_rng([seed, int(key.removeprefix("L"))])
        starts = _places(without.parameters, random, HELD_OUT_STARTS)
        good = [without.sweep(one) for one in _equally_good(without, starts, lambda _: None)]
        for row in (row for row in rows.ROWS if row.key == key):
            missed = [row.residual(one) for one in good]
            found[row.name] = min(missed), max(missed)
            say(f"without {key}: {row.op}: {row.claim}: {calibrated.span(found[row.name])}")
    return found


def _merit(objective: Objective, values: Values) -> float:
    """The worst row, and how far orders are missed, which no fit may be."""
    missed = min(0.0, *rows.order_margins(objective.sweep(values)))
    return objective.worst(values) - 100 * missed


def _engines(
    objective: Objective,
    best: Values,
    good: Sequence[Values],
    left_out: Mapping[str, tuple[float, float]],
) -> dict[str, Any]:
    times = {key: [_time(objective, values, key) for values in good] for key in _SHOWN}
    found = objective.sweep(best)
    return {
        "parameters": [
            _told(one, best[one.name])
            | {
                "least": _short(min(v[one.name] for v in good)),
                "most": _short(max(v[one.name] for v in good)),
            }
            for one in objective.parameters
        ],
        "rows": [
            {
                "key": row.key,
                "op": row.op,
                "claim": row.claim,
                "published": row.published,
                "model": round(row.value(found), 4),
                "residual": round(row.residual(found), 4),
                "left_out": [round(share, 4) for share in left_out[row.name]],
            }
            for row in rows.ROWS
        ],
        "equally_good": {
            "fits": len(good),
            "times_us": [
                {
                    "op": op,
                    "variant": variant,
                    "bytes": nbytes,
                    "fitted": round(_time(objective, best, (op, variant, nbytes)), 2),
                    "least": round(min(of), 2),
                    "most": round(max(of), 2),
                }
                for (op, variant, nbytes), of in times.items()
            ],
        },
    }


def _time(objective: Objective, values: Values, key: sweep.Key) -> float:
    op, variant, nbytes = key
    return float(objective.sweep(values).times[op, variant][sweep.SIZES.index(nbytes)])


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _told(one: Parameter, value: float) -> dict[str, Any]:
    told = {"name": one.name, "unit": one.unit, "meaning": one.meaning}
    return told | {"low": one.low, "high": one.high, "value": value}


def _power(
    machine: _core.Machine, values: Values, made: Mapping[sweep.Key, _core.Program]
) -> dict[str, Any]:
    found = sweep.simulated(machine, curves_of(values))
    active = power.activities(machine, found, made)

    def vector(given: Values) -> Vector:
        return power.residuals(power.shares(found, active, given | power.ASSUMED))

    return _small(power.PARAMETERS, vector, power.ASSUMED)


def _kv(machine: _core.Machine) -> dict[str, Any]:
    found = kv.fetches(machine)

    def vector(given: Values) -> Vector:
        return kv.residuals(kv.requests(found, given | kv.ASSUMED))

    return _small(kv.PARAMETERS, vector, kv.ASSUMED)


def _small(
    parameters: Sequence[Parameter], vector: Callable[[Values], Vector], assumed: Values
) -> dict[str, Any]:
    """The least squares of a model of few parameters, each of them drawn a little to its guess."""

    def drawn(values: Values) -> Vector:
        pulls = [_SMALL_PULL * one.pull(values[one.name]) for one in parameters]
        return np.concatenate([vector(values), pulls])

    start = {one.name: one.guess for one in parameters}
    values = solve(parameters, drawn, start, _STEPS[2])
    told = [_told(one, _short(values[one.name])) for one in parameters]
    return {"parameters": told, "assumed": assumed, "numbers": len(vector(values))}


def write(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """The costs into folder/NAME.json, whose other lines stay, the rest beside it. The folder has
    been prepared."""
    name = record["machine"]
    path = folder / f"{name}.json"
    source = path if path.is_file() else machines.path_of(name)
    text = source.read_text("utf-8")
    values = {one["name"]: one["value"] for one in record["engines"]["parameters"]}
    for one in COSTS:
        text = re.sub(rf'(\n    "{one.name}": )[^,\n]+', rf"\g<1>{values[one.name]:g}", text)
        section = "links" if one.name.endswith("_gbps") else "cost"
        text = re.sub(rf'("{section}.{one.name}": )"[^"]*"', rf'\g<1>"{_SOURCE}"', text)
    path.write_text(text, "utf-8")
    beside = folder / "calibrated" / f"{name}.json"
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return [path, beside]


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Parameters, residuals and what equally good fits differ in."""
    made = []
    for part, title in (
        ("engines", "engines and RCCL's curves (12 and 2 a collective)"),
        ("power", "power"),
        ("kv", "KV fetches"),
    ):
        spread = "least" in record[part]["parameters"][0]
        numbers = ["value", "low", "high"] + (["least", "most"] if spread else [])
        table = titled(f"parameters: {title}", ("parameter", "unit", "meaning"), numbers)
        for one in record[part]["parameters"]:
            table.add_row(
                one["name"], one["unit"], one["meaning"], *(f"{one[n]:g}" for n in numbers)
            )
        made.append(table)
    table = titled(
        "residuals, and those of fits without the row (all parts of L4 at once, and so on)",
        ("row", "operation", "claim"),
        ("published", "model", "residual", "left out"),
    )
    for row in record["engines"]["rows"]:
        table.add_row(
            row["key"],
            row["op"],
            row["claim"],
            f"{row['published']:g}",
            f"{row['model']:.2f}",
            f"{row['residual']:+.1%}",
            calibrated.span(row["left_out"]),
        )
    made.append(table)
    equally = record["engines"]["equally_good"]
    table = titled(
        f"us by the fit, and among {equally['fits']} of {record['starts']} that are as good: "
        + calibrated.ABSOLUTE,
        ("operation", "variant", "size"),
        ("fitted", "least", "most"),
    )
    for one in equally["times_us"]:
        told = (f"{one[n]:,.1f}" for n in ("fitted", "least", "most"))
        table.add_row(one["op"], one["variant"], format_bytes(one["bytes"]), *told)
    made.append(table)
    return made


def show(record: Mapping[str, Any], console: Console) -> None:
    for table in tables(record):
        console.print(table)
