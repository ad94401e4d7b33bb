"""DMA-Latte's ratios between variants beside those of simulated rows (sections 5.2.5 to 5.2.8).

A ratio is the geometric mean, over the powers of two of a range of sizes, of the slower variant's
time by the faster one's. The machine file's costs were fitted to ratios such as these and not
measured, so a ratio that agrees shows that the model can say what the paper says, not that a GPU
would.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from offcore.report import Row
from offcore.sizes import parse_sizes

_BOTH = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Claim:
    """`faster` is `paper` times as fast as the best of `slower`, by the paper."""

    section: str
    ops: tuple[str, ...]
    faster: str
    slower: tuple[str, ...]
    sizes: str
    paper: float

    def ratio(self, rows: Sequence[Row]) -> float | None:
        """What the rows say, or None where some of them are missing."""
        times = {(row.op, row.variant, row.bytes): row.time_us for row in rows}
        ratios = []
        for op in self.ops:
            for size in parse_sizes(self.sizes):
                fast = times.get((op, self.faster, size))
                slow = [times.get((op, name, size)) for name in self._slower_of(op)]
                known = [time_us for time_us in slow if time_us is not None]
                if fast is None or len(known) < len(slow):
                    return None
                ratios.append(min(known) / fast)
        return statistics.geometric_mean(ratios)

    def _slower_of(self, op: str) -> list[str]:
        """No all-gather is a swap, no all-to-all a bcst."""
        foreign = "swap" if op == "all_gather" else "bcst"
        return [name for name in self.slower if name != foreign]


CLAIMS = (
    Claim("5.2.5", ("all_gather",), "bcst", ("pcpy",), "1K:4M", 1.7),
    Claim("5.2.6", ("all_to_all",), "swap", ("pcpy",), "1K:4M", 1.7),
    Claim("5.2.7", ("all_gather",), "b2b", ("pcpy",), "1K:512K", 2.7),
    Claim("5.2.7", ("all_to_all",), "b2b", ("pcpy",), "1K:512K", 2.5),
    Claim("5.2.7", ("all_gather",), "b2b", ("bcst",), "1K:512K", 1.5),
    Claim("5.2.7", ("all_to_all",), "b2b", ("swap",), "1K:512K", 1.4),
    Claim("5.2.7", ("all_gather",), "bcst", ("b2b",), "1M:4M", 1.4),
    Claim("5.2.7", ("all_to_all",), "swap", ("b2b",), "1M:4M", 1.7),
    Claim("5.2.8", _BOTH, "prelaunch_pcpy", ("pcpy",), "1K:4G", 1.9),
    Claim("5.2.8", ("all_gather",), "prelaunch_bcst", ("bcst",), "1K:4G", 1.5),
    Claim("5.2.8", ("all_to_all",), "prelaunch_swap", ("swap",), "1K:4G", 1.5),
    Claim("5.2.8", _BOTH, "prelaunch_b2b", ("b2b",), "1K:4G", 1.2),
    Claim("5.2.8", ("all_gather",), "prelaunch_pcpy", ("pcpy", "bcst"), "1M:256M", 1.5),
    Claim("5.2.8", ("all_to_all",), "prelaunch_pcpy", ("pcpy", "swap"), "4M:512M", 1.3),
)


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each claim with both numbers, for what records them."""
    return [
        {
            "section": claim.section,
            "ops": list(claim.ops),
            "faster": claim.faster,
            "slower": list(claim.slower),
            "sizes": claim.sizes,
            "paper": claim.paper,
            "here": None if (ratio := claim.ratio(rows)) is None else round(ratio, 3),
        }
        for claim in CLAIMS
    ]


def table(rows: Sequence[Row]) -> Table:
    result = Table(
        title="DMA-Latte's ratios, and the simulator's: times as fast, geometric mean over sizes",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    for name in ("section", "operation", "faster", "than", "sizes"):
        result.add_column(name)
    result.add_column("paper", justify="right")
    result.add_column("simulated", justify="right")
    for claim in CLAIMS:
        ratio = claim.ratio(rows)
        result.add_row(
            claim.section,
            "both" if claim.ops == _BOTH else claim.ops[0],
            claim.faster,
            "best of " * (len(claim.slower) > 1) + ", ".join(claim.slower),
            claim.sizes.replace(":", " - "),
            f"{claim.paper:.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return result
