"""Calls whose tensors the core takes as they are, as nearly all are: two frames of Python from the
C++ of torch to ours. In a training step, whose kernels' calls have filled the caches, a frame costs
about 5 us. collectives.py and sides.py have the long way, for everything else."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

import offcore
from offcore import _core
from offcore.comm import nvtx
from offcore.distributed.sides import (
    KEPT,
    GpuSide,
    GpuWork,
    HostSide,
    OnStreams,
    Side,
    Told,
    nobody,
)
from offcore.torch import LEGACY_STREAM, stream_of
from offcore.torch_calls import REDUCTIONS, seconds, untraced

_NONE = datetime.timedelta(0)
_ENTERED = hasattr(torch.Stream, "__enter__")  # a context manager, in C++


@untraced
class Started(GpuWork):
    """A call that the core has started in one step. Its side sets all it holds: fewer frames."""

    __init__ = dist.Work.__init__
    _future = None
    _side: DirectSide
    _handles: Any
    pending: _core.Pending
    stream: int

    def is_completed(self) -> bool:
        """Whether the GPU has come to its end."""
        return self.pending.done()

    def wait(self, timeout: datetime.timedelta = _NONE) -> bool:
        """As GpuWork's."""
        side = self._side
        if side._failure is not None:
            side.check()
        if timeout and (limit := seconds(timeout)) is not None:
            side.wait_for(self._label, self._handles, limit)
        try:
            self.pending.follow(stream_of(side.index) or LEGACY_STREAM)
        except offcore.Error as failure:
            raise side._failed("a call under way", failure) from None
        return True

    def get_future(self) -> Any:
        """As GpuWork's."""
        if self._future is None:
            side = self._side
            future = torch._C.Future([side.device])
            if self.stream != side.stream:  # the current one, as a rule
                self.wait()
                future.set_result(self._outputs)
            else:
                # An object of its own: it keeps what was current before, and threads may ask at
                # once.
                with torch.Stream(**side.place) if _ENTERED else torch.cuda.stream(side._stream):
                    future.set_result(self._outputs)
            self._future = future
        return self._future


class DirectSide(GpuSide):
    """Of a communicator that is one of streams: its calls, and those that go in one step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        own = self._stream
        self.index: int = self.device.index
        self.stream: int = own.cuda_stream
        self.place = {"stream_id": own.stream_id, "device_index": self.index}
        self.place["device_type"] = own.device_type
        ops = {number: name for number, (name, _) in REDUCTIONS.items()}
        calls = _core.GroupCalls(self.comm._core, self.index, self.stream, self._timeout, ops)
        self._start_plain = nvtx.annotated(calls.start)

    def start(self, op: str, args: tuple[Any, ...]) -> Started | None:
        """`args`: what the group's method is given, by place. None: it goes the long way, and
        nothing has happened. Raises `offcore.Error`."""
        if self._failure is not None:
            self.check()
        try:
            started = self._start_plain(op, args, stream_of(self.index))
        except offcore.Error as failure:
            raise self._failed(self._label(op), failure, self._limit(args[-1])) from None
        if started is None:
            return None
        work: Started = Started()
        work._side, work._label = self, self._label(op)
        work._outputs = args[0] if type(args[0]) is list else [args[0]]
        work.pending, limit, work.stream = started
        work._handles = (work.pending,)
        self._late.append((time.monotonic() + limit, work._label, work._handles, None))
        if self._watch is None:
            self.begin_watch()
        if len(self._late) > KEPT:
            self._collect()
        return work

    def enqueue(self, op: str, *call: Any) -> bool:
        """A call in the caller's order, as Communicator._start has it. False: it goes the long way,
        and nothing has happened. Raises `offcore.Error`."""
        if self._failure is not None:
            self.check()
        if torch.cuda.is_current_stream_capturing():  # who has the graph keeps what it uses
            return False
        stream, limit = stream_of(self.index) or LEGACY_STREAM, self._timeout
        try:
            pending = self.comm._start_plain(
                op, self.comm._core, call, self.index, stream, False, limit
            )
        except offcore.Error as failure:
            raise self._failed(self._label(op), failure, limit) from None
        if pending is None:
            return False
        self._late.append((time.monotonic() + limit, self._label(op), (pending,), None))
        if self._watch is None:
            self.begin_watch()
        if len(self._late) > KEPT:
            self._collect()
        return True


def side_of(
    comm: Any, name: str, rank: int, timeout: float, device: Any, told: Told = nobody
) -> Side:
    """How calls of that communicator, or `Hosts`, run."""
    kind: type[Side] = HostSide
    if device.type == "cuda":
        kind = DirectSide if isinstance(comm, OnStreams) else GpuSide
    return kind(comm, name, rank, timeout, device, told)
