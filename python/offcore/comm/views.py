"""Views: all-gather and all-to-all into memory that the lane lends, instead of the caller's.

A view call writes into the next of four slots that the lane owns, in turn. Whoever finishes a call
knows that every rank has come that far, and so that an older slot is free: peers need not wait
until a rank has entered, and nothing is copied on into a buffer of the caller's (core/comm/lane.h
says why that is safe).
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
        """all_gather of equal parts whose output is lent: `handle.out`, of shape
        (ranks, *inp.shape) and inp's dtype (bytes for a Window or a region).

        A numpy array; a torch tensor on cuda, or where the input is one. A view is valid for two
        further view calls of the lane: whatever reads it must be done before this rank makes the
        third. Calls of other kinds do not count, and neither do those of other lanes.

        On cuda "done" means: comes earlier in the stream in which the third call is made. In the
        stream of the view call itself the view can be read at once, without `wait`. A reader on
        another stream waits for an event recorded behind the view call, and records one when it has
        read, which the stream of the third call waits for. A view that is an input of another call
        of its lane needs no such care. Writing into a valid view is allowed; no other rank sees it.

        inp: any memory, or what `next_input` gave. variant: as all_gather's; prelaunched ones have
        slots of their own. Slots take four times the largest output so far. Raises as all_gather
        does, and unsupported for a prelaunched variant of an input that `next_input` gave.
        """
        return self._start_view("all_gather", inp, (self.ranks,), variant, lane)

    def all_to_all_view(self, inp: Any, *, variant: str = "auto", lane: int = 0) -> View:
        """all_to_all of equal parts whose output is lent: `handle.out`, of inp's shape and dtype.
        What all_gather_view says of views holds here too."""
        return self._start_view("all_to_all", inp, (), variant, lane)

    def next_input(self, shape: int | tuple[int, ...], dtype: Any = "uint8", lane: int = 0) -> Any:
        """This rank's part of the output of the lane's next all_gather_view, to write the input
        into: passing exactly this array is the in-place form, which copies nothing on this rank.

        One array where one rank is local, else a list. All ranks pass theirs or none does. Another
        view call of the lane takes the slot for itself: the array is then part of that call's view,
        and ask again for the next. The memory is that of the view of four calls ago, so write it
        once all reads of that view are done, and once one of the lane's last four view calls has
        been waited for; on a stream the order of the stream is enough. What it holds before is
        undefined. Collective where the slots have to grow, as at the first call of a size: every
        rank then makes it at the same place in the order of its calls. Raises `Error`: memory;
        timeout and mismatch where ranks disagree; unsupported for phantom memory.
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
