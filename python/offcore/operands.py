"""Arrays as the core sees them: an address and a number of bytes, checked.

Any C-contiguous array in host memory will do: numpy arrays, torch CPU tensors of any dtype, and
whatever speaks the buffer protocol or DLPack. For a rank on a GPU: torch tensors on it, whatever
speaks CUDA's array interface, and pinned host memory (what is not pinned the backend refuses).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from offcore import _core
from offcore.errors import error

_DLPACK_CPU = 1
_HOST = -1  # in the place of a GPU's number
_READ_ONLY = " is read-only; the operation writes into it"
BYTES_MAX = 1 << 62  # what a size or a count may be, so that their product fits the core
NUMBER_MAX = (1 << 16) - 1  # what a rank or a lane may be
SEED_MAX = (1 << 64) - 1
SMS_MAX = 64  # of a reduction; more bring nothing


class OperandError(Exception):
    """An operand that cannot be used. The text goes on where its name ends: " is read-only"."""


# What the core needs of one array, its address and bytes; and what its other sides must be alike
# in, the dtype, numpy's or torch's. A plain tuple: every call makes some.
Memory = tuple[tuple[int, int], Any]
# One side of an operation: what the core takes, its arrays' dtype, and what must live as long as
# the operation besides a window.
Side = tuple[Any, Any, Any]


def memory_of(array: Any, writable: bool, gpu: int = _HOST) -> Memory:
    """The memory of an array, for a rank on that GPU or on none. Raises OperandError for what is
    not contiguous or lies elsewhere."""
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise OperandError(" holds Python objects, which mean nothing elsewhere")
        place = _core.buffer_of(array, writable) or _place_of(array, writable)
        return place, array.dtype
    if hasattr(array, "data_ptr"):  # a torch tensor, whose dtypes numpy may not know
        if not ((array.is_cuda and array.get_device() == gpu) or array.is_cpu):
            wanted = "host memory" if gpu == _HOST else f"memory of cuda:{gpu}"
            raise OperandError(f" lies on {array.device}; this rank needs {wanted}")
        if not array.is_contiguous():
            raise OperandError(" is not contiguous; pass array.contiguous()")
        if array.is_conj() or array.is_neg():
            raise OperandError(
                " is a lazy conjugate or negative; pass array.resolve_conj().resolve_neg()"
            )
        return (array.data_ptr(), array.nbytes), array.dtype
    if gpu != _HOST and hasattr(array, "__cuda_array_interface__"):
        return _by_interface(array.__cuda_array_interface__, writable)
    return memory_of(_as_numpy(array), writable)


def _memory_of_rank(array: Any, writable: bool, rank: int, gpu: int) -> Memory:
    try:
        return memory_of(array, writable, gpu)
    except OperandError as refusal:
        raise OperandError(f" of rank {rank}{refusal}") from None


def _place_of(array: np.ndarray[Any, Any], writable: bool) -> tuple[int, int]:
    """Where the buffer protocol fails: for the reason, or for a dtype that it cannot tell."""
    if not array.flags.c_contiguous:
        raise OperandError(" is not contiguous; pass numpy.ascontiguousarray(array)")
    if writable and not array.flags.writeable:
        raise OperandError(_READ_ONLY)
    return array.__array_interface__["data"][0], array.nbytes


def _by_interface(facts: dict[str, Any], writable: bool) -> Memory:
    kind = np.dtype(facts["typestr"])
    shape = tuple(facts["shape"])
    steps = [kind.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if facts.get("strides") not in (None, tuple(steps)):
        raise OperandError(" is not contiguous; pass a contiguous copy")
    address, read_only = facts["data"]
    if writable and read_only:
        raise OperandError(_READ_ONLY)
    return (address or 0, kind.itemsize * math.prod(shape)), kind


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    if hasattr(array, "__dlpack_device__"):
        device = array.__dlpack_device__()
        if device[0] != _DLPACK_CPU:
            raise OperandError(f" lies on DLPack device {device}; host memory is needed")
        return np.from_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        kind = type(array).__name__
        raise OperandError(f" is a {kind}; pass an array, a Window or a region") from None


def keep_alive(given: Any) -> Any:
    """What must live as long as an operation: the arrays given, or on what is none (a bytearray) a
    numpy array, whose export keeps the memory where it is."""
    if given is None or isinstance(given, np.ndarray) or hasattr(given, "data_ptr"):
        return given
    if isinstance(given, (list, tuple)):
        return [keep_alive(one) for one in given]
    try:
        return _as_numpy(given)
    except OperandError:
        return given  # on a GPU


def places_of(
    given: Any, local_ranks: Sequence[int], gpus: Sequence[int], writable: bool
) -> tuple[Sequence[tuple[int, int] | None], Any]:
    """Each local rank's (address, bytes), and the arrays' dtype (None: there is no array). Of one
    array where one rank is local, else of a sequence; a rank's GPU may be -1. Raises OperandError,
    also where the dtypes differ."""
    if len(local_ranks) == 1 and not isinstance(given, (list, tuple)):
        place, dtype = _memory_of_rank(given, writable, local_ranks[0], gpus[0])
        return (place,), dtype
    if not isinstance(given, (list, tuple)) or len(given) != len(local_ranks):
        raise OperandError(
            f": this communicator drives {len(local_ranks)} ranks; pass a Window, a region, "
            f"or a list of {len(local_ranks)} arrays"
        )
    places: list[tuple[int, int] | None] = []
    dtype = None
    for array, rank, gpu in zip(given, local_ranks, gpus, strict=True):
        if array is None:
            places.append(None)
            continue
        place, kind = _memory_of_rank(array, writable, rank, gpu)
        if dtype is not None and not same_dtype(kind, dtype):
            raise OperandError(": the arrays' dtypes differ")
        dtype = kind
        places.append(place)
    return places, dtype


def dtype_name(dtype: Any) -> str:
    """A dtype's name, the same for numpy's and torch's, their classes, and names."""
    if isinstance(dtype, type):
        return dtype.__name__
    return str(dtype).removeprefix("torch.")


def same_dtype(one: Any, other: Any) -> bool:
    """Most dtypes exist once: names, which are slow to make, are for the others."""
    return one is other or dtype_name(one) == dtype_name(other)


def checked(name: str, value: Any, last: int = BYTES_MAX, first: int = 0) -> int:
    """A whole number from `first` to `last`. Raises `Error`: invalid, naming what it is."""
    if type(value) is int and first <= value <= last:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise error("invalid", f"{name} must be a whole number, not {value!r}") from None
    if not first <= number <= last:
        raise error("invalid", f"{name} is {number}; it must lie in {first}..{last}")
    return number


def faults_of(given: Sequence[dict[str, Any]]) -> list[_core.Fault]:
    """The simulator's faults. Raises `Error`: invalid."""
    try:
        return [_core.Fault(**fault) for fault in given]
    except (TypeError, ValueError):
        raise error(
            "invalid",
            f"faults are {given!r}; pass dicts that have a kind (its name), and may have the "
            "numbers rank, queue, nth, factor, ns",
        ) from None


def counts_in_bytes(op: str, counts: Sequence[int], dtype: Any) -> list[int]:
    """The counts of a _v form, given in elements; without a dtype in bytes. Raises `Error`:
    invalid."""
    if not counts:
        raise error("invalid", f"{op}_v: pass counts, one for each rank")
    itemsize = 1 if dtype is None else dtype.itemsize
    return [checked(f"{op}_v: a count in bytes", count * itemsize) for count in counts]


def host_place_of(array: Any, writable: bool) -> tuple[int, int]:
    """(address, bytes) of one array in host memory. Raises `Error`: invalid."""
    try:
        return memory_of(array, writable)[0]
    except OperandError as refusal:
        raise error("invalid", f"the array{refusal}") from None
