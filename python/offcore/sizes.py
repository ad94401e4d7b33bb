"""Numbers of bytes as users write them (K = 1024), and what nccl-tests derives from them.

Bandwidths are in 1e9 bytes a second. S, the size of an operation, is always the total array:
what a rank holds after an all-gather, before and after an all-to-all, what the root holds in a
broadcast, scatter or gather, each rank's input of what reduces.
"""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES_MAX = 1 << 50
_COUNT_MAX = 4096


def parse_bytes(text: str) -> int:
    """`4096`, `64K`, `1M`, `4GiB` as a number of bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"'{text}' is not a number of bytes: write 4096, 64K, 1M or 4G (K = 1024)")
    nbytes = int(match[1]) * _UNITS[match[2].upper()]
    if nbytes > _BYTES_MAX:
        raise ValueError(f"'{text}' is more than {_BYTES_MAX} bytes")
    return nbytes


def parse_sizes(text: str) -> list[int]:
    """`1K:4G`, `1K:4G:4` (first:last:factor), `4096,1000003`, `4K,1M:64M`. Raises ValueError."""
    sizes: dict[int, None] = {}
    for part in text.split(","):
        sizes |= dict.fromkeys(_parse_range(part) if ":" in part else [parse_bytes(part)])
    return list(sizes)


def _parse_range(text: str) -> list[int]:
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise ValueError(f"'{text}' is not a range of sizes: write FIRST:LAST or FIRST:LAST:FACTOR")
    first, last = parse_bytes(parts[0]), parse_bytes(parts[1])
    try:
        factor = float(parts[2]) if len(parts) == 3 else 2.0
    except ValueError:
        raise ValueError(f"'{parts[2]}' is not a factor between sizes") from None
    if first < 1 or last < first:
        raise ValueError(f"'{text}' is not a range of sizes: 1 <= FIRST <= LAST is needed")
    if not 1.0 < factor < float("inf"):
        raise ValueError(f"'{parts[2]}' is not a factor between sizes: it must be above 1")
    sizes = [first]
    while (size := max(sizes[-1] + 1, int(sizes[-1] * factor))) <= last:
        sizes.append(size)
        if len(sizes) > _COUNT_MAX:
            raise ValueError(f"'{text}' holds more than {_COUNT_MAX} sizes: take a larger factor")
    return sizes


def format_bytes(nbytes: int) -> str:
    """The shortest exact form: 1024 -> 1K, 1000003 -> 1000003."""
    for unit in "TGMK":
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def split_evenly(nbytes: int, parts: int) -> list[int]:
    """As equal as whole bytes allow, the larger parts first."""
    base, more = divmod(nbytes, parts)
    return [base + (part < more) for part in range(parts)]


def algbw_gbps(nbytes: int, time_us: float) -> float:
    return nbytes / (time_us * 1e3) if time_us > 0 else 0.0


def busbw_factor(op: str, ranks: int) -> float:
    """From algbw to busbw, as nccl-tests defines it: what the busiest link has to carry."""
    if op in ("broadcast", "reduce"):
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
