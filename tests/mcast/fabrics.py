"""Collectives on the network in memory: what is sent, and a plain oracle of what must arrive."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import _core
from reductions import numbers, reduced, stored

Bytes = NDArray[np.uint8]
SECOND = 1_000_000_000
POISON = 0xA5


@dataclass
class Call:
    """One operation, as every rank makes it."""

    kind: str
    counts: list[int]
    root: int = 0
    seed: int = 0
    reduction: tuple[str, str, float] | None = None  # of a reduce-scatter: operation, dtype, scale

    def expected(self, rank: int = 0) -> Bytes:
        """The bytes that a rank must have; all the same, but of a reduce-scatter."""
        if self.reduction is not None:
            start = sum(self.counts[:rank])
            sources = [
                self.input(source)[start : start + self.counts[rank]]
                for source in range(len(self.counts))
            ]
            op, dtype, scale = self.reduction
            values = [source.view(stored(dtype)) for source in sources]
            return reduced(values, op, dtype, scale).view(np.uint8)
        return np.random.default_rng(self.seed).integers(0, 256, sum(self.counts), np.uint8)

    def input(self, rank: int) -> Bytes:
        """What a rank gives to a reduce-scatter; to others nothing."""
        if self.reduction is None:
            return np.zeros(0, np.uint8)
        dtype = self.reduction[1]
        count = sum(self.counts) // stored(dtype).itemsize
        return numbers(count, dtype, self.seed * 1000 + rank).view(np.uint8)

    def buffer(self, rank: int) -> Bytes:
        """A rank's buffer before: its own block in it, and nothing right elsewhere."""
        whole = self.expected(rank)
        mine = np.empty_like(whole)
        mine[:] = ~whole  # every byte is wrong
        if self.reduction is not None:
            return mine
        start = sum(self.counts[:rank])
        mine[start : start + self.counts[rank]] = whole[start : start + self.counts[rank]]
        return mine


def broadcast(ranks: int, nbytes: int, root: int = 0, seed: int = 0) -> Call:
    return Call("broadcast", [nbytes if rank == root else 0 for rank in range(ranks)], root, seed)


def all_gather(counts: list[int], seed: int = 0) -> Call:
    return Call("all_gather", counts, 0, seed)


def reduce_scatter(
    counts: list[int], op: str = "sum", dtype: str = "float32", seed: int = 0
) -> Call:
    """Counts of elements."""
    size = stored(dtype).itemsize
    parts = [count * size for count in counts]
    return Call("reduce_scatter", parts, 0, seed, (op, dtype, 3.0 if op == "premul_sum" else 1.0))


@dataclass
class Outcome:
    """How a call ended, by rank: its report or its error (None and None: it has not), its bytes."""

    reports: list[dict[str, int] | None] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def check_all_right(self) -> None:
        assert self.errors == [None] * len(self.errors)
        assert all(report is not None for report in self.reports)
        assert all(self.right)

    def check_bytes_or_error(self, dead: Collection[int] = ()) -> None:
        for rank, report in enumerate(self.reports):
            if rank not in dead:
                assert (report is None) != (self.errors[rank] is None), rank  # it has ended
            assert report is None or self.right[rank], rank


def group_of(ranks: int, **settings: Any) -> _core.McastGroup:
    group = _core.McastGroup()
    group.ranks = ranks
    group.tag = 0x1234567890ABCDEF
    group.set_secret(bytes(range(16)))
    group.chunk_bytes = 100
    group.timeout_ns = 2 * SECOND
    group.silence_ns = SECOND // 5
    for name, value in settings.items():
        assert hasattr(group, name), name
        setattr(group, name, value)
    return group


def faults_of(**settings: Any) -> _core.McastFaults:
    faults = _core.McastFaults()
    for name, value in settings.items():
        assert hasattr(faults, name), name
        setattr(faults, name, value)
    return faults


class Started:
    """A call under way at all ranks."""

    def __init__(self, fabric: _core.McastSimNetwork, call: Call, ranks: int) -> None:
        self.call = call
        self.buffers = [call.buffer(rank) for rank in range(ranks)]
        self.inputs = [call.input(rank) for rank in range(ranks)]
        self.operations: list[_core.McastOperation | str] = []
        for rank, buffer in enumerate(self.buffers):
            try:
                self.operations.append(
                    fabric.submit(
                        rank,
                        call.kind,
                        call.root,
                        buffer.ctypes.data,
                        call.counts,
                        buffer,
                        inp=0 if call.reduction is None else self.inputs[rank].ctypes.data,
                        reduction=call.reduction,
                    )
                )
            except _core.Error as refusal:  # what ended the communicator before
                self.operations.append(refusal.code)

    def ended(self, rank: int) -> bool:
        operation = self.operations[rank]
        return isinstance(operation, str) or operation.ended

    def outcome(self) -> Outcome:
        result = Outcome()
        for rank, (buffer, operation) in enumerate(zip(self.buffers, self.operations, strict=True)):
            report = error = None
            if isinstance(operation, str):
                error = operation
            elif operation.ended:
                try:
                    report = operation.wait(0)
                except _core.Error as caught:
                    error = caught.code
            result.reports.append(report)
            result.errors.append(error)
            result.right.append(bool((buffer == self.call.expected(rank)).all()))
        return result


def run(
    fabric: _core.McastSimNetwork, calls: list[Call], ranks: int, limit_s: int = 60
) -> list[Outcome]:
    """Makes the calls at all ranks and runs the network until nothing is left to do."""
    started = [Started(fabric, call, ranks) for call in calls]
    assert fabric.run_until(fabric.now_ns + limit_s * SECOND), "it has not come to rest"
    return [one.outcome() for one in started]


def run_once(ranks: int, call: Call, faults: dict[str, Any] | None = None, **group: Any) -> Outcome:
    fabric = _core.McastSimNetwork([group_of(ranks, **group)], faults_of(**(faults or {})))
    return run(fabric, [call], ranks)[0]
