"""The parameters of a measured machine's model, from a few of its rows (docs/overlap.md).

Isolated: curves of two GEMMs by their cores, two sizes of each collective, joules of endless loops
of one GEMM and one size. Beside each other: one compute-bound and one memory-bound GEMM, each with
an all-gather and an all-to-all. Nothing is searched: each parameter is computed from its rows.
Where several rows give one value, their mean is taken, and the least and the most are its range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from offcore.errors import Error, error
from offcore.overlap.kernels import Collective
from offcore.tools.overlap.cases import OPS
from offcore.tools.overlap.gpu_model import traffic_of
from offcore.tools.overlap.model import Gpu
from offcore.tools.overlap.stage import ENGINES, GEMM, KERNEL
from offcore.tools.overlap.summary import by_combination
from offcore.tools.overlap.tabled import GEMMS, cores_of

Row = Mapping[str, Any]
Found = dict[str, Sequence[float]]  # a parameter's values, as rows give them
_Case = Mapping[str, Row]  # by strategy
_MIB = 1 << 20
SIZES = {"cb": 896 * _MIB, "mb": 128 * _MIB}  # of the collectives beside the GEMMs of both classes
POWERED = "mb1"  # whose isolated time power limits
CAP_W = {"h200": 700.0, "h100": 700.0}  # data sheets, SXM
PAUSE_US = (800.0, 1000.0, 1200.0)
MEASURED, FITTED, SHEET, ASSUMED = "measured", "fitted", "datasheet", "assumed"
_SHEET = "NVIDIA's data sheet"
_PARTITION = ("documented", "cuDevSmResourceSplitByCount, compute capability 9.0")
_LOOPS = (MEASURED, "endless loops of cb1 and of collectives of 896 MiB")
_SIZES = (MEASURED, "256 and 896 MiB alone")


def _pairs(strategy: str, gemm: str = "cb1") -> tuple[str, str]:
    return FITTED, f"{gemm} beside both collectives, {strategy}"


# Unit, meaning, basis and source. Measured: alone. Fitted: to pairs of kernels, or by assumptions.
TOLD: dict[str, tuple[str, str, str, str]] = {
    "cores": ("", "SMs", MEASURED, "the count that the driver gives"),
    "cores_least": ("", "that a partition has, or a multiple", *_PARTITION),
    "tflops": ("TFLOP/s", "peak, for classes", SHEET, f"{_SHEET}: dense bf16"),
    "memory_gbps": ("GB/s", "peak of the memory", SHEET, f"{_SHEET}: memory bandwidth"),
    "network_gbps": ("GB/s", "peak out of a GPU", SHEET, f"{_SHEET}: NVLink in one direction"),
    "cap_w": ("W", "power limit of a GPU", SHEET, f"{_SHEET}: SXM, maximum power"),
    "gemm_tflops": ("TFLOP/s", "a compute-bound GEMM in short runs", MEASURED, "cb1 alone"),
    "gemm_gbps": (
        "GB/s",
        "a memory-bound GEMM that reads each operand once",
        MEASURED,
        "m64_mb1 alone",
    ),
    "fixed_us": ("us", "NCCL's kernel, of no bytes", *_SIZES),
    "gbps": ("GB/s", "NCCL's kernel, out of a rank", *_SIZES),
    "own_part": (
        "ratio",
        "time on engines by that of the program in the simulator, which copies no own part",
        MEASURED,
        "896 MiB alone",
    ),
    "idle_w": ("W", "an idle GPU", *_LOOPS),
    "awake_w": ("W", "a GPU that runs something: an all-gather on engines", *_LOOPS),
    "kernel_w": ("W", "beyond awake_w, NCCL's kernel", *_LOOPS),
    "engines_w": ("W", "beyond awake_w, engines", *_LOOPS),
    "gemm_joules": ("J/TFLOP", "a GEMM, beyond awake_w, at energy_tflops", *_LOOPS),
    "energy_tflops": ("TFLOP/s", "that GEMM at the power limit", *_LOOPS),
    "energy_exponent": (
        "",
        "joules of a TFLOP are proportional to speed to this power",
        FITTED,
        "mb1 alone at the power limit, by pause_us",
    ),
    "pause_us": (
        "us",
        "between two runs, in which the host enqueues",
        ASSUMED,
        "the benchmark's gate, and what it waits for",
    ),
    "memory_contention": (
        "ratio",
        "slowdown of a GEMM beside traffic of engines as wide as the memory",
        *_pairs("ConCCL"),
    ),
    "engines_contention": (
        "ratio",
        "slowdown of engines beside traffic of a GEMM as wide as the memory",
        *_pairs("ConCCL"),
    ),
    "l2_contention": (
        "ratio",
        "more of memory_contention between two kernels on cores",
        *_pairs("sp"),
    ),
    "op_byte": (
        "op/B",
        "a compute-bound GEMM's operations for a byte of memory, by what it costs collectives",
        *_pairs("sp"),
    ),
    "starved": (
        "share",
        "of a collective's workgroups that run while an earlier GEMM does",
        *_pairs("base"),
    ),
    "behind": (
        "share",
        "of its rate that a collective has on its partition behind an earlier GEMM",
        *_pairs("rp"),
    ),
    "few_cores": (
        "ratio",
        "time of a collective on fewer cores than by default, by that of its curve",
        *_pairs("the splits that rp tried"),
    ),
    "scattered_cb": (
        "ratio",
        "slowdown of a GEMM launched second on a partition, while the collective runs",
        *_pairs("sp_rp"),
    ),
    "scattered_mb": ("ratio", "the same, memory-bound", *_pairs("sp_rp", "m64_mb1")),
    "rounds_mb": (
        "ratio",
        "slowdown of a memory-bound GEMM whose last workgroups wait for the collective",
        *_pairs("sp", "m64_mb1"),
    ),
}


def _lacking(what: str) -> Error:
    needed = "all rows of benchmarks/gpu_overlap.py without options are needed"
    return error("invalid", f"rows lack {what}: {needed}")


class Rows:
    """What parameters are computed from. Raises `Error`: invalid where something is missing."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.machine = next((row["machine"] for row in rows if "machine" in row), "")
        card = self.machine.partition("-")[0]
        if card not in CAP_W:
            named = self.machine or "an unnamed machine"
            raise error("invalid", f"no power limit of {named} is known")
        self.cap_w = CAP_W[card]
        count = next((row["stage"]["cores"] for row in rows if "stage" in row), 0)
        self.peaks = cores_of(self.machine, "cuda", count)
        self.run = next((row["run"] for row in rows if "run" in row), "")
        self._rows = rows
        self._cases = by_combination(rows)

    def _one(self, what: str, **wanted: Any) -> Row:
        for row in self._rows:
            if all(row.get(name) == value for name, value in wanted.items()):
                return row
        raise _lacking(what)

    def curve(self, tag: str) -> dict[int, float]:
        found = [row for row in self._rows if row.get("measure") == "gemm" and row["gemm"] == tag]
        if not found:
            raise _lacking(f"the curve of {tag}")
        return {row["cores"]: row["slowdown"] for row in found}

    def gemm(self, tag: str) -> Row:
        where = {"measure": "gemm", "gemm": tag, "cores": self.peaks.count}
        return self._one(f"the curve of {tag}", **where)

    def case(self, op: str, bound: str) -> Mapping[str, Row]:
        case = self._cases.get((op, GEMMS[bound], SIZES[bound]), {})
        for name in ("base", "sp", "rp", "sp_rp", "ConCCL"):
            if name not in case:
                raise _lacking(f"{op} beside {GEMMS[bound]} under {name}")
        return case

    def energy(self, op: str, what: str) -> Row:
        where = {"measure": "energy", "gemm": GEMMS["cb"], "op": op, "strategy": what}
        return self._one(f"joules of {op}, {what}", bytes=SIZES["cb"], **where)

    def ctas(self, op: str) -> tuple[int, float, dict[int, float]]:
        """Bytes of the curve, the time by default, and times by cores."""
        found = [
            row
            for row in self._rows
            if row.get("measure") == "collective" and row["op"] == op and row["what"] == KERNEL
        ]
        nbytes = max((row["bytes"] for row in found), default=0)
        times = {row["cores"]: row["time_us"] for row in found if row["bytes"] == nbytes}
        if len(times) < 3 or None not in times:
            raise _lacking(f"the curve of {op} by its cores")
        return nbytes, float(times.pop(None)), times


def slowdowns(row: Row, what: str, after: float = 1.0) -> tuple[float, float]:
    """Slowdowns of the GEMM and of the collective while both run. after: the GEMM's once the
    collective has ended."""
    ends = row["ends_us"]
    both_us = min(ends.values())
    gemm_us = row["gemm_us"] - (ends[GEMM] - both_us) / after
    other_us = row[f"{what}_us"] - (ends[what] - both_us)
    return both_us / gemm_us, both_us / max(other_us, 1e-3 * both_us)


def record_of(rows: Sequence[Row], source: str) -> dict[str, Any]:
    """The record of machines/calibrated/NAME-overlap.json."""
    found = Rows(rows)
    values, curves = _isolated(found)
    values = _peaks(found) | values | _power(found)
    for more in (_beside, _second):
        means = {name: fmean(some) for name, some in values.items()}
        values = values | more(found, means, curves)
    return {
        "machine": found.machine,
        "source": source,
        "run": found.run,
        "combinations": [[op, GEMMS[bound], SIZES[bound]] for bound in GEMMS for op in OPS],
        "workgroups": {op: max(found.ctas(op)[2]) for op in OPS},
        "parameters": [_parameter(name, some) for name, some in values.items()],
        "curves": curves,
    }


def _parameter(name: str, values: Sequence[float]) -> dict[str, Any]:
    unit, meaning, basis, source = TOLD[name.rpartition(".")[2]]
    value, low, high = (float(f"{pick(values):.4g}") for pick in (fmean, min, max))
    found = {"name": name, "unit": unit, "meaning": meaning, "value": value}
    if len(values) > 1:
        found |= {"low": low, "high": high}
    return found | {"basis": basis, "source": source}


def _peaks(found: Rows) -> Found:
    peaks = found.peaks
    return {
        "cores": [peaks.count],
        "cores_least": [peaks.least],
        "tflops": [peaks.tflops],
        "memory_gbps": [peaks.memory_gbps],
        "network_gbps": [peaks.network_gbps],
        "cap_w": [found.cap_w],
    }


def _flops(row: Row) -> float:
    return float(2.0 * row["m"] * row["n"] * row["k"])


def _isolated(found: Rows) -> tuple[Found, dict[str, dict[int, float]]]:
    times = {
        bound: [found.gemm(tag)["time_us"], *(found.case(op, bound)["sp"]["gemm_us"] for op in OPS)]
        for bound, tag in GEMMS.items()
    }
    cb, mb = (found.gemm(GEMMS[bound]) for bound in ("cb", "mb"))
    least = 2 * (mb["m"] * mb["k"] + mb["k"] * mb["n"] + mb["m"] * mb["n"])
    values: Found = {
        "gemm_tflops": [_flops(cb) / one / 1e6 for one in times["cb"]],
        "gemm_gbps": [least / one / 1e3 for one in times["mb"]],
    }
    curves = {bound: found.curve(tag) for bound, tag in GEMMS.items()}
    simulated = Gpu(found.machine, found.peaks)
    for op in OPS:
        nbytes, small_us, by_cores = found.ctas(op)
        row = found.case(op, "cb")["sp"]
        small, large = (Collective(op, n, row["ranks"]).wire_bytes for n in (nbytes, row["bytes"]))
        gbps = (large - small) / (row["kernel_us"] - small_us) / 1e3
        fixed = small_us - small / gbps / 1e3
        values |= {
            f"{op}.fixed_us": [fixed],
            f"{op}.gbps": [gbps],
            f"{op}.own_part": [row["engines_us"] / simulated.engines_us(op, row["bytes"])],
        }
        curves[op] = {
            cores: round(max(1.0, (one - fixed) / (small_us - fixed)), 4)
            for cores, one in by_cores.items()
        }
    return values, curves


def _power(found: Rows) -> Found:
    loops = {(op, what): found.energy(op, what) for op in OPS for what in (GEMM, KERNEL, ENGINES)}
    idle = [row["idle_watts"] for row in loops.values()]
    awake = min(row["watts"] for (_, what), row in loops.items() if what == ENGINES)
    tflop = _flops(found.gemm(GEMMS["cb"])) / 1e12
    gemms = [loops[op, GEMM] for op in OPS]
    joules = [(row["joules"] - awake * row["time_us"] / 1e6) / tflop for row in gemms]
    rates = [tflop / row["time_us"] * 1e6 for row in gemms]
    mb = found.gemm(POWERED)
    cap, time_us, tflop = found.cap_w, mb["time_us"], _flops(mb) / 1e12
    exponents = []
    for pause in PAUSE_US:
        each = (cap * (time_us + pause) - awake * time_us - fmean(idle) * pause) / 1e6
        more = each / tflop / fmean(joules)
        exponents.append(math.log(more) / math.log(tflop / time_us * 1e6 / fmean(rates)))
    values: Found = {
        "idle_w": idle,
        "awake_w": [awake],
        "gemm_joules": joules,
        "energy_tflops": rates,
        "energy_exponent": exponents,
        "pause_us": PAUSE_US,
    }
    beyond = {key: max(0.0, row["watts"] - awake) for key, row in loops.items() if key[1] != GEMM}
    return values | {f"{op}.{what}_w": [watts] for (op, what), watts in beyond.items()}


def _share(row: Row, what: str, memory_gbps: float) -> float:
    """Of the memory's bandwidth, of a collective alone."""
    moved = traffic_of(Collective(row["op"], row["bytes"], row["ranks"]))
    return float(moved / row[f"{what}_us"] / 1e3 / memory_gbps)


def _fewer(found: Rows, bound: str, curves: Mapping[str, Mapping[int, float]]) -> float:
    """Slowdown of a GEMM on the cores that a collective's workgroups leave."""
    return curves[bound][found.peaks.count - max(curves[OPS[0]])]


def _beside(
    found: Rows, values: Mapping[str, float], curves: Mapping[str, Mapping[int, float]]
) -> Found:
    """What traffic costs."""
    peak, fewer = found.peaks.memory_gbps, _fewer(found, "cb", curves)
    cases = [found.case(op, "cb") for op in OPS]
    engines = [slowdowns(one["ConCCL"], ENGINES) for one in cases]
    kernels = [slowdowns(one["sp"], KERNEL) for one in cases]
    memory = [
        (gemm - 1) / _share(one["ConCCL"], ENGINES, peak)
        for one, (gemm, _) in zip(cases, engines, strict=True)
    ]
    both = [
        (gemm / fewer - 1) / _share(one["sp"], KERNEL, peak)
        for one, (gemm, _) in zip(cases, kernels, strict=True)
    ]
    rate = values["gemm_tflops"] * 1e3
    op_byte = [rate / fewer * fmean(both) / (slow - 1) / peak for _, slow in kernels]
    gemm_share = rate / fmean(op_byte) / peak
    return {
        "memory_contention": memory,
        "l2_contention": [one - fmean(memory) for one in both],
        "op_byte": op_byte,
        "engines_contention": [(slow - 1) / gemm_share for _, slow in engines],
    }


def _second(
    found: Rows, values: Mapping[str, float], curves: Mapping[str, Mapping[int, float]]
) -> Found:
    """What it costs to be launched second."""
    cases = [found.case(op, "cb") for op in OPS]
    behind = [min(1.0, _progress(one["rp"]) * slowdowns(one["sp"], KERNEL)[1]) for one in cases]
    made: Found = {
        "starved": [max(0.0, _progress(one["base"])) for one in cases],
        "behind": behind,
        "few_cores": [one for op in OPS for one in _few(found, op, fmean(behind))],
    }
    contention = values["memory_contention"] + values["l2_contention"]
    for bound in GEMMS:
        fewer = _fewer(found, bound, curves)
        both = [found.case(op, bound) for op in OPS]
        costs = [
            fewer * (1 + contention * _share(one["sp"], KERNEL, found.peaks.memory_gbps))
            for one in both
        ]
        made[f"scattered_{bound}"] = [
            slowdowns(one["sp_rp"], KERNEL, fewer)[0] / cost
            for one, cost in zip(both, costs, strict=True)
        ]
        if bound == "mb":
            made["rounds_mb"] = [
                slowdowns(one["sp"], KERNEL)[0] / cost
                for one, cost in zip(both, costs, strict=True)
            ]
    return made


def _few(found: Rows, op: str, behind: float) -> Iterable[float]:
    """Of each split that lost: what the collective took after the GEMM and what it did before, by
    what its curve says."""
    row = found.case(op, "cb")["rp"]
    _, small_us, times = found.ctas(op)
    curve = found.curve(row["gemm"])
    for left, total_us in row["tried_us"].items():
        cores = found.peaks.count - int(left)
        if cores < max(times):
            gemm_us = row["gemm_us"] * curve[int(left)]
            took_us = total_us - gemm_us + behind * gemm_us
            yield took_us / (row["kernel_us"] * times[cores] / small_us)


def _progress(row: Row) -> float:
    """The share of its isolated rate that a collective has until the GEMM ends."""
    ends = row["ends_us"]
    done_us = row["kernel_us"] - (ends[KERNEL] - ends[GEMM])
    return float(done_us / ends[GEMM])
