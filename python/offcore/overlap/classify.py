"""What kind of overlap two kernels make, and how much it could save at best (sections III, IV)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offcore.errors import error

LONGER = 1.15  # a kernel of more than so many times the other's time is the long one


def kind_of(compute_us: float, communication_us: float) -> str:
    """ "G-long", "C-long" or, within 15 % of each other, "GC-equal", by times alone."""
    if compute_us > LONGER * communication_us:
        return "G-long"
    return "C-long" if communication_us > LONGER * compute_us else "GC-equal"


def is_latency_bound(times_us: Mapping[int, float], nbytes: int) -> bool:
    """Whether a collective of that size is: from the next smaller measured size on, its time grew
    by less than half as much as its size, as shares of what they were.

    times_us: alone, by size. The smallest size is latency-bound if the next one is. Raises
    `Error`: invalid where the size, or any other, was not measured.
    """
    sizes = sorted(times_us)
    if nbytes not in times_us or len(sizes) < 2:
        raise error("invalid", f"times_us needs {nbytes} bytes and another size; it has {sizes}")
    at = max(sizes.index(nbytes), 1)
    before, size = sizes[at - 1], sizes[at]
    return times_us[size] / times_us[before] - 1 < (size / before - 1) / 2


@dataclass(frozen=True)
class Ideal:
    """Speed-ups over kernels one after the other, were only the longest one left.

    published: ConCCL's, of the isolated times of the serial run. least: of the shortest isolated
    time that anybody needs for each kernel, so that no run exceeds it by a faster implementation.
    """

    published: float
    least: float


def ideal(serial_us: Sequence[float], shortest_us: Sequence[float] | None = None) -> Ideal:
    """serial_us: isolated times of the kernels that run one after the other. shortest_us: by the
    same order, the shortest of any implementation; by default the same. Raises `Error`: invalid."""
    shortest = serial_us if shortest_us is None else shortest_us
    if len(shortest) != len(serial_us) or min((*serial_us, *shortest), default=0) <= 0:
        raise error("invalid", "times must be above 0, and both lists of the same length")
    least = max(min(pair) for pair in zip(serial_us, shortest, strict=True))
    return Ideal(sum(serial_us) / max(serial_us), sum(serial_us) / least)


def share_of_ideal(speedup: float, ideal: float) -> float:
    """How much of what could be gained was: 0 for 1x, 1 for the ideal."""
    return (speedup - 1) / (ideal - 1) if ideal > 1 else 0.0
