"""Measures GEMMs beside collectives on this machine's GPUs: NCCL's kernels and offcore.

    python benchmarks/gpu_overlap.py --quick       # a few of each, in two minutes
    python benchmarks/gpu_overlap.py               # all, in less than seven
    python benchmarks/gpu_overlap.py --energy      # joules of ConCCL's 30 and alone, in eight
    python benchmarks/gpu_overlap.py --matched     # ConCCL's 30, sizes by the paper's time ratios
    python benchmarks/gpu_overlap.py --dependent   # GEMMs and collectives that depend on each other

All: all-gather and all-to-all in ConCCL's 15 sizes each, reduce-scatter, all-reduce and GEMMs of
few rows, under every strategy; GEMMs behind an all-gather and in front of a reduce-scatter; joules;
GEMMs on fewer SMs, collectives on fewer CTAs. Rows go to $OUT/overlap-MACHINE.jsonl where OUT is
set, else to benchmarks/results, each as soon as it is known; what failed is among them. Short
tables end the output. The whole has a time limit, after which what is known is kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import offcore
from offcore.tools import report
from offcore.tools.overlap import dependent, measured, stage, summary
from offcore.tools.overlap.cases import COMBINATIONS, OPS
from offcore.tools.overlap.measured import Request

REDUCED = ("cb1_896M", "mb1_896M", "cb4_1G")
FEW_ROWS = ("m64_mb1_128M", "m128_mb1_128M", "m256_mb1_256M")
QUICK = ("cb1_896M", "mb1_896M", "cb4_1G", "cb2_3.25G")
CURVES = ("cb1", "mb1", "m64_mb1")
ALONE = (64 << 10, 1 << 20, 32 << 20, 1 << 30)  # all-gathers whose joules are taken
LOOPS = ("gemm", "kernel", "engines", "base", "rp", "ConCCL")
MIB = 1 << 20
LISTED = 20  # lines of a table, so that the rest is not pushed out of a short log
STEP_S = 15.0  # what is silent for four times as long has hung
LIMITS_S = {"quick": 115, "full": 390, "matched": 240, "energy": 560, "dependent": 90}
AFTER_S = {"quick": 45, "full": 110, "energy": 105}  # of these, for what follows the combinations
SPARE_S = 8  # for the end


class OutOfTimeError(Exception):
    pass


@dataclass(frozen=True)
class Asked:
    """A request, and after how many seconds of the whole it is to have ended."""

    request: Request
    until_s: float


def asked_of(args: argparse.Namespace, kind: str) -> list[Asked]:
    """Apart, since torch's fused form and NCCL's copy engines want symmetric memory of different
    kinds in a process."""
    quick = kind == "quick"
    common: dict[str, Any] = {
        "backend": args.backend,
        "ranks": args.ranks,
        "shrink": args.shrink,
        "step_s": STEP_S,
        "runs": (2, 5) if quick else (stage.WARMUP, stage.MEASURED),
    }
    end_s = args.limit - SPARE_S
    tags = QUICK if quick else tuple(COMBINATIONS)
    tags = tags if args.tags == "all" else tuple(args.tags.split(","))
    pairs = [(tag, op) for op in OPS for tag in tags]
    if kind == "matched":
        return [Asked(Request(**common, pairs=pairs, matched=True), end_s)]
    if kind == "dependent":
        return [Asked(Request(**common, steps=("matmul",)), end_s)]
    if kind == "energy":
        common |= {"steps": ("energy",), "energy_s": 3.0}
        # sp: the best of NCCL's kernels on 2 x H200.
        beside = Request(**common, energy=pairs, loops=("base", "sp", "ConCCL"), trials=1)
        alone = [("all_gather", nbytes) for nbytes in ALONE]
        return [
            Asked(beside, end_s - AFTER_S[kind]),
            Asked(Request(**common, energy_alone=alone, trials=3), end_s),
        ]
    if args.tags != "all":
        pairs += [(tag, op) for op in measured.REDUCING for tag in tags]
        return [Asked(Request(**common, pairs=pairs), end_s)]
    pairs += [(tag, op) for op in measured.REDUCING for tag in REDUCED[: 1 if quick else None]]
    pairs += [(tag, op) for op in OPS for tag in FEW_ROWS[: 1 if quick else None]]
    sizes = (64 << 10, 256 * MIB // max(1, args.shrink) ** 2)
    rest = Request(
        **common,
        energy=[("cb1_896M", op) for op in OPS[: 1 if quick else None]],
        steps=("matmul", "energy") if quick else ("matmul", "energy", "curve", "collectives"),
        dependents=dependent.NAMES[:1] if quick else dependent.NAMES,
        curve_gemms=CURVES,
        curve_sizes=sizes,
        loops=LOOPS[3:] if quick else LOOPS,
        energy_s=1.5 if quick else 3.0,
        trials=1 if quick else 2,
    )
    return [
        Asked(Request(**common, pairs=pairs), end_s - AFTER_S[kind]),
        Asked(rest, end_s),
    ]


def rows_of(asked: list[Asked], began: float) -> Iterator[dict[str, Any]]:
    """Those of all requests; one that ends early does not keep the others from being measured."""
    for number, one in enumerate(asked):
        left_s = one.until_s - (time.monotonic() - began)
        request = replace(one.request, limit_s=left_s)
        try:
            yield from measured.rows(request)
        except offcore.Error as failure:
            yield {"failed": f"request {number}: {failure.code}: {failure}"}


def measure(asked: list[Asked], path: Path, limit_s: int) -> list[dict[str, Any]]:
    """The rows, each written as soon as it is known."""
    stamp = asdict(report.Stamp())
    rows: list[dict[str, Any]] = []

    def ring(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    began = time.monotonic()
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in rows_of(asked, began):
                if "step" in row:
                    print(f"{time.monotonic() - began:5.0f} s {row['step']}", flush=True)
                    continue
                for lost in ("skipped", "failed"):
                    if lost in row:
                        print(f"{lost} {row[lost]}"[:300], flush=True)
                file.write(report.dumps(row | stamp))
                file.flush()
                rows.append(row)
    except OutOfTimeError:
        print(f"no end within {limit_s} s: what is known follows", flush=True)
    finally:
        signal.alarm(0)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    behind = summary.behind(rows)
    for told in (
        summary.curve_lines(rows),
        summary.energy_lines(rows),
        [*behind[:LISTED], f"{len(behind)} combinations behind"],
        summary.matmul_lines(rows),
        summary.lines(rows),
    ):
        if told:
            print("\n".join(told), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--matched", action="store_true")
    parser.add_argument("--energy", action="store_true")
    parser.add_argument("--dependent", action="store_true")
    parser.add_argument("--backend", default="cuda", help="cuda, or host")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; all by default")
    parser.add_argument("--limit", type=int, default=0, help="seconds, of the whole")
    parser.add_argument("--tags", default="all", help="GEMM_SIZE,...: these alone, every operation")
    parser.add_argument("--shrink", type=int, default=0, help="divides GEMMs' dimensions")
    args = parser.parse_args()
    kinds = [name for name in LIMITS_S if getattr(args, name, False)]
    if len(kinds) > 1:
        parser.error(f"--{' or --'.join(kinds)}")
    kind = kinds[0] if kinds else "full"
    args.limit = args.limit or LIMITS_S[kind]
    began = time.monotonic()
    try:
        args.ranks = args.ranks or (offcore._core.gpus() if args.backend == "cuda" else 2)
    except offcore.Error as failure:
        print(f"{failure.code}: {failure}")
        return 1
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    machine = offcore.machines.for_gpus(args.ranks) if args.backend == "cuda" else "host"
    path = folder / f"overlap-{machine}{'' if kind == 'full' else f'-{kind}'}.jsonl"
    rows = measure(asked_of(args, kind), path, args.limit)
    show(rows)
    failed = sum("failed" in row for row in rows)
    print(f"{len(rows)} rows, {failed} failed, {time.monotonic() - began:.0f} s: {path}")
    return 0 if any("strategy" in row or "form" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
