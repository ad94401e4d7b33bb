"""Window memory for tensors of a group, whose pieces live as long as their tensors."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from offcore import _core
from offcore.comm import Communicator
from offcore.comm.arrays import tensors_of

_ALIGN = 512


class _Piece(NamedTuple):
    begin: int
    end: int
    lease: _core.Lease


class Ring:
    """`nbytes` of window memory on every rank. Collective.

    Pieces lie at the two ends in turn, so two at a time need only their bytes; more go between.
    Where one lies follows from the sizes taken before and the tensors still held: ranks that
    allocate and drop alike get the same places, where peers write directly. So operations get a
    piece by its `region`: they would keep a tensor until they have ended, and longer.

    On GPUs whoever writes into a piece next is ordered behind its last readers by the stream in
    which FSDP allocates, as for torch's own allocator. On CPUs an asynchronous call of a group
    holds its tensors until its thread has ended it, sooner on one rank than on another: places can
    then differ, and calls with tensors at different places are staged.
    """

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.nbytes = nbytes
        self.refused = 0  # requests that it had no room for
        self._window = comm.window(max(nbytes, _ALIGN))
        self._rank = comm.local_ranks[0]
        self._first = self._window.address()
        self._high = False  # where the last piece lies: at the upper end
        self._pieces: list[_Piece] = []  # by place

    def take(self, size: Sequence[int], dtype: Any) -> Any:
        """A tensor; None: there is no room for it, or it needs none."""
        wide = -(-math.prod(size) * dtype.itemsize // _ALIGN) * _ALIGN
        self._pieces = [one for one in self._pieces if one.lease.held]
        begin = self._room(wide)
        if begin is None or wide == 0:
            self.refused += wide > 0
            return None
        self._high = begin > 0
        lease = _core.Lease()
        taken = tensors_of(dtype)(self._window._core, self._rank, begin, tuple(size), lease)
        bisect.insort(self._pieces, _Piece(begin, begin + wide, lease))
        return taken

    def _room(self, wide: int) -> int | None:
        """Where so many bytes are free: at the end that the last piece has not, at the other, or
        between."""
        ends = [0, *(one.end for one in self._pieces)]
        begins = [*(one.begin for one in self._pieces), self.nbytes]
        gaps = [*zip(ends, begins, strict=True)]
        upper = max(self.nbytes - wide, 0) // _ALIGN * _ALIGN
        for place in (0, upper) if self._high else (upper, 0):
            if any(low <= place and place + wide <= high for low, high in gaps):
                return place
        return next((low for low, high in gaps if high - low >= wide), None)

    def region(self, tensor: Any) -> Any:
        """Where a tensor lies, for an operation; None: outside of the ring."""
        offset = tensor.data_ptr() - self._first
        inside = 0 <= offset <= self.nbytes - tensor.nbytes
        return self._window.region(offset, tensor.nbytes) if inside else None


class Pool:
    """`nbytes` of window memory on every rank's GPU, which torch's allocator divides: it knows the
    streams. Collective."""

    def __init__(self, comm: Any, nbytes: int, device: Any) -> None:
        self.nbytes = nbytes
        self.refused = 0
        self._device = device
        self._pool = comm.memory_pool(nbytes)

    def take(self, size: Sequence[int], dtype: Any) -> Any:
        """As Ring's."""
        try:
            with torch.cuda.use_mem_pool(self._pool, self._device):
                return torch.empty(size, dtype=dtype, device=self._device)
        except torch.cuda.OutOfMemoryError:
            self.refused += 1
            return None


def memory_of(comm: Any, nbytes: int, device: Any) -> Ring | Pool:
    """For a group's tensors on that device. Collective."""
    return Ring(comm, nbytes) if device.type == "cpu" else Pool(comm, nbytes, device)
