"""What a batch did. It reads its facts when asked, so a wait costs nothing more."""

from __future__ import annotations

from offcore import _core, defaults
from offcore.facts import Facts, Phases, phases_of


class BatchResult(Facts):
    """What a batch did: what became of its entries, the path that really ran, and what it cost."""

    __slots__ = ("_report", "_run", "backend", "machine", "ranks")

    def __init__(
        self, run: _core.BatchRun, report: _core.Report, backend: str, machine: str, ranks: int
    ) -> None:
        self._run = run
        self._report = report
        self.backend = backend
        self.machine = machine
        self.ranks = ranks

    @property
    def entries(self) -> int:
        """Descriptors in, those of no bytes among them."""
        return self._run.plan.moves

    @property
    def empty(self) -> int:
        """Entries of no bytes."""
        return self._run.plan.empty

    @property
    def merged(self) -> int:
        """Entries that became a part of a neighbour."""
        return self._run.plan.merged

    @property
    def folded(self) -> int:
        """Of what was left then, what became rows of strided copies."""
        return self._run.plan.folded

    @property
    def bcst(self) -> int:
        """What became destinations of broadcasts."""
        return self._run.plan.bcst

    @property
    def swaps(self) -> int:
        """Exchanges that were asked for."""
        return self._run.plan.swaps

    @property
    def commands(self) -> int:
        """Commands out: copies and swaps of the program, on all ranks."""
        return self._run.plan.program.counts().copies

    @property
    def engines(self) -> int:
        """Engine queues in use on all ranks."""
        return self._run.plan.program.counts().engines

    @property
    def syncs(self) -> int:
        """Signals on the engine queues of all ranks."""
        return self._run.plan.program.counts().syncs

    @property
    def bytes(self) -> int:
        """Of all entries; those of a swap count once."""
        return self._run.plan.bytes

    @property
    def variant(self) -> str:
        """b2b where no rank used more than one engine, else pcpy."""
        return self._run.plan.program.variant

    @property
    def native(self) -> bool:
        """False if the machine lacks a command, which was emulated with several."""
        return self._run.plan.program.native

    @property
    def mode(self) -> str:
        """eager; or capture: recorded into a graph, and not run."""
        return self._run.mode

    @property
    def own_copy(self) -> str:
        """What copied within a GPU's memory: "none" where nothing did; a copy "engine"; on cuda
        "hint", a copy that asks for an engine and may take SMs all the same, or "sm"."""
        return self._report.own_copy if self._run.within else "none"

    @property
    def calls(self) -> dict[str, int]:
        """cuda: calls of the driver for `plain` and `strided` copies and for `batches`, and the
        copies `batched` in these. All 0 where there is no driver."""
        calls = self._report.calls
        return {name: getattr(calls, name) for name in ("batches", "batched", "plain", "strided")}

    @property
    def path(self) -> str:
        """How the copies went out: "engines" (sim and host, whose queues take commands as they
        are), on cuda "batches", "strided", "loop" (copies one by one: few of them, a driver without
        batches, a capture) or a sum of these; "none" where there was nothing to copy."""
        if self.commands == 0:
            return "none"
        calls = self.calls
        ways = {"batches": "batches", "strided": "strided", "plain": "loop"}
        return "+".join(way for name, way in ways.items() if calls[name]) or "engines"

    @property
    def plan_us(self) -> float:
        """The caller's time until the program was planned and verified."""
        return self._run.plan_ns / 1e3

    @property
    def submit_us(self) -> float:
        """The caller's time to hand the program over; on sim the host's, in virtual time."""
        if defaults.traits(self.backend).virtual:
            return self._report.phases.control_ns / 1e3
        return self._run.submit_ns / 1e3

    @property
    def copy_us(self) -> float | None:
        """From the first copy's begin to the last one's end on the engines; None: nobody looked."""
        if defaults.traits(self.backend).virtual:
            return self._report.phases.copy_ns / 1e3
        stamps = self._report.timestamps_ns
        if not stamps or min(stamps) < 0:
            return None
        return (max(stamps[1::2]) - min(stamps[0::2])) / 1e3

    @property
    def time_us(self) -> float:
        """From the launch until its end was seen; 0 in mode capture."""
        return self._report.time_ns / 1e3

    @property
    def phases(self) -> Phases:
        """The parts of that time."""
        return phases_of(self._report.phases)
