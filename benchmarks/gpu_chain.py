"""Small all-gathers between two GPUs beside the least that a program of driver calls can do: a copy
to the peer, a copy of a flag, a wait for the peer's flag, in one stream.

    python benchmarks/gpu_chain.py

In place in a window, one process a GPU, calls enqueued ahead of the GPU, NCCL's kernels replayed
from a graph. Medians of turns, the slower rank's, in us a call; in brackets times the chain's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from gpu_reduce import CALLS, graph_of, join_ranks, run_ranks, timed

import offcore.torch

SIZES = tuple(1 << shift for shift in range(10, 17))
ASLEEP = 12_000_000  # cycles in which calls are enqueued
TURNS = 15
REPEATED = 7  # with the first run 160 calls, of fewer than 1,024 commands
WAIT_GEQ = 0
GUARD = 1 << 20


class Chain:
    """Of an all-gather of `nbytes` in place in memory that the peer has mapped."""

    def __init__(self, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._room = symmetric.empty(2 * GUARD, dtype=torch.uint8, device=device)
        self._room.zero_()
        torch.cuda.synchronize()
        handle = symmetric.rendezvous(self._room, group=dist.group.WORLD)
        self._rank = dist.get_rank()
        peer = handle.get_buffer(1 - self._rank, (2 * GUARD,), torch.uint8)
        self._own, self._peer = self._room.data_ptr(), peer.data_ptr()
        self._kept = handle, peer
        # The flag of call n is n; a copy reads it from here.
        self._numbers = torch.arange(1 << 16, dtype=torch.int32, device=device)
        self._call = 0
        torch.cuda.synchronize()
        dist.barrier()

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver gives {code}")

    def calls(self, nbytes: int) -> None:
        """CALLS of them, in the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        part = nbytes // 2
        at = self._rank * part
        copy, wait = self._driver.cuMemcpyDtoDAsync_v2, self._driver.cuStreamWaitValue32_v2
        whole = ctypes.c_uint64
        for _ in range(CALLS):
            self._call += 1
            number = self._numbers.data_ptr() + 4 * self._call
            self._check(copy(whole(self._peer + at), whole(self._own + at), part, stream))
            self._check(copy(whole(self._peer + GUARD), whole(number), 4, stream))
            flag = ctypes.c_uint32(self._call)
            self._check(wait(stream, whole(self._own + GUARD), flag, WAIT_GEQ))

    def proof(self, nbytes: int) -> None:
        part = nbytes // 2
        self._room[:nbytes] = self._rank + 1
        torch.cuda.synchronize()
        dist.barrier()
        self.calls(nbytes)
        torch.cuda.synchronize()
        theirs = self._room[(1 - self._rank) * part :][:part]
        if not bool((theirs == 2 - self._rank).all()):
            raise SystemExit("the chain's bytes are wrong")
        dist.barrier()


def repeated(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def ways(comm: Any, chain: Chain, nbytes: int, device: torch.device) -> dict[str, Any]:
    """CALLS of each."""
    rank, stream = dist.get_rank(), torch.cuda.current_stream()
    window = comm.empty((nbytes,), torch.uint8)
    plain = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    nccl = partial(dist.all_gather_into_tensor, plain, plain.chunk(2)[rank])
    nccl()
    return {
        "chain": partial(chain.calls, nbytes),
        "promise": partial(repeated, partial(comm.all_gather, window, protocol="promise")),
        "view": partial(repeated, partial(comm.all_gather_view, window.chunk(2)[rank])),
        "safe": partial(repeated, partial(comm.all_gather, window)),
        "nccl": graph_of(nccl, stream),
    }


def row(comm: Any, chain: Chain, nbytes: int, device: torch.device) -> dict[str, float]:
    chain.proof(nbytes)
    found = {}
    for name, run in ways(comm, chain, nbytes, device).items():
        run()
        found[name] = timed(run, device, ASLEEP, TURNS, warm=1, runs=REPEATED)
    return found


def rank_main() -> None:
    device = join_ranks()
    chain = Chain(device)
    with (
        offcore.torch.Communicator(timeout=20) as comm,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        for nbytes in SIZES:
            found = row(comm, chain, nbytes, device)
            if dist.get_rank() == 0:
                if nbytes == SIZES[0]:
                    print(f"{'bytes':>8}" + "".join(f"{name:>16}" for name in found))
                cells = (f"{us:7.2f} ({us / found['chain']:4.2f})" for us in found.values())
                print(f"{nbytes:8}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    dist.destroy_process_group()


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    if "RANK" in os.environ:
        rank_main()
        return 0
    return run_ranks(2, {})


if __name__ == "__main__":
    sys.exit(main())
