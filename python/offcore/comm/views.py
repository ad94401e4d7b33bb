"""Views: all-gather and all-to-all into library memory instead of a buffer of the caller.

View calls use the four slots of a lane in turn. A rank that has completed a call knows that every
rank has entered it, and so that an older slot is free: no entry round is needed, and nothing is
copied to a buffer of the caller (core/comm/lane.h explains why this is safe).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from offcore._core import Communicator as CoreCommunicator
from offcore._core import Window as CoreWindow
from offcore.comm.arrays import dense, tensors_of
from offcore.comm.handle import View
from offcore.errors import error
from offcore.operands import NUMBER_MAX, checked

Spec = tuple[tuple[int, ...], Any]  # an array's shape, and its dtype: numpy's or torch's


class ViewCalls(ABC):
    """What a Communicator can do with views."""

    ranks: int
    local_ranks: list[int]
    timeout: float
    _core: CoreCommunicator

    @abstractmethod
    def _start_view(
        self, op: str, inp: Any, rows: tuple[int, ...], variant: str, lane: int
    ) -> View:
        """Starts a view call; its outputs' shape is the inputs' behind that one."""

    def all_gather_view(self, inp: Any, *, variant: str = "auto", lane: int = 0) -> View:
        """all_gather of equal parts into library memory: `handle.out`, of shape (ranks, *inp.shape)
        and inp's dtype (bytes for a Window or a region).

        The output is a numpy array, or a torch tensor on cuda or if the input is one. It is valid
        for two further view calls in the lane: complete all reads before this rank makes the third.
        Other calls and other lanes do not count.

        On cuda, reads must precede the third call in stream order. In the stream of the view call
        the view can be read without `wait`. A reader on another stream waits for an event recorded
        after the view call, and records one after its read, on which the stream of the third call
        waits. A view that is the input of another call in its lane needs no events. Writing to a
        valid view is allowed; other ranks do not see it.

        inp: any memory, or the result of `next_input`.
        variant: as all_gather's; prelaunched variants have separate slots.

        Slots use four times the size of the largest output. Raises `Error` as all_gather does, and
        unsupported for a prelaunched variant with the result of `next_input`.
        """
        return self._start_view("all_gather", inp, (self.ranks,), variant, lane)

    def all_to_all_view(self, inp: Any, *, variant: str = "auto", lane: int = 0) -> View:
        """all_to_all of equal parts into library memory: `handle.out`, of inp's shape and dtype.
        The rules of all_gather_view apply."""
        return self._start_view("all_to_all", inp, (), variant, lane)

    def next_input(self, shape: int | tuple[int, ...], dtype: Any = "uint8", lane: int = 0) -> Any:
        """Returns this rank's part of the output of the lane's next all_gather_view. Write the
        input there and pass this array as `inp`: in place, without a copy on this rank.

        One array if one rank is local, else a list. Either all ranks pass theirs or none does. Any
        other view call in the lane uses the slot: the array is then part of that call's view, and
        must be requested again. The memory was used by the view of four calls ago, so write it
        after all reads of that view, and after waiting for one of the lane's last four view calls;
        on a stream, stream order suffices. Its previous contents are undefined. Collective if the
        slots must grow, as at the first call with a size: all ranks must then call it at the same
        point in their order of calls. Raises `Error`: memory; timeout and mismatch if ranks
        disagree; unsupported for phantom memory.
        """
        shape, kind, nbytes = dense("next_input", shape, dtype)
        lane = checked("next_input: lane", lane, NUMBER_MAX)
        window, offset = self._core.next_input(lane, nbytes, self.timeout)
        if len(self.local_ranks) == 1:
            rank = self.local_ranks[0]
            return self._array(window, rank, offset + rank * nbytes, shape, kind)
        return [
            self._array(window, rank, offset + rank * nbytes, shape, kind)
            for rank in self.local_ranks
        ]

    def _array(
        self, window: CoreWindow, rank: int, offset: int, shape: tuple[int, ...], kind: Any
    ) -> Any:
        """Bytes of a local rank's window as an array of that shape and dtype, without a copy."""
        if isinstance(kind, np.dtype) and window.host_visible:
            memory: Any = window.view(rank, offset, math.prod(shape) * kind.itemsize)
            return memory.view(kind).reshape(shape)
        return tensors_of(kind)(window, rank, offset, shape)


def specs_of(given: Any) -> list[Spec]:
    """The shape and dtype of each local rank's input: a list of arrays, or one without a shape."""
    return [_spec_of(array) for array in (given if isinstance(given, (list, tuple)) else (given,))]


def _spec_of(array: Any) -> Spec:
    if array is None:
        raise error("invalid", "a view call needs an input of every rank")
    if hasattr(array, "data_ptr") or isinstance(array, np.ndarray):
        return array.shape, array.dtype
    if hasattr(array, "__cuda_array_interface__"):
        facts = array.__cuda_array_interface__
        return tuple(facts["shape"]), np.dtype(facts["typestr"])
    seen = np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(memoryview(array))
    return seen.shape, seen.dtype
