"""Memory that others allocate, by the driver's own calls, and tensors in it.

For the processes that tests start: this module is the caller's allocator.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import byref, c_uint64
from typing import Any

import numpy as np
from cuda_driver import MIB, Driver

import offcore

driver = Driver(os.environ["OFFCORE_LIBCUDA"])


class Tensor:
    """Bytes of a GPU, as a tensor of any framework describes itself."""

    def __init__(self, gpu: int, address: int, nbytes: int) -> None:
        self.gpu, self.address, self.nbytes = gpu, address, nbytes
        place = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = place

    def part(self, first: int, nbytes: int) -> Tensor:
        return Tensor(self.gpu, self.address + first, nbytes)

    def put(self, data: Any) -> None:
        driver.start(self.gpu)
        driver.put(self.address, np.asarray(data, np.uint8).tobytes())

    def read(self) -> Any:
        driver.start(self.gpu)
        return np.frombuffer(driver.read(self.address, self.nbytes), np.uint8)


def vmm(
    gpu: int, nbytes: int, head: int = 0, pieces: Sequence[int] = (2, 4, 2), types: int = 1
) -> Tensor:
    """From `head` bytes on in allocations of so many MiB, mapped side by side and then let go."""
    driver.start(gpu)
    start = at = driver.reserve(sum(pieces) * MIB)
    for size in pieces:
        handle = driver.create(size * MIB, gpu, types)
        driver("cuMemMap", at, size * MIB, 0, handle, 0)
        driver("cuMemRelease", handle)
        at += size * MIB
    assert driver.set_access(start, at - start, [gpu]) == 0
    assert head + nbytes <= at - start
    return Tensor(gpu, start + head, nbytes)


def plain(gpu: int, nbytes: int, head: int = 0) -> Tensor:
    """Of cuMemAlloc."""
    driver.start(gpu)
    start = driver.get(c_uint64, "cuMemAlloc", head + nbytes)
    return Tensor(gpu, start + head, nbytes)


def managed(gpu: int, nbytes: int) -> Tensor:
    driver.start(gpu)
    start = c_uint64()
    driver("cuMemAllocManaged", byref(start), nbytes, 1)
    return Tensor(gpu, start.value, nbytes)


def pooled(gpu: int, nbytes: int) -> Tensor:
    """Of cuMemAllocAsync."""
    driver.start(gpu)
    start = c_uint64()
    driver("cuMemAllocAsync", byref(start), nbytes, 0)
    return Tensor(gpu, start.value, nbytes)


def data_of(rank: int, seed: int, nbytes: int) -> Any:
    return ((np.arange(nbytes) * 31 + rank * 101 + seed * 53) & 255).astype(np.uint8)


class Exchange:
    """Operations on a registered tensor of each local rank, every byte checked. With a protocol, as
    a table may have slots ahead."""

    def __init__(self, comm: offcore.Communicator, tensors: Sequence[Tensor], part: int) -> None:
        self.comm, self.tensors, self.part = comm, tensors, part
        self.seed = 0

    def _sides(self, first: int, nbytes: int) -> list[Tensor]:
        return [tensor.part(first, nbytes) for tensor in self.tensors]

    def _given(self, sides: list[Any]) -> Any:
        return sides if len(sides) > 1 else sides[0]

    def all_gather(self, first: int, in_place: bool, **how: Any) -> Any:
        """From byte `first` of the tensor on."""
        self.fill_gather(first, in_place)
        handle = self.start_gather(first, in_place, **how)
        result = handle.wait()
        self.check_gather(first)
        return result

    def fill_gather(self, first: int, in_place: bool) -> None:
        part, ranks = self.part, self.comm.ranks
        self.seed += 1
        for rank, out in zip(self.comm.local_ranks, self._sides(first, ranks * part), strict=True):
            out.put(np.full(ranks * part, 85))
            place = first + rank * part if in_place else first + ranks * part
            tensor = self.tensors[self.comm.local_ranks.index(rank)]
            tensor.part(place, part).put(data_of(rank, self.seed, part))
        self.comm.barrier()

    def start_gather(self, first: int, in_place: bool, **how: Any) -> Any:
        part, ranks = self.part, self.comm.ranks
        out = self._given(self._sides(first, ranks * part))
        inp = None if in_place else self._given(self._sides(first + ranks * part, part))
        return self.comm.all_gather(out, inp, **{"protocol": "barrier", **how})

    def check_gather(self, first: int) -> None:
        ranks = self.comm.ranks
        wanted = np.concatenate([data_of(rank, self.seed, self.part) for rank in range(ranks)])
        for out in self._sides(first, ranks * self.part):
            assert np.array_equal(out.read(), wanted), self.seed
        self.comm.barrier()

    def all_to_all(self, first: int, **how: Any) -> Any:
        part, ranks = self.part, self.comm.ranks
        self.seed += 1
        outs, ins = (self._sides(first + i * ranks * part, ranks * part) for i in range(2))
        for rank, out, given in zip(self.comm.local_ranks, outs, ins, strict=True):
            out.put(np.full(ranks * part, 85))
            given.put(data_of(rank, self.seed, ranks * part))
        self.comm.barrier()
        handle = self.comm.all_to_all(
            self._given(outs), self._given(ins), protocol="barrier", **how
        )
        result = handle.wait()
        for rank, out in zip(self.comm.local_ranks, outs, strict=True):
            sent = [data_of(peer, self.seed, ranks * part) for peer in range(ranks)]
            wanted = np.concatenate([one[rank * part :][:part] for one in sent])
            assert np.array_equal(out.read(), wanted), self.seed
        self.comm.barrier()
        return result

    def broadcast(self, first: int) -> Any:
        self.seed += 1
        sides = self._sides(first, self.part)
        root = self.comm.ranks - 1
        for rank, side in zip(self.comm.local_ranks, sides, strict=True):
            side.put(data_of(rank, self.seed, self.part))
        self.comm.barrier()
        result = self.comm.broadcast(self._given(sides), root=root).wait()
        for side in sides:
            assert np.array_equal(side.read(), data_of(root, self.seed, self.part))
        self.comm.barrier()
        return result

    def all_reduce(self, first: int) -> Any:
        self.seed += 1
        sides = self._sides(first, self.part)
        for rank, side in zip(self.comm.local_ranks, sides, strict=True):
            side.put(data_of(rank, self.seed, self.part))
        self.comm.barrier()
        result = self.comm.all_reduce(self._given(sides), variant="pipelined").wait()
        sent = [data_of(rank, self.seed, self.part) for rank in range(self.comm.ranks)]
        for side in sides:
            assert np.array_equal(side.read(), np.sum(sent, 0, dtype=np.uint8))
        self.comm.barrier()
        return result

    def everything(self, first: int) -> list[Any]:
        """One of each operation, and of variants that reach all peers by one command."""
        results = [self.all_gather(first, in_place) for in_place in (False, True)]
        results += [
            self.all_gather(first, False, variant=variant, protocol=protocol)
            for variant in self.comm.variants("all_gather")
            if not variant.startswith("prelaunch")
            for protocol in ("promise", "barrier")
        ]
        results += [self.all_to_all(first, variant=variant) for variant in ("auto", "fan")]
        results += [self.broadcast(first), self.all_reduce(first)]
        assert all(result.registered and not result.staged for result in results), results
        return results
