"""Which bytes of a collective lie where: what a benchmark fills in and what it has to find.

Rank r sends from a stream of pseudo-random bytes of its own, so a byte that comes from a wrong
rank, from a wrong offset or from an earlier call is seen (values.py has what is reduced). A size
that the ranks do not divide runs exactly: through the _v form, with parts that differ by one byte,
or element, at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import offcore
from offcore.comm.programs import MOVING
from offcore.sizes import split_evenly
from offcore.tools.bench.values import Values

OPS = MOVING
ROOT = 0

Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """A range of an output, and where in rank `source`'s stream its bytes come from."""

    offset: int
    nbytes: int
    source: int
    source_offset: int


@dataclass(frozen=True)
class Layout:
    op: str
    ranks: int
    nbytes: int  # S: the total array
    in_place: bool
    values: Values | None = None  # of an operation that reduces

    @property
    def even(self) -> bool:
        """Whether the plain form can run it; the _v form otherwise."""
        if self.op in ("broadcast", "all_reduce", "reduce"):
            return True
        return self.nbytes % (self.ranks * self._item_bytes) == 0

    @property
    def _item_bytes(self) -> int:
        return 1 if self.values is None else self.values.stored.itemsize

    @property
    def counts(self) -> list[int]:
        """Rank r's part of S."""
        item = self._item_bytes
        return [item * count for count in split_evenly(self.nbytes // item, self.ranks)]

    @property
    def matrix(self) -> list[list[int]]:
        """All-to-all: matrix[r][q] goes from rank r to rank q; every row and column sums to S."""
        parts = self.counts
        return [[parts[(q - r) % self.ranks] for q in range(self.ranks)] for r in range(self.ranks)]

    @property
    def in_bytes(self) -> int:
        """The largest input of any rank."""
        return max(self.counts) if self.op in ("all_gather", "gather") else self.nbytes

    @property
    def out_bytes(self) -> int:
        """The largest output of any rank; in place, of what it lies in."""
        part = self.op == "scatter" or (self.op == "reduce_scatter" and not self.in_place)
        return max(self.counts) if part else self.nbytes

    def input_of(self, rank: int) -> tuple[int, int]:
        """Offset and bytes of rank's input in its input buffer, in place its only buffer."""
        if self.op in ("broadcast", "scatter"):
            return 0, self.nbytes if rank == ROOT else 0
        if self.op == "all_to_all" or self.values is not None:
            return 0, self.nbytes
        return sum(self.counts[:rank]) if self.in_place else 0, self.counts[rank]

    def fill(self, rank: int, array: Bytes, seed: int) -> None:
        """Writes rank's input into its input buffer."""
        offset, nbytes = self.input_of(rank)
        if self.values is not None:
            self.values.fill(array[:nbytes], 0, rank, self.ranks, seed)
        elif nbytes:
            offcore.fill(array[offset : offset + nbytes], seed + rank)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What rank's output consists of."""
        counts = self.counts
        if self.op == "broadcast":
            yield Piece(0, self.nbytes, ROOT, 0)
        elif self.op == "scatter":
            yield Piece(0, counts[rank], ROOT, sum(counts[:rank]))
        elif self.op == "all_to_all":
            matrix, offset = self.matrix, 0
            for source in range(self.ranks):
                nbytes = matrix[source][rank]
                yield Piece(offset, nbytes, source, sum(matrix[source][:rank]))
                offset += nbytes
        elif self.op == "all_gather" or rank == ROOT:
            offset = 0
            for source, nbytes in enumerate(counts):
                yield Piece(offset, nbytes, source, 0)
                offset += nbytes

    def reduced_by(self, rank: int) -> tuple[int, int]:
        """Which bytes of the whole result rank's output is."""
        if self.op == "reduce_scatter":
            return sum(self.counts[:rank]), self.counts[rank]
        return 0, self.nbytes if self.op == "all_reduce" or rank == ROOT else 0

    def wrong(self, rank: int, array: Bytes, seed: int) -> int:
        """The number of wrong bytes in rank's output."""
        if self.values is not None:
            begin, nbytes = self.reduced_by(rank)
            at = begin if self.in_place else 0  # its place in the input
            first = begin // self._item_bytes
            return self.values.wrong(array[at : at + nbytes], first, self.ranks, seed)
        return sum(
            offcore.wrong_bytes(array, offset, nbytes, seed + source, source_offset)
            for offset, nbytes, source, source_offset in self.pieces(rank)
            if nbytes
        )
