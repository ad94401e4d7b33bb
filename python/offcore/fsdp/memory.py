"""Window memory for what all-gathers write: a ring whose pieces live as long as their tensors."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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

    Where a piece lies follows from the sizes that were taken before, and from the tensors that the
    caller still has, never from how far an engine has come: so ranks that allocate alike get the
    same places, and peers can write there directly. That is why operations get a piece by its
    `region`: they would keep a tensor until they have ended, and longer. Whoever writes into a
    piece next is ordered behind its last readers by the stream in which FSDP allocates, as for
    torch's own allocator.
    """

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.nbytes = nbytes
        self.refused = 0  # requests that it had no room for
        self._window = comm.window(max(nbytes, _ALIGN))
        self._rank = comm.local_ranks[0]
        self._first = self._window.address()
        self._at = 0
        self._pieces: collections.deque[_Piece] = collections.deque()  # by age

    def take(self, size: Sequence[int], dtype: Any) -> Any:
        """A tensor; None: it is too large, or its place is still in use."""
        nbytes = math.prod(size) * dtype.itemsize
        wide = -(-nbytes // _ALIGN) * _ALIGN
        begin = self._at if self._at + wide <= self.nbytes else 0
        end = begin + wide
        pieces = self._pieces
        while pieces and not pieces[0].lease.held:
            pieces.popleft()
        in_use = any([one.begin < end and begin < one.end and one.lease.held for one in pieces])
        if wide > self.nbytes or wide == 0 or in_use:
            self.refused += 1
            return None
        self._at = end
        lease = _core.Lease()
        taken = tensors_of(dtype)(self._window._core, self._rank, begin, tuple(size), lease)
        pieces.append(_Piece(begin, end, lease))
        return taken

    def region(self, tensor: Any) -> Any:
        """Where a tensor lies, for an operation; None: outside of the ring."""
        offset = tensor.data_ptr() - self._first
        inside = 0 <= offset <= self.nbytes - tensor.nbytes
        return self._window.region(offset, tensor.nbytes) if inside else None
