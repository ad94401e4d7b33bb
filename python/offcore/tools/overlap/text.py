"""Tables of overlap for a terminal, and kernels as a user writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from offcore.overlap import Collective, Compute, Plan, gemm
from offcore.overlap.kernels import Kernel
from offcore.overlap.plan import STRATEGIES
from offcore.sizes import format_bytes, parse_bytes
from offcore.tools.overlap import summary
from offcore.tools.overlap.sweep import Outcome, share
from offcore.tools.tables import titled

FORM = "MxNxK, MxNxK@BYTES with the memory traffic that was measured, or OPERATION:SIZE"


def kernel_of(text: str, ranks: int) -> Kernel:
    """Raises ValueError for what is none of FORM, `Error` for a kernel that cannot be."""
    shape = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})(?:@(.+))?", text)
    if shape is not None:
        traffic = parse_bytes(shape[4]) if shape[4] else None
        m, n, k = (int(shape[i]) for i in (1, 2, 3))
        return gemm(m, n, k, name=text.partition("@")[0], memory_bytes=traffic)
    op, colon, size = text.partition(":")
    if not colon:
        raise ValueError(f"'{text}': write {FORM}")
    return Collective(op, parse_bytes(size), ranks)


def plan_record(plan: Plan) -> dict[str, Any]:
    """What `advise --json` writes."""
    return {
        "machine": plan.tables.machine,
        "strategy": plan.strategy,
        "order": list(plan.order),
        "cores": dict(plan.cores),
        "engines": list(plan.engines),
        "time_us": round(plan.time_us, 3),
        "kernels": [
            {
                "name": one.name,
                "class": plan.tables.cores.bound_of(one) if isinstance(one, Compute) else "",
                "workgroups": plan.tables.workgroups_of(one),
                "alone_us": round(plan.tables.time_us(one), 3),
            }
            for one in plan.kernels
        ],
        "choices": {name: round(one.time_us, 3) for name, one in plan.choices.items()},
    }


def plan_table(plan: Plan) -> Table:
    table = titled(
        f"{plan.tables.machine}: {plan.strategy}, {STRATEGIES[plan.strategy]}",
        ("strategy", "launch in this order", "cores", "on engines"),
        ("us, estimated",),
    )
    for name, one in plan.choices.items():
        cores = ", ".join(f"{kernel} {count}" for kernel, count in one.cores.items())
        chosen = "[bold]" if name == plan.strategy else ""
        table.add_row(
            f"{chosen}{name}", ", ".join(one.order), cores, ", ".join(one.engines),
            f"{one.time_us:,.1f}",
        )  # fmt: skip
    return table


def outcome_table(found: Sequence[Outcome], machine: str) -> Table:
    strategies = [name for name in found[0].times_us if name != "serial"]
    table = titled(
        f"{machine}, simulated: speed-up over one after the other",
        ("op", "GEMM size", "type"),
        ("ideal", *strategies),
    )
    for one in found:
        values = (f"{one.speedup(name):.2f}" for name in ("ideal", *strategies))
        table.add_row(one.op, one.tag, one.kind, *values)
    table.add_section()
    shares = (f"{share(found, name):.0%}" for name in strategies)
    table.add_row("of ideal", "mean", "", "", *shares)
    return table


def measured_table(rows: Sequence[Mapping[str, Any]], machine: str) -> Table:
    """Of rows that measured.rows gives; strategies that were not run in any are left out."""
    found = summary.by_combination(rows)
    ran = {name for one in found.values() for name in one}
    strategies = [name for name in summary.NAMES if name in ran and name != "serial"]
    table = titled(
        f"{machine}, measured: speed-up over one after the other",
        ("op", "GEMM size", "type"),
        ("ideal", *strategies),
    )
    for (op, tag, nbytes), one in found.items():
        row = next(iter(one.values()))
        cells = (f"{one[name]['speedup']:.2f}" if name in one else "-" for name in strategies)
        label = f"{tag}_{format_bytes(nbytes)}"
        table.add_row(op, label, row["kind"], f"{row['ideal_published']:.2f}", *cells)
    return table


def counters_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line a GEMM on all SMs: its bytes of HBM and L2, and its class by these and by name."""
    found = [row for row in rows if row.get("measure") == "counters" and row["sms"] == row["every"]]
    machine = f"{found[0]['machine']}, counted" if found else "counted"
    table = titled(
        f"{machine}: bytes and class on all SMs",
        ("GEMM", "class by bytes", "by name"),
        ("HBM GB", "L2 GB", "HBM TB/s", "L2 TB/s", "flop a byte", "machine's"),
    )
    for row in found:
        dram_bytes = row["dram_read_bytes"] + row["dram_write_bytes"]
        table.add_row(
            row["gemm"], row["bound"], row["bound_by_name"],
            *(f"{value / 1e9:.3f}" for value in (dram_bytes, row["l2_bytes"])),
            *(f"{row[name] / 1e3:.2f}" for name in ("dram_gbps", "l2_gbps")),
            *(f"{row[name]:,.0f}" for name in ("op_byte", "machine_op_byte")),
        )  # fmt: skip
    return table
