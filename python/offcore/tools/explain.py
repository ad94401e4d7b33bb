"""`offcore explain`: why a variant is chosen at a size, phase by phase, beside the runner-up.

Every variant that the operation can have is run on the simulator. Phases are those of the path that
ends last, so they add up to the time; what goes on beside that path costs nothing and shows as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from offcore import _core, machines
from offcore.comm.programs import REDUCING, plans_of
from offcore.sizes import format_bytes
from offcore.tools.bench.breakdown import PHASES
from offcore.tools.papers.latte.calibrated import caution
from offcore.tools.report import format_us


@dataclass(frozen=True)
class Case:
    """One variant, simulated; counts are of all ranks."""

    variant: str
    phases: dict[str, float]  # us
    commands: int
    copies: int
    engines: int
    syncs: int
    native: bool

    @property
    def time_us(self) -> float:
        return sum(self.phases.values())

    @property
    def name(self) -> str:
        return self.variant if self.native else f"{self.variant} +"

    @property
    def ahead(self) -> bool:
        return self.variant.startswith("prelaunch_")

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"time_us": self.time_us}


@dataclass(frozen=True)
class Why:
    op: str
    machine: str
    ranks: int
    bytes: int
    in_place: bool
    protocol: str
    tuned: bool  # a measured table chose
    chosen: Case
    runner_up: Case | None  # of those that auto chooses from
    others: Sequence[Case]
    dtype: str | None = None  # of what reduces
    reduction: str | None = None

    def to_json(self) -> dict[str, Any]:
        up = None if self.runner_up is None else self.runner_up.to_json()
        others = [case.to_json() for case in self.others]
        return vars(self) | {"chosen": self.chosen.to_json(), "runner_up": up, "others": others}


def explain(
    op: str,
    *,
    machine: str,
    ranks: int,
    nbytes: int,
    in_place: bool = False,
    protocol: str = "promise",
    dtype: str | None = None,
    reduction: str | None = None,
) -> Why:
    """Raises `Error`: invalid (unknown names, too many ranks), unsupported (no variant can)."""
    loaded = machines.load(machine)
    plans = plans_of(loaded, op, ranks, nbytes, in_place, protocol, dtype, reduction)
    name, tuned = plans.choose()
    session = _core.Session("sim", loaded, ranks, phantom=True)
    cases = {
        variant: _case(session, plans.plan(variant), variant)
        for variant in dict.fromkeys([name, *plans.variants()])
    }
    chosen = cases.pop(name)
    ordered = sorted(cases.values(), key=lambda case: case.time_us)
    runner_up = next((case for case in ordered if not case.ahead), None)
    return Why(
        op=op,
        machine=loaded.name,
        ranks=ranks,
        bytes=nbytes,
        in_place=in_place,
        protocol=protocol,
        tuned=tuned,
        chosen=chosen,
        runner_up=runner_up,
        others=[case for case in ordered if case is not runner_up],
        dtype=dtype or "float32" if op in REDUCING else None,
        reduction=reduction or "sum" if op in REDUCING else None,
    )


def _case(session: _core.Session, program: _core.Program, variant: str) -> Case:
    phases = session.run(program).phases
    counts = program.counts()
    return Case(
        variant=variant,
        phases={name: getattr(phases, f"{name}_ns") / 1e3 for name in PHASES},
        commands=counts.commands,
        copies=counts.copies,
        engines=counts.engines,
        syncs=counts.syncs,
        native=program.native,
    )


def _reason(phase: str, chosen: Case, other: Case) -> str:
    """What the two have different that this phase is spent on."""

    def both(name: str, what: str) -> str:
        own, theirs = getattr(chosen, name), getattr(other, name)
        return f"{own} {what} each" if own == theirs else f"{own} {what} instead of {theirs}"

    if abs(chosen.phases[phase] - other.phases[phase]) < 5e-4:
        return ""
    if phase == "control":
        return both("commands", "commands")
    if phase == "schedule":
        return both("engines", "doorbells and engines to wake")
    if phase == "copy":
        return f"{both('copies', 'copies')}, on {both('engines', 'engines')}"
    return both("syncs", "signals to send and to notice")


def show(why: Why, console: Console) -> None:
    place = "in place" if why.in_place else "out of place"
    what = f" ({why.reduction} of {why.dtype})" if why.reduction else ""
    title = (
        f"{why.op}{what} of {format_bytes(why.bytes)}, {place}, {why.ranks} ranks of {why.machine} "
        f"(simulated, {why.protocol}), us"
    )
    other = why.runner_up
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("phase")
    table.add_column(f"{why.chosen.name} *", justify="right")
    if other is not None:
        for name in (other.name, "saved"):
            table.add_column(name, justify="right")
        table.add_column("reason")
    for phase in PHASES:
        cells = [phase, format_us(why.chosen.phases[phase])]
        if other is not None:
            saved = other.phases[phase] - why.chosen.phases[phase]
            cells += [
                format_us(other.phases[phase]),
                f"{saved:+.2f}",
                _reason(phase, why.chosen, other),
            ]
        table.add_row(*cells)
    table.add_section()
    cells = ["total", format_us(why.chosen.time_us)]
    if other is not None:
        saved = other.time_us - why.chosen.time_us
        cells += [format_us(other.time_us), f"{saved:+.2f}", _conclusion(why, other)]
    table.add_row(*cells)
    console.print(table)
    if why.others:
        console.print(_others(why.others))
    for note in _notes(why):
        console.print(note, highlight=False, soft_wrap=True)


def _conclusion(why: Why, other: Case) -> str:
    ratio = other.time_us / why.chosen.time_us
    if why.tuned:
        return "a measured table chose"
    return (
        f"{ratio:.2f} times as fast"
        if ratio >= 1
        else "the cost model chose, the simulator differs"
    )


def _others(others: Sequence[Case]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("others", *PHASES, "total", "commands", "engines", "syncs"):
        table.add_column(name, justify="left" if name == "others" else "right")
    for case in others:
        phases = [format_us(case.phases[name]) for name in PHASES]
        counts = map(str, (case.commands, case.engines, case.syncs))
        table.add_row(case.name, *phases, format_us(case.time_us), *counts)
    return table


def _notes(why: Why) -> list[str]:
    notes = ["Phases are those of the critical path; work off that path adds no time."]
    if any(case.ahead for case in why.others):
        notes.append("prelaunch_ is for callers that repeat a call: auto never chooses it.")
    if not all(case.native for case in (why.chosen, why.runner_up, *why.others) if case):
        notes.append("+ this machine lacks the command; emulated with several.")
    if note := caution(why.machine):
        notes.append(note)
    return notes
