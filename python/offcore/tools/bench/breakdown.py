"""The phases of a single copy between two ranks, by size (DMA-Latte section 3.2).

On `sim` a broadcast between two ranks is exactly that: one copy and the signal that tells of it,
and the simulator knows each phase. On `cuda` the driver shows none of them, so they are differences
between submissions of the same queue that hold less and less (see phases_of).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

import offcore
from offcore import _core
from offcore.sizes import format_bytes
from offcore.tools.bench.collective_runner import CollectiveRunner, facts_of
from offcore.tools.report import format_us

PHASES = ("control", "schedule", "copy", "sync")
SIZES = "4K:2M"

NOTES = (
    "control: the host's calls into the driver, as far as no engine works meanwhile",
    "copy, sync: what the copy adds to an empty queue and the signal to the copy, all of them "
    "enqueued ahead behind a word that the host then writes",
    "schedule: what remains of the whole. Doorbell, the engine's waking and fetching, and the "
    "host's noticing the end are in it: the driver shows no line between them",
    "armed: copy and signal enqueued ahead, from the host's word until it sees the end",
)

_LAUNCHES = 60
_WARM = 10  # of these, not counted
_TIMEOUT_S = 20.0

_HEADER = """\
program copy machine=m ranks=2 variant=v mode=eager protocol=promise native=yes flags=4 span=1
buffer w window {bytes}
"""
_COPY = " copy w[1]+0 <- w[0]+0 bytes={bytes}\n"
_SIGNAL = " signal flag[1]:0 = 1\n"
# What a queue holds, from full to empty. A fence is no command of the driver's.
_BODIES = {
    "full": "queue 0.0\n" + _COPY + _SIGNAL,
    "copy": "queue 0.0\n" + _COPY,
    "empty": "queue 0.0\n fence\n",
}


@dataclass(frozen=True)
class Copy:
    bytes: int
    time_us: float
    phases: dict[str, float]
    armed_us: float | None = None  # None: not measured

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
        runner = CollectiveRunner(comm, "broadcast", True, max(sizes), "promise", phantom=True)
        found = []
        for nbytes in sizes:
            result, _ = runner.checked_call(runner.layout(nbytes), "pcpy", seed=0)
            found.append(Copy(nbytes, result.time_us, facts_of(result)["phases"]))
        return found


def phases_of(
    time_us: float, control_us: float, full_us: float, copy_us: float, empty_us: float
) -> dict[str, float]:
    """The four phases, which add up to time_us, what one copy and its signal take when the host
    submits them at once (for control_us it was calling the driver). full_us, copy_us, empty_us:
    armed ahead, copy and signal, the copy alone, and nothing. Control is what no engine works
    during: while the host submits the signal, the copy is under way. None is below 0."""
    sync_us = max(0.0, full_us - copy_us)
    engines_us = min(time_us, max(0.0, copy_us - empty_us) + sync_us)
    alone_us = time_us - engines_us
    phases = {
        "control_us": min(control_us, alone_us),
        "schedule_us": alone_us - min(control_us, alone_us),
        "copy_us": engines_us - min(sync_us, engines_us),
        "sync_us": min(sync_us, engines_us),
    }
    return {name: round(value, 3) for name, value in phases.items()}


def measured(machine: str, sizes: Sequence[int]) -> list[Copy]:
    """A copy of each size between the first two GPUs of this machine, all in this process."""
    session = _core.Session("cuda", offcore.machines.load(machine), 2)
    gate = _core.GpuTimer(0)
    found = []
    for nbytes in sizes:
        time_us, control_us = _submitted(session, _BODIES["full"], nbytes, None)
        armed = {
            f"{name}_us": _submitted(session, body, nbytes, gate)[0]
            for name, body in _BODIES.items()
        }
        phases = phases_of(time_us, control_us, **armed)
        found.append(Copy(nbytes, round(time_us, 3), phases, round(armed["full_us"], 3)))
    return found


def _submitted(
    session: _core.Session, body: str, nbytes: int, gate: _core.GpuTimer | None
) -> tuple[float, float]:
    """The medians of the whole time and of the host's own share, in microseconds."""
    text = (_HEADER + body).format(bytes=nbytes)
    run = session.run(
        _core.Program.parse(text),
        repeat=_LAUNCHES,
        timeout_s=_TIMEOUT_S,
        checked=False,  # no other rank waits for this one
        gate=gate,
    )
    medians = [statistics.median(of[_WARM:]) / 1e3 for of in (run.times_ns, run.controls_ns)]
    return medians[0], medians[1]


def table(machine: str, backend: str, found: list[Copy]) -> Table:
    where = "simulated" if backend == "sim" else backend
    result = Table(
        title=f"one copy between two ranks of {machine} ({where}): phases in us",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    armed = any(copy.armed_us is not None for copy in found)
    for name in ("size", *PHASES, "total us", "non-copy, %", *(["armed us"] if armed else [])):
        result.add_column(name, justify="right")
    for copy in found:
        cells = [format_us(copy.phases[f"{name}_us"]) for name in PHASES]
        cells += [format_us(copy.time_us), f"{100 * copy.overhead:.0f}"]
        cells += [] if copy.armed_us is None else [format_us(copy.armed_us)]
        result.add_row(format_bytes(copy.bytes), *cells)
    return result
