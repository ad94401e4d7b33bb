"""The ranks of test_hosts.py: processes of one machine that say by OFFCORE_HOST where they are."""

import datetime
import os
import random
import signal
import socket
import struct
import sys
import time
from typing import Any

import crew
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import offcore
import offcore.distributed
from offcore.distributed import hosts
from offcore.mcast.torch import McastOptions

SENT_AT = 200  # tcpi_bytes_sent and then tcpi_bytes_retrans in the kernel's tcp_info
HEADERS = 4096  # more than gloo's headers of a call
DTYPES = [torch.int32, torch.int64, torch.uint8, torch.float32, torch.float64, torch.bfloat16]


def place(rank: int, local: int) -> None:
    os.environ["OFFCORE_HOST"] = f"host {rank // local}"


def sent() -> int:
    """Bytes that this process has sent by TCP, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            copied = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=copied) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    all_bytes, again = struct.unpack_from("QQ", info, SENT_AT)
                    total += all_bytes - again
        except OSError:
            os.close(copied)
    return total


def counted(call: Any) -> int:
    dist.barrier()
    before = sent()
    call()
    dist.barrier()  # by then the kernel has sent all, since the others have got it
    return sent() - before


def drawn(draw: random.Random, count: int, dtype: Any) -> Any:
    """Whole numbers whose sums are exact in every dtype."""
    return torch.tensor([draw.randrange(5) for _ in range(count)], dtype=torch.float32).to(dtype)


def results(rank: int, ranks: int, turns: int = 40) -> None:
    """Are gloo's to the bit where sums are exact."""
    gloo = dist.new_group(backend="gloo")
    shared = random.Random(3)
    for turn in range(turns):
        dtype, count = shared.choice(DTYPES), shared.choice([0, 1, 3, 17, 1000])
        kept = {"async_op": shared.random() < 0.5}
        root = shared.randrange(ranks)
        op = shared.choice([dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX])
        own = random.Random(turn * ranks + rank)
        part, whole = drawn(own, count, dtype), drawn(own, count * ranks, dtype)
        outs = []
        for group in (None, gloo):
            gathered, swapped = torch.zeros_like(whole), torch.zeros_like(whole)
            scattered, summed, told = torch.zeros_like(part), part.clone(), part.clone()
            lists = [torch.zeros_like(part) for _ in range(ranks)]
            taken, reduced = torch.zeros_like(part), part.clone()
            parts = [torch.zeros_like(part) for _ in range(ranks)] if rank == root else None
            given = [*whole.split(count)] if rank == root and count else None
            works = [
                dist.all_gather_into_tensor(gathered, part, group=group, **kept),
                dist.all_gather(lists, part, group=group, **kept),
                dist.reduce_scatter_tensor(scattered, whole, op=op, group=group, **kept),
                dist.all_reduce(summed, op=op, group=group, **kept),
                dist.all_to_all_single(swapped, whole, group=group, **kept),
                dist.broadcast(told, root, group=group, **kept),
                dist.gather(part, parts, root, group=group, **kept),
                dist.reduce(reduced, root, op, group=group, **kept),
            ]
            if count:  # gloo has no list of empty parts
                works.append(dist.scatter(taken, given, root, group=group, **kept))
            for work in works:
                if work is not None:
                    work.wait()
            outs.append([gathered, *lists, scattered, summed, swapped, told, taken])
            outs[-1] += [*parts, reduced] if rank == root else []
        for ours, theirs in zip(*outs, strict=True):
            assert torch.equal(ours, theirs), (turn, dtype, count)
    told = offcore.distributed.report()
    assert told["handed"] == {}
    assert told["obstacles"] == {}


def scaled(rank: int, ranks: int) -> None:
    mean = torch.full((5,), rank + 1.0)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert torch.allclose(mean, torch.full((5,), (ranks + 1) / 2))
    half = torch.full((5,), rank + 1.0, dtype=torch.bfloat16)
    dist.all_reduce(half, op=torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    assert (half == ranks * (ranks + 1) / 4).all()
    rows, splits = torch.full((ranks,), float(rank)), [1] * ranks
    out = torch.zeros(ranks)
    dist.all_to_all_single(out, rows, splits, splits)  # torch's own backend has splits
    assert torch.equal(out, torch.arange(ranks) + 0.0)
    assert sum(offcore.distributed.report()["handed"].values()) == 1


def bytes_between(rank: int, ranks: int, local: int) -> None:
    """Are the least that the ranks of a host can send."""
    hosts = ranks // local
    part = torch.ones(1 << 18)
    whole = torch.ones(ranks << 18)
    far = (hosts - 1) * part.nbytes
    parts = [torch.empty_like(part) for _ in range(ranks)] if rank == 0 else None
    there, away = int(rank < local), int(rank >= local)  # of the root's host, or not
    swapped = torch.empty_like(whole)
    cases = {  # what a rank sends, and gets
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), far, far),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), far, far),
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * far, 2 * far),
        "all_to_all": (lambda: dist.all_to_all_single(swapped, whole), far * local, far * local),
        "gather": (lambda: dist.gather(part, parts), away * part.nbytes, there * far),
        "scatter": (lambda: dist.scatter(part, parts), there * far, away * part.nbytes),
        "reduce": (lambda: dist.reduce(whole, 0), far + away * part.nbytes, far + there * far),
    }
    for name, (call, sends, gets) in cases.items():
        before = offcore.distributed.report()["hosts"]["cpu"]["received"]
        count = counted(call)
        assert sends <= count <= sends + HEADERS * hosts, (name, count, sends)
        assert offcore.distributed.report()["hosts"]["cpu"]["received"] - before == gets, name


def trained(whole: Any, rank: int) -> list[Any]:
    """The weights after four steps, and before these the first step's loss."""
    step = torch.optim.SGD(whole.parameters(), lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for _ in range(4):
        loss = whole(torch.randn(8, 16)).square().mean()
        loss.backward()
        step.step()
        step.zero_grad()
        losses.append(loss.detach())
    weights = [one.detach() for one in whole.parameters()]
    return [losses[0], *(getattr(one, "full_tensor", lambda one=one: one)() for one in weights)]


def model() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


def training(rank: int, ranks: int) -> None:
    """DDP and FSDP2 as over gloo: what only moved, to the bit."""

    def replicated(group: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(model(), process_group=group)

    def sharded(group: Any) -> Any:
        mesh = DeviceMesh.from_group(group, "cpu")
        whole = model()
        for layer in whole:
            fully_shard(layer, mesh=mesh)
        return fully_shard(whole, mesh=mesh)

    for make, needs in ((replicated, "all_reduce"), (sharded, "all_gather")):
        groups = [dist.new_group(backend=backend) for backend in ("offcore", "gloo")]
        ours, theirs = (trained(make(group), rank) for group in groups)
        told = offcore.distributed.report(groups[0])
        assert told["carried"][needs] >= 4
        assert told["handed"] == {}
        assert torch.equal(ours[0], theirs[0])  # of gathered or broadcast weights
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def uneven(rank: int, ranks: int) -> None:
    """Groups that offcore cannot divide say so and go by torch's own backend."""
    layouts = {
        "from 1 to 3 ranks": "a" if rank < ranks - 1 else "b",
        "one rank only": str(rank),
        "do not follow each other": str(rank % 2),
    }
    for why, name in layouts.items():
        os.environ["OFFCORE_HOST"] = name
        group = dist.new_group()
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert (ones == ranks).all()
        told = offcore.distributed.report(group)
        assert why in told["obstacles"]["cpu"]
        assert told["carried"] == told["hosts"] == {}
        dist.destroy_process_group(group)


def even(local: int) -> Any:
    def ranks_of_hosts(rank: int, ranks: int) -> None:
        group = dist.new_group(pg_options=offcore.distributed.Options(memory=1 << 20))
        cpu = torch.device("cpu")
        assert not group._get_backend(cpu).supports_tensor_alloc(cpu)
        assert offcore.distributed.report(group)["memory"] == {}
        dist.destroy_process_group(group)
        told = offcore.distributed.report()["hosts"]["cpu"]
        assert told == {"hosts": ranks // local, "ranks": local, "received": 0}
        if ranks == 6:
            hosts._SMALL = 64  # both ways, by what comes
        results(rank, ranks)
        scaled(rank, ranks)
        bytes_between(rank, ranks, local)
        training(rank, ranks)
        if ranks == 4:
            uneven(rank, ranks)
        dist.barrier()
        dist.destroy_process_group()

    return ranks_of_hosts


def killed(rank: int, ranks: int) -> None:
    """The others raise within the timeout, also those on other hosts."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    whole, part = torch.ones(ranks << 16), torch.ones(1 << 16)
    dist.all_gather_into_tensor(whole, part, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(offcore.Error, match=r"all_gather \(call") as caught:
        dist.all_gather_into_tensor(whole, part, group=group)
    assert caught.value.code in ("peer", "timeout")
    with pytest.raises(offcore.Error, match="is dead since"):
        dist.all_reduce(whole, group=group)
    assert time.monotonic() - began < 15


if __name__ == "__main__":
    crew.run(4, even(2), "offcore", before=lambda rank: place(rank, 2))
    crew.run(6, even(2), "offcore", before=lambda rank: place(rank, 2))
    crew.run(4, killed, "offcore", before=lambda rank: place(rank, 2), killed=1)
    offcore.distributed.configure(between=McastOptions(interface="lo", multicast=False))
    crew.run(4, killed, "offcore", before=lambda rank: place(rank, 2), killed=1)
    print("done")
    sys.exit()
