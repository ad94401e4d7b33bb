"""Operations under way."""

from __future__ import annotations

import math
from typing import Any, Protocol

from numpy.typing import NDArray

from offcore import _core
from offcore.comm.result import Result
from offcore.comm.window import Window
from offcore.errors import error


class Caller(Protocol):
    """What a handle asks the communicator that made the call."""

    backend: str
    machine: str
    ranks: int
    local_ranks: list[int]
    timeout: float

    def _streams(self) -> list[int]: ...

    def _array(
        self, window: _core.Window, rank: int, offset: int, shape: tuple[int, ...], kind: Any
    ) -> Any: ...


class Handle:
    """An operation in progress. It proceeds whether or not `wait` is called."""

    __slots__ = ("_comm", "_pending", "_result")

    def __init__(self, comm: Caller, pending: _core.Pending) -> None:
        self._comm = comm
        self._pending = pending
        self._result: Result | None = None

    def done(self) -> bool:
        """Returns whether the operation has ended. Only `wait` reports errors."""
        return self._pending.done()

    def wait(self, timeout: float | None = None) -> Result:
        """Waits until this rank's output is complete and its input may be written again.

        timeout: seconds; None: the communicator's.
        Raises `Error`: timeout (the operation continues and can be waited for again), peer (a rank
        died or aborted), cancelled (this rank aborted), mismatch (ranks made different calls). The
        first three name the last command reached. In mode capture it returns immediately: to wait
        for a graph's replay, synchronise its stream.
        """
        if self._result is None:
            seconds = self._comm.timeout if timeout is None else timeout
            outcome = self._pending.wait(seconds)
            comm = self._comm
            self._result = Result(outcome, comm.backend, comm.machine, comm.ranks)
        return self._result

    def release(self) -> None:
        """Protocol "credits" only: releases the output, so that peers may write it for the next
        call of the same operation on the same buffers without waiting for this rank. Do not use
        the output until that call has ended. Ordered in the current stream, if there is one.
        Raises `Error`: invalid for another protocol.
        """
        self._pending.release(self._comm._streams())


class View(Handle):
    """A view call in progress. Its result's protocol is "view"."""

    __slots__ = ("_out", "_rows", "_specs")

    def __init__(
        self,
        comm: Caller,
        pending: _core.Pending,
        rows: tuple[int, ...],
        specs: list[tuple[tuple[int, ...], Any]],
    ) -> None:
        self._comm = comm
        self._pending = pending
        self._result = None
        self._rows = rows  # the output's shape is this and then the input's
        self._specs = specs  # each local rank's input's shape and dtype
        self._out: Any = None

    @property
    def out(self) -> Any:
        """The output, without a copy: an array, or a list with one per local rank if several are
        local. Complete once the operation has ended; on a stream, for all later work in it. Valid
        for two further view calls in the lane (see `all_gather_view`). Its memory stays mapped
        while it is referenced. Raises `Error`: unsupported for phantom memory.
        """
        if self._out is None:
            window, offset = self._pending.view
            comm = self._comm
            arrays = [
                comm._array(window, rank, offset, (*self._rows, *shape), kind)
                for rank, (shape, kind) in zip(comm.local_ranks, self._specs, strict=True)
            ]
            self._out = arrays[0] if len(arrays) == 1 else arrays
        return self._out

    def read(self, array: NDArray[Any], offset: int = 0, rank: int | None = None) -> None:
        """Copies a local rank's output, from byte `offset` on, into a contiguous array in host
        memory, and waits for the copy. The view must be complete and valid. `rank` is optional if
        one rank is local. Raises `Error`: invalid, unsupported for phantom memory.
        """
        core, at = self._pending.view
        window = Window(self._comm, core)
        rank = window._local(rank)
        shape, kind = self._specs[self._comm.local_ranks.index(rank)]
        nbytes = math.prod((*self._rows, *shape)) * kind.itemsize
        if not 0 <= offset <= nbytes - array.nbytes:
            raise error("invalid", f"bytes {offset}+{array.nbytes} lie outside the view's {nbytes}")
        window.read(array, at + offset, rank)
