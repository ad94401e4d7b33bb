"""Measures collectives on this machine's GPUs next to NCCL, quickly.

    python benchmarks/gpu_bench.py

All-gather in place and all-to-all out of place at every power of two: what auto chooses (other
variants by --variants), promised, safe and as a view, both signal forms; NCCL's kernels and copy
engines, called and replayed; and single calls of 4 KiB as the host sees them. All in the same
processes, one a GPU. Rows go to $OUT/cuda-MACHINE.jsonl where OUT is set, else to
benchmarks/results; a table ends the output. The whole has a time limit, after which what is known
is kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import offcore
from offcore.sizes import parse_sizes
from offcore.tools import report
from offcore.tools.bench import collectives, compare

PLACES = (("all_gather", True), ("all_to_all", False))
SMALL = "1K:4M"
LARGE = "8M:128M"
HUGE = "256M:1G"
ALONE = "4K"


class OutOfTimeError(Exception):
    pass


def requests(args: argparse.Namespace) -> list[collectives.Request]:
    """Small sizes first, so that a limit costs the large ones."""
    common: dict[str, Any] = {
        "backend": "cuda",
        "machine": None,
        "ranks": args.ranks,
        "protocols": args.protocols.split(","),
        "timeout_s": 10.0,
        "warmup": 3,
    }
    libraries = [] if args.no_nccl else ["nccl", "nccl-ce"]
    variants = args.variants.split(",")
    both: list[str | None] = ["fenced", "copy_order"]
    fenced: list[str | None] = ["fenced"]
    fewer = {"batches": 3, "calls": 10} if args.quick else {}
    found = []

    def ask(sizes: str, **more: Any) -> None:
        wanted = [size for size in parse_sizes(sizes) if size <= args.largest]
        for op, in_place in PLACES if wanted else ():
            given = {"sizes": wanted, "variants": variants, "baselines": libraries} | more | fewer
            found.append(collectives.Request(op=op, in_place=in_place, **common | given))

    ask(SMALL, signals=both, batches=11, calls=60)
    ask(ALONE, signals=both, batches=31, timings=["call"], variants=["auto"])
    both_copies = ["engines", "sm"]  # of the own chunk, where there is one
    ask(LARGE, signals=both, own_copies=both_copies, batches=7)
    ask(HUGE, signals=fenced, own_copies=both_copies, batches=5, check=False)
    return found


def measure(asked: list[collectives.Request], path: Path, limit_s: int) -> list[dict[str, Any]]:
    """The rows, each written as soon as it is known."""
    stamp = report.Stamp()
    records: list[dict[str, Any]] = []
    reasons: dict[str, None] = {}

    def ring(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    try:
        with path.open("w", encoding="utf-8") as file:
            for outcome in collectives.run_processes(asked):
                if isinstance(outcome, report.Skip):
                    reasons[f"skipped {outcome.name}: {outcome.reason}"] = None
                    continue
                record = report.to_json(outcome, stamp)
                file.write(report.dumps(record))
                file.flush()
                records.append(record)
    except OutOfTimeError:
        print(f"no end within {limit_s} s: what is known follows", flush=True)
    except offcore.Error as failure:
        print(f"{failure.code}: {failure}", flush=True)
    finally:
        signal.alarm(0)
    for reason in reasons:
        print(reason[:300])
    return records


def show(records: list[dict[str, Any]], ranks: int) -> None:
    for timing, what in (("chain", "enqueued ahead"), ("call", "one call seen by the host")):
        for op, in_place in PLACES:
            lines = compare.lines(records, op, ranks, in_place, timing)
            if len(lines) > 1:
                print(f"{op}, {'in place' if in_place else 'out of place'}, us a call, {what}:")
                print("\n".join(lines), flush=True)
    wrong = sum(record["wrong"] or 0 for record in records)
    print(f"{len(records)} rows, {wrong} wrong bytes", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; all by default")
    parser.add_argument("--limit", type=int, default=75, help="seconds, of the whole")
    parser.add_argument("--variants", default="auto", help="which to measure")
    parser.add_argument("--protocols", default="promise,auto,view", help="which to measure")
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--quick", action="store_true", help="few calls: to see that it runs")
    parser.add_argument("--no-nccl", action="store_true", help="measure offcore alone")
    args = parser.parse_args()
    try:
        collectives.check_backend("cuda")
        args.ranks = args.ranks or offcore._core.gpus()
    except offcore.Error as failure:
        print(f"{failure.code}: {failure}")
        return 1
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    machine = offcore.machines.for_gpus(args.ranks)
    path = folder / f"cuda-{machine}.jsonl"
    records = measure(requests(args), path, args.limit)
    show(records, args.ranks)
    print(f"rows: {path}")
    return 0 if records and not any(record["wrong"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
