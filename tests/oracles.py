"""What an operation must leave in memory, written without the core: slices, nothing clever."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.random  # else loaded at its first use, which may be short of memory on purpose
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
T = TypeVar("T")


@functools.cache
def _pool() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, 1 << 22, dtype=np.uint8)


def noise(nbytes: int, *seed: int) -> Bytes:
    """Bytes that a seed determines; no two ranks or calls should get the same.

    A part of a pool, since a generator for each of a million buffers takes a minute.
    """
    room = _pool().size - nbytes
    if room < 1 << 20:
        return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    at = hash(seed) % room  # the same in every process: Python salts the hashes of texts only
    return _pool()[at : at + nbytes].copy()


@dataclass(frozen=True)
class Case:
    """One collective. `counts` are bytes, as the _v forms take them; equal parts are spelt out."""

    op: str
    ranks: int
    counts: tuple[int, ...]
    in_place: bool = False
    root: int = 0

    def in_bytes(self, rank: int) -> int | None:
        """What a rank hands in; None where it hands in nothing."""
        if self.op == "all_to_all":
            return sum(self.counts[rank * self.ranks : (rank + 1) * self.ranks])
        if self.op == "broadcast":
            return self.counts[0] if rank == self.root else None
        if self.op == "scatter":
            return sum(self.counts) if rank == self.root else None
        return self.counts[rank]

    def out_bytes(self, rank: int) -> int | None:
        if self.op == "all_to_all":
            return sum(self.counts[rank :: self.ranks])
        if self.op == "broadcast":
            return self.counts[0]
        if self.op == "scatter":
            return self.counts[rank]
        if self.op == "gather":
            return sum(self.counts) if rank == self.root else None
        return sum(self.counts)

    def own_offset(self, rank: int) -> int:
        """Where, in place, a rank's input lies in its output."""
        return sum(self.counts[:rank]) if self.op == "all_gather" else 0

    def expected(self, inputs: Sequence[Bytes | None]) -> list[Bytes | None]:
        """Each rank's output."""
        everyone = range(self.ranks)
        if self.op == "all_gather":
            whole = np.concatenate([given(inputs[r]) for r in everyone])
            return [whole for _ in everyone]
        if self.op == "broadcast":
            return [given(inputs[self.root]) for _ in everyone]
        if self.op == "scatter":
            parts = np.split(given(inputs[self.root]), np.cumsum(self.counts)[:-1])
            return list(parts)
        if self.op == "gather":
            whole = np.concatenate([given(inputs[r]) for r in everyone])
            return [whole if r == self.root else None for r in everyone]
        rows = np.array(self.counts).reshape(self.ranks, self.ranks)
        sent = [np.split(given(inputs[r]), np.cumsum(rows[r])[:-1]) for r in everyone]
        return [np.concatenate([sent[r][q] for r in everyone]) for q in everyone]


def given(value: T | None) -> T:
    """What must be there."""
    assert value is not None
    return value


def equal_case(op: str, ranks: int, part: int, in_place: bool = False, root: int = 0) -> Case:
    """The case of equal parts: `part` bytes of each rank (of each pair, for all_to_all)."""
    number = {"all_to_all": ranks * ranks, "broadcast": 1}.get(op, ranks)
    return Case(op, ranks, (part,) * number, in_place, root)


def kinds_of(case: Case, staged: bool, captured: bool = False) -> set[str]:
    """The variants, without prelaunch_, that an operation can have which moves bytes."""
    chunks = {"pipelined"} if staged and not captured else set()
    exchange_in_place = case.op == "all_to_all" and case.in_place and case.ranks > 1
    if exchange_in_place:
        return {"b2b", "fan"} | chunks if staged else {"swap"}
    if case.ranks == 1 and case.in_place:  # nothing moves: even a swap or chunks would do
        chunks = set() if captured else {"pipelined"}
        return {"pcpy", "b2b", "fan"} | chunks | (set() if staged else {"swap"})
    kinds = {"pcpy", "b2b", "fan"} | chunks
    shared_source = case.op == "broadcast" or (case.op == "all_gather" and max(case.counts) > 0)
    if shared_source and case.ranks > 2:
        kinds.add("bcst")
    return kinds


Memory = dict[tuple[str, int], bytes]  # by buffer and rank (-1: the host)
BatchMove = tuple[tuple[str, int, int], tuple[str, int, int], int]  # dst, src, bytes


def after_moves(memory: Memory, moves: Sequence[BatchMove]) -> Memory:
    """The contents after moves that all read what was there before any of them wrote."""
    result = {place: bytearray(old) for place, old in memory.items()}
    for (dst_name, dst_rank, dst_at), (src_name, src_rank, src_at), nbytes in moves:
        data = memory[src_name, src_rank][src_at : src_at + nbytes]
        result[dst_name, dst_rank][dst_at : dst_at + nbytes] = data
    return {place: bytes(new) for place, new in result.items()}
