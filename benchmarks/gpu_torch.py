"""What torch's users do: operations on tensors and streams, a memory pool, views, credits.

Run by h200_check.py as one rank of several, a process a GPU. Every byte is checked on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

CALLS = 150
TIMED_CALLS = 300
LATENCY_BYTES = 4096
SLEEP_CYCLES = 300_000


class Rank:
    """One rank's tensors; all ranks draw the same random numbers."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import offcore.torch

        self.torch = torch
        self.rank, self.ranks = args.rank, args.ranks
        torch.cuda.set_device(self.rank)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{args.ports[0]}",
            rank=self.rank,
            world_size=self.ranks,
        )
        self.comm = offcore.torch.Communicator(timeout=5)
        self.random = random.Random(7)
        self.wrong = 0

    def part(self, count: int, seed: int, rank: int) -> Any:
        """The int32 tensor that a rank contributes."""
        torch = self.torch
        return torch.arange(count, dtype=torch.int32, device="cuda") * 31 + seed * 7919 + rank

    def check(self, got: Any, count: int, seed: int) -> None:
        for rank, part in enumerate(got.reshape(self.ranks, count)):
            self.wrong += int((part != self.part(count, seed, rank)).sum())

    def count(self) -> int:
        return self.random.choice([1, 7, 1024, self.random.randrange(1, 1 << 16)])

    def pool(self) -> None:
        """Tensors of a torch.cuda.MemPool lie in a window: nothing is staged."""
        torch, comm = self.torch, self.comm
        pool = comm.memory_pool(256 << 20)
        with torch.cuda.use_mem_pool(pool):
            outs = [torch.zeros(self.ranks * 5000, dtype=torch.int32, device="cuda") for _ in "ab"]
            large = torch.zeros((16 << 20) // 4, dtype=torch.int32, device="cuda")
        for turn in range(40):
            out = outs[turn % 2]
            result = comm.all_gather(
                out, self.part(5000, turn, self.rank), protocol="barrier"
            ).wait()
            self.wrong += 1_000_000 * int(result.staged)
            self.check(out, 5000, turn)
            comm.barrier()
        count = large.numel() // self.ranks
        large[self.rank * count : (self.rank + 1) * count] = self.part(count, 99, self.rank)
        result = comm.all_gather(large[: count * self.ranks], protocol="barrier").wait()
        self.wrong += 1_000_000 * int(result.staged)
        self.check(large[: count * self.ranks], count, 99)
        comm.barrier()

    def streams(self) -> None:
        """Nothing is waited for on the host; inputs are dropped as soon as they were passed."""
        torch, comm = self.torch, self.comm
        side = torch.cuda.Stream()
        outs = [comm.empty(self.ranks << 16, torch.int32) for _ in range(2)]
        for turn in range(CALLS):
            count = self.count()
            with torch.cuda.stream(side if turn % 3 else torch.cuda.default_stream()):
                out = outs[turn % 2][: self.ranks * count]
                comm.all_gather(out, self.part(count, turn, self.rank))
                torch.full((count,), -1, dtype=torch.int32, device="cuda")  # takes freed memory
                self.check(out, count, turn)
            torch.cuda.synchronize()
            comm.barrier()

    def views(self) -> None:
        comm = self.comm
        kept: list[tuple[Any, int, int]] = []
        for turn in range(CALLS):
            count = 1 + self.random.randrange(20_000)
            if turn % 2:
                own = comm.next_input(count, self.torch.int32)
                own.copy_(self.part(count, turn, self.rank))
            else:
                own = self.part(count, turn, self.rank)
            kept.append((comm.all_gather_view(own).out, count, turn))
            if len(kept) > 2:  # a view is good for two more calls
                self.check(*kept.pop(0))
        self.torch.cuda.synchronize()

    def late_views(self) -> None:
        """A side stream reads each view late, for as long as it may; a rank at a time is slow."""
        torch, comm = self.torch, self.comm
        side = torch.cuda.Stream()
        reads: list[Any] = []
        copies: list[tuple[Any, int, int]] = []
        for turn in range(CALLS):
            if turn > 2:  # the read of the view that this call lets the peers overwrite
                torch.cuda.current_stream().wait_event(reads[turn - 3])
            count = self.random.choice([100, 4096, 20_000])
            if turn % 3 == 2:
                sent = [self.part(count, turn * 8 + peer, self.rank) for peer in range(self.ranks)]
                view, seed = comm.all_to_all_view(torch.cat(sent)), turn * 8 + self.rank
            else:
                view, seed = comm.all_gather_view(self.part(count, turn, self.rank)), turn
            ready = torch.cuda.Event()
            ready.record()
            with torch.cuda.stream(side):
                side.wait_event(ready)
                if turn % self.ranks == self.rank:
                    torch.cuda._sleep(SLEEP_CYCLES)
                copies.append((view.out.clone(), count, seed))
                reads.append(torch.cuda.Event())
                reads[-1].record()
        torch.cuda.synchronize()
        for copied in copies:
            self.check(*copied)

    def credits(self) -> None:
        comm = self.comm
        out = comm.empty(self.ranks * 4096, self.torch.int32)
        for turn in range(CALLS):
            handle = comm.all_gather(out, self.part(4096, turn, self.rank), protocol="credits")
            self.check(out, 4096, turn)
            if turn % 5:
                handle.release()
        self.torch.cuda.synchronize()

    def latency(self) -> None:
        """One call seen from the host, issued and completed, in the default and another stream."""
        torch, comm = self.torch, self.comm
        count = LATENCY_BYTES // 4
        out = comm.empty(count, torch.int32)
        own = out[self.rank * (count // self.ranks) :][: count // self.ranks]

        def given() -> Any:
            return comm.next_input(count // self.ranks, torch.int32)

        # What is made before the clock starts, and what is timed.
        cases: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "safe": (lambda: None, lambda _: comm.all_gather(out, own)),
            "promise": (lambda: None, lambda _: comm.all_gather(out, own, protocol="promise")),
            "view": (lambda: None, lambda _: comm.all_gather_view(given())),
            "view, input at hand": (given, comm.all_gather_view),
        }
        streams = {"default": torch.cuda.default_stream(), "own": torch.cuda.Stream()}
        for place, name in itertools.product(streams, cases):
            with torch.cuda.stream(streams[place]):
                whole, issue, enqueue, seen = self.timed(*cases[name])
            print(
                f"   one all-gather of 4 KiB from the host, {name}, {place} stream, rank "
                f"{self.rank}: {whole:.1f} us, of which to issue {issue:.1f} us; in the core "
                f"{enqueue:.1f} us to enqueue, {seen:.1f} us until it saw the end",
                flush=True,
            )

    def timed(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> list[float]:
        """Medians, in us: of the call with its wait, of the call, and the core's own times."""
        rows = []
        for _ in range(TIMED_CALLS):
            prepared = prepare()
            self.comm.barrier()
            began = time.perf_counter()
            handle = call(prepared)
            issued = time.perf_counter()
            result = handle.wait()
            ended = time.perf_counter()
            core = (result.phases.control_us, result.time_us)
            rows.append(((ended - began) * 1e6, (issued - began) * 1e6, *core))
        return [statistics.median(column) for column in zip(*rows[50:], strict=True)]

    def close(self) -> None:
        import torch.distributed as dist

        self.comm.close()
        dist.destroy_process_group()


def torch_users(args: argparse.Namespace) -> int:
    rank = Rank(args)
    for work in (rank.pool, rank.streams, rank.views, rank.late_views, rank.credits, rank.latency):
        began = time.monotonic()
        before = rank.wrong
        try:
            work()
        except Exception as failure:  # the others are still worth knowing
            print(f"   {work.__name__} of rank {rank.rank}: {failure!r}", flush=True)
            rank.wrong += 1
        if rank.rank == 0:
            print(
                f"   {work.__name__}: {rank.wrong - before} wrong in "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )
    rank.close()
    return 1 if rank.wrong else 0
