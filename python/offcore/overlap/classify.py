"""What kind of overlap two kernels make, and how much it could save at best (sections III, IV)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offcore.errors import error

LONGER = 1.15  # a kernel of more than so many times the other's time is the long one


def kind_of(compute_us: float, communication_us: float) -> str:
    """ "G-long", "C-long" or, if times differ by at most 15 %, "GC-equal"."""
    if compute_us > LONGER * communication_us:
        return "G-long"
    return "C-long" if communication_us > LONGER * compute_us else "GC-equal"


def is_latency_bound(times_us: Mapping[int, float], nbytes: int) -> bool:
    """Returns whether a collective of this size is latency-bound: from the next smaller measured
    size, its time grew by less than half as much as its size, in relative terms.

    times_us: isolated times by size. The smallest size is latency-bound if the next one is.
    Raises `Error`: invalid if this size, or any other, was not measured.
    """
    sizes = sorted(times_us)
    if nbytes not in times_us or len(sizes) < 2:
        raise error("invalid", f"times_us needs {nbytes} bytes and another size; it has {sizes}")
    at = max(sizes.index(nbytes), 1)
    before, size = sizes[at - 1], sizes[at]
    return times_us[size] / times_us[before] - 1 < (size / before - 1) / 2


@dataclass(frozen=True)
class Ideal:
    """Upper bounds of the speedup over serial execution, in which only the longest kernel remains.

    published: ConCCL's definition, from the isolated times of the serial run.
    least: from the shortest isolated time of any implementation of each kernel; no run exceeds it.
    """

    published: float
    least: float


def ideal(serial_us: Sequence[float], shortest_us: Sequence[float] | None = None) -> Ideal:
    """Computes both bounds. serial_us: isolated times of the kernels of the serial run.
    shortest_us: the shortest of any implementation, in the same order; default: serial_us. Raises
    `Error`: invalid."""
    shortest = serial_us if shortest_us is None else shortest_us
    if len(shortest) != len(serial_us) or min((*serial_us, *shortest), default=0) <= 0:
        raise error("invalid", "times must be above 0, and both lists of the same length")
    least = max(min(pair) for pair in zip(serial_us, shortest, strict=True))
    return Ideal(sum(serial_us) / max(serial_us), sum(serial_us) / least)


def share_of_ideal(speedup: float, ideal: float) -> float:
    """Returns the share of the possible gain that was achieved: 0 for 1x, 1 for the ideal."""
    return (speedup - 1) / (ideal - 1) if ideal > 1 else 0.0
