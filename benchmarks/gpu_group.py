"""Checks on this machine's GPUs what a group of the backend "offcore" is used for besides plain
calls, beside a group of NCCL's: the same bytes come out.

    python benchmarks/gpu_group.py            # 2 GPUs, a minute
    python benchmarks/gpu_group.py --device cpu   # tries it with gloo; without graphs and attention

FSDP2 as torch ships it (set_allocate_memory_from_process_group_for_comm) with and without window
memory (`Options(memory=)`), too little of it, and torch.cuda.empty_cache() between the steps; sends
and receives in a batch around a ring; collectives under torch.compile (aot_eager and inductor); in
a CUDA graph that is replayed with other numbers; ring attention (context_parallel) with both ways
to rotate. Each line: milliseconds of a step where there are steps, the largest difference from
NCCL's result, all-gathers that went through slots of all, and bytes of window memory and what did
not fit. The last training is by offcore.fsdp. The status is 1 for a difference (of attention, for
one of more than 1e-3), and for all-gathers that go through slots though there is memory, or that do
not though there is too little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gpu_reduce import join_ranks, run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import offcore.distributed
import offcore.fsdp
from offcore.distributed.report import calls_of

STEPS, LAYERS = 6, 4
WIDTH = {"cuda": 2048, "cpu": 64}
MEMORY = {"cuda": 1 << 30, "cpu": 1 << 20}
TOO_LITTLE = {"cuda": 64 << 20, "cpu": 1 << 16}


def trained(
    group: Any, device: torch.device, allocates: bool, empties: bool, enables: bool = False
) -> tuple[Any, float, dict[str, Any]]:
    """A few steps of FSDP2 over that group: the weights, milliseconds of a step, and the report of
    offcore.fsdp, where that is enabled."""
    width = WIDTH[device.type]
    torch.manual_seed(1)
    layers = [
        torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for layer in model.modules() if allocates else ():
        if isinstance(layer, FSDPModule):
            layer.set_allocate_memory_from_process_group_for_comm(True)
    if enables:
        offcore.fsdp.enable(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(10 + dist.get_rank())
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        model(torch.randn(2 * width, width, device=device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
            if empties:
                torch.cuda.empty_cache()
        times.append(1e3 * (time.perf_counter() - began))
    report = offcore.fsdp.report(model) if enables else {}
    if enables:
        offcore.fsdp.disable(model)
    weights = [one.full_tensor().detach() for one in model.parameters()]
    return weights, statistics.median(times), report


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference; NaN where one has it."""
    off = [(a.double() - b.double()).abs().max() for a, b in zip(one, other, strict=True)]
    return float(torch.stack(off).max())


class Check:
    """A rank."""

    def __init__(self, device: torch.device, own: Any) -> None:
        self.device = device
        self.own = own  # NCCL's group, or gloo's
        self.group = dist.new_group(backend="offcore")
        self.wrong = 0

    def line(
        self,
        name: str,
        off: float,
        ms: float = 0,
        told: tuple[str, Any] = ("", ""),
        most: float = 0,
    ) -> None:
        """told: all-gathers through slots of all; window memory."""
        self.wrong += not off <= most  # NaN too
        staged, memory = told
        if dist.get_rank() == 0:
            step = f"{ms:8.1f}" if ms else " " * 8
            print(f"{name:<28} {step} {off:10.3g} {staged:>8}  {memory}".rstrip(), flush=True)

    def fsdp(self) -> None:
        kind = self.device.type
        plain, ms, _ = trained(self.own, self.device, False, False)
        self.line("FSDP2, torch's backend", 0, ms)
        whole, little = MEMORY[kind], TOO_LITTLE[kind]
        cases = (("", 0), (", memory", whole), (", empty_cache", whole), (", too little", little))
        for name, nbytes in cases:
            group = dist.new_group(
                backend="offcore", pg_options=offcore.distributed.Options(memory=nbytes)
            )
            told: list[Any] = []
            calls = calls_of(group)
            assert calls is not None
            if nbytes:  # collective, as is the first allocation
                group._get_backend(self.device).supports_tensor_alloc(self.device)
                calls.collectives._sides[kind]._told = told.append
            ours, ms, _ = trained(group, self.device, nbytes > 0, "empty" in name)
            calls.collectives._sides[kind].settle()
            staged = [one.staged for one in told if one.op == "all_gather"]
            memory = offcore.distributed.report(group)["memory"].get(kind, "")
            told_of = f"{sum(staged)}/{len(staged)}", memory
            self.line(f"FSDP2{name}", apart(plain, ours), ms, told_of)
            self.wrong += nbytes > 0 and sum(staged) != len(staged) * (nbytes == little)
            dist.destroy_process_group(group)
        ours, ms, report = trained(self.own, self.device, False, False, enables=True)
        gathers = report["all_gather"]
        self.wrong += gathers["staged"] + gathers["handed"]
        told_of = f"{gathers['staged']}/{gathers['calls']}", report["memory"]
        self.line("offcore.fsdp", apart(plain, ours), ms, told_of)

    def collectives(self, group: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather_tensor(x, 0, group) @ w
        part = functional.reduce_scatter_tensor(whole, "sum", 0, group)
        total = functional.all_reduce(part, "sum", group)
        turned = functional.all_to_all_single(total, None, None, group)
        return functional.wait_tensor(turned) + 1

    def ring(self) -> None:
        """All ranks send first: only a batch of both ends."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sent = torch.full((1 << 20,), float(rank), device=self.device)
        got = torch.full_like(sent, -1)
        for _ in range(3):
            sends = dist.P2POp(dist.isend, sent, (rank + 1) % ranks, self.group)
            receives = dist.P2POp(dist.irecv, got, (rank - 1) % ranks, self.group)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
            sent, got = got + 0, torch.full_like(sent, -1)
        wanted = torch.full_like(sent, float((rank - 3) % ranks))
        self.line("batch_isend_irecv", apart([wanted], [sent]))

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole numbers, whose sums are exact in any order."""
        x = torch.randint(0, 4, (1024, 256), device=self.device).float() + dist.get_rank()
        return x, torch.randint(0, 2, (256, 256), device=self.device).float()

    def compiled(self) -> None:
        x, w = self.operands()
        wanted = self.collectives(self.own, x, w)
        for how in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            found = torch.compile(self.collectives, fullgraph=True, backend=how)(self.group, x, w)
            self.line(f"torch.compile, {how}", apart([wanted], [found]))

    def graph(self) -> None:
        """Captured once, replayed with other numbers, with eager calls between."""
        x, _ = self.operands()
        ranks = dist.get_world_size()
        outs = x.new_empty(ranks * len(x), x.shape[1]), x.new_empty(len(x) // ranks, x.shape[1])
        turned, total = torch.empty_like(x), x.clone()

        def calls(group: Any) -> list[torch.Tensor]:
            dist.all_gather_into_tensor(outs[0], x, group=group)
            dist.reduce_scatter_tensor(outs[1], x, group=group)
            dist.all_to_all_single(turned, x, group=group)
            total.copy_(x)
            dist.all_reduce(total, group=group)
            return [one.clone() for one in (*outs, turned, total)]

        calls(self.group)
        calls(self.own)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls(self.group)
        off = 0.0
        for turn in range(20):
            x.fill_(turn * ranks + dist.get_rank())
            for one in (*outs, turned, total):
                one.fill_(-1)
            graph.replay()
            found = [one.clone() for one in (*outs, turned, total)]
            off += apart(found, calls(self.own if turn % 2 else self.group))
        torch.cuda.synchronize()
        self.line("CUDA graph, 20 replays", off)

    def attention(self) -> None:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        for method in ("allgather", "alltoall"):
            set_rotate_method(method)
            outs = []
            torch.use_deterministic_algorithms(True)  # else sums of gradients have no fixed order
            for group in (self.own, self.group):
                torch.manual_seed(3)
                whole = [
                    torch.randn(1, 8, 4096, 64, device=self.device, dtype=torch.bfloat16)
                    for _ in range(3)
                ]
                mesh = DeviceMesh.from_group(group, self.device.type)
                with context_parallel(
                    mesh, buffers=whole, buffer_seq_dims=[2] * 3, no_restore_buffers={*whole}
                ):
                    own = [one.requires_grad_() for one in whole]
                    out = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True)
                    out.float().square().sum().backward()
                    outs.append([out.detach(), *(one.grad for one in own)])
            self.line(f"context_parallel, {method}", apart(*outs), most=1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        name = "step ms | difference | staged | window memory"
        print(f"{'':<28} {name}", flush=True)
        return run_ranks(args.ranks, {})
    if args.device == "cuda":
        device = join_ranks()
    else:
        device = torch.device("cpu")
        where = f"file://{os.environ['MEETING']}"
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    check = Check(device, dist.group.WORLD)
    check.fsdp()
    check.ring()
    check.compiled()
    if args.device == "cuda":
        check.graph()
        check.attention()
    dist.barrier()
    dist.destroy_process_group()
    return int(check.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
