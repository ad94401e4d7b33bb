"""Random operations of every kind on this machine's GPUs, one process a GPU, every byte checked:
copies and reductions, all dtypes, all kinds of memory, eager and captured.

    python benchmarks/gpu_mixed.py --operations 20000
    python benchmarks/gpu_mixed.py --backend host --ranks 3 --operations 500      # without a GPU

Every rank draws the same operations. Memory: allocations of their own, slices of one at odd
elements, windows, registered tensors, a memory pool (all of 128 MiB a side) and pinned host memory
(copies only). The bytes around an output are checked too. What is refused with `unsupported` is
counted apart.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_reduce import DTYPES, OPS, filled, join_ranks, oracle, run_ranks

import offcore.torch

ROOM = 128 << 20
AROUND = 85
EDGE = 64  # bytes beside an output that are looked at
COUNTS = (0, 1, 5, 1000, 1000, 70_001, 70_001, 1 << 20, 3_000_017)
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce_scatter_v", "reduce")
COPIES = ("all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "broadcast")
PROMISED = ("all_gather", "all_to_all", "broadcast")
ROOTED = ("scatter", "scatter_v", "gather", "gather_v")
BYTES_ONLY = {"complex64": torch.complex64, "bool": torch.bool}
SIDES = range(2)  # outputs, inputs


def unsigned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class Memory:
    """Of each kind one room for outputs and one for inputs."""

    def __init__(self, comm: Any, device: torch.device) -> None:
        self._device = device
        self._keep: list[Any] = []
        self.rooms = {"slice": [self._plain() for _ in SIDES]}
        self.rooms["window"] = [torch.as_tensor(comm.empty((ROOM,))) for _ in SIDES]
        if device.type == "cuda":
            self.rooms["registered"] = [self._plain() for _ in SIDES]
            self._keep += [comm.register(one) for one in self.rooms["registered"]]
            pool = comm.memory_pool(2 * ROOM + (64 << 20))
            with torch.cuda.use_mem_pool(pool):
                self.rooms["pool"] = [self._plain() for _ in SIDES]
            self._keep.append(pool)
            self.rooms["host"] = [torch.as_tensor(comm.host_array(ROOM)) for _ in SIDES]

    def _plain(self) -> torch.Tensor:
        return torch.empty(ROOM, dtype=torch.uint8, device=self._device)

    def take(self, kind: str, side: int, count: int, dtype: torch.dtype, shift: int) -> Any:
        """A tensor, and its surroundings in bytes: what begins EDGE before and ends EDGE after."""
        first, nbytes = EDGE + shift * dtype.itemsize, count * dtype.itemsize
        if kind == "own":
            room = torch.empty(first + nbytes + EDGE, dtype=torch.uint8, device=self._device)
        else:
            room = self.rooms[kind][side]
        around = room[first - EDGE : first + nbytes + EDGE]
        around.fill_(AROUND)
        return room[first : first + nbytes].view(dtype), around


class Mixed:
    def __init__(self, comm: Any, memory: Memory, device: torch.device, seed: int) -> None:
        self.comm, self.memory, self.device = comm, memory, device
        self.rank, self.ranks = dist.get_rank(), comm.ranks
        self.rng = random.Random(seed)
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()

    def data(self, count: int, name: str, reduces: bool) -> list[torch.Tensor]:
        seed = self.rng.randrange(1 << 30)
        if reduces:
            return [filled(count, name, seed + r, self.device) for r in range(self.ranks)]
        found = []
        for rank in range(self.ranks):
            generator = torch.Generator(device=self.device).manual_seed(seed + rank)
            nbytes = count * (DTYPES | BYTES_ONLY)[name].itemsize
            high = 2 if name == "bool" else 256
            raw = torch.randint(
                0, high, (nbytes,), generator=generator, device=self.device, dtype=torch.uint8
            )
            found.append(raw.view((DTYPES | BYTES_ONLY)[name]))
        return found

    def drawn(self, op: str, name: str, reduces: bool) -> dict[str, Any]:
        """The inputs of all ranks, what this rank has to find, and the call's arguments."""
        rng, ranks, rank = self.rng, self.ranks, self.rank
        most = ROOM // 2 // (ranks * 8)
        count = min(rng.choice(COUNTS), most)
        root = rng.randrange(ranks)
        counts = [rng.randrange(count + 1) if op.endswith("_v") else count for _ in range(ranks)]
        ends = [sum(counts[:peer]) for peer in range(ranks + 1)]
        call: dict[str, Any] = {"counts": None, "root": None, "gives": True, "takes": True}
        if op.startswith(("broadcast", "scatter", "gather")) or op == "reduce":
            call["root"] = root
        if op.endswith("_v"):
            call["counts"] = counts
        if op == "all_to_all_v":
            rows = [[rng.randrange(count + 1) for _ in range(ranks)] for _ in range(ranks)]
            inputs = self.data(max(map(sum, rows)), name, False)
            inputs = [one[: sum(row)] for one, row in zip(inputs, rows, strict=True)]
            begins = [sum(row[:rank]) for row in rows]
            parts = [
                one[begin : begin + row[rank]]
                for one, row, begin in zip(inputs, rows, begins, strict=True)
            ]
            return call | {"inputs": inputs, "wanted": torch.cat(parts), "counts": rows}
        if op.startswith(("all_gather", "gather")):
            inputs = self.data(max(counts), name, False)
            inputs = [one[:length] for one, length in zip(inputs, counts, strict=True)]
            call["takes"] = not op.startswith("gather") or rank == root
            return call | {"inputs": inputs, "wanted": torch.cat(inputs), "ends": ends}
        if op == "all_to_all":
            inputs = self.data(ranks * count, name, False)
            parts = [one[rank * count :][:count] for one in inputs]
            return call | {"inputs": inputs, "wanted": torch.cat(parts)}
        if op.startswith("scatter"):
            inputs = self.data(sum(counts), name, False)
            call["gives"] = rank == root
            return call | {"inputs": inputs, "wanted": inputs[root][ends[rank] : ends[rank + 1]]}
        if op == "broadcast":
            inputs = self.data(count, name, False)
            call["gives"] = rank == root
            return call | {"inputs": inputs, "wanted": inputs[root]}
        whole = sum(counts) if op.startswith("reduce_scatter") else count
        inputs = self.data(whole, name, True)
        how, scale = rng.choice(OPS), 1.0
        if how == "premul_sum":
            scale = 3.0 if name.startswith(("int", "uint")) else 0.3
        total = oracle(inputs, how, scale)
        if op.startswith("reduce_scatter"):
            total = total[ends[rank] : ends[rank + 1]]
        call["takes"] = op != "reduce" or rank == root
        return call | {"inputs": inputs, "wanted": total, "how": how, "scale": scale}

    def one(self, captured: bool) -> None:
        rng, rank = self.rng, self.rank
        reduces = rng.random() < 0.4
        op = rng.choice(REDUCTIONS if reduces else COPIES + ROOTED)
        name = rng.choice(list(DTYPES if reduces else DTYPES | BYTES_ONLY))
        dtype = (DTYPES | BYTES_ONLY)[name]
        kinds = [kind for kind in ("own", *self.memory.rooms) if kind != "host" or not reduces]
        to, of = rng.choice(kinds), rng.choice(kinds)
        shifts = [rng.choice((0, 0, 1, 3, 8, 12_345)) for _ in SIDES]
        promises = rng.random() < 0.15
        in_place = rng.random() < 0.4 and op in ("all_gather", "broadcast", "all_reduce")
        call = self.drawn(op, name, reduces)
        wanted = call["wanted"]
        out, around = self.memory.take(to, 0, wanted.numel(), dtype, shifts[0])
        own = call["inputs"][rank]
        if in_place:
            begin = call["ends"][rank] if op == "all_gather" else 0
            out[begin : begin + own.numel()].copy_(own)
        inp = None
        if call["gives"] and not in_place:
            inp, _ = self.memory.take(of, 1, own.numel(), dtype, shifts[1])
            inp.copy_(own)
        sides = [out if call["takes"] else None, inp]
        arguments = [*sides] if call["counts"] is None else [*sides, call["counts"]]
        extra: dict[str, Any] = {} if call["root"] is None else {"root": call["root"]}
        if reduces:
            arguments.append(call["how"])
            extra["scale"] = call["scale"]
        elif promises and op in PROMISED and to in ("window", "registered", "pool"):
            extra["protocol"] = "promise"
        told = f"{op} {name} {wanted.numel()} to {to} of {of} shifts {shifts} {in_place=} {extra}"
        self.settle()
        try:
            if captured and not in_place and "protocol" not in extra:
                self.replay(op, arguments, extra)
            else:
                getattr(self.comm, op)(*arguments, **extra).wait()
        except offcore.Error as failure:
            if failure.code != "unsupported":
                raise SystemExit(f"rank {rank}: {told}: {failure.code}: {failure}") from failure
            self.refused[f"{op} to {to} of {of}: {failure}"[:150]] += 1
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.done[op] += 1
        self.done[to] += 1
        self.done[name] += 1
        if call["takes"] and not torch.equal(unsigned(out).to(self.device), unsigned(wanted)):
            raise SystemExit(f"rank {rank}: WRONG bytes: {told}")
        edges = (around[:EDGE], around[around.numel() - EDGE :])
        if any(bool((edge != AROUND).any()) for edge in edges):
            raise SystemExit(f"rank {rank}: bytes around the output changed: {told}")

    def settle(self) -> None:
        """A promise is kept, and nobody fills what a peer still reads."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.comm.barrier()

    def replay(self, op: str, arguments: list[Any], extra: dict[str, Any]) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            getattr(self.comm, op)(*arguments, **extra)
        for _ in range(2):
            if arguments[0] is not None:
                arguments[0].zero_()
            self.settle()
            graph.replay()
            torch.cuda.synchronize()
            self.comm.barrier()


def opened(backend: str) -> tuple[Any, torch.device]:
    if backend == "cuda":
        device = join_ranks()
        return offcore.torch.Communicator(timeout=20), device
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['MEETING']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    comm = offcore.Communicator(backend="host", store=dist.group.WORLD, timeout=20)
    return comm, torch.device("cpu")


def rank_main(args: argparse.Namespace) -> None:
    comm, device = opened(args.backend)
    with comm:
        mixed = Mixed(comm, Memory(comm, device), device, args.seed)
        began = time.monotonic()
        for index in range(args.operations):
            mixed.one(captured=device.type == "cuda" and index % 10 == 9)
        if dist.get_rank() == 0:
            took_s = time.monotonic() - began
            refused = sum(mixed.refused.values())
            print(
                f"{args.operations} operations on {comm.ranks} ranks, seed {args.seed}: no wrong "
                f"byte, {refused} refused as unsupported, {took_s:.0f} s"
            )
            print(", ".join(f"{name} {count}" for name, count in sorted(mixed.done.items())))
            for what, count in mixed.refused.most_common(10):
                print(f"refused {count}: {what}")
        del mixed
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    return run_ranks(args.ranks, {})


if __name__ == "__main__":
    sys.exit(main())
