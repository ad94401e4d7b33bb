"""The ranks of test_distributed.py: the backend "offcore" beside gloo, on CPU tensors."""

import contextlib
import copy
import datetime
import json
import os
import random
import signal
import sys
import time
from typing import Any

import crew
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

import offcore
import offcore.distributed
from offcore.distributed import reach
from offcore.distributed.group import BACKENDS

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8]
BYTES = [torch.bool, torch.complex64, torch.float8_e4m3fn]  # that only move
REDUCING = "all_reduce reduce reduce_scatter single"
MOVING = "broadcast all_gather into all_to_all split lists scatter gather"
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


def tensor(draw: random.Random, shape: tuple[int, ...], dtype: Any, dense: bool) -> Any:
    """Small whole numbers, whose sums are exact; every second one's rows are not dense."""
    wide = shape if dense else (*shape[:-1], shape[-1] * 2)
    count = int(torch.Size(wide).numel())
    whole = torch.tensor([draw.randrange(5) for _ in range(count)], dtype=torch.float32)
    made = whole.view(wide).to(dtype)
    return made if dense else made[..., ::2]


def solid(given: Any) -> Any:
    return given.clone(memory_format=torch.contiguous_format)


def bits(given: Any) -> Any:
    return given.detach().contiguous().view(-1).view(torch.uint8)


def calls(draw: random.Random, rank: int, ranks: int) -> list[Any]:
    """A random call, as functions of a group that return the work and the outputs."""
    reduced = draw.random() < 0.5
    dtype = draw.choice(DTYPES if reduced else DTYPES + BYTES)
    dense, late = draw.random() < 0.7, draw.random() < 0.5
    rows, root, op = draw.choice([0, 1, 3, 40]), draw.randrange(ranks), draw.choice(OPS)
    name = draw.choice(
        ["all_reduce", "reduce", "reduce_scatter", "single"]
        if reduced
        else [
            "broadcast",
            "all_gather",
            "into",
            "all_to_all",
            "split",
            "lists",
            "scatter",
            "gather",
        ]
    )
    splits = [[draw.randrange(3) for _ in range(ranks)] for _ in range(ranks)]
    own = random.Random(draw.randrange(1 << 30) + rank)
    given = tensor(own, (rows * ranks, 2), dtype, dense)
    parts = [tensor(own, (rows, 3), dtype, dense) for _ in range(ranks)]
    sent, taken = splits[rank], [splits[other][rank] for other in range(ranks)]
    cut = tensor(own, (sum(sent), 2), dtype, dense)

    def call(group: Any, raw: bool) -> tuple[Any, list[Any]]:
        kept = {"group": group, "async_op": late}
        kind, wide = (torch.uint8, dtype.itemsize) if raw else (dtype, 1)
        whole = solid(given).view(kind) if raw else given
        ins = [
            part.clone(memory_format=torch.contiguous_format).view(kind) if raw else part.clone()
            for part in parts
        ]
        outs = [torch.zeros(rows, 3 * wide, dtype=kind) for _ in range(ranks)]
        if name in ("all_reduce", "broadcast", "reduce"):
            # gloo takes what is not dense for dense in a reduce.
            out = tensor(own, whole.shape, kind, dense or group is not None)
            out.copy_(whole)
            if name == "all_reduce":
                return dist.all_reduce(out, op=op, **kept), [out]
            if name == "broadcast":
                return dist.broadcast(out, root, **kept), [out]
            return dist.reduce(out, root, op=op, **kept), [out] if rank == root else []
        if name == "reduce_scatter":
            return dist.reduce_scatter(outs[0], ins, op=op, **kept), outs[:1]
        if name == "single":
            out = torch.zeros(rows, 2, dtype=kind)
            return dist.reduce_scatter_tensor(out, whole.contiguous(), op=op, **kept), [out]
        if name == "all_gather":
            return dist.all_gather(outs, ins[0], **kept), outs
        if name == "into":
            out = torch.zeros(rows * ranks * ranks, 2 * wide, dtype=kind)
            return dist.all_gather_into_tensor(out, whole.contiguous(), **kept), [out]
        if name == "all_to_all":
            out = torch.zeros(whole.shape, dtype=kind)
            return dist.all_to_all_single(out, whole.contiguous(), **kept), [out]
        if name == "split":
            out = torch.zeros(sum(taken), 2 * wide, dtype=kind)
            inp = solid(cut).view(kind)
            return dist.all_to_all_single(out, inp, taken, sent, **kept), [out]
        if name == "lists":
            return dist.all_to_all(outs, ins, **kept), outs
        if name == "scatter":
            return dist.scatter(outs[0], ins if rank == root else None, root, **kept), outs[:1]
        into = outs if rank == root else None
        return dist.gather(ins[0], into, root, **kept), outs if rank == root else []

    return [name, dtype, late, call]


def random_calls(rank: int, ranks: int) -> None:
    gloo = dist.new_group(backend="gloo")
    draw = random.Random(7)
    for turn in range(150):
        name, dtype, late, call = calls(draw, rank, ranks)
        raw = dtype in BYTES  # which gloo does not know
        ours, theirs = call(None, False), call(gloo, raw)
        if late:
            ours[0].wait()
            theirs[0].wait()
        for one, other in zip(ours[1], theirs[1], strict=True):
            assert torch.equal(bits(one), bits(other)), (turn, name, dtype)
    assert offcore.distributed.report()["handed"] == {}
    carried = offcore.distributed.report()["carried"]
    assert set(carried) == {
        *("all_reduce", "reduce", "reduce_scatter", "broadcast"),
        *("all_gather", "all_to_all", "scatter", "gather"),
    }


def reductions(rank: int, ranks: int) -> None:
    mean = torch.full((5,), rank + 1.0, dtype=torch.bfloat16)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert (mean == (ranks + 1) / 2).all()
    scaled = torch.full((5,), rank + 1.0)
    dist.all_reduce(scaled, op=torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    assert (scaled == ranks * (ranks + 1) / 4).all()
    product = torch.full((5,), 2.0)
    dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)  # gloo's
    assert (product == 2**ranks).all()
    complexes = torch.full((5,), complex(rank, 1), dtype=torch.complex64)
    dist.all_reduce(complexes)
    assert (complexes == complex(sum(range(ranks)), ranks)).all()
    turned = torch.arange(6).to(torch.complex64).mul(1j).conj()  # conjugated when it is read
    dist.group.WORLD.broadcast(turned, 0).wait()  # the group's own method
    assert torch.equal(turned.resolve_conj(), torch.arange(6) * -1j)
    with pytest.raises(offcore.Error, match="dtypes differ"):
        dist.group.WORLD.allgather([[torch.ones(2)] * ranks], [torch.ones(2).double()]).wait()
    for splits in ([ranks + 1] * ranks, [1] * (ranks - 1)):
        with pytest.raises(offcore.Error, match="all_to_all: splits"):
            dist.all_to_all_single(torch.ones(ranks), torch.ones(ranks), splits, [1] * ranks)
    with pytest.raises(offcore.Error, match="all_to_all: needs"):
        dist.all_to_all([torch.ones(1)], [torch.ones(1)])
    eighths = torch.ones(4).to(torch.float8_e4m3fn)
    for call in (  # neither torch's own backend nor offcore has these
        lambda: dist.all_reduce(eighths),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64), op=dist.ReduceOp.MAX),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        got = torch.zeros(3)
        dist.recv(got, 0)
        assert (got == 1).all()
    assert dist.get_backend() == "offcore"


def other_forms(rank: int, ranks: int) -> None:
    parts = [torch.zeros(rank_ + 1) for rank_ in range(ranks)]  # of different sizes
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    assert all((part == other).all() for other, part in enumerate(parts))
    with _coalescing_manager():
        sums = [torch.full((n,), float(rank), dtype=torch.float32) for n in (3, 0, 5)]
        for one in sums:
            dist.all_reduce(one)
    assert all((one == sum(range(ranks))).all() for one in sums)
    with _coalescing_manager(async_ops=True) as both:
        wholes = [torch.zeros(ranks * n) for n in (2, 3)]
        for one in wholes:
            dist.all_gather_into_tensor(one, torch.full((one.numel() // ranks,), float(rank)))
    both.wait()
    assert all((one.view(ranks, -1)[rank] == rank).all() for one in wholes)
    world = dist.group.WORLD
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, world)
    assert torch.equal(gathered + 0, torch.arange(ranks).repeat_interleave(2) + 0.0)
    share = functional.reduce_scatter_tensor(torch.arange(2.0 * ranks), "sum", 0, world)
    assert torch.equal(share + 0, ranks * (torch.arange(2.0) + 2 * rank))
    lists: list[Any] = [None] * ranks
    dist.all_gather_object(lists, {"rank": rank})
    assert lists == [{"rank": other} for other in range(ranks)]
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert (doubled == 2 * ranks).all()
    assert world.allreduce(torch.ones(2)).wait()
    with torch.device("meta"):
        dist.all_reduce(sums[0])
    dist.barrier()


def groups(rank: int, ranks: int) -> None:
    pairs = {}
    for low, high in ((0, 1), (1, 2), (2, 0)):
        pairs[low, high] = dist.new_group([high, low])
    mine = [pair for pair in pairs if rank in pair]
    random.Random(rank).shuffle(mine)  # in different orders
    sums = {pair: torch.full((9,), float(rank)) for pair in mine}
    works = [dist.all_reduce(sums[pair], group=pairs[pair], async_op=True) for pair in mine]
    for work in works:
        work.wait()
    assert all((sums[pair] == sum(pair)).all() for pair in mine)
    for refuses in (offcore.distributed.Options, offcore.distributed.configure):
        with pytest.raises(offcore.Error, match="unknown argument backend: give"):
            refuses(backend="host")
        for wrong in (-1, 1.5, "1M", None, True):
            for name in ("all_reduce_from", "memory"):
                with pytest.raises(offcore.Error, match=f"{name}=.*: pass a number of bytes"):
                    refuses(**{name: wrong})
    alone = dist.new_group(
        [rank],
        pg_options=offcore.distributed.Options(sms=8, all_reduce_from=1 << 20),
        use_local_synchronization=True,
    )
    one = torch.ones(3)
    dist.all_reduce(one, group=alone)
    assert (one == 1).all()
    dist.destroy_process_group(alone)


def data_parallel(rank: int, ranks: int) -> None:
    gloo = dist.new_group(backend="gloo")
    weights = []
    for group in (None, gloo):
        torch.manual_seed(3)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        whole = torch.nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), process_group=group, bucket_cap_mb=0.001
        )
        step = torch.optim.SGD(whole.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for turn in range(8):  # gradients are added up every second step
            with whole.no_sync() if turn % 2 == 0 else contextlib.nullcontext():
                whole(torch.randn(8, 16)).square().mean().backward()
            if turn % 2 == 1:
                step.step()
                step.zero_grad()
        weights.append([parameter.detach() for parameter in whole.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def apart(rank: int, ranks: int) -> None:
    """Where ranks are on different hosts, as they say, gloo does everything."""
    told = reach.facts_of
    reach.facts_of = lambda device: told(device).replace('"place": "', f'"place": "{rank}')
    group = dist.new_group()
    reach.facts_of = told
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert (ones == ranks).all()
    whole = torch.zeros(ranks)
    dist.all_gather_into_tensor(whole, torch.full((1,), float(rank)), group=group)
    assert torch.equal(whole, torch.arange(ranks) + 0.0)
    lists = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(lists, torch.full((1,), float(rank)), group=group)
    with _coalescing_manager(group):
        dist.all_gather_into_tensor(whole, torch.full((1,), float(-rank)), group=group)
    assert torch.equal(whole, 0.0 - torch.arange(ranks))
    dist.barrier(group=group)
    found = offcore.distributed.report(group)
    assert found["carried"] == {}
    assert "different hosts" in found["obstacles"]["cpu"]
    facts = [{"place": "1", "missing": "", "gpu": str(gpu), "not_peers": []} for gpu in range(2)]
    assert reach.obstacle([json.dumps(one) for one in facts]) == ""
    facts[1]["not_peers"] = ["0"]
    assert "GPU of rank 1 has no peer access" in reach.obstacle([json.dumps(one) for one in facts])
    facts[0]["missing"] = "no driver"
    assert reach.obstacle([json.dumps(one) for one in facts]) == "rank 0: no driver"


def mixed_devices(rank: int, ranks: int) -> None:
    """Refused on each rank, and nothing has been sent: the group lives on."""
    own, other = torch.ones(2), torch.ones(2, device="meta")
    whole = torch.ones(2 * ranks)
    for call in (
        lambda: dist.all_gather([own] * ranks, other),
        lambda: dist.all_gather([own] * (ranks - 1) + [other], own),
        lambda: dist.all_gather_into_tensor(whole, other),
        lambda: dist.reduce_scatter_tensor(other, whole),
        lambda: dist.reduce_scatter(own, [own] * (ranks - 1) + [other]),
        lambda: dist.all_to_all([own] * ranks, [other] + [own] * (ranks - 1)),
        lambda: dist.all_to_all_single(whole, torch.ones(2 * ranks, device="meta")),
        lambda: dist.all_reduce_coalesced([own, other]),
        lambda: dist.scatter(other, [own] * ranks if rank == 0 else None),
        lambda: dist.gather(other, [own] * ranks if rank == 0 else None),
    ):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            call()
    with pytest.raises(offcore.Error, match="has no backend for meta"):
        dist.broadcast(other, 0)
    dist.all_reduce(own)
    assert (own == ranks).all()


def loaded(rank: int, ranks: int) -> None:
    """Processes of a loader come and go beside calls under way."""
    for given in torch.utils.data.DataLoader(
        [torch.full((1 << 16,), 1.0 + rank + turn) for turn in range(6)],
        num_workers=2,
        multiprocessing_context="fork",
    ):
        rows = given.squeeze(0)
        expected = rows[0] * ranks + sum(range(ranks)) - rank * ranks
        works = [dist.all_reduce(rows, async_op=True), dist.barrier(async_op=True)]
        for work in works:
            work.wait()
        assert (rows == expected).all()


def forked(rank: int, ranks: int) -> None:
    """A child of a rank is refused, rather than waiting for threads that it does not have."""
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        refused = 0
        for late in (False, True):
            try:
                work = dist.all_reduce(torch.ones(3), async_op=late)
                work.wait()
            except offcore.Error as failure:
                refused += failure.code == "invalid"
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    dist.all_reduce(torch.ones(3))


def world(rank: int, ranks: int) -> None:
    random_calls(rank, ranks)
    reductions(rank, ranks)
    other_forms(rank, ranks)
    groups(rank, ranks)
    data_parallel(rank, ranks)
    apart(rank, ranks)
    if not BACKENDS:  # from torch 2.14 on its dispatcher makes calls with meta tensors, of nothing
        mixed_devices(rank, ranks)
    loaded(rank, ranks)
    forked(rank, ranks)
    dist.destroy_process_group()


def late_peer(rank: int, ranks: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(offcore.Error, match=r"has not ended within 0\.05 s") as caught:
            work.wait(datetime.timedelta(seconds=0.05))
        assert caught.value.code == "timeout"
        with pytest.raises(offcore.Error, match=r"all_reduce \(call 2 of rank 0, group") as caught:
            work.wait()
        assert caught.value.code == "timeout"
        with pytest.raises(offcore.Error, match="is dead since all_reduce"):
            dist.all_reduce(torch.ones(3), group=group)
    else:
        time.sleep(1)
        with pytest.raises(offcore.Error, match="all_reduce") as caught:
            dist.all_reduce(torch.ones(3), group=group)
        assert caught.value.code == "peer"
    dist.all_reduce(torch.ones(3))  # other groups go on


def unlike_calls(rank: int, ranks: int) -> None:
    """Ranks that differ in a call's size, dtype, reduction, root or kind are told so, all of them,
    also in a group that has made the call before."""
    kind, op = ([torch.float32, torch.int32][rank], OPS[rank])
    for differs in (
        lambda group: dist.all_reduce(torch.ones(3 + rank), group=group),
        lambda group: dist.all_reduce(torch.ones(4, dtype=kind), group=group),
        lambda group: dist.all_reduce(torch.ones(4), op=op, group=group, async_op=True).wait(),
        lambda group: dist.broadcast(torch.ones(4), rank, group=group),
        lambda group: dist.barrier(group) if rank else dist.all_reduce(torch.ones(4), group=group),
    ):
        group = dist.new_group()
        dist.all_reduce(torch.ones(4), group=group)
        with pytest.raises(offcore.Error) as caught:
            differs(group)
        assert caught.value.code == "mismatch"
        with pytest.raises(offcore.Error, match="is dead since"):
            dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)


def dead_peer(rank: int, ranks: int) -> None:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(offcore.Error, match=r"broadcast \(call 2 of rank 0.*rank 1") as caught:
        dist.broadcast(torch.ones(3), 1)
    assert caught.value.code == "peer"
    with pytest.raises(offcore.Error, match="dead"):
        dist.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 10


def dead_peer_of_ddp(rank: int, ranks: int) -> None:
    """A backward pass raises what its futures bring: none of them is taken for gradients."""
    whole = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    for turn in range(2):
        loss = whole(torch.ones(4, 16)).sum()
        if rank == 1 and turn == 1:
            os._exit(0)
        with pytest.raises(Exception, match="rank 1") if turn == 1 else contextlib.nullcontext():
            loss.backward()


def aborted(rank: int, ranks: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 0:
        store.wait(["through the barrier"])
        dist.distributed_c10d._abort_process_group()
        return
    store.set("through the barrier", "")
    with pytest.raises(offcore.Error) as caught:
        dist.all_reduce(torch.ones(3))
    assert caught.value.code == "peer"


if __name__ == "__main__":
    crew.run(3, world, "offcore")
    for failing in (unlike_calls, late_peer, dead_peer, dead_peer_of_ddp, aborted):
        crew.run(2, failing, "offcore", timeout_s=20)
    print("done")
    sys.exit()
