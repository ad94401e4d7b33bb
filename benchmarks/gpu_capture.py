"""Operations in torch.cuda.graph: captured once, replayed hundreds of times, eager calls between.

Run by h200_check.py as one rank of several, a process a GPU. Inputs change before every replay and
every byte is checked on the GPU; the host waits only now and then, so that ranks run ahead of each
other. A line an operation: wrong elements, and microseconds a replay, enqueued back to back.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from gpu_torch import Rank

REPLAYS = 300
TIMED_REPLAYS = 100
GRAPHS = 600
WORK_S = 15.0  # operations that have not begun by then are left out, and said to be
ABORT_S = 5.0

# name, variant, int32 elements a rank, output outside windows, in place
OPERATIONS = (
    ("all_gather", "auto", 256, False, True),
    ("all_gather", "pcpy", 65536, False, True),
    ("all_gather", "auto", 4096, True, False),
    ("all_to_all", "auto", 1024, False, False),
    ("all_to_all", "swap", 65536, False, True),
    ("broadcast", "auto", 4096, False, True),
)


class Captured:
    """One operation in a graph, with what it needs to be filled and checked."""

    def __init__(
        self, rank: Rank, name: str, variant: str, count: int, outside: bool, in_place: bool
    ) -> None:
        torch, comm = rank.torch, rank.comm
        self.rank, self.name, self.count, self.in_place = rank, name, count, in_place
        self.whole = count * (1 if name == "broadcast" else rank.ranks)
        given = count if name == "all_gather" else self.whole
        self.out = (
            torch.zeros(self.whole, dtype=torch.int32, device="cuda")
            if outside
            else comm.empty(self.whole, torch.int32)
        )
        self.inp = None if in_place else torch.zeros(given, dtype=torch.int32, device="cuda")
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = getattr(comm, name)(self.out, self.inp, variant=variant).wait()

    def sent(self, turn: int, rank: int) -> Any:
        """What a rank hands in."""
        count = self.whole if self.name == "all_to_all" else self.count
        return self.rank.part(count, turn, rank)

    def fill(self, turn: int) -> None:
        own = self.rank.rank
        data = self.sent(turn, own)
        if self.inp is not None:
            self.inp.copy_(data)
        elif self.name == "all_gather":
            self.out[own * self.count : (own + 1) * self.count] = data
        elif self.name == "all_to_all" or own == 0:
            self.out.copy_(data)

    def check(self, turn: int) -> None:
        torch, own, ranks = self.rank.torch, self.rank.rank, range(self.rank.ranks)
        if self.name == "all_gather":
            wanted = torch.cat([self.sent(turn, rank) for rank in ranks])
        elif self.name == "broadcast":
            wanted = self.sent(turn, 0)
        else:
            parts = [self.sent(turn, rank).view(len(ranks), self.count)[own] for rank in ranks]
            wanted = torch.cat(parts)
        self.bad += (self.out != wanted).sum()

    def run(self) -> None:
        rank, torch, comm = self.rank, self.rank.torch, self.rank.comm
        eager = comm.empty(rank.ranks * 1000, torch.int32)
        torch.cuda.synchronize()
        for turn in range(REPLAYS):
            self.fill(turn)
            self.graph.replay()
            if turn % 3 == 0:
                comm.all_gather(eager, rank.part(1000, turn, rank.rank))
            self.check(turn)
            if turn % 3 == 0:
                for peer, part in enumerate(eager.view(rank.ranks, 1000)):
                    self.bad += (part != rank.part(1000, turn, peer)).sum()
            if turn % 64 == 63:
                torch.cuda.synchronize()
        rank.wrong += int(self.bad)
        self.tell()

    def tell(self) -> None:
        rank, torch = self.rank, self.rank.torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        rank.comm.barrier()
        begin.record()
        for _ in range(TIMED_REPLAYS):
            self.graph.replay()
        end.record()
        end.synchronize()
        us = torch.tensor([begin.elapsed_time(end) * 1e3 / TIMED_REPLAYS, float(self.bad)])
        torch.distributed.all_reduce(us, torch.distributed.ReduceOp.MAX)
        if rank.rank == 0:
            r = self.result
            print(
                f"   {self.name} {4 * self.whole} B {r.variant} staged={r.staged} "
                f"own_copy={r.own_copy}: {int(us[1])} wrong, {us[0]:.1f} us a replay",
                flush=True,
            )


def come_and_go(rank: Rank) -> None:
    """More graphs than a communicator has words for, one after the other."""
    torch, comm, own = rank.torch, rank.comm, rank.rank
    out = comm.empty(rank.ranks * 256, torch.int32)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    began, side = time.monotonic(), torch.cuda.Stream()
    for turn in range(GRAPHS):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.capture_begin()
            comm.all_gather(out)
            graph.capture_end()
            out.view(rank.ranks, 256)[own] = rank.part(256, turn, own)
            graph.replay()
            parts = [rank.part(256, turn, peer) for peer in range(rank.ranks)]
            bad += (out != torch.cat(parts)).sum()
        del graph  # its replay may still run
    torch.cuda.synchronize()
    rank.wrong += int(bad)
    if rank.rank == 0:
        passed_s = time.monotonic() - began
        print(f"   {GRAPHS} graphs: {int(bad)} wrong, {passed_s:.1f} s", flush=True)


def abort_lets_go(rank: Rank) -> bool:
    """Rank 0 replays alone and aborts: its stream is through soon after. Ends the communicator."""
    torch = rank.torch
    lonely = Captured(rank, "all_gather", "auto", 256, False, True)
    torch.cuda.synchronize()
    rank.comm.barrier()
    if rank.rank != 0:
        time.sleep(1)
        return True
    lonely.graph.replay()
    event = torch.cuda.Event()
    event.record()
    time.sleep(0.2)
    held = not event.query()
    rank.comm.abort()
    began = time.monotonic()
    while not event.query() and time.monotonic() - began < ABORT_S:
        time.sleep(0.001)
    free = event.query()
    print(
        f"   abort: the replay waited {held}, was let go {free} in "
        f"{(time.monotonic() - began) * 1e3:.1f} ms",
        flush=True,
    )
    return held and free


def captured(args: argparse.Namespace) -> int:
    rank = Rank(args)
    began = time.monotonic()
    for operation in OPERATIONS:
        late = rank.torch.tensor([float(time.monotonic() - began > WORK_S)])
        rank.torch.distributed.all_reduce(late, rank.torch.distributed.ReduceOp.MAX)
        if late[0]:
            if rank.rank == 0:
                print(f"   left out, no time: {operation}", flush=True)
            continue
        try:
            Captured(rank, *operation).run()
            rank.comm.check()
        except Exception as failure:
            print(f"   FAILED rank {rank.rank} {operation}: {failure}", flush=True)
            os._exit(1)
    try:
        come_and_go(rank)
    except Exception as failure:
        print(f"   FAILED rank {rank.rank}, graphs that come and go: {failure}", flush=True)
        os._exit(1)
    good = abort_lets_go(rank) and not rank.wrong
    # A stream that was not let go would hold up every orderly end.
    os._exit(0 if good else 1)
