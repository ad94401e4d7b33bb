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

    Places follow from what was taken and is held: ranks that allocate and drop alike get the same,
    where peers write directly. Operations get a piece's `region`, or they would hold it longer.
    tight: pieces lie at both ends in turn, so two need only their bytes; else each lies behind the
    one before, and no place depends on a drop that is a little late.

    On GPUs whoever writes into a piece next is ordered behind its last readers by the stream in
    which FSDP allocates, as for torch's own allocator. On CPUs an asynchronous call of a group
    holds its tensors until its thread has ended it, sooner on one rank than on another.
    """

    def __init__(self, comm: Communicator, nbytes: int, tight: bool = False) -> None:
        self.nbytes = nbytes
        self.refused = 0  # requests that it had no room for
        self._tight = tight
        self._window = comm.window(max(nbytes, _ALIGN))
        self._rank = comm.local_ranks[0]
        self._first = self._window.address()
        self._at = 0  # where the last piece ends
        self._pieces: list[_Piece] = []  # by place

    def take(self, size: Sequence[int], dtype: Any) -> Any:
        """A tensor; None: there is no room for it, or it needs none."""
        wide = -(-math.prod(size) * dtype.itemsize // _ALIGN) * _ALIGN
        self._pieces = [one for one in self._pieces if one.lease.held]
        begin = self._room(wide)
        if begin is None or wide == 0:
            self.refused += wide > 0
            return None
        self._at = begin + wide
        lease = _core.Lease()
        taken = tensors_of(dtype)(self._window._core, self._rank, begin, tuple(size), lease)
        bisect.insort(self._pieces, _Piece(begin, self._at, lease))
        return taken

    def _room(self, wide: int) -> int | None:
        """Where so many bytes are free."""
        ends = [0, *(one.end for one in self._pieces)]
        begins = [*(one.begin for one in self._pieces), self.nbytes]
        upper = max(self.nbytes - wide, 0) // _ALIGN * _ALIGN
        first = [upper, 0] if self._at <= upper else [0, upper]  # the end that the last has not
        for place in first if self._tight else [self._at]:
            for low, high in zip(ends, begins, strict=True):
                if max(low, place) + wide <= high and (low <= place or not self._tight):
                    return max(low, place)
        return next((a for a, b in zip(ends, begins, strict=True) if b - a >= wide), None)

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
