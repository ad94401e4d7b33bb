"""Window memory for what all-gathers write: a ring whose pieces live as long as their tensors."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch

from offcore.comm import Communicator
from offcore.comm.arrays import tensors_of

_ALIGN = 512


class _Piece:
    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.held = True

    def release(self) -> None:
        self.held = False


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
        self._make = tensors_of(torch.uint8)
        self._first = self._window.address()
        self._at = 0
        self._pieces: collections.deque[_Piece] = collections.deque()  # by age

    def take(self, nbytes: int) -> Any:
        """A tensor of so many bytes; None: it is too large, or its place is still in use."""
        wide = -(-nbytes // _ALIGN) * _ALIGN
        begin = self._at if self._at + wide <= self.nbytes else 0
        while self._pieces and not self._pieces[0].held:
            self._pieces.popleft()
        end = begin + wide
        in_use = any(one.held and one.begin < end and begin < one.end for one in self._pieces)
        if wide > self.nbytes or wide == 0 or in_use:
            self.refused += 1
            return None
        self._at = end
        taken = self._make(self._window._core, self._rank, begin, (nbytes,))
        piece = _Piece(begin, end)
        self._pieces.append(piece)
        weakref.finalize(taken.untyped_storage(), piece.release).atexit = False
        return taken

    def region(self, tensor: Any) -> Any:
        """Where a tensor lies, for an operation; None: outside of the ring."""
        offset = tensor.data_ptr() - self._first
        inside = 0 <= offset <= self.nbytes - tensor.nbytes
        return self._window.region(offset, tensor.nbytes) if inside else None
