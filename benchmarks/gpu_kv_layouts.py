"""Measures transfers of KV caches as engines allocate them, on one GPU, beside all peers, in turns.

    python benchmarks/gpu_kv_layouts.py           # 345 s at most
    python benchmarks/gpu_kv_layouts.py --quick   # 145 s at most: the first cases, fewer peers

Cases, each tensor an allocation of its own of 64 MiB or more: `kv-apart`, a tensor a layer with K
and V apart (vLLM 0.26); `kv-tensors`, K and V in tensors of their own (transformers); `tensors`, a
tensor a layer; in one allocation `layers` (vLLM 0.33) and `contiguous`; and with rows as engines
have them on the host, `page-first` (SGLang) and `chunks` (LMCache). Ways: offcore as it is
(`offcore`), without SMs (`zero-sm`), packed by 2, 4 and 8 SMs, its kernel of 16 blocks; one batch
call of all pages, calls of 32, 64 and 256, copies one by one; torch's index_select and a copy a
tensor; batch_copy, as the adapter of LMCache uses it. Steps, each a process of its own: `alone`;
`segments`, the same from torch's expandable segments (* in the table); `pool`, from kv.cache_pool()
(+); `adopted`, in VMM memory at unequal steps, which transfers map again (=, or ! where they did
not); `gemm`, how much a product of matrices of 8192 slows down meanwhile; then random jobs of all
layouts and policies (kv_check.py).
Every byte is checked.
Rows go to $OUT/cuda-kv-layouts.jsonl where OUT is set, else to benchmarks/results; the table comes
last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_steps import run_step

from offcore import kv
from offcore.sizes import format_bytes
from offcore.tools.kv import bench
from offcore.tools.kv.models import Geometry
from offcore.tools.report import Stamp, dumps

FOLDER = Path(__file__).parent
KIB = 1 << 10
KERNEL_SMS = 16
BY_ENGINES = ("batch", "batch32", "batch64", "batch256", "loop")
PACKED = ("packed-2", "packed", "packed-8")
ALL = ("zero-sm", *PACKED, "kernel", *BY_ENGINES, "torch")
FEW = ("zero-sm", "packed", "kernel", "batch32", "batch64", "batch256", "torch")
OWN = ("zero-sm", "packed")
Row = dict[str, Any]
# Layout, KiB of a layer's page (K and V together), layers, blocks, peers: what matters first.
CASES = [
    ("kv-apart", 16, 28, 64, ALL),
    ("kv-apart", 64, 32, 256, ALL),
    ("kv-apart", 32, 28, 64, ALL),
    ("kv-apart", 64, 32, 64, ALL),
    ("kv-apart", 32, 28, 256, FEW),
    ("kv-apart", 16, 28, 256, ALL),
    ("kv-tensors", 32, 28, 64, FEW),
    ("tensors", 32, 28, 64, FEW),
    ("layers", 16, 28, 64, FEW),
    ("layers", 64, 28, 64, FEW),
    ("contiguous", 32, 28, 64, FEW),
    ("page-first", 32, 28, 64, (*FEW, "batch-copy")),
    ("chunks", 32, 28, 64, (*FEW, "batch-copy")),
    ("tensors", 128, 28, 64, OWN),
    ("layers", 32, 28, 256, OWN),
    ("layers", 128, 28, 64, OWN),
    ("tensors", 256, 28, 64, OWN),
    ("tensors", 32, 28, 16, OWN),
]
QUICK = 3  # cases
SEGMENTS = "expandable_segments:True"
MEMORIES = {"segments": "*", "pool": "+", "adopted": "="}  # other than torch's usual one
LAYERS_MAX = 32


@dataclass(frozen=True)
class Step:
    """A process: its name, when the last case but the first may begin, and when it is ended."""

    name: str
    seconds: float
    limit_s: float


STEPS = [
    Step("alone", 95, 140),
    *(Step(name, 12, 35) for name in MEMORIES),
    Step("gemm", 15, 40),
]
# What they measure bounds them; what ends them leaves a slow host's processes time to begin.
QUICK_STEPS = [
    Step("alone", 55, 55),
    Step("pool", 22, 22),
    Step("adopted", 22, 22),
    Step("gemm", 22, 22),
]
RANDOM_LIMIT_S, RANDOM_QUICK_LIMIT_S = 60.0, 24.0


def plans(args: argparse.Namespace) -> Iterator[bench.Plan]:
    common: dict[str, Any] = {"backend": args.backend, "rounds": args.rounds}

    def shape(layout: str, page: int, layers: int, blocks: int) -> dict[str, Any]:
        geometries = [Geometry("", max(1, layers // args.smaller), page * KIB)]
        return {
            "layouts": [layout],
            "geometries": geometries,
            "blocks": [max(1, blocks // args.smaller)],
        }

    if args.step == "gemm":
        gemm = {"peers": (*OWN, "kernel"), "with_gemm": args.smaller == 1}
        for page in (32,) if args.quick else (32, 64):
            case = shape("kv-apart", page, 28, 64)
            yield bench.Plan(directions=("load", "store"), **common | case | gemm)
        return
    cases = CASES[: QUICK if args.quick else None]
    if args.step in MEMORIES:
        cases = [("kv-apart", 32, 28, 64, FEW), ("kv-apart", 64, LAYERS_MAX, 256, FEW)]
        cases = cases[: 1 if args.quick else None]
    for layout, page, layers, blocks, peers in cases:
        case = shape(layout, page, layers, blocks)
        peers = FEW if args.quick else peers
        yield bench.Plan(directions=("store", "load"), peers=peers, **common | case)
    if args.step == "alone":
        case = shape("kv-apart", 32, 28, 64)
        peers = (*OWN, "kernel", "batch32")
        yield bench.Plan(directions=("both",), peers=peers, **common | case)


@contextlib.contextmanager
def memory(args: argparse.Namespace) -> Iterator[None]:
    """Where torch's tensors come from meanwhile."""
    if args.step not in ("pool", "adopted") or args.backend != "cuda":
        yield
        return
    import torch

    with torch.cuda.use_mem_pool(kv.cache_pool()):
        kept, holes = [], []
        # Holes for tensors of 64 MiB, no two of them as far apart, which torch gives out next.
        for number in range(LAYERS_MAX + 2 if args.step == "adopted" else 0):
            holes.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
            kept.append(torch.empty(20 + 2 * number << 20, dtype=torch.uint8, device="cuda"))
        holes.clear()
        yield
        kept.clear()


def measure(args: argparse.Namespace) -> int:
    """In a process of its own: a row a line to the file that the parent has named."""
    end = time.monotonic() + args.seconds
    wrong = 0
    with memory(args), Path(args.rows).open("a", encoding="utf-8") as out:
        for number, plan in enumerate(plans(args)):
            if number > 0 and time.monotonic() > end:
                print(f"{args.step}: no time is left for further cases")
                break
            for row in bench.run(plan):
                out.write(dumps({"step": args.step} | row))
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
    print("GB/s: auto, zero-SM, packed by 2, 4, 8, kernel, one batch, calls of 32, 64, 256,")
    print("single, torch, batch_copy | auto's % of the link, path, times as fast as torch,")
    print("as all peers; zero-SM / best batch peer | us to submit; SM-ms a GB, the kernel's;")
    print("slowdown of GEMMs: auto, zero-SM, packed, kernel, one contiguous copy")
    for (step, layout, page, blocks, direction), ways in groups.items():
        own = ways["offcore"]
        layout += MEMORIES.get(step, "") if step != "adopted" or own["adopted"] else "!"
        rates = " ".join(rate(ways, name) for name in ("offcore", *ALL, "batch-copy"))
        peers = ("kernel", *BY_ENGINES, "torch", "batch-copy")
        kernel = f"{sm_ms(ways['kernel']):4.0f}" if "kernel" in ways else "   -"
        gemm = ""
        if own["gemm_slowdown"] is not None:
            shown = [name for name in ("offcore", *OWN, "kernel") if name in ways]
            slower = [ways[name]["gemm_slowdown"] for name in shown]
            slower.append(own["ceiling_gemm_slowdown"])
            gemm = " gemm " + " ".join(f"{one:.3f}" for one in slower)
        print(
            f"{layout:>11} {format_bytes(page):>4} {blocks:4} {direction:>5} {rates} | "
            f"{100 * own['gbps'] / own['ceiling_gbps']:3.0f}% {own['path'][:6]:>6} "
            f"{ratio(ways, ('torch',), 'offcore')} {ratio(ways, peers, 'offcore')} "
            f"{ratio(ways, BY_ENGINES, 'zero-sm')} | {own['submit_us']:5.0f} "
            f"{sm_ms(own):4.0f} {kernel}{gemm}"
        )


def run_steps(args: argparse.Namespace, rows: Path) -> list[int | str]:
    """How each has ended."""
    own = [sys.executable, __file__, "--rows", str(rows.resolve()), *sys.argv[1:]]
    ended = []
    for step in QUICK_STEPS if args.quick else STEPS:
        more = {"PYTORCH_CUDA_ALLOC_CONF": SEGMENTS} if step.name == "segments" else {}
        words = [*own, "--step", step.name, "--seconds", str(step.seconds)]
        ended.append(run_step(words, FOLDER, step.limit_s, os.environ | more))
    jobs = max(20, (200 if args.quick else args.random) // 5)  # of each of five layouts
    words = ["--only", "jobs", "--jobs", str(jobs), "--backend", args.backend]
    check = [sys.executable, str(FOLDER / "kv_check.py"), *words]
    limit_s = RANDOM_QUICK_LIMIT_S if args.quick else RANDOM_LIMIT_S
    return [*ended, run_step(check, FOLDER, limit_s)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=9, help="of which medians are taken")
    parser.add_argument("--random", type=int, default=1000, help="jobs")
    parser.add_argument("--smaller", type=int, default=1, help="a share of the layers and blocks")
    parser.add_argument("--backend", default="cuda", help="cuda or host")
    for name, kind in (("--rows", str), ("--step", str), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        return measure(args)
    folder = Path(os.environ.get("OUT") or FOLDER / "results")
    final, found = folder / "cuda-kv-layouts.jsonl", folder / "cuda-kv-layouts.rows"
    found.write_text("", "utf-8")
    began = time.monotonic()
    ended = run_steps(args, found)
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
    return 1 if wrong or any(ended) else 0


if __name__ == "__main__":
    sys.exit(main())
