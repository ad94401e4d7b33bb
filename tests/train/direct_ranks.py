"""The ranks of test_direct.py: a group's calls on GPUs of the stand-in driver, as training makes
them."""

import contextlib
import ctypes
import datetime
import gc
import os
import sys
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crew
import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
import torch_cuda

import offcore
from offcore.distributed import direct, sides
from offcore.fsdp.shards import Meeting, Shards

PART = 1 << 12  # elements
RING = 32 << 20  # bytes of window memory: too many to go by way of a slot
c10d = torch._C._distributed_c10d


class Rank:
    """Of two: a group whose communicator for GPUs is one of the stand-in's."""

    made = 0

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        Rank.made += 1
        self.driver = torch_cuda.Driver(os.environ["OFFCORE_LIBCUDA"], rank)
        torch_cuda.use(self.driver, rank)
        direct.stream_of = torch._C._cuda_getCurrentRawStream
        self.group: Any = dist.group.WORLD
        core = self.group.collectives
        store = dist.PrefixStore(f"{Rank.made}", dist.distributed_c10d._get_default_store())
        device = torch.device("cuda", rank)
        self.comm: Any = sides.open_communicator(store, rank, ranks, 30.0, device, {})
        self.side = direct.DirectSide(self.comm, "g", rank, 30.0, device)
        core.carried.clear()
        core._sides["cuda"] = core.direct = self.side
        self.window = self.comm.window(16 * PART * 4)
        self.used = 0

    def tensor(self, count: int, value: float, dtype: Any = torch.float32) -> Any:
        """Of memory that only the driver reaches."""
        at = self.used
        self.used += count * 4
        self.window.write(np.full(count, value, np.float32), at, rank=self.rank)
        memory = (ctypes.c_uint8 * (count * 4)).from_address(self.window.address(self.rank) + at)
        made = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        made.at = at
        return made

    def values(self, tensor: Any) -> list[float]:
        array = np.empty(tensor.numel(), np.float32)
        self.window.read(array, tensor.at, rank=self.rank)
        return sorted({*array.tolist()})

    def calls(self, name: str) -> int:
        counted = self.driver.calls.fakecuda_calls
        counted.restype = ctypes.c_uint64
        return int(counted(name.encode()))


def options(kind: str = "Allreduce", **given: Any) -> Any:
    made = getattr(c10d, f"{kind}Options")()
    for name, value in given.items():
        setattr(made, name, value)
    return made


def right(rank: int, ranks: int) -> None:
    one = Rank(rank, ranks)
    whole, part = one.tensor(2 * PART, -1), one.tensor(PART, rank + 1)
    summed, scattered = one.tensor(PART, rank + 1), one.tensor(PART, -1)
    spread = one.tensor(2 * PART, rank + 1)
    for turn, late in enumerate((True, False, True)):
        works = [
            one.group.allreduce([summed], options(asyncOp=late)),
            one.group._allgather_base(whole, part, options("Allgather", asyncOp=late)),
            one.group._reduce_scatter_base(
                scattered,
                spread,
                options("ReduceScatter", asyncOp=late, reduceOp=dist.ReduceOp(dist.ReduceOp.AVG)),
            ),
        ]
        waits = one.calls("cuStreamWaitEvent")
        assert all(isinstance(work, direct.Started) and work.wait() for work in works)
        # The stream that is current follows what another one does, and nothing else.
        assert one.calls("cuStreamWaitEvent") - waits <= (3 if late else 0)
        for work in works:
            work.wait(datetime.timedelta(seconds=20))
            assert work.is_completed()
            assert work.is_success()
        assert works[0].result()[0] is summed
        assert works[1].get_future().value()[0] is whole
        assert works[1].get_future() is works[1].get_future()
        assert one.values(summed) == [3 * 2.0**turn]
        assert one.values(whole) == [1, 2]
        assert one.values(scattered) == [1.5]
    report = offcore.distributed.report()["carried"]
    assert report == {"all_reduce": 3, "all_gather": 3, "reduce_scatter": 3}
    several(one)


def in_order(rank: int, ranks: int) -> None:
    """What the current stream has comes before a call, and what it gets after a wait behind it."""
    one = Rank(rank, ranks)
    source, summed, copied = (one.tensor(PART, value) for value in (rank + 1, 0, 0))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def copy(dst: Any, src: Any) -> None:
        to, what = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (dst, src))
        one.driver.cuMemcpyAsync(to, what, ctypes.c_size_t(4 * PART), stream)

    for turn in range(20):
        copy(summed, source)
        work = one.group.allreduce([summed], options(asyncOp=turn % 2 == 0))
        assert work.stream == (one.side.stream if turn % 2 == 0 else stream.value)
        if turn % 3 == 0:
            work.get_future()
        work.wait()
        copy(copied, summed)
        one.driver.cuStreamSynchronize(stream)
        assert one.values(copied) == [3]


def several(one: Rank) -> None:
    """In the order of the caller's stream, each behind the one before; and let go of."""
    summed = one.tensor(PART, 1)
    for _ in range(20):
        work = one.group.allreduce([summed], options())
    work.wait(datetime.timedelta(seconds=20))
    assert one.values(summed) == [2.0**20]
    one.side.settle()
    assert not one.side._late


def long_way(rank: int, ranks: int) -> None:
    """What the core does not take goes through the communicator, as before."""
    one = Rank(rank, ranks)
    floats, longs = one.tensor(PART, 0), one.tensor(PART, 0)
    twice = [floats, longs]
    sent: list[Any] = []

    def taken(name: str, *given: Any) -> Any:
        sent.append(name)
        return "long"

    one.group._call = taken
    group, plain = one.group, options()
    premul = c10d._make_nccl_premul_sum(2.0)
    for args in (
        (twice, plain),
        ([floats[::2]], plain),
        ([floats.to(torch.float32).view(torch.bool)], plain),
        ([torch.nn.Parameter(torch.zeros(3))], plain),
        ([torch.eye(3).to_sparse()], plain),
        ([torch._neg_view(floats)], plain),
        ([floats],),
        ([floats], dist.ReduceOp.SUM),
        ([floats], options(reduceOp=dist.ReduceOp(dist.ReduceOp.BXOR))),
        ([floats], options(reduceOp=premul)),
    ):
        assert group.allreduce(*args) == "long", args
    assert group.allreduce([floats], opts=plain) == "long"
    other = one.tensor(PART, 0, torch.int32)
    assert group._allgather_base(other, floats, options("Allgather")) == "long"
    capturing = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    one.driver.cuStreamBeginCapture_v2(capturing, 0)
    assert group.allreduce([floats], plain) == "long"
    one.driver.cuStreamEndCapture(capturing, ctypes.byref(ctypes.c_void_p()))
    del one.group._call
    assert len(sent) == 13
    assert not one.side._late
    assert not one.group.collectives.carried


def short(rank: int, ranks: int) -> None:
    """All-reduces that NCCL ends sooner are its own."""
    one = Rank(rank, ranks)
    group, floats = one.group, one.tensor(PART, rank + 1)
    assert group.nccl_below == 0  # there is none here
    taken: list[Any] = []

    class Nccl:
        def allreduce(self, *given: Any, **named: Any) -> Any:
            taken.append((given, named))
            return "NCCL's"

        allreduce_coalesced = allreduce

    group.inner["cuda"], group.nccl_below = Nccl(), 4 * PART + 1
    before = group.handed.get("allreduce", 0)
    plain = options()
    assert group.allreduce([floats], plain) == "NCCL's"
    assert group.allreduce(floats, op=dist.ReduceOp.SUM) == "NCCL's"
    assert group.allreduce_coalesced([floats], plain) == "NCCL's"
    given = [([floats], plain), (floats,), ([floats], plain)]
    assert [[*one] for one, _ in taken] == [[*one] for one in given]
    assert group.handed["allreduce"] == before + 2
    sparse = torch.eye(3).to_sparse()  # of whose bytes nobody knows
    assert group.allreduce([sparse], plain).wait()  # by gloo: its device is a CPU
    group.nccl_below = 4 * PART
    assert group.allreduce([floats], plain).wait(datetime.timedelta(seconds=20))
    assert one.values(floats) == [3]
    assert len(taken) == 3
    assert one.group.collectives.carried == {"all_reduce": 1}
    del group.inner["cuda"]
    group.nccl_below = 0


def wrong(rank: int, ranks: int) -> None:
    one = Rank(rank, ranks)
    whole, part = one.tensor(3 * PART, 0), one.tensor(PART, 0)
    with pytest.raises(offcore.Error, match=r"all_gather \(call 1 of rank \d, group g\)") as odd:
        one.group._allgather_base(whole, part, options("Allgather"))
    assert odd.value.code == "invalid"
    elsewhere(one, part)
    work = one.group.allreduce([part], options())  # the group lives on
    work.wait(datetime.timedelta(seconds=20))
    late = one.tensor(PART, 0)
    one.group.allreduce([late], options()).wait(datetime.timedelta(seconds=20))
    kept = weakref.ref(late)
    meet(rank, ranks, "ready")
    if rank == 0:
        work = one.group.allreduce([late], options(timeout=datetime.timedelta(seconds=1.5)))
        work._outputs = None
        del late
        gc.collect()
        assert kept() is not None  # it has not ended
        deadline = time.monotonic() + 20
        while one.side.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        for again in (work.wait, lambda: one.group.allreduce([part], options())):
            with pytest.raises(offcore.Error, match=r"all_reduce \(call 6 .*in time") as dead:
                again()
            assert dead.value.code == "timeout"
    meet(rank, ranks, "aborted")
    if rank == 1:
        for again in (work.wait, lambda: one.group.allreduce([part], options())):
            with pytest.raises(offcore.Error) as dead:
                again()
            assert dead.value.code == "peer"
    meet(rank, ranks, "over")
    early(rank, ranks)


def elsewhere(one: Rank, part: Any) -> None:
    """Tensors of another GPU are refused. A call with both kinds of device goes to torch's own back
    end, whose it is to refuse it."""
    other, host, whole = one.tensor(PART, 0), torch.zeros(PART), one.tensor(2 * PART, 0)
    other.get_device = lambda: 1 - one.rank
    host.is_cuda, host.is_cpu, host.get_device = False, True, lambda: -1
    wrong = f"rank {one.rank} lies on .*; this rank needs memory of cuda:{one.rank}"
    gathers = options("Allgather")
    for call in (
        lambda: one.group.allreduce([other], options()),
        lambda: one.group._allgather_base(whole, other, gathers),
    ):
        with pytest.raises(offcore.Error, match=wrong) as refused:
            call()
        assert refused.value.code == "invalid"
    carried, taken = dict(one.group.collectives.carried), []

    class Torch:
        def taken(self, *given: Any) -> Any:
            taken.append(given)

        allreduce_coalesced = _allgather_base = taken

    one.group._inner_of = lambda _: Torch()
    one.group._allgather_base(whole, host, gathers)
    one.group.allreduce_coalesced([part, host], options("AllreduceCoalesced"))
    del one.group._inner_of
    assert [len(given) for given in taken] == [3, 2]
    assert one.group.collectives.carried == carried


def early(rank: int, ranks: int) -> None:
    """A first call that nobody else makes ends by its own limit, and says so."""
    one = Rank(rank, ranks)
    if rank == 0:
        limited = options(timeout=datetime.timedelta(seconds=1))
        with pytest.raises(offcore.Error, match=r"call 1 of rank 0, group g\): timeout of 1 s: "):
            one.group.allreduce([one.tensor(PART, 0)], limited)
    meet(rank, ranks, "late")


def in_ranges(rank: int, ranks: int) -> None:
    """For a profiler: every call, whichever way it goes."""
    named: list[str] = []

    @contextlib.contextmanager
    def annotate(name: str, domain: str) -> Iterator[None]:
        named.append(name)
        yield

    sys.modules["nvtx"] = types.SimpleNamespace(annotate=annotate)
    os.environ["OFFCORE_NVTX"] = "1"
    one = Rank(rank, ranks)
    del os.environ["OFFCORE_NVTX"]
    summed = one.tensor(PART, 1)
    for start in (
        lambda: one.group.allreduce([summed], options()),
        lambda: one.comm.all_reduce(summed),
        lambda: one.comm.all_reduce([summed]),
    ):
        named.clear()
        start()
        assert {*named} == {"offcore.all_reduce"}
    one.side.settle()


def shards(rank: int, ranks: int) -> None:
    """FSDP2's calls."""
    one = Rank(rank, ranks)
    store = dist.PrefixStore("shards", dist.distributed_c10d._get_default_store())
    meeting = Meeting(store, [[*range(ranks)]])
    made = Shards(dist.group.WORLD, one.side.device, 30.0, RING, {}, meeting)
    comm, window = made._ends[0], made.ring._window
    memory = (ctypes.c_uint8 * RING).from_address(window.address(rank))
    gathered = torch.frombuffer(memory, dtype=torch.float32)
    own = gathered.chunk(ranks)[rank]
    other = comm.window(RING // 2)
    other.write(np.full(RING // 8, rank + 1, np.float32), rank=rank)
    memory = (ctypes.c_uint8 * (RING // 2)).from_address(other.address(rank))
    part = torch.frombuffer(memory, dtype=torch.float32)
    whole, reduced = one.tensor(2 * PART, rank + 1), one.tensor(PART, 0)
    comm._start = None  # the long way is not gone
    for inp in (part, own):
        assert made.all_gather(gathered, inp, False) is None
        array = np.empty(RING // 4, np.float32)
        torch_cuda.Here.driver.cuStreamSynchronize(
            ctypes.c_void_p(torch_cuda.Here.stream.cuda_stream)
        )
        window.read(array, 0, rank=rank)
        assert [{*half.tolist()} for half in np.split(array, 2)] == [{1}, {2}]
    for turn in range(20):
        assert made.reduce_scatter(reduced, whole, "premul_sum", 0.5 + turn, False) is None
    made.settle()
    assert one.values(reduced) == [3 * 19.5]
    facts = {name: ran.facts() for name, ran in made.ran.items()}
    assert facts["all_gather"]["calls"] == 2
    assert facts["all_gather"]["bytes"] == 2 * RING
    assert facts["all_gather"]["staged"] == 0  # peers write into the ring
    assert facts["reduce_scatter"]["calls"] == 20
    assert facts["reduce_scatter"]["sms"] > 0
    assert [*facts["reduce_scatter"]["variants"].values()] == [20]
    with pytest.raises(offcore.Error, match=r"all_gather \(call 3 of rank \d, group fsdp") as odd:
        made.all_gather(gathered, whole, False)
    assert odd.value.code == "invalid"
    del comm._start
    capturing = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert made.all_gather(gathered, part, True).wait()  # on a stream of its own
    one.driver.cuStreamBeginCapture_v2(capturing, 0)
    late = len(made._gathers._late)
    made.all_gather(gathered, part, False)
    assert len(made._gathers._late) == late  # a graph keeps what it uses
    graph = ctypes.c_void_p()
    one.driver.cuStreamEndCapture(capturing, ctypes.byref(graph))
    made.settle()
    made.close()
    with pytest.raises(offcore.Error) as closed:
        made.all_gather(gathered, part, False)
    assert closed.value.code == "invalid"


def from_the_group(rank: int, ranks: int) -> None:
    """Tensors in a pool of window memory, until it is full: then they are torch's own."""
    one = Rank(rank, ranks)
    core, device = one.group.collectives, one.side.device
    assert not one.group.supports_tensor_alloc(device)
    core._arguments = {"memory": 4 * RING}
    assert one.group.supports_tensor_alloc(device)
    told: list[Any] = []
    one.side._told = told.append
    part, copied = one.tensor(PART, rank + 1), one.tensor(PART, 0)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def copy(dst: Any, src: Any) -> None:
        to, what = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (dst, src))
        one.driver.cuMemcpyAsync(to, what, ctypes.c_size_t(4 * PART), stream)
        one.driver.cuStreamSynchronize(stream)

    count = 3 * RING // 8  # three of them do not fit
    for turn in range(4):
        made = [
            one.group.allocate_tensor(count, dtype=torch.float32, device=device) for _ in range(3)
        ]
        assert core.memory["cuda"].refused == turn + 1
        whole = made[turn % 2]
        shards = whole.chunk(ranks)
        copy(shards[rank], part)
        late = options("Allgather", asyncOp=turn > 1)
        one.group._allgather_base(whole, shards[rank], late).wait()
        for peer, shard in enumerate(shards):
            copy(copied, shard)
            assert one.values(copied) == [peer + 1]
        one.side.settle()  # a late call keeps its tensors until then
        del made, whole, shards, shard
    assert [result.staged for result in told] == [False] * 4
    memory = offcore.distributed.report()["memory"]
    assert memory == {"cuda": {"bytes": 4 * RING, "refused": 4}}
    core._arguments, core.memory = {}, {}


def meet(rank: int, ranks: int, name: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{rank}", "")
    store.wait([f"{name}/{other}" for other in range(ranks)])


def well(rank: int, ranks: int) -> None:
    for part in (right, in_order, long_way, short, in_ranges, shards, from_the_group):
        part(rank, ranks)


MAINS = {main.__name__: main for main in (well, wrong)}

if __name__ == "__main__":
    crew.run(2, MAINS[sys.argv[1]], "offcore")
