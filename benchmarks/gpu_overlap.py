"""Measures GEMMs beside collectives on this machine's GPUs: NCCL's kernels and offcore.

    python benchmarks/gpu_overlap.py                  # all-gather and all-to-all, 15 sizes each
    python benchmarks/gpu_overlap.py --matched        # the same, sizes by the paper's time ratios
    python benchmarks/gpu_overlap.py --more           # energy; reductions; a dependent GEMM

Rows are those of `offcore overlap run` (docs/overlap.md). They go to $OUT/overlap-MACHINE.jsonl
where OUT is set, else to benchmarks/results, each as soon as it is known; short tables end the
output. The whole has a time limit, after which what is known is kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import offcore
from offcore.tools import report
from offcore.tools.overlap import measured, summary
from offcore.tools.overlap.cases import COMBINATIONS, OPS
from offcore.tools.overlap.measured import Request

# Beside reductions, and GEMMs of few rows, which memory bounds.
REDUCED = ("cb1_896M", "mb1_896M", "cb4_1G")
FEW_ROWS = ("m64_mb1_128M", "m128_mb1_128M", "m256_mb1_256M")
KERNELS = ("base", "sp", "rp", "ConCCL")
MIB = 1 << 20
LISTED = 20  # lines, so that the table is not pushed out of a short log


class OutOfTimeError(Exception):
    pass


def request_of(args: argparse.Namespace) -> Request:
    common: dict[str, Any] = {"backend": args.backend, "ranks": args.ranks, "shrink": args.shrink}
    limit_s = args.limit - args.spare
    if not args.more:
        tags = tuple(COMBINATIONS) if args.tags == "all" else tuple(args.tags.split(","))
        sizes = () if args.matched else (64 << 10, 256 * MIB // max(1, args.shrink) ** 2)
        steps = ("run",) if args.matched else ("collectives", "run")
        pairs = [(tag, op) for op in OPS for tag in tags]
        more = {"pairs": pairs, "steps": steps, "curve_sizes": sizes, "limit_s": limit_s}
        return Request(**common, **more, matched=args.matched)
    return Request(
        **common,
        pairs=[
            *((tag, op) for op in measured.REDUCING for tag in REDUCED),
            *((tag, op) for op in OPS for tag in FEW_ROWS),
        ],
        strategies=KERNELS,
        energy=[("cb1_896M", "all_gather")],
        steps=("curve", "matmul", "run", "energy"),
        curve_gemms=("cb1", "m64_mb1"),
        loops=("gemm", "kernel", "engines", "base", "rp", "ConCCL"),
        energy_s=args.seconds,
        trials=args.trials,
        limit_s=limit_s,
    )


def measure(asked: Request, path: Path, limit_s: int) -> list[dict[str, Any]]:
    """The rows, each written as soon as it is known."""
    stamp = asdict(report.Stamp())
    rows: list[dict[str, Any]] = []

    def ring(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in measured.rows(asked):
                if "skipped" in row:
                    print(f"skipped {row['skipped']}"[:200], flush=True)
                    continue
                file.write(report.dumps(row | stamp))
                file.flush()
                rows.append(row)
    except OutOfTimeError:
        print(f"no end within {limit_s} s: what is known follows", flush=True)
    except offcore.Error as failure:
        print(f"{failure.code}: {failure}", flush=True)
    finally:
        signal.alarm(0)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for told in (
        summary.curve_lines(rows),
        summary.matmul_lines(rows),
        summary.energy_lines(rows),
        summary.behind(rows)[:LISTED],
        summary.lines(rows),
    ):
        if told:
            print("\n".join(told), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", default="cuda", help="cuda, or host")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; all by default")
    parser.add_argument("--limit", type=int, default=195, help="seconds, of the whole")
    parser.add_argument("--spare", type=int, default=25, help="of these, for what starts and ends")
    parser.add_argument("--tags", default="all", help="GEMM_SIZE,...")
    parser.add_argument("--matched", action="store_true")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--shrink", type=int, default=0, help="divides GEMMs' dimensions")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a loop that energy is of")
    parser.add_argument("--trials", type=int, default=2, help="of each such loop")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        args.ranks = args.ranks or (offcore._core.gpus() if args.backend == "cuda" else 2)
    except offcore.Error as failure:
        print(f"{failure.code}: {failure}")
        return 1
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    machine = offcore.machines.for_gpus(args.ranks) if args.backend == "cuda" else "host"
    kind = "-more" if args.more else "-matched" if args.matched else ""
    path = folder / f"overlap-{machine}{kind}.jsonl"
    rows = measure(request_of(args), path, args.limit)
    show(rows)
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s: {path}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
