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
    """ncclUniqueId, which goes by value."""

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
        whole = {"AllGather": count * ranks, "Gather": count * ranks, "AlltoAll": count * ranks}
        given = {
            "AlltoAll": count * ranks,
            "ReduceScatter": count * ranks,
            "Scatter": count * ranks,
        }
        out_count, in_count = whole.get(name, count), given.get(name, count)
        inputs = [pattern(one, in_count, seed) for one in range(ranks)]
        out = self.memory([-1] * out_count)
        inp = self.memory(inputs[rank])
        if in_place and name == "AllReduce":
            self.put(out, inputs[rank])
            inp = out
        if in_place and name == "AllGather":
            inp = out + 4 * count * rank
            self.put(inp, inputs[rank])
        extra = {"AllReduce": [SUM], "ReduceScatter": [SUM]}
        extra |= {"Broadcast": [1], "Gather": [1], "Scatter": [1]}
        code = self.call(name, inp, out, count, INT32, *extra.get(name, []))
        if code == 0:
            got = self.read(out, out_count)
            assert got == wanted(name, inputs, rank, count) or (name == "Gather" and rank != 1), (
                name
            )
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
    before = r.calls("AllReduce")
    r.nccl.ncclGroupStart()
    out = r.memory([0] * 2048)
    assert r.call("AllReduce", r.memory(parts[r.rank]), out, 2048, INT32, SUM) == 0
    r.nccl.ncclSend(c_void_p(out), c_size_t(1), INT32, 0, r.comm, c_void_p(r.stream))
    assert r.nccl.ncclGroupEnd() == 0
    taken.append(r.calls("AllReduce") - before)
    r.destroy()
    return {"calls": taken, "sends": r.calls("Send")}


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


def plain_reduce(r: Rank) -> dict[str, Any]:
    """Two reductions, both right."""
    time.sleep(float(os.environ.get("TEST_LATE_S", "0")))
    for seed in range(2):
        assert r.checked("AllReduce", 2048, seed) == 0
    r.destroy()
    return {"calls": r.calls("AllReduce")}


def preloaded(r: Rank) -> dict[str, Any]:
    """One below its size and one above."""
    assert r.checked("AllReduce", 64) == 0
    assert r.checked("AllReduce", 2048) == 0
    r.destroy()
    return {"calls": r.calls("AllReduce")}


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

    started = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(30)
    return {"told": told}


def one_thread(r: Rank) -> dict[str, Any]:
    """One thread drives two GPUs, by groups: NCCL's affair, and nobody waits."""
    devices = []
    for number in range(2):
        r.driver.start(number)
        devices.append((r.driver.stream(), r.memory([0] * 2048)))
    comms = [c_void_p(), c_void_p()]
    uid = UniqueId.from_buffer_copy(bytes.fromhex(sys.argv[4]))

    def join(number: int) -> None:
        r.driver.start(number)
        assert r.nccl.ncclCommInitRank(byref(comms[number]), 2, uid, number) == 0

    started = [threading.Thread(target=join, args=(number,)) for number in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(30)
    before = r.calls("CommCuDevice")
    r.nccl.ncclGroupStart()
    # The stand-in's collectives wait for each other, so that its reduction is not called here.
    for comm, (stream, data) in zip(comms, devices, strict=True):
        given = (c_void_p(data), c_void_p(data), c_size_t(2048), 99, SUM)
        r.nccl.ncclAllReduce(*given, comm, c_void_p(stream))
    assert r.nccl.ncclGroupEnd() == 0
    return {"asked": r.calls("CommCuDevice") - before}


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
