"""Batches of copies between any memories of one process (DMA-Latte section 6).

    handle = offcore.batch_copy(dsts, srcs)            # lists of arrays, in any order
    handle = offcore.batch_copy(dst_addresses, src_addresses, sizes)
    result = handle.wait()

All entries share one prologue and one epilogue. Neighbours are merged, entries at constant steps
become strided copies, and small batches go back to back on one engine: see docs/batch.md.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from offcore import _core, defaults, folders, machines
from offcore.batch.entries import Entries, entries_of, streams_of
from offcore.batch.result import BatchResult
from offcore.errors import error

Streams = Any  # a stream, or one for each GPU: torch's, or the driver's handles


@dataclass(frozen=True)
class BatchPolicy:
    """Forces choices of a batch; what is left as it is follows the machine.

    merge: entries that continue each other on both sides become one.
    fold: entries of equal size at constant steps become strided copies; None: where the machine has
        them and they are no slower. fold_rows_min: the least number of entries worth one.
    bcst: one source to the same place on ranks that follow each other becomes a broadcast; None:
        where the machine has it, but not on GPUs, where only windows can be a source of one.
    swap: entries that exchange their two ranges, by number; True: all of them.
    engines: how many a GPU uses at most; 0: one up to `b2b_bytes_max` bytes of the whole batch,
        beyond that engines by destination.
    sub_batch: copies that are handed over at once while more are prepared; 0: all of them.
    own_copy: cuda: copies within a GPU ask for an "engine", or take "sm"s.
    timed: whether the result tells the copies' time.
    """

    merge: bool = True
    fold: bool | None = None
    fold_rows_min: int = 4
    bcst: bool | None = None
    swap: tuple[int, ...] | bool = ()
    engines: int = 0
    b2b_bytes_max: int | None = None
    sub_batch: int | None = None
    own_copy: str = "engine"
    timed: bool = True

    def _core_policy(self, backend: str) -> _core.BatchPolicy:
        bcst = False if self.bcst is None and defaults.traits(backend).gpus else self.bcst
        try:
            return _core.BatchPolicy(
                merge=self.merge,
                fold=self.fold,
                fold_rows_min=self.fold_rows_min,
                bcst=bcst,
                engines=self.engines,
                b2b_bytes_max=self.b2b_bytes_max,
                sub_batch=self.sub_batch,
                # Virtual time is watched without commands for it.
                timed=self.timed and not defaults.traits(backend).virtual,
            )
        except TypeError:
            raise error("invalid", f"{self} holds an invalid number or choice") from None

    def _swaps(self, count: int) -> list[int]:
        if isinstance(self.swap, bool):
            return list(range(count)) if self.swap else []
        return list(self.swap)


class BatchHandle:
    """A batch under way. It goes on whether or not anybody waits for it."""

    __slots__ = ("_result", "_run", "_what", "timeout")

    def __init__(self, run: _core.BatchRun, what: tuple[str, str, int], timeout: float) -> None:
        self._run = run
        self._what = what
        self._result: BatchResult | None = None
        self.timeout = timeout

    def done(self) -> bool:
        """Whether all copies have ended. Only `wait` tells whether they ended well."""
        return self._run.done()

    def wait(self, timeout: float | None = None) -> BatchResult:
        """Waits until every copy has ended.

        timeout: seconds; None: that of the call. Raises `Error`: timeout (the batch stays under way
        and can be waited for again), driver. In mode capture it returns at once: a graph's replays
        are waited for by their stream.
        """
        if self._result is None:
            seconds = self.timeout if timeout is None else timeout
            self._result = BatchResult(self._run, self._run.wait(seconds), *self._what)
        return self._result

    @property
    def program(self) -> _core.Program:
        """What runs; str() is its text. Offsets count from the lowest place of each memory."""
        return self._run.plan.program


@dataclass(frozen=True)
class _Call:
    """A batch whose entries, backend and machine are known."""

    backend: str
    machine: _core.Machine
    entries: Entries
    policy: BatchPolicy

    @property
    def swaps(self) -> list[int]:
        return self.policy._swaps(len(self.entries.sizes))


def batch_copy(
    dsts: Sequence[Any] | NDArray[Any],
    srcs: Sequence[Any] | NDArray[Any],
    sizes: Sequence[int] | NDArray[Any] | None = None,
    *,
    kind: str = "auto",
    stream: Streams = None,
    policy: BatchPolicy | None = None,
    backend: str = "auto",
    machine: str | None = None,
    timeout: float | None = None,
) -> BatchHandle:
    """Copies srcs[i] to dsts[i], for all i in no order. Returns at once.

    dsts, srcs: arrays (torch tensors on GPUs or pinned, numpy arrays, what speaks the buffer
        protocol or DLPack); or addresses; or on sim places, which are pairs of a rank (or "host")
        and an offset, and hold no bytes.
    sizes: bytes of each entry. Needed for addresses and places; of arrays the first so many bytes.
    kind: "auto", or what all entries must be: "h2d", "d2h", "d2d" or "h2h". On sim and host, whose
        arrays all lie in host memory, it says which of them stand for the memory of a GPU.
    stream: cuda: the stream that the batch is ordered in, or with several GPUs a dict or a sequence
        of one for each (their numbers ascend). torch's streams, or handles. None: torch's current
        ones, or without torch one of our own, which waits for nothing.
    backend: "auto": cuda if there is memory of GPUs, sim for a machine that is named and not this
        host, else host. machine: as in `Communicator`.
    timeout: seconds that a wait lasts which names none.

    Entries must not write what another one reads or writes. What is passed is kept alive until the
    copies have ended (but for a captured batch, whose memory has to live as long as its graph).
    Raises `Error`, before anything is enqueued and naming the entry: invalid (overlap, sizes that
    differ or do not fit, memory that is not contiguous, not pinned or elsewhere), unsupported (host
    to host on cuda, several GPUs in a capture), and what opening the backend raises.
    """
    call = _call(dsts, srcs, sizes, kind, stream, policy, backend, machine)
    seconds = defaults.seconds(timeout)
    entries = call.entries
    run = _core.start_batch(
        call.backend,
        call.machine,
        entries.core,
        call.swaps,
        call.policy._core_policy(call.backend),
        entries.phantom,
        str(call.policy.own_copy),
        streams_of(stream, entries.core.gpus) if defaults.traits(call.backend).gpus else [],
        entries.keep,
        seconds,
    )
    return BatchHandle(run, (call.backend, call.machine.name, entries.core.ranks), seconds)


def batch_program(
    dsts: Sequence[Any] | NDArray[Any],
    srcs: Sequence[Any] | NDArray[Any],
    sizes: Sequence[int] | NDArray[Any] | None = None,
    *,
    kind: str = "auto",
    policy: BatchPolicy | None = None,
    backend: str = "auto",
    machine: str | None = None,
) -> _core.Program:
    """The program that `batch_copy` would run; str() is its text. Nothing is copied.

    Raises `Error` as batch_copy does.
    """
    call = _call(dsts, srcs, sizes, kind, None, policy, backend, machine)
    plan = _core.plan_entries(
        call.entries.core,
        call.swaps,
        call.policy._core_policy(call.backend),
        call.machine,
        call.entries.phantom,
    )
    return plan.program


def _call(
    dsts: Any,
    srcs: Any,
    sizes: Any,
    kind: str,
    stream: Streams,
    policy: BatchPolicy | None,
    backend: str,
    machine: str | None,
) -> _Call:
    chosen = policy or BatchPolicy()
    entries = entries_of(dsts, srcs, sizes, swap=bool(chosen.swap))
    where = _backend(backend, machine, entries)
    entries.settle(where, kind, stream)
    ranks = entries.core.ranks
    name = machine or defaults.machine(where, ranks)
    loaded = _machine(name, str(folders.machines()))
    if ranks > loaded.ranks:
        raise error("invalid", f"machine {name} has 1 to {loaded.ranks} ranks, not {ranks}")
    return _Call(where, loaded, entries, chosen)


def _backend(asked: str, machine: str | None, entries: Entries) -> str:
    wanted = _core.env("OFFCORE_BACKEND") if asked == "auto" else asked
    able = [name for name, found in defaults.BACKENDS.items() if found.batches]
    if wanted in able:
        return wanted
    if wanted != "auto":
        raise error("invalid", f"batches have no backend {wanted!r}: {', '.join(able)} or auto")
    if machine is not None:
        return defaults.backend(machine)
    if entries.addresses and not (entries.phantom or entries.on_gpus):
        return defaults.backend(None)
    return next(
        name
        for name in able
        if (defaults.BACKENDS[name].virtual, defaults.BACKENDS[name].gpus)
        == (entries.phantom, entries.on_gpus)
    )


@functools.lru_cache(maxsize=16)
def _machine(name: str, folder: str) -> _core.Machine:
    """A file is read once; `folder` is where one may lie instead of those that come along."""
    del folder
    machine = machines.load(name)
    machine.tuned, machine.tuned_version = [], ""  # choices of collectives, hundreds of them
    return machine


atexit.register(_core.close_batches)
