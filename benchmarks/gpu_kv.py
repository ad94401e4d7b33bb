"""Checks and measures transfers of KV blocks on one GPU, in steps that are bounded in time.

    python benchmarks/gpu_kv.py                    # some five minutes
    python benchmarks/gpu_kv.py --only calls,pages

`check`: random jobs beside matrix products, and streams, every byte (kv_check.py). `calls`: what
the driver's own calls cost (kv_calls.py). `pages`: 28 layers, 64 and 256 scattered blocks, pages of
8 to 256 KiB, beside the loop, one batch call and the kernel, in turns. `alone`: the same by itself,
one after the other: peers leave the driver's and the thread's caches cold. `scattered`: 256 pages
that nothing folds. `tensors`: a tensor a layer, each an allocation of its own, as engines have
them, K and V together and apart, beside one batch call and calls of 32 and 64 pages. `submit`: a
load of 4096 tokens of Qwen2.5-0.5B. `gemm`: how much a GEMM of 8192 slows down. `links`: 1 GiB over
the links of other GPUs too, where there are any.
Each step is a process of its own; one that fails or takes too long is told, and the others go on,
as long as all of them together have time.
Rows go to $OUT/cuda-kv.jsonl where OUT is set, else to benchmarks/results; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offcore import _core
from offcore.sizes import format_bytes, parse_sizes
from offcore.tools.kv import bench as kv_bench
from offcore.tools.kv.case import torch_with_gpu
from offcore.tools.kv.models import MODELS, Geometry
from offcore.tools.report import Stamp, dumps

FOLDER = Path(__file__).parent
LAYERS = 28
PEERS = ("loop", "batch", "kernel")
BATCHES = ("batch", "batch32", "batch64", "loop")  # of which the table has a column each
LIMITS_S = {  # of a step
    "check": 50,
    "calls": 20,
    "pages": 120,
    "alone": 45,
    "scattered": 20,
    "tensors": 120,
    "submit": 20,
    "gemm": 30,
    "links": 100,  # of several GPUs only
}
ALL_S = 430  # where all GPUs but one are left out
GIB = 1 << 30
LARGE = 128 << 10  # pages from here on: 64 blocks only
Row = dict[str, Any]


def plans(step: str, args: argparse.Namespace) -> list[kv_bench.Plan]:
    """What a step measures."""
    pages = parse_sizes(args.pages)
    common = {"backend": "cuda", "peers": PEERS, "rounds": args.rounds}
    common |= {"ceiling_bytes": 1 << 20 if args.quick else 0}
    if step in ("pages", "alone"):
        three = ("load", "store", "both")
        if step == "alone":
            common |= {"peers": ()}
        return [
            kv_bench.Plan(
                geometries=[Geometry("", args.layers, page)],
                blocks=[64] if page >= LARGE else [64, 256],
                directions=three,
                **common,
            )
            for page in pages
        ]
    if step == "scattered":
        geometries = [Geometry("", 1, page) for page in pages if page < LARGE]
        two = ("load", "store")
        return [kv_bench.Plan(geometries=geometries, blocks=[256], directions=two, **common)]
    if step == "tensors":
        common |= {"peers": ("batch", "batch32", "batch64")}
        return [
            kv_bench.Plan(
                geometries=[Geometry("", args.layers, page)],
                layouts=[layout],
                blocks=[64, 256],
                directions=("load", "store"),
                **common,
            )
            for layout in ("kv-apart", "tensors")
            for page in pages
            if page < LARGE
        ]
    if step == "submit":
        return [kv_bench.Plan(geometries=[MODELS["qwen2.5-0.5b"]], **common)]
    if step == "links":
        page = pages[-1] if args.quick else 64 << 10
        blocks = [(GIB if not args.quick else 1 << 20) // (args.layers * page)]
        common |= {"peers": ()}
        return [
            kv_bench.Plan(
                geometries=[Geometry("", args.layers, page)],
                layouts=[layout],
                blocks=blocks,
                directions=("load", "store"),
                links=list(range(1, count)) or None,
                **common,
            )
            for count in range(1, _core.gpus() + 1)
            for layout in ("contiguous", "layers")
        ]
    geometries = [Geometry("", args.layers, page) for page in (8 << 10, 64 << 10)]
    common |= {"peers": ("kernel",), "with_gemm": True}
    return [kv_bench.Plan(geometries=geometries, blocks=[64], directions=("load",), **common)]


def run_step(step: str, args: argparse.Namespace) -> int:
    """In the step's own process; a row a line to the file that the parent has named."""
    wrong = 0
    if step == "gemm" and torch_with_gpu() is None:
        print("gemm: there is no torch with a GPU")
        return 0
    if step == "links" and _core.gpus() == 1:
        print("links: there is no other GPU")
        return 0
    with Path(args.rows).open("a", encoding="utf-8") as out:
        for plan in plans(step, args):
            for row in kv_bench.run(plan):
                lent = {"lent": len(plan.links or ())} if step == "links" else {}
                out.write(dumps({"step": step} | lent | row))
                out.flush()
                wrong += row.get("wrong", 0)
    return 1 if wrong else 0


def command(step: str, args: argparse.Namespace) -> list[str]:
    if step == "check":
        jobs = ["--only", "jobs,streams", "--jobs", str(args.jobs)]
        return [sys.executable, str(FOLDER / "kv_check.py"), *jobs]
    if step == "calls":
        return [sys.executable, str(FOLDER / "kv_calls.py")]
    words = ["--quick"] if args.quick else []
    words += ["--pages", args.pages, "--rounds", str(args.rounds), "--layers", str(args.layers)]
    return [sys.executable, __file__, "--step", step, "--rows", str(args.rows), *words]


def share(row: Row) -> str:
    return f"{row['gbps']:6.1f} {100 * row['gbps'] / row['ceiling_gbps']:4.0f} %"


def ratio(ways: dict[str, Row], name: str) -> str:
    if name not in ways:
        return "     -"
    return f"{ways[name]['time_us'] / ways['offcore']['time_us']:5.2f}x"


def links_of(row: Row) -> str:
    """How many MiB each GPU's link carried."""
    return " + ".join(f"{nbytes >> 20}" for nbytes in row["links"].values())


def show(rows: list[Row]) -> None:
    """A line a case and direction."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        names = ("step", "page_bytes", "blocks", "direction", "layout", "lent")
        key = tuple(row.get(name) for name in names)
        groups.setdefault(key, {})[row["impl"]] = row
    if not groups:
        return
    print("step, page, blocks, direction: offcore GB/s and % of the ceiling; kernel; times as fast")
    print("as one batch, calls of 32, of 64, the loop; caller's us, thread's us; calls; GEMM's")
    print("slowdown, the kernel's")
    for (step, page, blocks, direction, layout, lent), ways in groups.items():
        own = ways["offcore"]
        kernel = share(ways["kernel"]) if "kernel" in ways else "-"
        calls = own["calls"]
        told = sum(calls[name] for name in ("batches", "plain", "strided", "kernels"))
        slow = [ways[name]["gemm_slowdown"] for name in ("offcore", "kernel") if name in ways]
        gemm = " ".join(f"{one:.3f}" for one in slow if one is not None)
        print(
            f"{step:>9} {format_bytes(page):>5} {blocks:4} {direction:>5} {share(own)} | "
            f"{kernel:>13} | {' '.join(ratio(ways, peer) for peer in BATCHES)} | "
            f"{own['submit_us']:6.1f} {own['enqueue_us']:7.1f} | {told:4} {gemm}"
            + (f" {layout}" if layout != "layers" else "")
            + (f": {links_of(own)}" if lent is not None else "")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(LIMITS_S), help="of " + ", ".join(LIMITS_S))
    parser.add_argument("--pages", default="8K,16K,32K,64K,256K", help="bytes of a layer's page")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=9, help="of which medians are taken")
    parser.add_argument("--jobs", type=int, default=200, help="random jobs of each layout")
    parser.add_argument("--quick", action="store_true", help="few bytes as ceiling and over links")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        return run_step(args.step, args)
    folder = Path(os.environ.get("OUT") or FOLDER / "results")
    final = folder / "cuda-kv.jsonl"
    args.rows = folder / "cuda-kv.rows"
    args.rows.write_text("", "utf-8")
    verdicts = []
    end = time.monotonic() + ALL_S
    for step in args.only.split(","):
        began = time.monotonic()
        print(f"== {step}", flush=True)
        limit_s = LIMITS_S[step] if step == "links" else min(LIMITS_S[step], max(1, end - began))
        try:
            done = subprocess.run(command(step, args), timeout=limit_s, check=False)
            verdict = "ok" if done.returncode == 0 else f"FAILED ({done.returncode})"
        except subprocess.TimeoutExpired:
            verdict = f"FAILED: more than {limit_s:.0f} s"
        verdicts.append(f"{step}: {verdict}, {time.monotonic() - began:.0f} s")
    stamp = asdict(Stamp())
    rows = [json.loads(line) for line in args.rows.read_text("utf-8").splitlines()]
    final.write_text("".join(dumps(row | stamp) for row in rows), "utf-8")
    args.rows.unlink()
    measured = [row for row in rows if "absent" not in row]
    show(measured)
    for row in rows:
        if "absent" in row:
            print(row["absent"])
    print(*verdicts, sep="\n")
    wrong = sum(row["wrong"] for row in measured)
    failed = sum("FAILED" in verdict for verdict in verdicts)
    print(f"{len(measured)} rows, {wrong} wrong bytes, {failed} steps failed: {final}")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
