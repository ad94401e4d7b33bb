"""Views: all-gather and all-to-all into memory that the lane lends, instead of the caller's.

A view call writes into the next of four slots that the lane owns, in turn. Whoever finishes a call
knows that every rank has come that far, and so that an older slot is free: peers need not wait
until a rank has entered, and nothing is copied on into a buffer of the caller's (core/comm/lane.h
says why that is safe).
"""

from __future__ import annotations

import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from offcore._core import Communicator as CoreCommunicator
from offcore._core import Window as CoreWindow
from offcore.errors import error
from offcore.handle import View
from offcore.operands import NUMBER_MAX, checked, dtype_name

Look = tuple[tuple[int, ...], Any]  # an array's shape, and its dtype: numpy's or torch's


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


# DLPack's code and bits of the dtypes that every version of it knows, by name.
_FORMATS = {"bool": (6, 8), "bfloat16": (4, 16)} | {
    f"{name}{bits}": (code, bits)
    for name, code in {"int": 0, "uint": 1, "float": 2, "complex": 5}.items()
    for bits in (8, 16, 32, 64, 128)
}


Make = Callable[[CoreWindow, int, int, tuple[int, ...]], Any]


@functools.cache
def tensors_of(kind: Any) -> Make:
    """What makes tensors of that dtype, torch's or numpy's: of bytes of a local rank's window, from
    an offset on and in a shape, without a copy. They keep their memory mapped."""
    torch: Any = importlib.import_module("torch")
    # Capsules need nothing of what torch.from_dlpack does for other objects.
    from_dlpack = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
    wanted = getattr(torch, str(kind)) if isinstance(kind, np.dtype) else kind
    known = dtype_name(wanted) in _FORMATS
    code, bits = _FORMATS[dtype_name(wanted) if known else "uint8"]

    def make(window: CoreWindow, rank: int, offset: int, shape: tuple[int, ...]) -> Any:
        return from_dlpack(window.dlpack(rank, offset, shape, code, bits))

    def view_bytes(window: CoreWindow, rank: int, offset: int, shape: tuple[int, ...]) -> Any:
        raw = make(window, rank, offset, (math.prod(shape) * wanted.itemsize,))
        return raw.view(wanted).view(shape)

    return make if known else view_bytes


def dense(what: str, shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any, int]:
    """The shape, the dtype (numpy's or torch's) and the bytes of an array that `what` makes.
    Raises `Error`: invalid for lengths below 0, and for a dtype of no fixed size or of objects."""
    given = shape if isinstance(shape, (list, tuple)) else (shape,)
    lengths = tuple(checked(f"{what}: a length of the shape", length) for length in given)
    try:
        kind = dtype if type(dtype).__module__ == "torch" else np.dtype(dtype)
        itemsize = int(kind.itemsize)
    except (TypeError, ValueError, AttributeError):
        raise error("invalid", f"{what}: {dtype!r} is no dtype") from None
    if itemsize == 0 or getattr(kind, "hasobject", False):
        raise error("invalid", f"{what}: elements of dtype {kind} have no bytes of a fixed number")
    return lengths, kind, checked(f"{what}: bytes", math.prod(lengths) * itemsize)


def looks_of(given: Any) -> list[Look]:
    """The shape and dtype of each local rank's input: a list of arrays, or one without a shape."""
    return [_look_of(array) for array in (given if isinstance(given, (list, tuple)) else (given,))]


def _look_of(array: Any) -> Look:
    if array is None:
        raise error("invalid", "a view call needs an input of every rank")
    if hasattr(array, "data_ptr") or isinstance(array, np.ndarray):
        return array.shape, array.dtype
    if hasattr(array, "__cuda_array_interface__"):
        facts = array.__cuda_array_interface__
        return tuple(facts["shape"]), np.dtype(facts["typestr"])
    seen = np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(memoryview(array))
    return seen.shape, seen.dtype
