"""MoE-like dispatch between two GPUs: tokens whose counts only the GPUs know, a process a GPU.

    timeout 120 python benchmarks/gpu_dispatch.py --json FILE

offcore     all_to_all_v(counts_on_device=True): no host reads the counts.
nccl        all_to_all_single of the counts, `.cpu()` of both, then all_to_all_single of the tokens:
            what torch offers for such counts.

Rows of 7168 bytes (fp8). Counts differ with every call. Microseconds a call as the host sees it,
from the call to the end of the stream, median of --calls; and `stream`, from event to event. Both
write every row, and each call's every byte is compared with what was sent, in calls of their own.
The exit status is 0 where all was right. --backend host tries it without GPUs, and without NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offcore
import offcore.torch

WORLD = 2
ROW = 7168
TOKENS = (64, 256, 1024, 4096, 8192)
CHECKS = 10


class Rank:
    def __init__(self, rank: int, given: argparse.Namespace) -> None:
        self.rank, self.given, self.failures = rank, given, 0
        self.gpu = given.backend == "cuda"
        self.device = torch.device("cuda", rank) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(rank)
            self.comm: Any = offcore.torch.Communicator(timeout=20)
        else:
            store = f"127.0.0.1:{given.port + 1}"
            self.comm = offcore.Communicator(
                backend="host", store=store, rank=rank, world_size=WORLD, timeout=20
            )
        most = max(given.tokens)
        shape = most * WORLD, ROW
        if self.gpu:
            self.out, self.inp = (self.comm.empty(shape, torch.uint8) for _ in range(2))
        else:
            self.out, self.inp = (torch.from_numpy(self.comm.empty(shape)) for _ in range(2))
        self.counts = torch.zeros(WORLD, dtype=torch.int64, device=self.device)
        self.received = torch.zeros_like(self.counts)
        self.random = torch.Generator().manual_seed(7)

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def matrix(self, tokens: int) -> torch.Tensor:
        """The same on all ranks: each sends all of its tokens, to one rank or the other."""
        first = torch.randint(0, tokens + 1, (WORLD, 1), generator=self.random)
        return torch.cat([first, tokens - first], 1)

    def fill(self, tokens: int, turn: int, rank: int) -> torch.Tensor:
        at = torch.arange(tokens * ROW, device=self.device, dtype=torch.int64)
        return ((at * 31 + rank * 101 + turn * 7 + at // ROW) % 251).to(torch.uint8).view(-1, ROW)

    def offcore(self, tokens: int) -> None:
        handle = self.comm.all_to_all_v(
            self.out, self.inp, self.counts, counts_on_device=True, received=self.received
        )
        if not self.gpu:
            handle.wait()

    def nccl(self, tokens: int) -> None:
        dist.all_to_all_single(self.received, self.counts)
        sent, got = torch.stack([self.counts, self.received]).cpu().tolist()
        out, inp = self.out[: sum(got)], self.inp[: sum(sent)]
        dist.all_to_all_single(out, inp, got, sent)

    def check(self, what: str, call: Callable[[int], None], tokens: int) -> None:
        wrong = 0
        for turn in range(CHECKS):
            matrix = self.matrix(tokens)
            self.counts.copy_(matrix[self.rank])
            self.inp[:tokens] = self.fill(tokens, turn, self.rank)
            self.out.fill_(255)
            call(tokens)
            self.wait()
            place = 0
            for source in range(WORLD):
                first = int(matrix[source][: self.rank].sum())
                count = int(matrix[source][self.rank])
                wanted = self.fill(tokens, turn, source)[first : first + count]
                wrong += int((self.out[place : place + count] != wanted).sum())
                wrong += int(self.received[source]) != count
                place += count
            wrong += int((self.out[place:] != 255).sum())
        if wrong:
            self.failures += 1
            print(f"rank {self.rank}: {what}, {tokens} tokens: {wrong} wrong bytes", flush=True)

    def measure(self, what: str, call: Callable[[int], None], tokens: int) -> None:
        spans, streams = [], []
        if self.gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.given.calls + 5):
            self.counts.copy_(self.matrix(tokens)[self.rank])
            self.wait()
            dist.barrier()
            self.wait()
            began = time.perf_counter_ns()
            if self.gpu:
                begin.record()
            call(tokens)
            if self.gpu:
                end.record()
            self.wait()
            spans.append((time.perf_counter_ns() - began) / 1e3)
            streams.append(begin.elapsed_time(end) * 1e3 if self.gpu else spans[-1])
        row = {"what": "dispatch", "engine": what, "tokens": tokens, "bytes": tokens * ROW}
        row |= {"us": statistics.median(spans[5:]), "stream_us": statistics.median(streams[5:])}
        if self.rank == 0:
            with self.given.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            told = f"{row['us']:9.1f} us {row['stream_us']:9.1f} us in the stream"
            print(f"{what:<8} {tokens:>6} tokens {told}", flush=True)

    def all(self) -> int:
        calls = (
            {"offcore": self.offcore, "nccl": self.nccl} if self.gpu else {"offcore": self.offcore}
        )
        for tokens in self.given.tokens:
            for what, call in calls.items():
                self.check(what, call, tokens)
                self.measure(what, call, tokens)
        return self.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-dispatch.jsonl"))
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--limit-s", type=float, default=110)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        backend = "nccl" if given.backend == "cuda" else "gloo"
        where = f"tcp://127.0.0.1:{given.port}"
        dist.init_process_group(backend, where, rank=given.rank, world_size=WORLD)
        failures = Rank(given.rank, given).all()
        dist.barrier()
        os._exit(failures > 0)
    given.json.write_text("", "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"CUDA_MODULE_LOADING": "EAGER", "NCCL_NVLS_ENABLE": "0"}
    command = [sys.executable, *sys.argv, "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(WORLD)]
    try:
        codes = [one.wait(given.limit_s) for one in ranks]
    except subprocess.TimeoutExpired:
        print("a rank did not end", file=sys.stderr)
        return 1
    finally:
        for one in ranks:
            one.kill()
    return any(codes)


if __name__ == "__main__":
    sys.exit(main())
