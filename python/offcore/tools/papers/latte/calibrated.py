"""What `offcore calibrate` found: machines/calibrated/NAME.json.

Only the engines' costs are in the machine's file, which everybody reads. Here is the rest: RCCL's
curves, the parameters of power and of KV fetches, and how good the fit is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offcore import _core, machines
from offcore.comm.programs import REDUCING
from offcore.errors import error
from offcore.tools.papers.latte import kv, power
from offcore.tools.papers.latte.fit import Values, curves_of
from offcore.tools.papers.latte.rows import RATIO_BOUND
from offcore.tools.papers.latte.sweep import Curve

NAME = "mi300x-8"
ABSOLUTE = "absolute times are uncertain by about 25 %, since ratios do not fix their scale"


def caution(machine: str | None) -> str:
    """What belongs beside times of a machine whose costs were fitted to ratios; else nothing."""
    fitted = machine is not None and machines.calibration_of(Path(machine).stem) is not None
    return f"{machine}, simulated: {ABSOLUTE}. Compare ratios." if fitted else ""


def assumed(machine: str, op: str) -> str:
    """What a simulated operation's time rests on that nobody measured; else nothing."""
    if op not in REDUCING or machine.endswith(".json"):
        return ""
    sources = json.loads(machines.path_of(machine).read_text("utf-8"))["sources"]
    told = sources.get("cost.reduce_gbps", "")
    return f"how fast cores reduce is assumed: {told}" if "assum" in told else ""


def span(residuals: Sequence[float]) -> str:
    """The least and the most, once where they read alike."""
    return " to ".join(dict.fromkeys(f"{100 * one:+.1f} %" for one in residuals))


def held_out(record: Mapping[str, Any]) -> str:
    """How well rows are predicted by fits that have not seen them."""
    rows = record["engines"]["rows"]
    missed = {
        f"{row['key']} {row['op']}": row["left_out"] for row in rows if beyond(row["left_out"])
    }
    told = f"left out of the fit, {len(rows) - len(missed)} of {len(rows)} ratios are predicted "
    told += f"within {100 * RATIO_BOUND:g} %"
    if missed:
        told += ", not " + ", ".join(f"{name} ({span(one)})" for name, one in missed.items())
    return told


def beyond(residuals: Sequence[float]) -> bool:
    """Whether a held-out fit misses a row by more than a fitted row may be off."""
    return max(map(abs, residuals)) > RATIO_BOUND


@dataclass(frozen=True)
class Calibrated:
    machine: _core.Machine
    values: Values  # of the engines' costs and RCCL's curves
    power: Values
    kv: Values
    record: dict[str, Any]  # the file

    @property
    def rccl(self) -> dict[str, Curve]:
        return curves_of(self.values)


def load(name: str = NAME) -> Calibrated:
    """Raises invalid where the file is missing or does not hold what it should."""
    if (path := machines.calibration_of(name)) is None:
        raise error("invalid", f"machine {name} is not calibrated: run offcore calibrate")
    try:
        record = json.loads(path.read_text("utf-8"))
        parts = {
            part: {one["name"]: float(one["value"]) for one in record[part]["parameters"]}
            for part in ("engines", "power", "kv")
        }
        return Calibrated(
            machines.load(name),
            parts["engines"],
            parts["power"] | power.ASSUMED,
            parts["kv"] | kv.ASSUMED,
            record,
        )
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise error(
            "invalid", f"{path}: not a calibration ({cause!r}): run offcore calibrate"
        ) from cause
