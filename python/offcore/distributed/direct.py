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
from offcore.distributed.sides import GpuWork
from offcore.torch import stream_of
from offcore.torch_calls import REDUCTIONS, seconds

_NONE = datetime.timedelta(0)
_BEGUN = 8  # calls that may have ended and not been let go of
_ENTERED = hasattr(torch.Stream, "__enter__")  # a context manager, in C++


class Started(GpuWork):
    """A call that the core has started in one step. `Direct` sets all it holds: fewer frames."""

    __init__ = dist.Work.__init__
    _future = None
    direct: Direct
    pending: _core.Pending
    _handles: Any
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
            self.pending.follow(stream_of(self.direct.index) or 1)
        except offcore.Error as failure:
            raise side._failed("a call under way", failure) from None
        return True

    def get_future(self) -> Any:
        """As GpuWork's."""
        if self._future is None:
            future = torch._C.Future([self._side.device])
            if self.stream != self.direct.stream:  # the current one, as a rule
                self.wait()
                future.set_result(self._outputs)
            else:
                # An object of its own: it keeps what was current before, and threads may ask at
                # once.
                own = self.direct.own
                with torch.Stream(**self.direct.place) if _ENTERED else torch.cuda.stream(own):
                    future.set_result(self._outputs)
            self._future = future
        return self._future


class Direct:
    """Of a group's calls on a GPU, those that go so. `carried` counts them by name."""

    def __init__(self, side: Any, carried: dict[str, int]) -> None:
        self.side = side
        self.index: int = side.device.index
        self.own = side._stream
        self.stream: int = self.own.cuda_stream
        self.place = {"stream_id": self.own.stream_id, "device_index": self.index}
        self.place["device_type"] = self.own.device_type
        self._carried = carried
        calls = _core.GroupCalls(
            side.comm._core,
            self.index,
            self.stream,
            side._timeout,
            {number: name for number, (name, _) in REDUCTIONS.items()},
        )
        self._start = nvtx.annotated(calls.start)

    def start(self, op: str, args: tuple[Any, ...]) -> Started | None:
        """`args`: what the group's method is given, by place. None: it goes the long way, and
        nothing has happened. Raises `offcore.Error`."""
        side = self.side
        if side._failure is not None:
            side.check()
        try:
            started = self._start(op, args, stream_of(self.index))
        except offcore.Error as failure:
            raise side._failed(side._label(op), failure, side._limit(args[-1])) from None
        if started is None:
            return None
        work: Started = Started()
        work.direct, work._side = self, side
        work._outputs = args[0] if type(args[0]) is list else [args[0]]
        work.pending, limit, work.stream = started
        work._handles = handles = (work.pending,)
        work._label = label = side._label(op)
        side._late.append((time.monotonic() + limit, label, handles, None))
        if side._watch is None:
            side.begin_watch()
        if len(side._late) > _BEGUN:
            side._collect()
        self._carried[op] = self._carried.get(op, 0) + 1
        return work
