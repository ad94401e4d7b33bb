"""Loop kernels on two GPUs, a process each: exchanges by engines, arithmetic in one kernel that is
launched once (docs/loop.md).

    timeout 150 python benchmarks/gpu_loop.py --json FILE

all-reduce  DMA exchange, reduction in the loop, DMA all-gather, 4 KiB to 16 MiB.
all-to-all  To and fro between two receive buffers, each part mixed in between.
mlp         A tensor-parallel MLP (split and gather of its sums), 1,000 iterations in one launch;
            then the same operators launched one by one from the same start: equal bytes.

Microseconds an iteration by the GPU's clock, median (mlp: by the host's, of the whole run). Every
byte of the result is compared with numpy's (mlp: with the launched run's). --backend host tries it
without GPUs. The exit status is 0 where all was right.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import offcore
from offcore import loop

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
A, C = np.uint32(1664525), np.uint32(1013904223)
STEP = loop.Function("(a + b) * 1664525u + 1013904223u", lambda a, b: (a + b) * A + C)
NEXT = loop.Function("a * 1664525u + 1013904223u", lambda a: a * A + C)
CLAMP = loop.Function(
    "fminf(fmaxf((a + b) * 0.25f, -4.0f), 4.0f)",
    lambda a, b: np.clip((a + b) * np.float32(0.25), -4, 4),
)


def all_reduce(rank: int, count: int) -> loop.Graph:
    graph = loop.Graph(rank, 2)
    data = graph.buffer("data", count, "uint32", number=0).buffer
    other = graph.buffer("other", count, "uint32", number=1).buffer
    mine, theirs = halves(rank, count)
    graph.put(1 - rank, other[theirs], data[theirs])
    graph.wait(1 - rank, other[mine])
    graph.map(STEP, data[mine], data[mine], other[mine])
    graph.put(1 - rank, data[mine], data[mine])
    graph.wait(1 - rank, data[theirs])
    return graph


def all_to_all(rank: int, count: int) -> loop.Graph:
    """Two exchanges an iteration, so that none overwrites what the peer still reads. A put goes to
    the same place of the peer's buffer: each rank uses the place of the peer's part."""
    graph = loop.Graph(rank, 2)
    data = graph.buffer("data", count, "uint32", number=0).buffer
    got = [graph.buffer(f"got{k}", count, "uint32", number=1 + k).buffer for k in range(2)]
    mine, theirs = halves(rank, count)
    for k in range(2):
        graph.map(NEXT, data[mine], data[mine])
        graph.put(1 - rank, got[k][theirs], data[theirs])
        graph.wait(1 - rank, got[k][mine])
        graph.map(NEXT, data[theirs], got[k][mine])
    return graph


def mlp(rank: int, rows: int, width: int, hidden: int) -> loop.Graph:
    graph = loop.Graph(rank, 2)
    count = rows * width
    x = graph.buffer("x", count, number=0)
    got = graph.buffer("got", count, number=1).buffer
    y = graph.buffer("y", count, number=2)
    w1, w2 = graph.buffer("w1", width * hidden), graph.buffer("w2", hidden * width)
    h = graph.buffer("h", rows * hidden)
    mine, theirs = halves(rank, count)
    graph.gemm(h, x, w1, rows, hidden, width)
    graph.map(loop.RELU, h, h)
    graph.gemm(y, h, w2, rows, width, hidden)
    graph.put(1 - rank, got[theirs], y.buffer[theirs])
    graph.wait(1 - rank, got[mine])
    graph.map(CLAMP, x.buffer[mine], y.buffer[mine], got[mine])
    graph.put(1 - rank, x.buffer[mine], x.buffer[mine])
    graph.wait(1 - rank, x.buffer[theirs])
    return graph


def halves(rank: int, count: int) -> tuple[slice, slice]:
    half = count // 2
    own, other = slice(0, half), slice(half, count)
    return (own, other) if rank == 0 else (other, own)


def expected(what: str, data: list[Any], iterations: int) -> list[Any]:
    half = data[0].size // 2
    a, b = (one.copy() for one in data)
    for _ in range(iterations):
        if what == "all-reduce":
            a = b = STEP.host(a, b)
            continue
        for _ in range(2):
            a[:half], b[half:] = NEXT.host(a[:half]), NEXT.host(b[half:])
            to_b, to_a = a[half:].copy(), b[:half].copy()
            a[half:], b[:half] = NEXT.host(to_a), NEXT.host(to_b)
    return [a, b]


class Rank:
    """One process's part."""

    def __init__(self, rank: int, given: argparse.Namespace) -> None:
        self.rank, self.given, self.failures = rank, given, 0
        where = {"backend": given.backend, "store": given.store, "rank": rank, "world_size": 2}
        self.comm = offcore.Communicator(**where, timeout=20, signals=given.signals)
        self.engines = ("armed", "proxy") if given.backend == "cuda" else ("proxy",)

    def opened(self, graphs: list[loop.Graph], engine: str, windows: Any) -> loop.Loop:
        return loop.Loop(self.comm, graphs, buffers=windows, engine=engine, limit=5.0, spin=5.0)

    def row(self, what: str, engine: str, nbytes: int, us: float, right: bool) -> None:
        self.failures += not right
        row = {"what": what, "engine": engine, "bytes": nbytes, "us": us, "right": right}
        if self.rank == 0:
            with self.given.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        told = "right" if right else "WRONG BYTES"
        print(
            f"rank {self.rank} {what:<14} {engine:<6} {nbytes:>9} {us:9.2f} us {told}", flush=True
        )

    def exchange(self, what: str, engine: str, nbytes: int) -> None:
        make = all_reduce if what == "all-reduce" else all_to_all
        count = nbytes // 4
        graphs = [make(rank, count) for rank in range(2)]
        windows = [self.comm.window(nbytes) for _ in range(3)]
        data = [np.random.default_rng(r).integers(0, 1 << 32, count, "uint32") for r in range(2)]
        iterations = 200 if nbytes <= MIB else 40
        with self.opened(graphs, engine, windows) as made:
            own = graphs[self.rank].buffers["data"][:]
            made.write(own, data[self.rank])
            self.comm.barrier()
            made.run(iterations)
            times = np.diff(made.times()[iterations // 4 :, 0])
            want = expected(what, data, iterations)[self.rank]
            right = bool(np.array_equal(made.read(own), want))
            self.row(what, engine, nbytes, float(np.median(times)) / 1e3, right)
            self.comm.barrier()

    def mlp(self, engine: str) -> None:
        rows, width, hidden, iterations = self.given.mlp
        graphs = [mlp(rank, rows, width, hidden) for rank in range(2)]
        windows = [self.comm.window(rows * width * 4) for _ in range(3)]
        rng = np.random.default_rng(7 + self.rank)
        x = np.random.default_rng(1).standard_normal(rows * width, "float32")
        weights = [rng.standard_normal(width * hidden, "float32") * 0.1 for _ in range(2)]
        ends = []
        for launched in (False, True) if self.given.backend == "cuda" else (False,):
            with self.opened(graphs, engine, windows) as made:
                named = graphs[self.rank].buffers
                for name, one in zip(("x", "w1", "w2"), (x, *weights), strict=True):
                    made.write(named[name][:], one)
                self.comm.barrier()
                began = time.perf_counter()
                made.run(iterations, 30.0, launched=launched)
                wall_us = (time.perf_counter() - began) * 1e6 / iterations
                ends.append(made.read(named["x"][:]))
                right = ends[0].tobytes() == ends[-1].tobytes() and bool(np.any(ends[0]))
                what = "mlp, launched" if launched else "mlp"
                self.row(what, engine, rows * width * 4, wall_us, right)
                self.comm.barrier()

    def all(self) -> int:
        for engine in self.engines:
            for what in ("all-reduce", "all-to-all"):
                for nbytes in SIZES:
                    if nbytes <= self.given.bytes_max:
                        self.exchange(what, engine, nbytes)
            self.mlp(engine)
        return self.failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-loop.jsonl"))
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--signals", default="auto", help="auto, fenced or copy_order")
    parser.add_argument("--bytes-max", type=int, default=SIZES[-1])
    parser.add_argument("--mlp", type=int, nargs=4, default=(128, 256, 512, 1000))
    parser.add_argument("--limit-s", type=float, default=140)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        faulthandler.dump_traceback_later(given.limit_s - 5)  # where it hangs
        failures = Rank(given.rank, given).all()
        return failures > 0
    given.json.write_text("", "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{probe.getsockname()[1]}"
    env = os.environ | {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    command = [sys.executable, *sys.argv, "--store", store, "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(2)]
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
