"""A rank that calls NCCL's functions, by whatever library it is told, on the stand-in driver.

As a program: nccl_rank.py CASE RANK RANKS ID, where ID is the unique id in hexadecimal. A case is a
function of a Rank. What it prints last is a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from cuda_driver import Driver

UINT8, INT32, FLOAT32 = 1, 2, 7
SUM, PROD, AVG = 0, 1, 4
OPS = ("AllGather", "AlltoAll", "AllReduce", "ReduceScatter", "Broadcast", "Gather", "Scatter")


class UniqueId(ctypes.Structure):
    """ncclUniqueId, by value."""

    _fields_ = (("internal", c_char * 128),)


class Team(ctypes.Structure):
    """ncclTeam_t."""

    _fields_ = (("ranks", c_int), ("rank", c_int), ("stride", c_int))


def library() -> ctypes.CDLL:
    """That under test: of a path, or what the loader finds first for a program's own names."""
    path = os.environ.get("TEST_NCCL")
    if path:
        return ctypes.CDLL(path)
    ctypes.CDLL("libnccl.so.2", int(os.environ["TEST_NCCL_MODE"]))
    return ctypes.CDLL(None)


def stand_in() -> ctypes.CDLL:
    """The real library of the tests."""
    return ctypes.CDLL(os.environ["TEST_STAND_IN"])


def pattern(rank: int, count: int, seed: int = 0) -> list[int]:
    return [(7 * i + 1000 * rank + 13 * seed) % 4093 for i in range(count)]


def at_once(body: Callable[[int], None], numbers: Sequence[int]) -> None:
    """A thread for each number."""
    started = [threading.Thread(target=body, args=(number,)) for number in numbers]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(30)


class Rank:
    """A communicator, with memory and a stream of its GPU."""

    def __init__(self, rank: int, ranks: int, uid: bytes, nccl: Any = None) -> None:
        self.rank, self.ranks = rank, ranks
        self.nccl = nccl or library()
        self.driver = Driver(os.environ["OFFCORE_LIBCUDA"])
        self.driver.start(rank)
        self.stream = self.driver.stream()
        self.comm = c_void_p()
        unique = UniqueId.from_buffer_copy(uid)
        assert self.nccl.ncclCommInitRank(byref(self.comm), ranks, unique, rank) == 0

    def memory(self, values: Sequence[int]) -> int:
        address = self.driver.get(c_uint64, "cuMemAlloc", 4 * len(values))
        self.put(address, values)
        return address

    def put(self, address: int, values: Sequence[int]) -> None:
        self.driver.put(address, bytes((c_int * len(values))(*values)))

    def read(self, address: int, count: int) -> list[int]:
        self.driver("cuStreamSynchronize", self.stream)
        return list((c_int * count).from_buffer_copy(self.driver.read(address, 4 * count)))

    def call(self, name: str, *arguments: Any, comm: Any = None) -> int:
        """A collective on int32; the communicator and the stream come last."""
        sizes = [c_size_t(one) if i == 2 else one for i, one in enumerate(arguments)]
        wide = [c_void_p(one) if i < 2 else one for i, one in enumerate(sizes)]
        function = getattr(self.nccl, f"nccl{name}")
        return int(function(*wide, comm or self.comm, c_void_p(self.stream)))

    def checked(self, name: str, count: int, seed: int = 0, in_place: bool = False) -> int:
        """Runs a collective of `count` elements a part and looks at every one; NCCL's result."""
        ranks, rank = self.ranks, self.rank
        whole = count * ranks
        out_count = whole if name in ("AllGather", "Gather", "AlltoAll") else count
        in_count = whole if name in ("AlltoAll", "ReduceScatter", "Scatter") else count
        inputs = [pattern(one, in_count, seed) for one in range(ranks)]
        out = self.memory([-1] * out_count)
        inp = self.memory(inputs[rank])
        if in_place and name in ("AllReduce", "AllGather", "Broadcast"):
            inp = out + 4 * count * rank * (name == "AllGather")
            self.put(inp, inputs[rank])
        if in_place and name == "ReduceScatter":
            out = inp + 4 * count * rank
        extra = {"AllReduce": [SUM], "ReduceScatter": [SUM]}
        extra |= {"Broadcast": [1], "Gather": [1], "Scatter": [1]}
        code = self.call(name, inp, out, count, INT32, *extra.get(name, []))
        if code == 0 and (name != "Gather" or rank == 1):
            assert self.read(out, out_count) == wanted(name, inputs, rank, count), name
        return code

    def calls(self, name: str) -> int:
        """How often the stand-in was asked."""
        count = stand_in().fakenccl_calls
        count.restype = c_uint64
        return int(count(f"nccl{name}".encode()))

    def destroy(self) -> None:
        assert self.nccl.ncclCommDestroy(self.comm) == 0


def wanted(name: str, inputs: list[list[int]], rank: int, count: int) -> list[int]:
    """What rank gets of these inputs."""
    part = slice(rank * count, (rank + 1) * count)
    if name in ("AllGather", "Gather"):
        return [one for given in inputs for one in given]
    if name == "AlltoAll":
        return [one for given in inputs for one in given[part]]
    if name == "Broadcast":
        return inputs[1]
    if name == "Scatter":
        return inputs[1][part]
    sums = [sum(column) for column in zip(*inputs, strict=True)]
    return sums if name == "AllReduce" else sums[part]


def collectives(r: Rank) -> dict[str, Any]:
    """Each once below its size, and from it on; the second time without the ranks' meeting."""
    taken: dict[str, list[int]] = {}
    for name in OPS:
        counts = []
        for count, seed in ((64, 0), (2048, 1), (2048, 2)):
            before = r.calls(name)
            assert r.checked(name, count, seed, in_place=seed == 2) == 0
            counts.append(r.calls(name) - before)
        taken[name] = counts
    r.destroy()
    return taken


def not_ours(r: Rank) -> dict[str, Any]:
    """What is large enough, and NCCL's all the same."""
    out, inp = r.memory([0] * 4096), r.memory(pattern(r.rank, 4096))
    before = r.calls("AllReduce")
    assert r.call("AllReduce", inp, out, 2048, INT32, PROD) == 0  # an operation
    assert r.call("AllReduce", inp, out, 2048, 3, SUM) == 0  # uint32
    operations = r.calls("AllReduce") - before
    graph: list[int] = []
    captured = r.calls("AllReduce")
    r.checked("AllReduce", 2048)  # the ranks have met: capture would be possible
    assert r.calls("AllReduce") == captured
    with r.driver.capture(r.stream, graph):
        code = r.call("AllReduce", inp, out, 2048, INT32, SUM)
    r.destroy()
    return {"operations": operations, "captured": r.calls("AllReduce") - captured, "code": code}


def groups(r: Rank) -> dict[str, Any]:
    """One call of a group is ours, several are NCCL's, and they keep their results."""
    parts = [pattern(one, 2048) for one in range(r.ranks)]
    sums = [sum(column) for column in zip(*parts, strict=True)]
    taken = []
    for calls in (1, 2):
        before = r.calls("AllReduce")
        outs = [r.memory([0] * 2048) for _ in range(calls)]
        inp = r.memory(parts[r.rank])
        assert r.nccl.ncclGroupStart() == 0
        assert r.nccl.ncclGroupStart() == 0
        for out in outs:
            assert r.call("AllReduce", inp, out, 2048, INT32, SUM) == 0
        assert r.nccl.ncclGroupEnd() == 0
        if calls == 1:
            assert r.read(outs[0], 2048) == [0] * 2048  # nothing begins before the end
        assert r.nccl.ncclGroupEnd() == 0
        assert all(r.read(out, 2048) == sums for out in outs)
        taken.append(r.calls("AllReduce") - before)
    r.destroy()
    return {"calls": taken}


def uneven_groups(r: Rank) -> dict[str, Any]:
    """Two ranks send to each other in the group of a reduction; the third has that alone."""
    told = []
    for seed in range(2):
        parts = [pattern(one, 2048, seed) for one in range(r.ranks)]
        before, out = r.calls("AllReduce"), r.memory([0] * 2048)
        peer = (c_size_t(1), INT32, 1 - r.rank, r.comm, c_void_p(r.stream))
        if r.rank < 2:
            r.nccl.ncclGroupStart()
            r.nccl.ncclSend(c_void_p(out), *peer)
            r.nccl.ncclRecv(c_void_p(out), *peer)
        assert r.call("AllReduce", r.memory(parts[r.rank]), out, 2048, INT32, SUM) == 0
        assert r.rank == 2 or r.nccl.ncclGroupEnd() == int(os.environ.get("TEST_END", "0"))
        assert r.read(out, 2048) == [sum(column) for column in zip(*parts, strict=True)]
        told.append(r.calls("AllReduce") - before)
    r.destroy()
    return {"calls": told, "sends": r.calls("Send")}


def crossed_groups(r: Rank) -> dict[str, Any]:
    """Groups of two communicators, which each rank begins with another one; in a stream each."""
    second = c_void_p()
    stream = int(os.environ["TEST_STREAM"]) or r.driver.stream()
    assert r.nccl.ncclCommSplit(r.comm, 0, r.rank, byref(second), None) == 0
    told = []
    for count in (2048, 2048, 4096):
        parts = [pattern(one, count) for one in range(r.ranks)]
        sums = [sum(column) for column in zip(*parts, strict=True)]
        before, inp = r.calls("AllReduce"), r.memory(parts[r.rank])
        outs = [r.memory([0] * count) for _ in range(2)]
        calls = [(outs[0], r.comm, r.stream), (outs[1], second, stream)]
        r.nccl.ncclGroupStart()
        for out, comm, where in calls if r.rank == 0 else reversed(calls):
            given = (c_void_p(inp), c_void_p(out), c_size_t(count), INT32, SUM, comm)
            assert r.nccl.ncclAllReduce(*given, c_void_p(where)) == 0
        assert r.nccl.ncclGroupEnd() == 0
        r.driver("cuStreamSynchronize", stream)
        assert all(r.read(out, count) == sums for out in outs)
        told.append(r.calls("AllReduce") - before)
    assert r.nccl.ncclCommDestroy(second) == 0
    r.destroy()
    return {"calls": told}


def shrunk(r: Rank) -> dict[str, Any]:
    """An operation ends whose peer never comes, where the rest of the ranks leave that one."""
    assert r.checked("AllReduce", 2048) == 0
    if r.rank == 1:
        sys.stdin.readline()
        return {}
    assert r.call("AllReduce", r.memory([1] * 2048), r.memory([0] * 2048), 2048, INT32, SUM) == 0
    excluded, made = c_int(1), c_void_p()
    for flags in (0, 1):
        given = (byref(excluded), 1, byref(made), None, flags)
        assert r.nccl.ncclCommShrink(r.comm, *given) == 0
        assert (r.driver.code("cuStreamQuery", r.stream) == 0) == bool(flags)
    r.driver("cuStreamSynchronize", r.stream)
    assert r.nccl.ncclCommAbort(r.comm) == 0
    return {"shrunk": r.calls("CommShrink")}


def not_ready(r: Rank) -> dict[str, Any]:
    """A rank whose communicator is not ready at its first call is told, and calls again."""
    codes = [r.call("AllReduce", 1 << 20, 1 << 20, 2048, INT32, SUM)] if r.rank == 1 else []
    codes.append(r.checked("AllReduce", 2048))
    r.destroy()
    return {"codes": codes, "calls": r.calls("AllReduce")}


def rooted_in_place(r: Rank) -> dict[str, Any]:
    """The root's own part lies in the whole, as NCCL's callers may have it; twice each."""
    count, ranks, told = 2048, r.ranks, {}
    for name in ("Gather", "Scatter"):
        whole = name == "Scatter"
        inputs = [pattern(one, count * (ranks if whole else 1)) for one in range(ranks)]
        before = r.calls(name)
        for _ in range(2):
            large, small = r.memory([-1] * count * ranks), r.memory([-1] * count)
            small = large + 4 * count * r.rank if r.rank == 1 else small
            inp, out = (large, small) if whole else (small, large)
            r.put(inp, inputs[r.rank])
            assert r.call(name, inp, out, count, INT32, 1) == 0
            if whole or r.rank == 1:
                got = r.read(out, count if whole else count * ranks)
                assert got == wanted(name, inputs, r.rank, count), name
        told[name] = r.calls(name) - before
    before = r.calls("AllReduce")
    assert r.checked("AllReduce", count) == 0
    told["AllReduce"] = r.calls("AllReduce") - before
    r.destroy()
    return told


def split(r: Rank) -> dict[str, Any]:
    """A part of the ranks, in another order, has a communicator of its own; so has the whole."""
    assert r.checked("AllReduce", 2048) == 0
    whole, made = r.comm, c_void_p()
    assert r.nccl.ncclCommSplit(r.comm, r.rank // 2, -r.rank, byref(made), None) == 0
    before = r.calls("AllReduce")
    out = r.memory([0] * 2048)
    mates = [one for one in range(r.ranks) if one // 2 == r.rank // 2]
    inp = r.memory(pattern(r.rank, 2048))
    for _ in range(2):
        assert r.call("AllReduce", inp, out, 2048, INT32, SUM, comm=made) == 0
    columns = zip(*(pattern(one, 2048) for one in mates), strict=True)
    assert r.read(out, 2048) == [sum(column) for column in columns]
    taken = r.calls("AllReduce") - before
    assert r.nccl.ncclCommFinalize(made) == 0
    assert r.nccl.ncclCommDestroy(made) == 0
    r.comm = whole
    assert r.checked("AllReduce", 2048, 3) == 0
    r.destroy()
    return {"taken": taken}


def windows(r: Rank) -> dict[str, Any]:
    """A collective that is ours in registered memory alone."""
    count = 2048
    inputs = [pattern(one, count) for one in range(r.ranks)]
    whole = [one for given in inputs for one in given]
    taken = []
    data = r.driver.memory(2 << 20, (r.rank,))
    window = c_void_p()
    register = r.nccl.ncclCommWindowRegister

    def gather(out: int) -> None:
        before = r.calls("AllGather")
        inp = out + 4 * count * r.rank
        r.put(inp, inputs[r.rank])
        assert r.call("AllGather", inp, out, count, INT32) == 0
        assert r.read(out, count * r.ranks) == whole
        taken.append(r.calls("AllGather") - before)

    gather(r.memory([0] * count * r.ranks))
    assert register(r.comm, c_void_p(data), c_size_t(2 << 20), byref(window), 1) == 0
    gather(data + 4096)
    gather(data + 4096)
    assert r.nccl.ncclCommWindowDeregister(r.comm, window) == 0
    gather(data + 4096)
    r.destroy()
    return {"taken": taken, "registered": r.calls("CommWindowRegister")}


def aborted(r: Rank) -> dict[str, Any]:
    """A rank that aborts makes the others' operation end, which they are told."""
    assert r.checked("AllReduce", 2048) == 0
    state = c_int()
    asked = r.nccl.ncclCommGetAsyncError
    assert (asked(r.comm, byref(state)), state.value) == (0, 0)
    if r.rank == 1:
        sys.stdin.readline()
        assert r.nccl.ncclCommAbort(r.comm) == 0
        return {}
    assert r.call("AllReduce", r.memory([1] * 2048), r.memory([0] * 2048), 2048, INT32, SUM) == 0
    print("started", flush=True)
    end = time.monotonic() + 30
    while state.value == 0 and time.monotonic() < end:
        assert asked(r.comm, byref(state)) == 0
        time.sleep(0.01)
    r.driver("cuStreamSynchronize", r.stream)
    code = r.call("AllReduce", r.memory([1] * 2048), r.memory([0] * 2048), 2048, INT32, SUM)
    r.nccl.ncclGetLastError.restype = ctypes.c_char_p
    told = [r.nccl.ncclGetLastError(comm).decode() for comm in (r.comm, None, c_void_p(1))]
    assert r.nccl.ncclCommAbort(r.comm) == 0
    told.append(r.nccl.ncclGetLastError(None).decode())
    return {"state": state.value, "code": code, "told": told}


def plain_reduce(r: Rank, counts: Sequence[int] = (2048, 2048)) -> dict[str, Any]:
    """Two reductions, both right."""
    time.sleep(float(os.environ.get("TEST_LATE_S", "0")))
    for seed, count in enumerate(counts):
        assert r.checked("AllReduce", count, seed) == 0
    r.destroy()
    return {"calls": r.calls("AllReduce")}


def preloaded(r: Rank) -> dict[str, Any]:
    """One below its size and one above."""
    return plain_reduce(r, (64, 2048))


def wrong_size(r: Rank) -> dict[str, Any]:
    """A variable that makes no sense."""
    return {"code": r.checked("AllReduce", 2048)}


def threads(r: Rank) -> dict[str, Any]:
    """Both ranks in one process, a thread each."""
    uid = bytes.fromhex(sys.argv[4])
    told: list[dict[str, Any]] = []

    def body(rank: int) -> None:
        one = Rank(rank, 2, uid, r.nccl)
        before = one.calls("AllReduce")
        codes = [one.checked("AllReduce", 2048, seed) for seed in range(3)]
        told.append({"codes": codes, "calls": one.calls("AllReduce") - before})
        one.destroy()

    at_once(body, range(2))
    return {"told": told}


def one_thread(r: Rank) -> dict[str, Any]:
    """The first process's thread drives two GPUs, by groups, and the second's one: three ranks."""
    number, uid = int(sys.argv[2]), UniqueId.from_buffer_copy(bytes.fromhex(sys.argv[4]))
    ranks = [2] if number == 1 else [0, 1]
    comms = {rank: c_void_p() for rank in ranks}

    def join(rank: int) -> None:
        r.driver.start(rank)
        assert r.nccl.ncclCommInitRank(byref(comms[rank]), 3, uid, rank) == 0

    at_once(join, ranks)
    parts = [pattern(rank, 2048) for rank in range(3)]
    sums = [sum(column) for column in zip(*parts, strict=True)]
    calls = []
    for _ in range(2):
        before, outs = r.calls("AllReduce"), {}
        r.nccl.ncclGroupStart()
        for rank, comm in comms.items():
            r.driver.start(rank)
            inp, outs[rank] = r.memory(parts[rank]), r.memory([0] * 2048)
            given = (c_void_p(inp), c_void_p(outs[rank]), c_size_t(2048), INT32, SUM)
            assert r.nccl.ncclAllReduce(*given, comm, c_void_p(r.driver.stream())) == 0
        assert r.nccl.ncclGroupEnd() == 0
        for rank, out in outs.items():
            r.driver.start(rank)
            assert list((c_int * 2048).from_buffer_copy(r.driver.read(out, 8192))) == sums
        calls.append(r.calls("AllReduce") - before)
    return {"calls": calls}


def forwarded(_: Any) -> dict[str, Any]:
    """Every name arrives where it should, with all that it was given."""
    nccl = library()
    names = os.environ["TEST_NAMES"].split()
    fake = stand_in()
    fake.fakenccl_calls.restype = c_uint64
    lost = []
    for name in names:
        before = fake.fakenccl_calls(name.encode())
        getattr(nccl, name)(*[c_void_p(0)] * 6)
        if fake.fakenccl_calls(name.encode()) != before + 1:
            lost.append(name)
    numbers = [c_void_p(1), c_size_t(2), c_int(3), c_int(4), c_void_p(5), c_size_t(6), c_int(7)]
    sums = [
        nccl.ncclPutSignal(*numbers, c_int(8), ctypes.c_uint(9), c_void_p(10), c_void_p(11))
        for _ in range(2)
    ]
    nccl.ncclTeamWorld.restype = Team
    team = nccl.ncclTeamWorld(c_void_p(0))
    lacking = nccl.ncclScatterConfig(*[c_void_p(0)] * 3)
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return {
        "lost": lost,
        "sums": sums,
        "team": [team.ranks, team.rank, team.stride],
        "lacking": lacking,
        "words": nccl.ncclGetErrorString(0).decode(),
    }


def missing(_: Any) -> dict[str, Any]:
    """No library to pass calls on to."""
    nccl = library()
    version = c_int()
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return {
        "code": nccl.ncclGetVersion(byref(version)),
        "reduced": nccl.ncclAllReduce(*[c_void_p(0)] * 7),
        "words": nccl.ncclGetErrorString(2).decode(),
    }


class Bare:
    """A process without a communicator yet."""

    def __init__(self) -> None:
        self.nccl = library()
        self.driver = Driver(os.environ["OFFCORE_LIBCUDA"])
        self.memory = Rank.memory.__get__(self)
        self.put = Rank.put.__get__(self)
        self.calls = Rank.calls.__get__(self)


ALONE: set[Callable[..., Any]] = {forwarded, missing, threads, one_thread}


def main() -> None:
    case, rank, ranks, uid = sys.argv[1:]
    function = globals()[case]
    if function in ALONE:
        given: Any = None if function in (forwarded, missing) else Bare()
    else:
        given = Rank(int(rank), int(ranks), bytes.fromhex(uid))
    print(json.dumps(function(given)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
