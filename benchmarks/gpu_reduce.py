"""Reductions of plain torch tensors on this machine's GPUs, one process a GPU: checked to the bit,
and timed beside NCCL's kernels.

    python benchmarks/gpu_reduce.py --check 2000
    python benchmarks/gpu_reduce.py --measure
    python benchmarks/gpu_reduce.py --measure --sms 8 --ctas 8 --sizes 256M

The package must be importable (PYTHONPATH=build/gpu/site after h200_check.py --only build). Times
are of calls in a stream whose work is enqueued ahead (`ours`), of replays of a graph of 20 calls
(`graph`), NCCL's the same, and of calls that the host makes one after another (`calls`). `torch`:
its _low_contention_reduce_scatter of symmetric memory, enqueued ahead. Medians, of the slower rank,
in us. S is the whole array; NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

import offcore.torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
OPS = ("sum", "avg", "premul_sum", "min", "max")
CALLS = 20


def parsed(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def oracle(inputs: list[torch.Tensor], op: str, scale: float) -> torch.Tensor:
    """In rank order, in fp32 (fp64, int64), rounded once."""
    dtype = inputs[0].dtype
    wide = torch.int64 if not dtype.is_floating_point else torch.float32
    wide = torch.float64 if dtype == torch.float64 else wide
    values = [one.to(wide) for one in inputs]
    factor = torch.tensor(scale, dtype=wide, device=inputs[0].device)
    total = values[0] * factor if op == "premul_sum" else values[0].clone()
    for value in values[1:]:
        if op == "min":
            total = torch.minimum(total, value)
        elif op == "max":
            total = torch.maximum(total, value)
        else:
            total = total + (value * factor if op == "premul_sum" else value)
    if op == "avg":
        count = len(inputs)
        total = (
            total / count if dtype.is_floating_point else total.div(count, rounding_mode="trunc")
        )
    return total.to(dtype)


def filled(count: int, name: str, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[name]
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(count, generator=generator, device=device, dtype=wide).to(dtype)
    kind = torch.iinfo(dtype)
    low, high = max(kind.min, -(1 << 40)), min(kind.max, 1 << 40)
    return torch.randint(low, high + 1, (count,), generator=generator, device=device).to(dtype)


def at_offset(
    pool: torch.Tensor, count: int, name: str, rng: random.Random, device: torch.device
) -> torch.Tensor:
    """Plain memory or the window's, at an aligned or an odd element."""
    shift = rng.choice([0, 0, 1, 3, 8])
    dtype = DTYPES[name]
    if rng.random() < 0.3:
        size = dtype.itemsize
        return pool[shift * size : (shift + count) * size].view(dtype)
    return torch.empty(count + shift, dtype=dtype, device=device)[shift:]


def one_check(
    comm: Any, pools: list[torch.Tensor], rng: random.Random, device: torch.device, captured: bool
) -> None:
    ranks, rank = comm.ranks, dist.get_rank()
    op, name = rng.choice(OPS), rng.choice(list(DTYPES))
    call = rng.choice(["all_reduce", "reduce_scatter", "reduce_scatter_v", "reduce"])
    count = rng.choice([0, 1, 5, 1000, 70_001, 1 << 20, 3_000_017, 9 << 20])
    scale = 1.0
    if op == "premul_sum":
        scale = 3.0 if name.startswith(("int", "uint")) else 0.3
    counts = [count] * ranks
    if call == "reduce_scatter_v":
        counts = [rng.randrange(count + 1) for _ in range(ranks)]
    whole = sum(counts) if call.startswith("reduce_scatter") else count
    seed = rng.randrange(1 << 30)
    inputs = [filled(whole, name, seed + peer, device) for peer in range(ranks)]
    wanted = oracle(inputs, op, scale)
    inp = at_offset(pools[0], whole, name, rng, device)
    inp.copy_(inputs[rank])
    in_place = call == "all_reduce" and rng.random() < 0.5
    out = (
        inp
        if in_place
        else at_offset(pools[1], counts[rank] if call[-1] in "vr" else count, name, rng, device)
    )
    root = rng.randrange(ranks)
    arguments: list[Any] = [out, None if in_place else inp]
    if call == "reduce_scatter_v":
        arguments.append(counts)
    if call == "reduce" and rank != root:
        arguments[0] = None
    extra = {"root": root} if call == "reduce" else {}

    def start() -> Any:
        return getattr(comm, call)(*arguments, op, scale=scale, **extra)

    if captured and not in_place and whole > 0:
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            start()
        for _ in range(3):
            if arguments[0] is not None:
                out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            comm.barrier()
    else:
        start().wait()
    begin = sum(counts[:rank]) if call.startswith("reduce_scatter") else 0
    if call == "reduce" and rank != root:
        return
    part = wanted[begin : begin + out.numel()]
    view = torch.int8 if out.element_size() == 1 else None
    same = torch.equal(out, part) if view is None else torch.equal(out.view(view), part.view(view))
    if not same:
        wrong = int((out != part).sum())
        raise SystemExit(f"{call} {op} {name} {counts}: {wrong} wrong of {out.numel()} at {rank}")


def check(comm: Any, number: int, device: torch.device, eager: bool) -> None:
    rng = random.Random(1)
    pools = [comm.empty((300 << 20,), torch.uint8) for _ in range(2)]
    began = time.monotonic()
    for index in range(number):
        one_check(comm, pools, rng, device, captured=not eager and index % 10 == 9)
    if dist.get_rank() == 0:
        print(f"{number} reductions without a wrong bit in {time.monotonic() - began:.0f} s")


def slowest(us: float, device: torch.device) -> float:
    value = torch.tensor([us], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def timed(
    run: Callable[[], Any],
    device: torch.device,
    cycles: int,
    turns: int = 7,
    *,
    warm: int = 0,
    runs: int = 1,
) -> float:
    """us of one of CALLS, enqueued behind a kernel that sleeps so long. warm: runs that are not
    timed, in which the ranks fall into step."""
    times = []
    for _ in range(turns):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cycles:
            torch.cuda._sleep(cycles)
        for _ in range(warm):
            run()
        first.record()
        for _ in range(runs):
            run()
        last.record()
        torch.cuda.synchronize()
        times.append(slowest(first.elapsed_time(last) * 1e3 / (runs * CALLS), device))
    return sorted(times)[len(times) // 2]


def graph_of(start: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            start()
    replay: Callable[[], None] = graph.replay
    return replay


def join_ranks() -> torch.device:
    """This process's GPU, with torch.distributed on NCCL."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = f"file://{os.environ['MEETING']}"
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=ranks, device_id=device
    )
    return device


def run_ranks(ranks: int, settings: dict[str, str]) -> int:
    """This script again, in a process a rank that join_ranks() lets meet; the worst exit status."""
    shared = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    shared |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        shared["MEETING"] = f"{folder}/store"
        command = [sys.executable, *sys.argv]
        processes = [
            subprocess.Popen(command, env={**os.environ, **shared, **settings, "RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            codes = [one.wait(550) for one in processes]
        finally:
            for one in processes:
                one.kill()
    return max(codes, key=abs)


def print_row(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        row = {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(row), flush=True)


def low_contention(count: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """CALLS of torch's reduce-scatter by copies and a kernel that sums them."""
    x = symmetric.empty(count, dtype=dtype, device=device).zero_()
    name = dist.group.WORLD.group_name
    symmetric.rendezvous(x, name)
    start = torch.ops.symm_mem._low_contention_reduce_scatter

    def calls() -> None:
        for _ in range(CALLS):
            torch.ops._c10d_functional.wait_tensor(start(x, "sum", name))

    return calls


def measure(comm: Any, arguments: argparse.Namespace, device: torch.device) -> None:
    stream = torch.cuda.Stream()
    ranks = comm.ranks
    for size in map(parsed, arguments.sizes.split(",")):
        dtype = DTYPES[arguments.dtype]
        count = size // dtype.itemsize
        x = torch.zeros(count, dtype=dtype, device=device)
        part = torch.empty(count // ranks, dtype=dtype, device=device)
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "reduce_scatter": (
                partial(comm.reduce_scatter, part, x),
                partial(dist.reduce_scatter_tensor, part, x),
            ),
            "all_reduce": (partial(comm.all_reduce, x), partial(dist.all_reduce, x)),
        }
        for op, (ours, theirs) in pairs.items():
            if arguments.op not in ("all", op):
                continue
            row: dict[str, Any] = {"op": op, "dtype": arguments.dtype, "bytes": size}
            with torch.cuda.stream(stream):
                result = ours().wait()
                for _ in range(3):
                    ours()
                    theirs()
                torch.cuda.synchronize()
                row |= {"sms": result.sms, "variant": result.variant, "commands": result.commands}

                def calls(run: Callable[[], Any] = ours) -> None:
                    for _ in range(CALLS):
                        run()

                row["ours"] = timed(calls, device, 12_000_000)
                row["calls"] = timed(calls, device, 0)
                if not arguments.eager:
                    row["graph"] = timed(graph_of(ours, stream), device, 2_000_000)
                row["nccl"] = timed(graph_of(theirs, stream), device, 2_000_000)
                if op == "reduce_scatter" and arguments.torch:
                    peer = low_contention(count, dtype, device)
                    peer()
                    row["torch"] = timed(peer, device, 12_000_000)
            print_row(row)


def rank_main(arguments: argparse.Namespace) -> None:
    device = join_ranks()
    with offcore.torch.Communicator(sms=arguments.sms, timeout=20) as comm:
        if arguments.check:
            check(comm, arguments.check, device, arguments.eager)
        if arguments.measure:
            measure(comm, arguments, device)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", type=int, default=0, metavar="N", help="random reductions")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--op", default="all")
    parser.add_argument("--torch", action="store_true", help="torch's reduce-scatter too")
    parser.add_argument("--eager", action="store_true", help="leave graphs out")
    parser.add_argument("--sizes", default="4K,64K,256K,1M,4M,16M,64M,256M,1G")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of --measure")
    parser.add_argument("--sms", type=int, default=12)
    parser.add_argument("--ctas", type=int, default=0, help="NCCL's, at most; 0: its default")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return 0
    limits = {"NCCL_MAX_CTAS": str(arguments.ctas)} if arguments.ctas else {}
    return run_ranks(arguments.ranks, limits)


if __name__ == "__main__":
    sys.exit(main())
