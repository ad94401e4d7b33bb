"""A KV cache to measure: its memory, its blocks and rows, and what must be in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import offcore
from offcore import kv
from offcore.tools.kv.models import Geometry

LAYOUTS = ("layers", "tensors", "kv-apart", "kv-tensors", "contiguous")
DIRECTIONS = ("load", "store", "both")

_READY_S = 600.0  # pinning takes about 0.1 s/GB
_OWN_BYTES = 64 << 20  # torch puts smaller tensors together in one allocation
_SPARE = 4  # of so many blocks one more that no copy may touch

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Addresses = NDArray[np.uint64]


class Memory(Protocol):
    """One allocation where caches lie."""

    address: int

    def tensor(self, at: int, shape: tuple[int, ...]) -> Any:
        """A part of it as a `Layout` takes it."""

    def read(self, into: Bytes) -> None: ...

    def write(self, data: Bytes) -> None: ...


class HostMemory:
    """This process's own, in which the host backend copies."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.zeros(nbytes, np.uint8)
        self.address = self._array.ctypes.data

    def tensor(self, at: int, shape: tuple[int, ...]) -> Any:
        return self._array[at : at + math.prod(shape)].reshape(shape)

    def read(self, into: Bytes) -> None:
        into[:] = self._array

    def write(self, data: Bytes) -> None:
        self._array[:] = data


@dataclass
class _Part:
    """Memory of a GPU by its address."""

    address: int
    shape: tuple[int, ...]
    memory: Any = field(repr=False)  # what keeps it

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),
            "shape": self.shape,
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class TorchMemory:
    """A GPU's, as engines have it: from torch's allocator, each an allocation of its own."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self._torch = torch
        whole = torch.empty(max(nbytes, _OWN_BYTES), dtype=torch.uint8, device="cuda:0")
        self._tensor = whole[:nbytes]
        self.address = self._tensor.data_ptr()

    def tensor(self, at: int, shape: tuple[int, ...]) -> Any:
        return self._tensor[at : at + math.prod(shape)].view(shape)

    def read(self, into: Bytes) -> None:
        self._torch.from_numpy(into).copy_(self._tensor)

    def write(self, data: Bytes) -> None:
        self._tensor.copy_(self._torch.from_numpy(data))
        self._torch.cuda.synchronize()


class WindowMemory:
    """A GPU's, where there is no torch that has one: a window of offcore's, which only the GPUs of
    its ranks reach."""

    def __init__(self, nbytes: int, ranks: int) -> None:
        self._comm = offcore.Communicator(backend="cuda", ranks=ranks)
        self._window = self._comm.window(nbytes)
        self.address = self._window.address(0)

    def tensor(self, at: int, shape: tuple[int, ...]) -> Any:
        return _Part(self.address + at, shape, self._window)

    def read(self, into: Bytes) -> None:
        self._window.read(into, rank=0)

    def write(self, data: Bytes) -> None:
        self._window.write(data, rank=0)


def torch_with_gpu() -> Any:
    """torch, where it is installed and has a GPU; else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def memory_of(backend: str, nbytes: int, gpus: int = 1) -> Memory:
    """Memory that transfers of this backend load into, which the first so many GPUs reach."""
    if backend != "cuda":
        return HostMemory(nbytes)
    return WindowMemory(nbytes, gpus) if torch_with_gpu() is None else TorchMemory(nbytes)


@dataclass(frozen=True)
class _Piece:
    """What a block has of a tensor: `nbytes` at `at` + block * `step` of a memory."""

    memory: int
    at: int
    step: int
    nbytes: int


def _pieces(geometry: Geometry, layout: str, blocks: int) -> list[_Piece]:
    """In the order of a row of host memory."""
    page, layers = geometry.page_bytes, geometry.layers
    if layout == "contiguous":
        return [_Piece(0, 0, layers * page, layers * page)]
    if layout == "layers":
        return [_Piece(0, layer * blocks * page, page, page) for layer in range(layers)]
    if layout == "tensors":
        return [_Piece(layer, 0, page, page) for layer in range(layers)]
    half = page // 2
    apart = layout == "kv-tensors"  # K's and V's tensors are allocations of their own
    return [
        _Piece(
            2 * layer + part if apart else layer, 0 if apart else part * blocks * half, half, half
        )
        for layer in range(layers)
        for part in range(2)
    ]


def _words(array: Bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return array.reshape(-1).view(np.uint64)


def _differing(found: Bytes, wanted: Bytes) -> int:
    """How many bytes; by words at first, which is quicker where there are none."""
    whole = found.flags.c_contiguous and wanted.flags.c_contiguous and found.nbytes % 8 == 0
    if whole and np.array_equal(_words(found), _words(wanted)):
        return 0
    return int((found != wanted).sum())


class Case:
    """A cache with scattered blocks that requests name, and rows of pinned memory for them.

    Loads and stores of one direction after the other use the same blocks; for `both` at once they
    have blocks and rows of their own. No block and no row follows another one.
    """

    def __init__(
        self,
        backend: str,
        geometry: Geometry,
        layout: str,
        blocks: int,
        *,
        requests: int = 1,
        both: bool = False,
        gpus: int = 1,
        seed: int = 1,
    ) -> None:
        self.backend = backend
        self.geometry = geometry
        self.layout = layout
        self.blocks = blocks
        self.requests = requests
        self._seed = seed
        sets = requests * (2 if both else 1)
        named = sets * blocks
        total = named + max(1, named // _SPARE)
        rng = np.random.default_rng(seed)
        order = rng.permutation(total)[:named].reshape(sets, blocks)
        self._total = total
        self._pieces = _pieces(geometry, layout, total)
        memories = 1 + max(piece.memory for piece in self._pieces)
        nbytes = total * geometry.block_bytes // memories
        self._memories = [memory_of(backend, nbytes, gpus) for _ in range(memories)]
        self.pool = kv.HostPool(geometry.block_bytes, named, backend=backend)
        self.pool.wait_ready(_READY_S)
        slots = rng.permutation(self.pool.allocate(named)).reshape(sets, blocks)
        self.loads = list(zip(order[:requests], slots[:requests], strict=True))
        self.stores = list(zip(order[-requests:], slots[-requests:], strict=True))
        self.cache = self._layout(total)
        self._images = [np.empty(nbytes, np.uint8) for _ in self._memories]
        # What checks write to is kept: a host may take longer for new memory than for a check.
        self._found = np.empty(nbytes, np.uint8)
        self._before = np.empty((requests, blocks, geometry.block_bytes), np.uint8)
        for number, (memory, image) in enumerate(zip(self._memories, self._images, strict=True)):
            offcore.fill(image, seed + number)
            memory.write(image)

    def _layout(self, total: int) -> kv.Layout:
        page, layers = self.geometry.page_bytes, self.geometry.layers
        if self.layout == "contiguous":
            return kv.Layout(self._memories[0].tensor(0, (total, layers, page)), layer_axis=1)
        if self.layout == "layers":
            whole = self._memories[0].tensor(0, (layers, total, page))
            return kv.Layout(whole, block_axis=1, layer_axis=0)
        if self.layout == "tensors":
            return kv.Layout([memory.tensor(0, (total, page)) for memory in self._memories])
        if self.layout == "kv-tensors":
            memories = [memory.tensor(0, (total, page // 2)) for memory in self._memories]
            return kv.Layout(list(zip(memories[::2], memories[1::2], strict=True)))
        halves = [memory.tensor(0, (2, total, page // 2)) for memory in self._memories]
        return kv.Layout(halves, block_axis=1)

    @property
    def nbytes(self) -> int:
        """Of all requests of one direction."""
        return self.requests * self.blocks * self.geometry.block_bytes

    @property
    def piece_bytes(self) -> int:
        """Of a page as peers name it."""
        return self._pieces[0].nbytes

    @property
    def block_axis(self) -> int:
        """Of the cache's tensors."""
        return int(self.layout in ("layers", "kv-apart"))

    def named(self, direction: str) -> list[tuple[Numbers, Numbers]]:
        """The blocks and slots of each request."""
        return self.loads if direction == "load" else self.stores

    def pages(self, blocks: Numbers, slots: Numbers) -> tuple[Addresses, Addresses]:
        """Where each page of a request lies, in the cache and on the host: block by block."""
        bases = np.array([self._memories[p.memory].address + p.at for p in self._pieces], np.uint64)
        steps = np.array([piece.step for piece in self._pieces], np.uint64)
        cache = bases[None, :] + blocks.astype(np.uint64)[:, None] * steps[None, :]
        rows = np.array([self.pool.row(slot).ctypes.data for slot in slots], np.uint64)
        inside = np.arange(len(self._pieces), dtype=np.uint64) * np.uint64(self.piece_bytes)
        return cache.ravel(), (rows[:, None] + inside[None, :]).ravel()

    def refresh(self, turn: int) -> None:
        """Other bytes in all rows, so that what an earlier copy has left there cannot pass."""
        for slot in {slot for _, slots in (*self.loads, *self.stores) for slot in slots.tolist()}:
            offcore.fill(self.pool.row(slot), (turn << 32) + slot)

    def rows(self) -> Bytes:
        """What the rows of the loads hold now, until the next call."""
        for rows, (_, slots) in zip(self._before, self.loads, strict=True):
            for row, slot in zip(rows, slots, strict=True):
                row[:] = self.pool.row(slot)
        return self._before

    def wrong(self, direction: str, before: Bytes) -> int:
        """Bytes of cache and rows that are not what a copy of this direction has to leave there,
        where rows held `before`."""
        wrong = 0
        if direction != "store":
            for (blocks, slots), rows in zip(self.loads, before, strict=True):
                for row, slot in zip(rows, slots, strict=True):
                    wrong += _differing(self.pool.row(slot), row)
                self._put(blocks, rows)
        if direction != "load":
            for blocks, slots in self.stores:
                wrong += self._stored_wrong(blocks, slots)
        for place, memory in enumerate(self._memories):
            memory.read(self._found)
            wrong += _differing(self._found, self._images[place])
            self._images[place], self._found = self._found, self._images[place]
        return wrong

    def _stored_wrong(self, blocks: Numbers, slots: Numbers) -> int:
        views = self._views()
        wrong = 0
        for block, slot in zip(blocks, slots, strict=True):
            row, at = self.pool.row(slot), 0
            for view in views:
                wrong += _differing(row[at : at + view.shape[1]], view[block])
                at += view.shape[1]
        return wrong

    def _views(self) -> list[Bytes]:
        """Each piece in the images, as (blocks, bytes)."""
        return self.views(self._images, self._total)

    def views(self, images: list[Bytes], blocks: int) -> list[Bytes]:
        """Each piece, as (blocks, bytes), in memories of caches like this one of so many blocks."""
        return [
            np.lib.stride_tricks.as_strided(
                images[piece.memory][piece.at // self._total * blocks :],
                (blocks, piece.nbytes),
                (piece.step, 1),
            )
            for piece in self._pieces
        ]

    def _put(self, blocks: Numbers, rows: Bytes) -> None:
        at = 0
        for view in self._views():
            view[blocks] = rows[:, at : at + view.shape[1]]
            at += view.shape[1]

    def close(self) -> None:
        self.pool.close()
