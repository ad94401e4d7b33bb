"""A rank of test_mcast_torch.py, as a process: torch_ranks.py RANK RANKS PORT."""

import datetime
import faulthandler
import sys
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offcore
from offcore import mcast
from offcore.mcast import torch as mcast_torch

warnings.filterwarnings("ignore", category=FutureWarning)


def operations(group: Any = None) -> int:
    """How many collectives multicast has carried."""
    world = dist.group.WORLD if group is None else group
    count: int = world.communicator.counters["operations"]
    return count


def own_collectives(rank: int, ranks: int) -> None:
    before = operations()
    tensor = torch.arange(5000.0) if rank == 1 else torch.zeros(5000)
    dist.broadcast(tensor, 1)
    assert (tensor == torch.arange(5000.0)).all()
    turned = torch.full((30, 20), rank, dtype=torch.int16).t()  # not contiguous
    dist.broadcast(turned, 0)
    assert (turned == 0).all()
    assert not turned.is_contiguous()
    whole = torch.zeros(ranks, 1000, dtype=torch.bfloat16)
    work = dist.all_gather_into_tensor(
        whole, torch.full((1000,), rank, dtype=torch.bfloat16), async_op=True
    )
    assert work.wait()
    assert (whole == torch.arange(ranks).view(-1, 1)).all()
    parts = [torch.zeros(4, 3).t() for _ in range(ranks)]
    dist.all_gather(parts, torch.full((3, 4), float(rank)))
    assert all((part == index).all() for index, part in enumerate(parts))
    uneven = [torch.zeros(index) for index in range(ranks)]
    future = dist.all_gather(uneven, torch.full((rank,), float(rank)), async_op=True).get_future()
    future.wait()
    assert all((part == index).all() for index, part in enumerate(uneven))
    share = torch.zeros(2)
    dist.reduce_scatter_tensor(share, torch.arange(2.0 * ranks))
    assert (share == ranks * torch.arange(2.0 * rank, 2.0 * rank + 2)).all()
    halves = torch.zeros(5, dtype=torch.bfloat16)
    given = torch.full((5 * ranks,), 1.0 + rank, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(halves, given, dist.ReduceOp.MAX, async_op=True).wait()
    assert (halves == ranks).all()
    turned = torch.zeros(3, 2).t()
    dist.reduce_scatter(turned, [torch.full((2, 3), float(part)) for part in range(ranks)])
    assert (turned == ranks * rank).all()
    own = torch.zeros(rank)
    dist.reduce_scatter(own, [torch.full((part,), 2.0) for part in range(ranks)])
    assert (own == 2 * ranks).all()
    dist.barrier()
    assert operations() - before == 10


def works(rank: int, ranks: int) -> None:
    parts = [torch.zeros(4, 3).t() for _ in range(ranks)]
    work = dist.all_gather(parts, torch.full((3, 4), float(rank)), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert all((part == index).all() for index, part in enumerate(parts))  # and nobody waited
    assert work.is_success()
    with torch.device("meta"):
        dist.all_gather(parts, torch.full((3, 4), float(rank + 1), device="cpu"))
    assert all((part == index + 1).all() for index, part in enumerate(parts))
    leaf = torch.full((4, 3), float(rank)).t().requires_grad_()
    dist.broadcast(leaf, 1)
    assert (leaf == 1).all()


def timeouts(rank: int, ranks: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    late = [f"late {other}" for other in range(1, ranks)]
    options = torch.distributed.distributed_c10d.BroadcastOptions()
    options.rootRank, options.timeout = 0, datetime.timedelta(milliseconds=50)
    if rank == 0:
        store.wait(late)  # until the others have given up waiting for it
        options.timeout = datetime.timedelta(seconds=20)
    tensor = torch.full((10,), float(rank))
    work = dist.group.WORLD.broadcast([tensor], options)
    future = work.get_future()
    if rank != 0:
        for wait in (work.wait, future.wait):
            with pytest.raises(Exception, match=r"has not ended within 0\.05 s"):
                wait()
        store.set(late[rank - 1], "")
    assert work.wait(datetime.timedelta(seconds=20))
    assert (tensor == 0).all()


def handed_to_gloo(rank: int, ranks: int) -> None:
    before = operations()
    tensor = torch.full((100,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(ranks))).all()
    for _ in range(20):  # a thread of gloo's lets go of the last one's tensors meanwhile
        dist.all_reduce(tensor)
    parts = [torch.zeros(3) for _ in range(ranks)] if rank == 0 else None
    dist.gather(torch.full((3,), float(rank)), parts)
    assert parts is None or all((part == index).all() for index, part in enumerate(parts))
    taken = torch.zeros(3)
    dist.scatter(taken, parts)
    assert (taken == rank).all()
    dist.reduce(taken, 0)
    assert rank != 0 or (taken == sum(range(ranks))).all()
    share = torch.zeros(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(
        share, torch.full((ranks,), 1 << rank, dtype=torch.int64), dist.ReduceOp.BOR
    )
    assert (share == (1 << ranks) - 1).all()
    out = torch.zeros(ranks)
    dist.all_to_all_single(out, torch.full((ranks,), float(rank)))
    assert (out == torch.arange(ranks)).all()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        got = torch.zeros(3)
        dist.recv(got, 0)
        assert (got == 1).all()
    assert operations() == before
    things: list[Any] = [None] * ranks
    dist.all_gather_object(things, {"rank": rank})  # made of all_gather
    assert things == [{"rank": index} for index in range(ranks)]


def groups(rank: int, ranks: int) -> None:
    pair = dist.new_group([0, ranks - 1])
    single = dist.new_group(
        list(range(ranks)), pg_options=mcast_torch.McastOptions(multicast=False)
    )
    if rank in (0, ranks - 1):
        tensor = torch.full((70,), rank)
        dist.broadcast(tensor, ranks - 1, group=pair)
        assert (tensor == ranks - 1).all()
        assert operations(pair) == 1
    whole = torch.zeros(ranks * 70)
    dist.all_gather_into_tensor(whole, torch.full((70,), float(rank)), group=single)
    assert (whole.view(ranks, 70) == torch.arange(ranks).view(-1, 1)).all()
    assert single.communicator.counters["datagrams"] == 0


def communicators_of_groups(rank: int, ranks: int) -> None:
    for group in (None, dist.new_group(backend="gloo")):
        with mcast.Communicator(group, interface="lo") as comm:
            assert (comm.rank, comm.ranks) == (rank, ranks)
            tensor = torch.full((9, 7), rank, dtype=torch.bfloat16)
            assert comm.broadcast(tensor, root=1).wait().op == "broadcast"
            assert (tensor == 1).all()


def aborted(rank: int, ranks: int) -> None:
    """Calls of the other ranks end, and other groups go on."""
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 0:
        group.abort()
    with pytest.raises(offcore.Error) as caught:
        dist.barrier(group=group)
    assert caught.value.code in ("peer", "cancelled")
    dist.barrier()


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # where it hangs
    rank, ranks, port = map(int, sys.argv[1:])
    for give in (mcast_torch.configure, mcast_torch.McastOptions):
        with pytest.raises(offcore.Error, match="unknown argument interfaces: give alpha_us, "):
            give(interfaces="lo")
    mcast_torch.configure(interface="lo")
    dist.init_process_group(
        "cpu:offcore_mcast",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=30),
    )
    own_collectives(rank, ranks)
    works(rank, ranks)
    timeouts(rank, ranks)
    handed_to_gloo(rank, ranks)
    groups(rank, ranks)
    communicators_of_groups(rank, ranks)
    aborted(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
