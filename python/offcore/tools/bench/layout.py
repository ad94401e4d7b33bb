"""Which bytes of a collective lie where: what a benchmark fills in and what it has to find.

Rank r sends from a stream of pseudo-random bytes of its own, so a byte that comes from a wrong
rank, from a wrong offset or from an earlier call is seen. A size that the ranks do not divide runs
exactly: through the _v form, with parts that differ by one byte at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import offcore
from offcore.sizes import split_evenly

OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
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

    @property
    def even(self) -> bool:
        """Whether the plain form can run it; the _v form otherwise."""
        return self.op == "broadcast" or self.nbytes % self.ranks == 0

    @property
    def counts(self) -> list[int]:
        """Rank r's part of S."""
        return split_evenly(self.nbytes, self.ranks)

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
        """The largest output of any rank."""
        return max(self.counts) if self.op == "scatter" else self.nbytes

    def input_of(self, rank: int) -> tuple[int, int]:
        """Offset and bytes of rank's input in its input buffer, in place its only buffer."""
        if self.op in ("broadcast", "scatter"):
            return 0, self.nbytes if rank == ROOT else 0
        if self.op == "all_to_all":
            return 0, self.nbytes
        return sum(self.counts[:rank]) if self.in_place else 0, self.counts[rank]

    def fill(self, rank: int, array: Bytes, seed: int) -> None:
        """Writes rank's input into its input buffer."""
        offset, nbytes = self.input_of(rank)
        if nbytes:
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

    def wrong(self, rank: int, array: Bytes, seed: int) -> int:
        """The number of wrong bytes in rank's output."""
        return sum(
            offcore.wrong_bytes(array, offset, nbytes, seed + source, source_offset)
            for offset, nbytes, source, source_offset in self.pieces(rank)
            if nbytes
        )
