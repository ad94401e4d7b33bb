"""Operations on plain torch tensors, of any size and from each of torch's allocators.

Run by h200_check.py as one rank of several, a process a GPU, once for each allocator. Tensors have
1 byte to 2 GiB and lie in allocations of their own or at odd offsets in one; every byte is checked
on the GPU. Copies that no engine made are counted. Then some are registered (gpu_registered.py).
"""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Iterator
from typing import Any

from gpu_registered import registered_tensors

ALLOCATORS = {
    "cudaMalloc": "",
    "expandable": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}
MIB = 1 << 20
SIZES = (1, 17, 4099, 65_536, MIB + 3, 5 * MIB, 20 * MIB, 33 * MIB + 1, 64 * MIB, 256 * MIB)
LARGEST = 1024 * MIB  # of a rank, so that the output has 2 GiB and more
OFFSETS = (0, 1, 12_345)
CHUNK = 64 * MIB  # that is checked at once


class Bytes:
    """A rank's bytes: a function of the rank, the seed and the place."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def _pattern(self, first: int, count: int, rank: int, seed: int) -> Any:
        at = self._torch.arange(first, first + count, device="cuda", dtype=self._torch.int64)
        return ((at * 31 + at // 251 + rank * 101 + seed * 53) & 255).to(self._torch.uint8)

    def fill(self, tensor: Any, rank: int, seed: int, first: int = 0) -> None:
        for at in range(0, tensor.numel(), CHUNK):
            part = tensor[at : at + CHUNK]
            part.copy_(self._pattern(first + at, part.numel(), rank, seed))

    def wrong(self, tensor: Any, rank: int, seed: int, first: int = 0) -> int:
        count = 0
        for at in range(0, tensor.numel(), CHUNK):
            part = tensor[at : at + CHUNK]
            count += int((part != self._pattern(first + at, part.numel(), rank, seed)).sum())
        return count


class Plain:
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
        self.comm = offcore.torch.Communicator(timeout=20)
        self.bytes = Bytes(torch)
        self.ran: collections.Counter[str] = collections.Counter()
        self.calls = self.wrong = 0

    def tensor(self, count: int, offset: int) -> Any:
        whole = self.torch.empty(count + offset, dtype=self.torch.uint8, device="cuda")
        return whole[offset:]

    def cases(self) -> Iterator[tuple[int, int]]:
        for size in SIZES:
            for offset in OFFSETS:
                yield size, offset
        yield LARGEST, 1

    def check(self, name: str, result: Any, wrong: int) -> None:
        self.calls += 1
        self.wrong += wrong
        self.ran[f"{result.own_copy}{'' if result.native else ', another form'}"] += 1
        if wrong:
            print(f"rank {self.rank}: {name}: {wrong} wrong bytes ({result})", flush=True)

    def all_gather(self, size: int, offset: int, seed: int, in_place: bool) -> None:
        out = self.tensor(self.ranks * size, offset).fill_(85)
        mine = out[self.rank * size :][:size] if in_place else self.tensor(size, offset)
        self.bytes.fill(mine, self.rank, seed)
        result = self.comm.all_gather(out, None if in_place else mine).wait()
        parts = out.reshape(self.ranks, size)
        wrong = sum(self.bytes.wrong(part, rank, seed) for rank, part in enumerate(parts))
        self.check(f"all_gather of {size}, in place {in_place}", result, wrong)

    def all_to_all(self, size: int, offset: int, seed: int) -> None:
        size = max(1, size // self.ranks)
        out, given = (self.tensor(self.ranks * size, offset).fill_(85) for _ in range(2))
        for peer, part in enumerate(given.reshape(self.ranks, size)):
            self.bytes.fill(part, self.rank, seed, first=peer * size)
        result = self.comm.all_to_all(out, given).wait()
        wrong = sum(
            self.bytes.wrong(part, rank, seed, first=self.rank * size)
            for rank, part in enumerate(out.reshape(self.ranks, size))
        )
        self.check(f"all_to_all of {size}", result, wrong)

    def rooted(self, size: int, offset: int, seed: int) -> None:
        root, own = seed % self.ranks, self.rank == seed % self.ranks
        out = self.tensor(size, offset).fill_(85)
        if own:
            self.bytes.fill(out, root, seed)
        result = self.comm.broadcast(out, root=root).wait()
        self.check(f"broadcast of {size}", result, self.bytes.wrong(out, root, seed))
        whole = self.tensor(self.ranks * size, offset).fill_(85)
        if own:
            for rank, part in enumerate(whole.reshape(self.ranks, size)):
                self.bytes.fill(part, rank, seed + 1)
        out.fill_(85)
        result = self.comm.scatter(out, whole, root=root).wait()
        self.check(f"scatter of {size}", result, self.bytes.wrong(out, self.rank, seed + 1))
        whole.fill_(85)
        result = self.comm.gather(whole, out, root=root).wait()
        parts = enumerate(whole.reshape(self.ranks, size)) if own else ()
        wrong = sum(self.bytes.wrong(part, rank, seed + 1) for rank, part in parts)
        self.check(f"gather of {size}", result, wrong)

    def run(self) -> None:
        for seed, (size, offset) in enumerate(self.cases()):
            self.torch.cuda.empty_cache()  # so that large tensors are allocations of their own
            for in_place in (False, True):
                self.all_gather(size, offset, seed, in_place)
            self.all_to_all(size, offset, seed)
            if size <= 256 * MIB:
                self.rooted(size, offset, seed)


def plain_tensors(args: argparse.Namespace) -> int:
    began = time.monotonic()
    plain = Plain(args)
    plain.run()
    told = ", ".join(f"{count} {how}" for how, count in plain.ran.items())
    print(
        f"rank {plain.rank}: {plain.calls} operations on plain tensors, {plain.wrong} wrong bytes; "
        f"copies within the GPU: {told}; {time.monotonic() - began:.1f} s",
        flush=True,
    )
    good = registered_tensors(plain)
    plain.comm.close()
    return 1 if plain.wrong or set(plain.ran) - {"engine", "engines", "none"} or not good else 0
