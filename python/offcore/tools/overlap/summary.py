"""Measured rows as short tables: a line a combination, and means over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offcore.overlap import classify
from offcore.sizes import format_bytes

Row = Mapping[str, Any]
NAMES = ("serial", "base", "sp", "rp", "sp_rp", "nccl-ce", "ConCCL", "ConCCL_rp")
_KERNELS = ("base", "sp", "rp", "sp_rp")


def by_combination(rows: Iterable[Row]) -> dict[tuple[str, str, int], dict[str, Row]]:
    """Rows of `run` by operation, GEMM and bytes, then by strategy."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        if "strategy" in row and "speedup" in row:
            case = row["op"], row["gemm"], row["bytes"]
            found.setdefault(case, {})[row["strategy"]] = row
    return found


def share_of_means(rows: Sequence[Row], ideal: str = "ideal_published") -> float:
    """Of the ideal, of mean speed-ups, as ConCCL's 1.13x and 21 % of 1.6x fit together."""
    speedup = sum(row["speedup"] for row in rows) / len(rows)
    return classify.share_of_ideal(speedup, sum(row[ideal] for row in rows) / len(rows))


def lines(rows: Iterable[Row]) -> list[str]:
    """Speed-ups, and in brackets percent of the ideal, as ConCCL counts it."""
    found = by_combination(rows)
    names = [name for name in NAMES if any(name in one for one in found.values())]
    wide = " ".join(f"{name:>10}" for name in names)
    told = [f"{'':28} {'GEMM':>6} {'kernel':>6} {'engine':>6} ms {'type':8} ideal {wide}"]
    for op in dict.fromkeys(case[0] for case in found):
        some = {case: one for case, one in found.items() if case[0] == op}
        for (_, gemm, nbytes), one in some.items():
            told.append(_line(f"{op} {gemm} {format_bytes(nbytes)}", one, names))
        told += _means(op, list(some.values()), names)
    return told


def _line(label: str, one: Mapping[str, Row], names: Sequence[str]) -> str:
    row = next(iter(one.values()))
    times = " ".join(f"{row[f'{what}_us'] / 1e3:6.2f}" for what in ("gemm", "kernel", "engines"))
    cells = (_cell(one[name]) if name in one else "" for name in names)
    values = " ".join(f"{cell:>10}" for cell in cells)
    return f"{label:28} {times}    {row['kind']:8} {row['ideal_published']:5.2f} {values}"


def _cell(row: Row) -> str:
    return f"{row['speedup']:.2f} ({100 * row['share']:.0f})"


def _means(op: str, found: Sequence[Mapping[str, Row]], names: Sequence[str]) -> list[str]:
    """Over the combinations that have every strategy shown, where all that is shown was run."""
    told = []
    for ideal in ("ideal_published", "ideal_least"):
        cells = []
        for name in names:
            rows = [one[name] for one in found if name in one]
            cells.append(f"{100 * share_of_means(rows, ideal):.0f}%" if rows else "")
        values = " ".join(f"{cell:>10}" for cell in cells)
        told.append(f"{op + ', means of ' + ideal[6:]:28} {'':34} {'':5} {values}")
    return told


def behind(rows: Iterable[Row]) -> list[str]:
    """Combinations in which ConCCL is slower than the best of NCCL's kernels, or more than 3 %
    slower than NCCL's copy engines."""
    told = []
    for (op, gemm, nbytes), one in by_combination(rows).items():
        if "ConCCL" not in one:
            continue
        own = min(one[name]["time_us"] for name in ("ConCCL", "ConCCL_rp") if name in one)
        rivals = {name: one[name]["time_us"] for name in (*_KERNELS, "nccl-ce") if name in one}
        for name, time_us in rivals.items():
            if own > time_us * (1.03 if name == "nccl-ce" else 1.0):
                lost = own / time_us - 1
                told.append(f"{op} {gemm} {format_bytes(nbytes)}: {lost:.1%} behind {name}")
    return told


def energy_lines(rows: Iterable[Row]) -> list[str]:
    told = []
    for row in rows:
        if row.get("measure") == "energy":
            told.append(
                f"{row['op']} {row['gemm']} {format_bytes(row['bytes'])} {row['strategy']:8} "
                f"{row['time_us'] / 1e3:7.2f} ms {row['watts']:6.1f} W {row['joules']:8.3f} J "
                f"({row['joules_least']:.3f} to {row['joules_most']:.3f}) {row['sm_mhz']} MHz"
                + (f" {row['joules_a_gb']:.3f} J a GB" if row.get("joules_a_gb") else "")
            )
    return told


def curve_lines(rows: Iterable[Row]) -> list[str]:
    """Times as long on fewer cores."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if row.get("measure") == "gemm":
            cell = f"{row['cores']}:{row['slowdown']:.2f}"
            told.setdefault(f"{row['gemm']} by cores", []).append(cell)
        elif row.get("measure") == "collective":
            cell = f"{row['cores'] or row['what']}:{row['time_us']:.0f}"
            name = f"{row['op']} {format_bytes(row['bytes'])} us by cores"
            told.setdefault(name, []).append(cell)
    return [f"{name}: {' '.join(cells)}" for name, cells in told.items()]


def matmul_lines(rows: Iterable[Row]) -> list[str]:
    """GEMMs and collectives that depend on each other: over the library's, one after the other."""
    told = []
    for row in rows:
        if row.get("measure") == "matmul":
            name = f"{row.get('op', 'all_gather')} {row['gemm']}"
            speedup = f", {row['speedup']:.2f}x" if row["speedup"] else ""
            told.append(f"{name:22} {row['form']:18} {row['time_us'] / 1e3:7.3f} ms{speedup}")
    return told
