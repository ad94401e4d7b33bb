"""Arrays as the core sees them: an address and a number of bytes, checked.

Any C-contiguous array in host memory will do: numpy arrays, torch CPU tensors of any dtype, and
whatever speaks the buffer protocol or DLPack. For a rank on a GPU: torch tensors on it, whatever
speaks CUDA's array interface, and pinned host memory (what is not pinned the backend refuses).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offcore.errors import error

_DLPACK_CPU = 1
_HOST = -1  # in the place of a GPU's number
BYTES_MAX = 1 << 62  # what a size or a count may be, so that their product fits the core
NUMBER_MAX = (1 << 16) - 1  # what a rank or a lane may be


@dataclass(frozen=True)
class Memory:
    """What the core needs of one array."""

    address: int
    nbytes: int
    dtype: str
    itemsize: int


def memory_of(array: Any, what: str, writable: bool, gpu: int = _HOST) -> Memory:
    """The memory of an array, for a rank on that GPU or on none. Raises `Error`: invalid for what
    is not contiguous or lies elsewhere."""
    if hasattr(array, "data_ptr"):  # a torch tensor, whose dtypes numpy may not know
        wanted = "host memory" if gpu == _HOST else f"memory of cuda:{gpu}"
        here = array.device.type == "cuda" and array.device.index == gpu
        if array.device.type != "cpu" and not here:
            raise error("invalid", f"{what} lies on {array.device}; this rank needs {wanted}")
        if not array.is_contiguous():
            raise error("invalid", f"{what} is not contiguous; pass array.contiguous()")
        itemsize = array.element_size()
        dtype = str(array.dtype).removeprefix("torch.")
        return Memory(array.data_ptr(), array.numel() * itemsize, dtype, itemsize)
    if gpu != _HOST and hasattr(array, "__cuda_array_interface__"):
        return _by_interface(array.__cuda_array_interface__, what, writable)
    if not isinstance(array, np.ndarray):
        array = _as_numpy(array, what)
    if not array.flags.c_contiguous:
        raise error("invalid", f"{what} is not contiguous; pass numpy.ascontiguousarray(array)")
    if writable and not array.flags.writeable:
        raise error("invalid", f"{what} is read-only; the operation writes into it")
    address = array.__array_interface__["data"][0]
    return Memory(address, array.nbytes, str(array.dtype), array.itemsize)


def _by_interface(facts: dict[str, Any], what: str, writable: bool) -> Memory:
    kind = np.dtype(facts["typestr"])
    shape = tuple(facts["shape"])
    steps = [kind.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if facts.get("strides") not in (None, tuple(steps)):
        raise error("invalid", f"{what} is not contiguous; pass a contiguous copy")
    address, read_only = facts["data"]
    if writable and read_only:
        raise error("invalid", f"{what} is read-only; the operation writes into it")
    return Memory(address or 0, kind.itemsize * math.prod(shape), str(kind), kind.itemsize)


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
    given: Any,
    local_ranks: Sequence[int],
    what: str,
    writable: bool,
    gpus: Sequence[int],
) -> list[Memory | None]:
    """One memory for each local rank (on that GPU, or -1): of one array where one rank is local,
    else of a sequence."""
    alone = len(local_ranks) == 1 and not isinstance(given, (list, tuple))
    arrays = [given] if alone else given
    if not isinstance(arrays, (list, tuple)) or len(arrays) != len(local_ranks):
        raise error(
            "invalid",
            f"{what}: this communicator drives {len(local_ranks)} ranks; pass a Window, a region, "
            f"or a list of {len(local_ranks)} arrays",
        )
    return [
        None if array is None else memory_of(array, f"{what} of rank {rank}", writable, gpu)
        for rank, array, gpu in zip(local_ranks, arrays, gpus, strict=True)
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
