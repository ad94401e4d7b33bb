"""The entries of a batch as the core takes them: columns of places, sizes and homes, checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import _core, defaults
from offcore.errors import error
from offcore.operands import BYTES_MAX, OperandError, keep_alive, memory_of

HOST = -1  # in the place of a rank
_LEGACY_STREAM = 1  # the driver's other name for the default stream, whose handle is 0

Column = NDArray[np.uint64]
_LISTS_WRAP = int(np.__version__.split(".")[0]) < 2  # a number below 0 becomes a large one


class _Side:
    """Destinations or sources: where they lie, and what is known of their sizes and homes."""

    def __init__(self, given: Any, role: str, writable: bool, sized: bool) -> None:
        self.role = role
        self.nbytes: Column | None = None
        self.homes: NDArray[np.int32] | None = None
        self.gpus: list[int] = []  # that torch tensors lie on
        self.on_gpus = False
        self.addresses = False
        self.exports: list[Any] = []  # of what is no array: they keep its memory in its place
        given = _as_numbers(given) if sized else given
        if isinstance(given, np.ndarray):
            if given.ndim != 1 or given.dtype.kind not in "iu" or not sized:
                raise error("invalid", f"{role}s: pass a list of arrays, or addresses and sizes")
            self._take_addresses(given)
        elif not isinstance(given, (list, tuple)):
            raise error("invalid", f"{role}s: pass a list of arrays, not a {type(given).__name__}")
        elif given and isinstance(given[0], int):
            self._take_addresses(given)
        elif given and isinstance(given[0], tuple):
            self._take_places(given)
        else:
            self._take_arrays(given, writable)

    def __len__(self) -> int:
        return len(self.places)

    def _take_addresses(self, given: Any) -> None:
        self.addresses = True
        try:
            if isinstance(given, np.ndarray):
                below = given.dtype.kind == "i" and (given < 0).any()
            else:
                below = _LISTS_WRAP and min(given) < 0
            if below:
                raise OverflowError
            self.places: Column = np.ascontiguousarray(given, dtype=np.uint64)
        except (OverflowError, TypeError, ValueError):
            raise error("invalid", f"{self.role}s: an address is not a 64-bit integer") from None

    def _take_places(self, given: Sequence[Any]) -> None:
        places, homes = [], []
        for index, place in enumerate(given):
            try:
                home, offset = place
                home = HOST if home in ("host", None) else int(home)
                if not (HOST <= home < 1 << 16 and 0 <= offset < BYTES_MAX):
                    raise ValueError
            except (TypeError, ValueError):
                text = "is not a place: a pair of a rank (or 'host') and an offset"
                raise error("invalid", f"entry {index}: its {self.role} {text}") from None
            places.append(offset)
            homes.append(home)
        self.places = np.array(places, np.uint64)
        self.homes = np.array(homes, np.int32)

    def _take_arrays(self, given: Sequence[Any], writable: bool) -> None:
        places, nbytes = [], []
        for index, array in enumerate(given):
            try:
                place = self._place_of(array, writable)
            except OperandError as refusal:
                raise error("invalid", f"entry {index}: its {self.role}{refusal}") from None
            places.append(place[0])
            nbytes.append(place[1])
        self.places = np.array(places, np.uint64)
        self.nbytes = np.array(nbytes, np.uint64)

    def _place_of(self, array: Any, writable: bool) -> tuple[int, int]:
        gpu = HOST
        if hasattr(array, "data_ptr") and array.is_cuda:
            gpu = array.get_device()
            self.gpus.append(gpu)
            self.on_gpus = True
        elif not isinstance(array, np.ndarray):
            if hasattr(array, "__cuda_array_interface__"):
                gpu = 0  # the driver tells which
                self.on_gpus = True
            else:
                array = keep_alive(array)
                self.exports.append(array)
        place, _ = memory_of(array, writable, gpu)
        return place


def _as_numbers(given: Any) -> Any:
    """A torch tensor of addresses as numpy's array."""
    if hasattr(given, "data_ptr") and given.is_cpu:
        return given.numpy()
    return given


class Entries:
    """A batch's entries. `core` is complete once they are settled."""

    def __init__(self, dsts: _Side, srcs: _Side, sizes: Column, keep: Any) -> None:
        self._dsts = dsts
        self._srcs = srcs
        self.sizes = sizes
        self.keep = keep  # what must stay alive
        self.phantom = dsts.homes is not None
        self.on_gpus = dsts.on_gpus or srcs.on_gpus
        self.addresses = dsts.addresses or srcs.addresses
        self.core: _core.BatchEntries

    def settle(self, backend: str, kind: str, stream: Any) -> None:
        """Finds out which memory each place is in. Raises `Error`: invalid, unsupported."""
        ranks = 1
        dst, src = self._dsts.homes, self._srcs.homes
        traits = defaults.traits(backend)
        if self.phantom and not traits.virtual:
            raise error("invalid", f"entries without memory need backend sim, not {backend}")
        if dst is not None and src is not None:
            ranks = 1 + max(0, int(dst.max(initial=0)), int(src.max(initial=0)))
        elif self.on_gpus and not traits.gpus:
            raise error("invalid", f"backend {backend} cannot reach the memory of GPUs")
        elif not traits.gpus and kind in ("h2d", "d2h", "d2d"):
            zeros = np.zeros(len(self.sizes), np.int32)
            dst, src = (zeros if kind[at] == "d" else None for at in (2, 0))
        self.core = _core.BatchEntries(
            self._dsts.places, self._srcs.places, self.sizes, dst, src, ranks
        )
        if traits.gpus:
            self.core.locate(self._gpu(stream))
        self.core.check_kind(kind)

    def _gpu(self, stream: Any) -> int:
        """One to ask the driver from."""
        for gpus in (self._dsts.gpus, self._srcs.gpus):
            if gpus:
                return gpus[0]
        given = getattr(getattr(stream, "device", None), "index", None)
        if given is not None:
            return int(given)
        torch = _cuda_of_torch()
        return 0 if torch is None else int(torch.current_device())


def entries_of(dsts: Any, srcs: Any, sizes: Any, swap: bool) -> Entries:
    """Checks what the caller gave. Raises `Error`: invalid, naming the entry."""
    sized = sizes is not None
    to = _Side(dsts, "destination", True, sized)
    what = _Side(srcs, "source", swap, sized)
    if len(to) != len(what):
        raise error("invalid", f"{len(to)} destinations, but {len(what)} sources")
    if (to.homes is None) != (what.homes is None) and len(to):
        raise error("invalid", "destinations and sources must both have memory, or neither")
    return Entries(to, what, _sizes(to, what, sizes), (dsts, srcs, to.exports, what.exports))


def _sizes(to: _Side, what: _Side, sizes: Any) -> Column:
    if sizes is None:
        if to.nbytes is None or what.nbytes is None:
            raise error("invalid", "addresses and places need sizes, in bytes")
        differ = to.nbytes != what.nbytes
        if differ.any():
            index = int(differ.argmax())
            raise error(
                "invalid",
                f"entry {index}: its destination has {to.nbytes[index]} bytes, its source "
                f"{what.nbytes[index]}",
            )
        return to.nbytes
    column = _numbers(sizes)
    if len(column) != len(to):
        raise error("invalid", f"{len(to)} entries, but {len(column)} sizes")
    for side in (to, what):
        if side.nbytes is None:
            continue
        short = column > side.nbytes
        if short.any():
            index = int(short.argmax())
            raise error(
                "invalid",
                f"entry {index}: its {side.role} has {side.nbytes[index]} bytes, fewer than its "
                f"size, {column[index]}",
            )
    return column


def _numbers(sizes: Any) -> Column:
    try:
        column = np.asarray(_as_numbers(sizes))
        if column.size == 0:
            return np.zeros(0, np.uint64)
        if column.ndim != 1 or column.dtype.kind not in "iu":
            raise TypeError
    except (OverflowError, TypeError, ValueError):
        raise error("invalid", "sizes must be whole numbers of bytes, one per entry") from None
    wrong = (column < 0) | (column > BYTES_MAX)
    if wrong.any():
        index = int(wrong.argmax())
        raise error("invalid", f"entry {index}: its size is {column[index]}; 0 to {BYTES_MAX}")
    return np.ascontiguousarray(column, np.uint64)


def _cuda_of_torch() -> Any:
    """torch.cuda, where this process uses it; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda


def streams_of(stream: Any, gpus: Sequence[int]) -> list[int]:
    """The streams' handles, a GPU each; none: the backend's own. Raises `Error`: invalid."""
    if stream is None:
        cuda = _cuda_of_torch()
        return [] if cuda is None else [_handle(cuda.current_stream(gpu), gpu) for gpu in gpus]
    if isinstance(stream, dict):
        stream = [stream.get(gpu) for gpu in gpus]
    elif not isinstance(stream, (list, tuple)):
        stream = [stream]
    if len(stream) != len(gpus) or any(one is None for one in stream):
        raise error(
            "invalid",
            f"this batch uses the GPUs {', '.join(map(str, gpus))}: pass a stream for each of "
            "them, as a dict by GPU, and for no other",
        )
    return [_handle(one, gpu) for one, gpu in zip(stream, gpus, strict=True)]


def _handle(stream: Any, gpu: int) -> int:
    device = getattr(getattr(stream, "device", None), "index", None)
    if device is not None and device != gpu:
        raise error("invalid", f"a stream of GPU {device} was given for GPU {gpu}")
    handle = getattr(stream, "cuda_stream", stream)
    if not isinstance(handle, int):
        raise error("invalid", f"a {type(stream).__name__} is not a stream")
    return handle or _LEGACY_STREAM
