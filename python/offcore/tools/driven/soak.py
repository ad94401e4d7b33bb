"""Millions of requests of many lanes, of which none may be lost, doubled or torn.

studies/requests/soak.h, which is installed beside this file, says what the lanes push. Here the
same requests are drawn, to say what the received buffers hold in the end and what the engine has
counted. Each request has a place of its own: one that is lost or torn leaves wrong bytes there, and
one that is served twice is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import RequestStats

SLOT, EVERY, CLOCK = 64, 16, 16  # as in soak.h: bytes, requests, bytes
PART = 1 << 18  # slots that are drawn at once

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """lanes x each requests into buffers x slots places."""

    lanes: int
    each: int
    buffers: int
    slots: int

    def __post_init__(self) -> None:
        assert self.lanes * self.each == self.buffers * self.slots
        assert self.each % EVERY == 0

    @property
    def nbytes(self) -> int:
        """Of the sent buffer, and of each received one."""
        return self.slots * SLOT

    @property
    def ticks(self) -> int:
        """What each clock shows in the end."""
        return self.each // EVERY

    @property
    def clock_bytes(self) -> int:
        return -(-self.lanes * CLOCK // SLOT) * SLOT

    def table(self) -> Bytes:
        """What a clock may show, one after the other: a number, and its complement."""
        count = -(-(self.ticks + 1) * CLOCK // SLOT) * SLOT // CLOCK
        numbers = np.arange(count, dtype=np.uint64)
        return np.stack((numbers, ~numbers), axis=1).view(np.uint8).reshape(-1)

    def drawn(self, first: int, count: int) -> tuple[Any, Any, Any, Any]:
        """Of requests: whether they have a whole slot; bytes, place in the slot, and in the source
        of those that have not."""
        h = (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        h = (h ^ h >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ h >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
        nbytes = np.uint64(1) + (h >> np.uint64(1) & np.uint64(SLOT - 1))
        shift = (h >> np.uint64(8) & np.uint64(0xFFF)) % (np.uint64(SLOT + 1) - nbytes)
        src = (h >> np.uint64(20)) % (np.uint64(self.nbytes + 1) - nbytes)
        return (h & np.uint64(1)) == 0, *(one.astype(np.int64) for one in (nbytes, shift, src))

    def parts(self) -> list[tuple[int, int]]:
        """Of a buffer, in slots: from, to."""
        return [(at, min(at + PART, self.slots)) for at in range(0, self.slots, PART)]

    def counted(self) -> RequestStats:
        """What the engine should have counted; its copies and batches are its own affair."""
        nbytes = 0
        for buffer in range(self.buffers):
            for first, last in self.parts():
                whole, size, _, _ = self.drawn(buffer * self.slots + first, last - first)
                nbytes += int(np.where(whole, SLOT, size).sum())
        signals = self.lanes * self.ticks
        total = self.lanes * self.each + signals
        return RequestStats(total, signals, 0, 0, nbytes + signals * CLOCK)

    def wanted(self, buffer: int, first: int, last: int, source: Bytes) -> Bytes:
        """These slots of a received buffer, from 0, which held zeros before."""
        whole, size, shift, src = self.drawn(buffer * self.slots + first, last - first)
        rows = np.where(whole[:, None], source.reshape(-1, SLOT)[first:last], np.uint8(0))
        some = np.flatnonzero(~whole)
        size = size[some]
        within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        to = np.repeat(some * SLOT + shift[some], size) + within
        rows.reshape(-1)[to] = source[np.repeat(src[some], size) + within]
        return rows.reshape(-1)


def wrong(
    shape: Shape, source: Bytes, read: Callable[[int], Bytes], stats: RequestStats
) -> list[str]:
    """What is not as it should be. read: a received buffer, from 0; behind them the clocks."""
    found = []
    expected = shape.counted()
    for name in ("requests", "signals", "nbytes"):
        if getattr(stats, name) != getattr(expected, name):
            found.append(f"{name}: {getattr(stats, name)} of {getattr(expected, name)}")
    for buffer in range(shape.buffers):
        got = read(buffer)
        for first, last in shape.parts():
            part = got[first * SLOT : last * SLOT]
            bad = (part != shape.wanted(buffer, first, last, source)).reshape(-1, SLOT).any(axis=1)
            if bad.any():
                at = first + int(bad.argmax())
                found.append(f"buffer {buffer}: {bad.sum()} wrong slots, the first is {at}")
    clocks = read(shape.buffers)[: shape.lanes * CLOCK].reshape(-1, CLOCK)
    last_tick = shape.table()[shape.ticks * CLOCK :][:CLOCK]
    if bad_clocks := int((clocks != last_tick).any(axis=1).sum()):
        found.append(f"{bad_clocks} clocks do not show the last number")
    return found
