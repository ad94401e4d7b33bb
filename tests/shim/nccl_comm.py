"""A communicator of a library with NCCL's functions, on the stand-in driver."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

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


class Bare:
    """A process without a communicator yet."""

    def __init__(self) -> None:
        self.nccl = library()
        self.driver = Driver(os.environ["OFFCORE_LIBCUDA"])
        self.memory = Rank.memory.__get__(self)
        self.put = Rank.put.__get__(self)
        self.calls = Rank.calls.__get__(self)
