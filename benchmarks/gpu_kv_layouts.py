"""Measures transfers of KV caches as engines allocate them, on one GPU, beside all peers, in turns.

    python benchmarks/gpu_kv_layouts.py                # 150 s at most
    python benchmarks/gpu_kv_layouts.py --seconds 40   # the first cases only

Cases, each tensor an allocation of its own of 64 MiB or more: `kv-apart`, a tensor a layer with K
and V apart (vLLM 0.26); `kv-tensors`, K and V in tensors of their own (transformers); `tensors`, a
tensor a layer; and in one allocation `layers` (vLLM 0.33) and `contiguous`. Ways: offcore as it is
(`offcore`), without SMs (`zero-sm`), packed by 2 and 8 SMs, its kernel of 16 blocks; one batch call
of all pages, calls of 32, copies one by one; torch's index_select and a copy a tensor. `gemm`: how
much a product of matrices of 8192 slows down meanwhile. Every byte is checked.
Each step is a process of its own. Rows go to $OUT/cuda-kv-layouts.jsonl where OUT is set, else to
benchmarks/results; the table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_steps import run_step

from offcore.sizes import format_bytes
from offcore.tools.kv import bench
from offcore.tools.kv.models import Geometry
from offcore.tools.report import Stamp, dumps

FOLDER = Path(__file__).parent
SECONDS = 150.0
KIB = 1 << 10
KERNEL_SMS = 16
BY_ENGINES = ("batch", "batch32", "loop")
ALL = ("zero-sm", "packed-2", "packed-8", "kernel", *BY_ENGINES, "torch")
FEW = ("zero-sm", "kernel", "batch32", "torch")
Row = dict[str, Any]
# Layout, KiB of a layer's page (K and V together), layers, blocks, peers: what matters first.
CASES = [
    ("kv-apart", 16, 28, 64, ALL),
    ("kv-apart", 32, 28, 64, ALL),
    ("kv-apart", 64, 32, 64, ALL),
    ("kv-apart", 16, 28, 256, ALL),
    ("kv-apart", 32, 28, 256, FEW),
    ("kv-apart", 64, 32, 256, FEW),
    ("kv-tensors", 32, 28, 64, FEW),
    ("tensors", 32, 28, 64, FEW),
    ("layers", 16, 28, 64, FEW),
    ("layers", 64, 28, 64, FEW),
    ("contiguous", 32, 28, 64, FEW),
]
GEMM_AFTER = 4  # cases


def plans(args: argparse.Namespace) -> Iterator[tuple[str, bench.Plan]]:
    for number, (layout, page, layers, blocks, peers) in enumerate(CASES):
        common: dict[str, Any] = {"backend": "cuda", "layouts": [layout], "rounds": args.rounds}
        shape = {"geometries": [Geometry("", layers // args.smaller, page * KIB)]}
        if number == GEMM_AFTER and args.gemm:
            gemm = {"peers": ("zero-sm", "kernel"), "with_gemm": True, "blocks": [64]}
            yield "gemm", bench.Plan(directions=("load", "store"), **common | shape | gemm)
        named = {"blocks": [blocks // args.smaller], "peers": peers}
        directions = ("load", "store") if args.smaller > 1 else ("store", "load")
        yield "alone", bench.Plan(directions=directions, **common | shape | named)
    page = {"geometries": [Geometry("", 28 // args.smaller, 32 * KIB)], "blocks": [64]}
    kinds = {"layouts": ["kv-apart"], "peers": FEW[:-1], "rounds": args.rounds}
    yield "alone", bench.Plan(backend="cuda", directions=("both",), **page | kinds)


def measure(args: argparse.Namespace) -> int:
    """In a process of its own: a row a line to the file that the parent has named."""
    end = time.monotonic() + args.seconds
    wrong = 0
    with Path(args.rows).open("a", encoding="utf-8") as out:
        for step, plan in plans(args):
            if time.monotonic() > end:
                print("no time is left for further cases")
                break
            for row in bench.run(plan):
                out.write(dumps({"step": step} | row))
                out.flush()
                wrong += row.get("wrong", 0)
    return 1 if wrong else 0


def ratio(ways: dict[str, Row], names: tuple[str, ...], own: str) -> str:
    """How many times as fast as the best of these."""
    times = [ways[name]["time_us"] for name in names if name in ways]
    return f"{min(times) / ways[own]['time_us']:5.2f}" if times and own in ways else "    -"


def rate(ways: dict[str, Row], name: str) -> str:
    return f"{ways[name]['gbps']:5.1f}" if name in ways else "    -"


def sm_ms(row: Row) -> float:
    """SM-milliseconds a GB."""
    busy = row["sm_ms"] or 0.0
    if row["impl"] == "kernel":
        busy = KERNEL_SMS * row["time_us"] / 1e3
    return float(busy / row["bytes"] * 1e9)


def show(rows: list[Row]) -> None:
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        names = ("step", "layout", "page_bytes", "blocks", "direction")
        groups.setdefault(tuple(row[name] for name in names), {})[row["impl"]] = row
    print(
        "GB/s: auto, zero-SM, packed by 2, by 8, kernel, one batch, calls of 32, one by one, torch"
    )
    print("then auto's % of the link and path, auto : torch, auto : all peers, zero-SM : engines;")
    print("us to submit; SM-ms a GB, the kernel's; slowdown of a GEMM: auto, zero-SM, kernel")
    for (step, layout, page, blocks, direction), ways in groups.items():
        own = ways["offcore"]
        rates = " ".join(rate(ways, name) for name in ("offcore", *ALL))
        peers = ("kernel", *BY_ENGINES, "torch")
        kernel = f"{sm_ms(ways['kernel']):4.0f}" if "kernel" in ways else "   -"
        gemm = ""
        if step == "gemm":
            names = [name for name in ("offcore", "zero-sm", "kernel") if name in ways]
            gemm = " gemm " + " ".join(f"{ways[name]['gemm_slowdown']:.3f}" for name in names)
        print(
            f"{layout:>10} {format_bytes(page):>4} {blocks:4} {direction:>5} {rates} | "
            f"{100 * own['gbps'] / own['ceiling_gbps']:3.0f} % {own['path'][:6]:>6} "
            f"{ratio(ways, ('torch',), 'offcore')} {ratio(ways, peers, 'offcore')} "
            f"{ratio(ways, BY_ENGINES, 'zero-sm')} | {own['submit_us']:5.0f} "
            f"{sm_ms(own):4.0f} {kernel}{gemm}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no case begins")
    parser.add_argument("--rounds", type=int, default=9, help="of which medians are taken")
    parser.add_argument("--smaller", type=int, default=1, help="a share of the layers and blocks")
    parser.add_argument("--no-gemm", dest="gemm", action="store_false")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows:
        return measure(args)
    folder = Path(os.environ.get("OUT") or FOLDER / "results")
    final, found = folder / "cuda-kv-layouts.jsonl", folder / "cuda-kv-layouts.rows"
    found.write_text("", "utf-8")
    began = time.monotonic()
    words = [*sys.argv[1:], "--rows", str(found.resolve())]
    ended = run_step([sys.executable, __file__, *words], FOLDER, args.seconds + 60)
    stamp = asdict(Stamp())
    rows = [json.loads(line) for line in found.read_text("utf-8").splitlines()]
    final.write_text("".join(dumps(row | stamp) for row in rows), "utf-8")
    found.unlink()
    measured = [row for row in rows if "absent" not in row]
    show(measured)
    for text in dict.fromkeys(row["absent"] for row in rows if "absent" in row):
        print(text)
    wrong = sum(row["wrong"] for row in measured)
    took = time.monotonic() - began
    print(f"{len(measured)} rows, {wrong} wrong bytes, ended with {ended}, {took:.0f} s: {final}")
    return 1 if wrong or ended != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
