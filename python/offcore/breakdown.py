"""The phases of a single copy between two ranks, by size (DMA-Latte section 3.2).

A broadcast between two ranks is exactly that: one copy and the signal that tells of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

import offcore
from offcore.exercise import Exercise, facts_of
from offcore.report import format_us
from offcore.sizes import format_bytes

PHASES = ("control", "schedule", "copy", "sync")
SIZES = "4K:2M"


@dataclass(frozen=True)
class Copy:
    bytes: int
    time_us: float
    phases: dict[str, float]

    @property
    def overhead(self) -> float:
        """The share of the time that is not the copy phase."""
        total = sum(self.phases.values())
        return 1 - self.phases["copy_us"] / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"overhead": round(self.overhead, 4)}


def copies(machine: str, sizes: list[int]) -> list[Copy]:
    """A copy of each size, on the simulator, without bytes."""
    with offcore.Communicator(backend="sim", machine=machine, ranks=2, phantom=True) as comm:
        exercise = Exercise(comm, "broadcast", True, max(sizes), "promise", phantom=True)
        found = []
        for nbytes in sizes:
            result, _ = exercise.checked_call(exercise.layout(nbytes), "pcpy", seed=0)
            found.append(Copy(nbytes, result.time_us, facts_of(result)["phases"]))
        return found


def table(machine: str, found: list[Copy]) -> Table:
    result = Table(
        title=f"one copy between two ranks of {machine} (sim): phases in us",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for name in ("size", *PHASES, "total us", "all but copy"):
        result.add_column(name, justify="right")
    for copy in found:
        phases = [format_us(copy.phases[f"{name}_us"]) for name in PHASES]
        total = format_us(copy.time_us)
        result.add_row(format_bytes(copy.bytes), *phases, total, f"{copy.overhead:.0%}")
    return result
