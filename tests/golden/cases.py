"""The pinned programs: `python tests/golden/cases.py` writes them anew (read the diff!)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import offcore

FOLDER = Path(__file__).parent


class Case(NamedTuple):
    """One program: what `offcore show` takes."""

    op: str
    machine: str
    ranks: int
    nbytes: int
    variant: str
    in_place: bool = False
    protocol: str = "promise"
    reduced: tuple[str, str] | None = None  # reduction and dtype

    @property
    def path(self) -> Path:
        variant = self.variant.replace(":", "_")
        place = "in_place" if self.in_place else "out_of_place"
        reduced = "".join(f"{name}." for name in self.reduced or ())
        return FOLDER / (
            f"{self.op}.{self.machine}.{self.ranks}x{self.nbytes}.{variant}.{place}."
            f"{reduced}{self.protocol}.dma"
        )

    def program(self) -> offcore.Program:
        reduction, dtype = self.reduced or (None, None)
        return offcore.show_program(
            self.op,
            machine=self.machine,
            ranks=self.ranks,
            nbytes=self.nbytes,
            variant=self.variant,
            in_place=self.in_place,
            protocol=self.protocol,
            dtype=dtype,
            reduction=reduction,
        )


CASES = [
    # The paper's variants on its machine (sections 4.1 to 4.5).
    Case("all_gather", "mi300x-8", 4, 4096, "pcpy", in_place=True),
    Case("all_gather", "mi300x-8", 8, 8192, "bcst", in_place=True),
    Case("all_gather", "mi300x-8", 4, 4096, "b2b", in_place=True),
    Case("all_gather", "mi300x-8", 4, 4096, "prelaunch_b2b", in_place=True),
    Case("all_gather", "mi300x-8", 4, 4096, "fan", in_place=True),
    Case("all_to_all", "mi300x-8", 4, 4096, "pcpy"),
    Case("all_to_all", "mi300x-8", 4, 4096, "swap", in_place=True),
    Case("all_to_all", "mi300x-8", 4, 4000, "swap", in_place=True),  # not aligned: expanded
    # One strided command for all peers, on a machine that has it.
    Case("all_gather", "h200-4", 4, 4096, "fan", in_place=True),
    Case("all_to_all", "h200-4", 4, 4096, "fan"),
    Case("all_to_all", "h200-4", 4, 4096, "swap", in_place=True),  # expanded through scratch
    # Uneven parts, and roots.
    Case("all_gather", "h200-4", 3, 1000, "fan"),
    Case("all_to_all", "h200-2", 2, 7, "pcpy"),
    Case("broadcast", "mi300x-8", 4, 4096, "bcst", in_place=True, protocol="barrier"),
    Case("scatter", "h200-4", 4, 4096, "fan", protocol="barrier"),
    Case("gather", "h200-4", 4, 4096, "pcpy", protocol="barrier"),
    # Every way to enter.
    Case("all_gather", "host-2", 2, 4096, "pcpy", protocol="barrier"),
    Case("all_gather", "host-2", 2, 4096, "pcpy", protocol="eager"),
    Case("broadcast", "host-2", 2, 4096, "pcpy", in_place=True, protocol="eager"),
    Case("all_gather", "host-4", 4, 4096, "prelaunch_pcpy", protocol="barrier"),
    # In chunks, by way of slots: a ring that goes round, and ranges that are exchanged in place.
    Case("all_gather", "h200-2", 2, 12288, "pipelined:1K", protocol="eager"),
    Case("all_to_all", "h200-4", 4, 8192, "pipelined:512", in_place=True, protocol="eager"),
    # What reduces: to a window (promise) or by way of slots (eager), in a chunk or several.
    Case("reduce_scatter", "h200-2", 2, 4096, "pipelined", reduced=("sum", "float32")),
    Case("reduce_scatter", "h200-4", 4, 1000, "pipelined", reduced=("avg", "int32")),
    Case("all_reduce", "h200-2", 2, 32 << 20, "pipelined", reduced=("sum", "bfloat16")),
    Case("all_reduce", "h200-2", 2, 4096, "pipelined", protocol="eager", reduced=("max", "int8")),
    Case("all_reduce", "h200-4", 4, 4096, "pipelined", in_place=True, reduced=("sum", "float32")),
    Case("all_reduce", "h200-2", 2, 4096, "one_shot", reduced=("premul_sum", "float16")),
    Case("all_reduce", "h200-4", 4, 4096, "one_shot", in_place=True, reduced=("min", "float64")),
    Case("reduce", "h200-4", 4, 4096, "pipelined", reduced=("sum", "float32")),
    Case("reduce", "host-2", 2, 4096, "pipelined", protocol="eager", reduced=("sum", "int64")),
    # Nothing to move: the signals alone.
    Case("all_gather", "h200-2", 2, 0, "b2b", in_place=True),
]

if __name__ == "__main__":
    for old in FOLDER.glob("*.dma"):
        old.unlink()
    for case in CASES:
        case.path.write_text(str(case.program()), encoding="utf-8")
