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
    """Options of a batch. Defaults depend on the machine.

    merge: merge entries that are contiguous on both sides.
    fold: turn entries of equal size at constant steps into strided copies; None: if the machine has
        them and they are not slower. fold_rows_min: minimum number of entries of a strided copy.
    bcst: turn copies of one source to the same offset on consecutive ranks into a broadcast; None:
        if the machine supports it, except on GPUs, where the source must be a window.
    swap: numbers of the entries that exchange their two ranges; True: all.
    engines: maximum number of engines per GPU; 0: one up to a total of `b2b_bytes_max` bytes, above
        that one per destination.
    sub_batch: number of copies submitted at once while more are prepared; 0: all.
    own_copy: cuda: copies within a GPU request an "engine" or use "sm"; not "engines".
    timed: whether the result has the time of the copies.
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
        if self.own_copy not in ("engine", "sm"):
            raise error("invalid", f"own_copy '{self.own_copy}' of a batch: pass engine or sm")
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
    """A batch in progress. It proceeds whether or not `wait` is called."""

    __slots__ = ("_result", "_run", "_what", "timeout")

    def __init__(self, run: _core.BatchRun, what: tuple[str, str, int], timeout: float) -> None:
        self._run = run
        self._what = what
        self._result: BatchResult | None = None
        self.timeout = timeout

    def done(self) -> bool:
        """Returns whether all copies have ended. Only `wait` reports errors."""
        return self._run.done()

    def wait(self, timeout: float | None = None) -> BatchResult:
        """Waits until every copy has ended.

        timeout: seconds; None: the timeout of the call.
        Raises `Error`: timeout (the batch continues and can be waited for again), driver. In mode
        capture it returns immediately: to wait for a graph's replay, synchronise its stream.
        """
        if self._result is None:
            seconds = self.timeout if timeout is None else timeout
            self._result = BatchResult(self._run, self._run.wait(seconds), *self._what)
        return self._result

    @property
    def program(self) -> _core.Program:
        """The program; str() prints it. Offsets are relative to each memory's lowest address."""
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
    """Copies srcs[i] to dsts[i], for all i in any order. Returns immediately.

    dsts, srcs: arrays (torch tensors on GPUs or pinned, numpy arrays, objects with the buffer
        protocol or DLPack); or addresses; or on sim, places: pairs of a rank (or "host") and an
        offset, without data.
    sizes: bytes of each entry; required for addresses and places. For arrays: copy only the first
        bytes.
    kind: "auto", or the required direction of all entries: "h2d", "d2h", "d2d" or "h2h". On sim and
        host, where all arrays are in host memory, it selects those that stand for GPU memory.
    stream: cuda: the stream that orders the batch; with several GPUs a dict or a sequence with one
        stream per GPU (in ascending order). torch streams, or handles. None: torch's current
        streams; without torch, an internal stream without dependencies.
    backend: "auto": cuda if there is GPU memory, sim if `machine` names another machine, else host.
    machine: as in `Communicator`.
    timeout: default timeout of a wait, in seconds.

    No entry may write memory that another entry reads or writes. Arguments are kept alive until the
    copies have ended; memory of a captured batch must outlive its graph. Raises `Error`, naming the
    entry, before anything is enqueued: invalid (overlap; sizes that differ or do not fit; memory
    not contiguous, not pinned or elsewhere), unsupported (host to host on cuda, several GPUs in a
    capture), and as opening the backend does; memory or driver half way: copies may be under way.
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
        call.policy.own_copy,
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
    """Returns the program that `batch_copy` would run; str() prints it. Copies nothing.

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
