"""What is measured once on a machine, from which plans are made: overlap/NAME.json among the
machine files (see offcore.machines). Rows are flat JSON objects, of four kinds:

    {"row": "slowdown", "kernel": "cb", "cores": 240, "slowdown": 1.27}
    {"row": "slowdown", "kernel": "all_gather", "bound": "latency", "cores": 8, "slowdown": 1.0}
    {"row": "latency", "kernel": "all_gather", "engines": true, "bytes": 65536, "time_us": 44.0}
    {"row": "bandwidth", "kernel": "all_gather", "engines": true, "bytes": 1048576, "time_us": 50.0}
    {"row": "beside", "kernel": "mb", "other": "all_gather", "engines": true, "slowdown": 1.1}

A slowdown is a time on that many cores by the time on all, or on a collective's default number of
workgroups. One compute-bound ("cb") and one memory-bound ("mb") GEMM stand for all; collectives
have a size that is latency-bound and one that is bandwidth-bound; times of other sizes lie on the
line through both, or, without a bandwidth row, on a roofline behind the latency. A kernel beside
another is as much slower as its memory traffic costs, on cores of its own; engines: one of the two
runs there.
Pairs without a row do not slow each other down, but for collectives, which share the links.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from offcore import machines
from offcore.errors import error
from offcore.overlap.kernels import Collective, Compute, Kernel

EFFICIENCY = 0.7  # of the peaks, in roofline times (section V-C)


@dataclass(frozen=True)
class Cores:
    """A GPU's peaks. Bandwidths are in 1e9 bytes per second."""

    count: int  # SMs, CUs
    least: int  # that a partition can have, and a multiple of which it has
    tflops: float  # of the dtype of the GEMMs
    memory_gbps: float
    network_gbps: float  # out of a rank

    @property
    def op_to_byte(self) -> float:
        """Peak operations per byte of memory."""
        return self.tflops * 1e3 / self.memory_gbps

    def bound_of(self, kernel: Compute) -> str:
        """ "cb" if a kernel has more operations per measured byte than the machine, else "mb"."""
        return "cb" if kernel.op_to_byte > self.op_to_byte else "mb"

    def splits(self) -> list[int]:
        """Possible sizes of a partition: powers of two, except all cores."""
        powers = (1 << i for i in range(self.count.bit_length()))
        return [one for one in powers if one >= self.least and self.count - one >= self.least]


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Tables:
    machine: str
    source: str
    cores: Cores
    workgroups: Mapping[str, int]  # of each collective's kernel, by default
    rows: tuple[Row, ...]

    def roofline_us(self, kernel: Kernel) -> float:
        """Time at 70 % of the machine's peaks."""
        cores = self.cores
        if isinstance(kernel, Collective):
            return kernel.wire_bytes / (EFFICIENCY * cores.network_gbps) / 1e3
        compute_us = kernel.flops / (EFFICIENCY * cores.tflops) / 1e6
        return max(compute_us, kernel.memory_bytes / (EFFICIENCY * cores.memory_gbps) / 1e3)

    def time_us(self, kernel: Kernel, *, engines: bool = False) -> float:
        """Isolated time: measured, or else from the roofline and, for a collective, the time of a
        latency-bound one."""
        if kernel.time_us is not None and not engines:
            return kernel.time_us
        if isinstance(kernel, Compute):
            return self.roofline_us(kernel)
        return self._collective_us(kernel, engines)

    def _collective_us(self, kernel: Collective, engines: bool) -> float:
        latency_us = self._latency_us(kernel.op, engines)
        for row in self._of("bandwidth", kernel.op):
            if row["engines"] is engines:
                rest_us = float(row["time_us"]) - latency_us
                return latency_us + max(rest_us, 0.0) * kernel.nbytes / float(row["bytes"])
        return latency_us + self.roofline_us(kernel)

    def workgroups_of(self, kernel: Kernel) -> int:
        """Raises `Error`: invalid for a collective if neither it nor the tables have a value."""
        if isinstance(kernel, Collective) and kernel.workgroups is None:
            if kernel.op not in self.workgroups:
                raise error("invalid", f"{self.machine}: {kernel.op}: give its workgroups")
            return self.workgroups[kernel.op]
        return kernel.workgroups or 1

    def slowdown(self, kernel: Kernel, cores: int) -> float:
        """Slowdown on this many cores, from the row with the next fewer cores. Raises `Error`:
        unsupported if kernels of this class were not measured."""
        bound, full, name = None, self.cores.count, self._class_of(kernel)
        if isinstance(kernel, Collective):
            latency = self._latency_us(kernel.op, False)
            bound = "latency" if self.roofline_us(kernel) < latency else "bandwidth"
            full = self.workgroups_of(kernel)
        rows = [row for row in self._of("slowdown", name) if row.get("bound") == bound]
        if not rows:
            raise error("unsupported", f"{self.machine}: no slowdowns of {name} were measured")
        found = {row["cores"]: row["slowdown"] for row in rows} | {full: 1.0}
        fewer = [one for one in found if one <= cores]
        if not fewer:
            raise error("unsupported", f"{self.machine}: {name} was not measured on {cores} cores")
        return float(found[max(fewer)])

    def beside(self, kernel: Kernel, other: Kernel, *, engines: bool) -> float:
        """Slowdown of one kernel while the other runs."""
        by = self._class_of(other)
        for row in self._of("beside", self._class_of(kernel)):
            if row["other"] == by and row["engines"] is engines:
                return float(row["slowdown"])
        share_links = isinstance(kernel, Collective) and isinstance(other, Collective)
        return 2.0 if share_links else 1.0

    def _class_of(self, kernel: Kernel) -> str:
        return kernel.op if isinstance(kernel, Collective) else self.cores.bound_of(kernel)

    def has_engines(self, kernel: Collective) -> bool:
        """Whether engines can run it and were measured."""
        rows = self._of("latency", kernel.op)
        return kernel.on_engines and any(row["engines"] for row in rows)

    def _latency_us(self, op: str, engines: bool) -> float:
        found = [row["time_us"] for row in self._of("latency", op) if row["engines"] is engines]
        if not found:
            raise error("unsupported", f"{self.machine}: no latency of {op} was measured")
        return float(min(found))

    def _of(self, kind: str, kernel: str) -> Iterable[Row]:
        return [row for row in self.rows if row["row"] == kind and row["kernel"] == kernel]

    def to_json(self) -> str:
        """The text of the file: one row per line."""
        head = {"machine": self.machine, "source": self.source, "cores": asdict(self.cores)}
        text = json.dumps(head | {"workgroups": dict(self.workgroups)}, indent=1)
        rows = ",\n".join("  " + json.dumps(row) for row in self.rows)
        return f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


_KEYS = {
    "slowdown": {"row", "kernel", "cores", "slowdown"},
    "latency": {"row", "kernel", "engines", "bytes", "time_us"},
    "bandwidth": {"row", "kernel", "engines", "bytes", "time_us"},
    "beside": {"row", "kernel", "other", "engines", "slowdown"},
}


def load(name_or_path: str | Path) -> Tables:
    """Loads tables of a machine, or a .json file. Raises `Error`: invalid if none or malformed."""
    name = str(name_or_path)
    path = Path(name) if name.endswith(".json") else machines.overlap_of(name)
    if path is None:
        make = "offcore overlap characterise --backend cuda"
        raise error("invalid", f"no overlap tables for {name}: run {make} on that machine")
    try:
        value = json.loads(path.read_text("utf-8"))
        names = {one.name for one in fields(Tables)}
        if value.keys() != names:
            raise ValueError(f"its keys must be {', '.join(sorted(names))}")
        for row in value["rows"]:
            if not row.keys() >= _KEYS[row["row"]]:
                raise ValueError(f"incomplete row {row}")
        rows = tuple(value.pop("rows"))
        return Tables(**value | {"cores": Cores(**value["cores"]), "rows": rows})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise error("invalid", f"{path}: not tables of overlap: {cause}") from cause
