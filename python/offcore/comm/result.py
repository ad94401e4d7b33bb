"""What an operation did. A result reads its facts when asked, so a wait costs nothing more."""

from __future__ import annotations

from offcore import _core, defaults
from offcore.facts import Facts, Phases, phases_of


class Result(Facts):
    """What an operation did: the path that really ran, and what it cost."""

    __slots__ = ("_core", "backend", "machine", "ranks")

    def __init__(self, core: _core.Result, backend: str, machine: str, ranks: int) -> None:
        self._core = core
        self.backend = backend
        self.machine = machine
        self.ranks = ranks

    @property
    def op(self) -> str:
        """The operation; a _v form carries the plain one's name."""
        return self._core.op

    @property
    def bytes(self) -> int:
        """S, the whole array, in bytes."""
        return self._core.bytes

    @property
    def in_place(self) -> bool:
        """Whether the input was the output."""
        return self._core.in_place

    @property
    def own_copy(self) -> str:
        """What copies within a local rank's memory, its own slice or out of a slot: "none" where
        nothing is; a copy "engine"; on cuda also "engines", several of them; "hint", a copy that
        asks for an engine and may take SMs all the same; or "sm", one that does not ask (see
        docs/cuda.md)."""
        return self._core.own_copy

    @property
    def sms(self) -> int:
        """cuda: SMs that a reduction took at most; 0 for what engines did alone."""
        return self._core.sms

    @property
    def variant(self) -> str:
        """The variant that ran."""
        return self._core.variant

    @property
    def native(self) -> bool:
        """False if the machine lacks a command, which was emulated with several."""
        return self._core.native

    @property
    def way(self) -> str | None:
        """sdma: how copies got to the engines, "queues" of packets, "batch_copy" or "hip_batch"
        (see docs/sdma.md). None on other backends."""
        return self._core.way or None

    @property
    def protocol(self) -> str:
        """How the peers entered: barrier, credits, eager or promise; view for a view call."""
        return self._core.protocol

    @property
    def signals(self) -> str | None:
        """How flags stayed behind the data: "fenced", or "copy_order" (see docs/cuda.md). None
        where there is only one way: not on GPUs."""
        return self._core.signals if defaults.traits(self.backend).gpus else None

    @property
    def staged(self) -> bool:
        """Whether data went through slots: a buffer lay outside the windows, or protocol eager."""
        return self._core.staged

    @property
    def registered(self) -> bool:
        """Whether peers wrote straight into tensors that were registered."""
        return self._core.registered

    @property
    def slot_bytes(self) -> int:
        """Bytes of a rank's slot that this operation used; 0 where it used none. A lane has three
        slots (a graph one), as large as its largest operation needs."""
        return self._core.slot_bytes

    @property
    def mode(self) -> str:
        """eager; armed for a prelaunched program; capture: recorded into a graph, and not run."""
        return self._core.mode

    @property
    def tuned(self) -> bool:
        """Whether the measured table chose the variant, not the cost model or the caller."""
        return self._core.tuned

    @property
    def armed_ahead(self) -> bool:
        """Whether the engines held a prelaunched program before the call."""
        return self._core.armed_ahead

    @property
    def commands(self) -> int:
        """Commands on the engine queues of all ranks."""
        return self._core.counts.commands

    @property
    def engines(self) -> int:
        """Engine queues in use on all ranks."""
        return self._core.counts.engines

    @property
    def syncs(self) -> int:
        """Signals on the engine queues of all ranks."""
        return self._core.counts.syncs

    @property
    def time_us(self) -> float:
        """From the launch until the last local rank was complete; 0 in mode capture."""
        return self._core.time_ns / 1e3

    @property
    def phases(self) -> Phases:
        """The parts of that time."""
        return phases_of(self._core.phases)

    @property
    def kernels(self) -> int | None:
        """Kernels that ran; None: nothing was profiled."""
        return None
