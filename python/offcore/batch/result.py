"""Results of batches. Properties are read on access, so a wait costs nothing more."""

from __future__ import annotations

from offcore import _core, defaults
from offcore.facts import Facts, Phases, phases_of


class BatchResult(Facts):
    """The result of a batch: how entries were combined, the path taken, and its cost."""

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
        """Number of entries passed, including empty ones."""
        return self._run.plan.moves

    @property
    def empty(self) -> int:
        """Number of entries without bytes."""
        return self._run.plan.empty

    @property
    def merged(self) -> int:
        """Number of entries merged into a neighbour."""
        return self._run.plan.merged

    @property
    def folded(self) -> int:
        """Number of merged entries that became rows of strided copies."""
        return self._run.plan.folded

    @property
    def bcst(self) -> int:
        """Number of entries that became destinations of broadcasts."""
        return self._run.plan.bcst

    @property
    def swaps(self) -> int:
        """Number of swaps requested."""
        return self._run.plan.swaps

    @property
    def commands(self) -> int:
        """Number of copy and swap commands on all ranks."""
        return self._run.plan.program.counts().copies

    @property
    def engines(self) -> int:
        """Number of engine queues in use on all ranks."""
        return self._run.plan.program.counts().engines

    @property
    def syncs(self) -> int:
        """Number of signals on the engine queues of all ranks."""
        return self._run.plan.program.counts().syncs

    @property
    def bytes(self) -> int:
        """Total bytes of all entries; a swap counts once."""
        return self._run.plan.bytes

    @property
    def variant(self) -> str:
        """b2b if no rank used more than one engine, else pcpy."""
        return self._run.plan.program.variant

    @property
    def native(self) -> bool:
        """False if the machine lacks a command, which was emulated with several."""
        return self._run.plan.program.native

    @property
    def mode(self) -> str:
        """eager, or capture (recorded into a graph, not run)."""
        return self._run.mode

    @property
    def own_copy(self) -> str:
        """How data was copied within a GPU's memory: "none"; "engine"; on cuda "hint" (requested an
        engine, but may use SMs) or "sm"."""
        return self._report.own_copy if self._run.within else "none"

    @property
    def calls(self) -> dict[str, int]:
        """cuda: driver calls for `plain` and `strided` copies and for `batches`, and the number of
        copies `batched` in these. All 0 without a driver."""
        calls = self._report.calls
        return {name: getattr(calls, name) for name in ("batches", "batched", "plain", "strided")}

    @property
    def path(self) -> str:
        """How copies were submitted: "engines" (sim and host, whose queues execute commands
        directly); on cuda "batches", "strided", "loop" (one by one: few copies, a driver without
        batches, a capture) or a sum of these; "none" if there was nothing to copy."""
        if self.commands == 0:
            return "none"
        calls = self.calls
        ways = {"batches": "batches", "strided": "strided", "plain": "loop"}
        return "+".join(way for name, way in ways.items() if calls[name]) or "engines"

    @property
    def plan_us(self) -> float:
        """The caller's time to plan and verify the program."""
        return self._run.plan_ns / 1e3

    @property
    def submit_us(self) -> float:
        """The caller's time to submit the program; on sim the host's, in virtual time."""
        if defaults.traits(self.backend).virtual:
            return self._report.phases.control_ns / 1e3
        return self._run.submit_ns / 1e3

    @property
    def copy_us(self) -> float | None:
        """Time from the start of the first copy to the end of the last; None if not timed."""
        if defaults.traits(self.backend).virtual:
            return self._report.phases.copy_ns / 1e3
        stamps = self._report.timestamps_ns
        if not stamps or min(stamps) < 0:
            return None
        return (max(stamps[1::2]) - min(stamps[0::2])) / 1e3

    @property
    def time_us(self) -> float:
        """Time from launch to observed completion; 0 in mode capture."""
        return self._report.time_ns / 1e3

    @property
    def phases(self) -> Phases:
        """Parts of `time_us`."""
        return phases_of(self._report.phases)
