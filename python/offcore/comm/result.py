"""Results of operations. Properties are read on access, so a wait costs nothing more."""

from __future__ import annotations

from offcore import _core, defaults
from offcore.facts import Facts, Phases, phases_of


class Result(Facts):
    """The result of an operation: the path taken and its cost."""

    __slots__ = ("_core", "backend", "machine", "ranks")

    def __init__(self, core: _core.Result, backend: str, machine: str, ranks: int) -> None:
        self._core = core
        self.backend = backend
        self.machine = machine
        self.ranks = ranks

    @property
    def op(self) -> str:
        """Name of the operation, without _v."""
        return self._core.op

    @property
    def bytes(self) -> int:
        """Size of the whole array in bytes."""
        return self._core.bytes

    @property
    def in_place(self) -> bool:
        """Whether the input was the output."""
        return self._core.in_place

    @property
    def own_copy(self) -> str:
        """How data was copied within a local rank's memory (its own slice, or out of a slot):
        "none"; "engine"; on cuda also "engines" (several), "hint" (requested an engine, but may use
        SMs) or "sm" (requested none; docs/cuda.md)."""
        return self._core.own_copy

    @property
    def sms(self) -> int:
        """cuda: maximum number of SMs used by a reduction; 0 if engines alone did the work."""
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
        """sdma: how copies were submitted: "queues" of packets, "batch_copy" or "hip_batch"
        (docs/sdma.md). None on other backends."""
        return self._core.way or None

    @property
    def protocol(self) -> str:
        """barrier, credits, eager or promise; view for a view call."""
        return self._core.protocol

    @property
    def signals(self) -> str | None:
        """How flags were ordered after the data: "fenced" or "copy_order" (docs/cuda.md). None
        without GPUs, where there is only one way."""
        return self._core.signals if defaults.traits(self.backend).gpus else None

    @property
    def staged(self) -> bool:
        """Whether data was staged through slots: a buffer outside windows, or protocol eager."""
        return self._core.staged

    @property
    def registered(self) -> bool:
        """Whether peers wrote directly into registered tensors."""
        return self._core.registered

    @property
    def slot_bytes(self) -> int:
        """Bytes of a rank's slot used by this operation; 0 if none. A lane has three slots (a graph
        has one), as large as its largest operation requires."""
        return self._core.slot_bytes

    @property
    def mode(self) -> str:
        """eager; armed (prelaunched program); capture (recorded into a graph, not run)."""
        return self._core.mode

    @property
    def tuned(self) -> bool:
        """Whether the variant came from the measured table, not the cost model or the caller."""
        return self._core.tuned

    @property
    def armed_ahead(self) -> bool:
        """Whether the engines held a prelaunched program before the call."""
        return self._core.armed_ahead

    @property
    def commands(self) -> int:
        """Number of commands on the engine queues of all ranks."""
        return self._core.counts.commands

    @property
    def engines(self) -> int:
        """Number of engine queues in use on all ranks."""
        return self._core.counts.engines

    @property
    def syncs(self) -> int:
        """Number of signals on the engine queues of all ranks."""
        return self._core.counts.syncs

    @property
    def time_us(self) -> float:
        """Time from launch to completion of the last local rank; 0 in mode capture."""
        return self._core.time_ns / 1e3

    @property
    def phases(self) -> Phases:
        """Parts of `time_us`."""
        return phases_of(self._core.phases)

    @property
    def kernels(self) -> int | None:
        """Number of kernels that ran; None if not profiled."""
        return None
