"""All-gathers and all-to-alls of torch tensors by where they lie, one process a GPU, beside NCCL.

    python benchmarks/gpu_tensors.py
    python benchmarks/gpu_tensors.py --op all_to_all --sizes 64M,1G --variants auto,pcpy

Out of place: both tensors in window memory (`window`), registered (`held`) or plain, in whatever
torch's allocator gave (`plain`), each as VARIANT says; NCCL's kernels on the same plain tensors.
Times are of calls in a stream whose work is enqueued ahead, and NCCL's of replays of a graph of 5
calls; medians, of the slower rank, in us. S is the whole output array of a rank. Every output is
compared with NCCL's, byte by byte. NVLink multicast is off. The package must be importable
(PYTHONPATH=build/gpu/site after h200_check.py --only build).
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_reduce import CALLS, graph_of, join_ranks, parsed, print_row, run_ranks, timed

import offcore
import offcore.torch

THEIRS = {"all_gather": dist.all_gather_into_tensor, "all_to_all": dist.all_to_all_single}


class Tensors:
    """What one size of one operation is measured with."""

    def __init__(self, comm: Any, op: str, size: int, device: torch.device) -> None:
        self.comm, self.op, self.device = comm, op, device
        self.given = size // comm.ranks if op == "all_gather" else size
        self.inp = torch.randint(256, (self.given,), dtype=torch.uint8, device=device)
        self.wanted = torch.empty(size, dtype=torch.uint8, device=device)
        THEIRS[op](self.wanted, self.inp)
        torch.cuda.synchronize()

    def pair(self, place: str) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        if place == "window":
            out = self.comm.empty((self.wanted.numel(),), torch.uint8)
            inp = self.comm.empty((self.given,), torch.uint8)
        else:
            out, inp = torch.empty_like(self.wanted), torch.empty_like(self.inp)
        held = [self.comm.register(out), self.comm.register(inp)] if place == "held" else []
        inp.copy_(self.inp)
        out.zero_()
        torch.cuda.synchronize()
        return out, inp, held

    def ours(self, place: str, variant: str) -> dict[str, Any]:
        out, inp, held = self.pair(place)
        run = partial(getattr(self.comm, self.op), out, inp, variant=variant)
        try:
            result = run().wait()
            for _ in range(2):
                run()
            torch.cuda.synchronize()

            def calls() -> None:
                for _ in range(CALLS):
                    run()

            us = timed(calls, self.device, 8_000_000)
            wrong = int((out != self.wanted).sum())
        finally:
            for one in held:
                one.close()
        told = {"place": place, "asked": variant, "us": us, "wrong": wrong}
        told |= {"variant": result.variant, "staged": result.staged}
        return told | {"slot_bytes": result.slot_bytes, "registered": result.registered}

    def nccl(self, stream: torch.cuda.Stream) -> float:
        out = torch.empty_like(self.wanted)
        run = partial(THEIRS[self.op], out, self.inp)
        for _ in range(3):
            run()
        return timed(graph_of(run, stream), self.device, 1_000_000)


def measure(comm: Any, arguments: argparse.Namespace, device: torch.device) -> None:
    stream = torch.cuda.Stream()
    for op in arguments.op.split(","):
        for size in map(parsed, arguments.sizes.split(",")):
            tensors = Tensors(comm, op, size, device)
            with torch.cuda.stream(stream):
                nccl = tensors.nccl(stream)
                for place in arguments.places.split(","):
                    for variant in arguments.variants.split(","):
                        if place != "plain" and variant.startswith("pipelined"):
                            continue
                        row: dict[str, Any] = {"op": op, "bytes": size}
                        try:
                            row |= tensors.ours(place, variant)
                        except offcore.Error as error:
                            row |= {"place": place, "asked": variant, "error": str(error)[:200]}
                        print_row(row | {"nccl": nccl})
            torch.cuda.empty_cache()


def rank_main(arguments: argparse.Namespace) -> None:
    device = join_ranks()
    with offcore.torch.Communicator(timeout=20) as comm:
        measure(comm, arguments, device)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--op", default="all_gather,all_to_all")
    parser.add_argument("--sizes", default="1M,4M,16M,64M,256M,1G")
    parser.add_argument("--places", default="window,held,plain")
    parser.add_argument("--variants", default="auto")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return 0
    return run_ranks(arguments.ranks, {})


if __name__ == "__main__":
    sys.exit(main())
