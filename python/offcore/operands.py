"""Arrays as the core sees them: an address and a number of bytes, checked.

Any C-contiguous array in host memory will do: numpy arrays, torch CPU tensors of any dtype, and
whatever speaks the buffer protocol or DLPack.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offcore.errors import error

_DLPACK_CPU = 1
BYTES_MAX = 1 << 62  # what a size or a count may be, so that their product fits the core
NUMBER_MAX = (1 << 16) - 1  # what a rank or a lane may be


@dataclass(frozen=True)
class Memory:
    """What the core needs of one array."""

    address: int
    nbytes: int
    dtype: str
    itemsize: int


def memory_of(array: Any, what: str, writable: bool) -> Memory:
    """The memory of an array. Raises `Error`: invalid for what is not contiguous host memory."""
    if hasattr(array, "data_ptr"):  # a torch tensor, whose dtypes numpy may not know
        if array.device.type != "cpu":
            raise error("invalid", f"{what} lies on {array.device}; this backend needs host memory")
        if not array.is_contiguous():
            raise error("invalid", f"{what} is not contiguous; pass array.contiguous()")
        itemsize = array.element_size()
        dtype = str(array.dtype).removeprefix("torch.")
        return Memory(array.data_ptr(), array.numel() * itemsize, dtype, itemsize)
    if not isinstance(array, np.ndarray):
        array = _as_numpy(array, what)
    if not array.flags.c_contiguous:
        raise error("invalid", f"{what} is not contiguous; pass numpy.ascontiguousarray(array)")
    if writable and not array.flags.writeable:
        raise error("invalid", f"{what} is read-only; the operation writes into it")
    address = array.__array_interface__["data"][0]
    return Memory(address, array.nbytes, str(array.dtype), array.itemsize)


def _as_numpy(array: Any, what: str) -> np.ndarray[Any, Any]:
    if hasattr(array, "__dlpack_device__"):
        device = array.__dlpack_device__()
        if device[0] != _DLPACK_CPU:
            raise error("invalid", f"{what} lies on DLPack device {device}; host memory is needed")
        return np.from_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        kind = type(array).__name__
        raise error("invalid", f"{what} is a {kind}; pass an array, a Window or a region") from None


def memories_of(
    given: Any, local_ranks: Sequence[int], what: str, writable: bool
) -> list[Memory | None]:
    """One memory for each local rank: of one array where one rank is local, else of a sequence."""
    alone = len(local_ranks) == 1 and not isinstance(given, (list, tuple))
    arrays = [given] if alone else given
    if not isinstance(arrays, (list, tuple)) or len(arrays) != len(local_ranks):
        raise error(
            "invalid",
            f"{what}: this communicator drives {len(local_ranks)} ranks; pass a Window, a region, "
            f"or a list of {len(local_ranks)} arrays",
        )
    return [
        None if array is None else memory_of(array, f"{what} of rank {rank}", writable)
        for rank, array in zip(local_ranks, arrays, strict=True)
    ]


def checked(name: str, value: Any, last: int = BYTES_MAX) -> int:
    """A whole number from 0 to `last`. Raises `Error`: invalid, naming what it is."""
    try:
        number = operator.index(value)
    except TypeError:
        raise error("invalid", f"{name} must be a whole number, not {value!r}") from None
    if not 0 <= number <= last:
        raise error("invalid", f"{name} is {number}; it must lie in 0..{last}")
    return number
