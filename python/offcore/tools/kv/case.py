"""A KV cache to measure: its memory, its blocks and rows, and what must be in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import offcore
from offcore import kv
from offcore.tools.kv.models import Geometry

LAYOUTS = (
    *("layers", "tensors", "kv-apart", "kv-tensors", "contiguous"),
    "page-first",  # kv-tensors; on the host K's rows, then V's: SGLang's page_first_direct
    "chunks",  # kv-apart; on the host 256 tokens a row, K's layers first: LMCache's chunks
)
DIRECTIONS = ("load", "store", "both")

_READY_S = 600.0  # pinning takes about 0.1 s/GB
_OWN_BYTES = 64 << 20  # torch puts smaller tensors together in one allocation
_CHUNK_BLOCKS = 16  # of 256 tokens
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
    order = [(layer, part) for layer in range(layers) for part in range(2)]
    if layout in ("page-first", "chunks"):
        order.sort(key=lambda place: place[1])
    if layout in ("kv-tensors", "page-first"):  # K's and V's are allocations of their own
        return [_Piece(2 * layer + part, 0, half, half) for layer, part in order]
    return [_Piece(layer, part * blocks * half, half, half) for layer, part in order]


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
        self.row_blocks = _CHUNK_BLOCKS if layout == "chunks" else 1  # blocks of a row
        self._pieces = _pieces(geometry, layout, total)
        memories = 1 + max(piece.memory for piece in self._pieces)
        nbytes = total * geometry.block_bytes // memories
        self._memories = [memory_of(backend, nbytes, gpus) for _ in range(memories)]
        self.caches = self._layouts(total)
        slots = self._open_pools(sets, rng)
        self.loads = list(zip(order[:requests], slots[:requests], strict=True))
        self.stores = list(zip(order[-requests:], slots[-requests:], strict=True))
        self._images = [np.empty(nbytes, np.uint8) for _ in self._memories]
        # What checks write to is kept: a host may take longer for new memory than for a check.
        self._found = np.empty(nbytes, np.uint8)
        self._before = np.empty((requests, blocks, geometry.block_bytes), np.uint8)
        for number, (memory, image) in enumerate(zip(self._memories, self._images, strict=True)):
            offcore.fill(image, seed + number)
            memory.write(image)

    def _open_pools(self, sets: int, rng: np.random.Generator) -> Numbers:
        """The pool of each group, with all rows taken; the slots of each set."""
        each = -(-self.blocks // self.row_blocks)
        self.pools = [
            kv.HostPool(cache.row_bytes, sets * each, backend=self.backend) for cache in self.caches
        ]
        for pool in self.pools:
            pool.allocate(pool.blocks, timeout=_READY_S)
        first = rng.permutation(sets * each).reshape(sets, each, 1) * self.row_blocks
        return (first + np.arange(self.row_blocks)).reshape(sets, -1)[:, : self.blocks]

    def _layouts(self, total: int) -> list[kv.Layout]:
        """Of each group that has rows of its own on the host."""
        page, layers = self.geometry.page_bytes, self.geometry.layers
        if self.layout == "contiguous":
            self.tensors = [self._memories[0].tensor(0, (total, layers, page))]
            return [kv.Layout(self.tensors[0], layer_axis=1)]
        if self.layout == "layers":
            self.tensors = [self._memories[0].tensor(0, (layers, total, page))]
            return [kv.Layout(self.tensors[0], block_axis=1, layer_axis=0)]
        shapes = {"tensors": (total, page), "kv-tensors": (total, page // 2)}
        shapes["page-first"] = shapes["kv-tensors"]
        shape = shapes.get(self.layout, (2, total, page // 2))
        self.tensors = [memory.tensor(0, shape) for memory in self._memories]
        sides = self.tensors[::2], self.tensors[1::2]
        if self.layout == "kv-tensors":
            return [kv.Layout(list(zip(*sides, strict=True)))]
        if self.layout == "page-first":
            return [kv.Layout(side) for side in sides]
        if self.layout == "chunks":
            halves = [
                memory.tensor(at, (total, page // 2))
                for at in (0, total * page // 2)
                for memory in self._memories
            ]
            return [kv.Layout([halves], row_blocks=self.row_blocks)]  # all of K comes first
        return [kv.Layout(self.tensors, block_axis=self.block_axis)]

    @property
    def nbytes(self) -> int:
        """Of all requests of one direction."""
        return self.requests * self.blocks * self.geometry.block_bytes

    @property
    def addresses(self) -> list[int]:
        """Of each memory."""
        return [memory.address for memory in self._memories]

    @property
    def piece_bytes(self) -> int:
        """Of a page as peers name it."""
        return self._pieces[0].nbytes

    @property
    def block_axis(self) -> int:
        """Of the cache's tensors."""
        return int(self.layout in ("layers", "kv-apart", "chunks"))

    def named(self, direction: str) -> list[tuple[Numbers, Numbers]]:
        """The blocks and slots of each request."""
        return self.loads if direction == "load" else self.stores

    def pages(self, blocks: Numbers, slots: Numbers) -> tuple[Addresses, Addresses]:
        """Where each page of a request lies, in the cache and on the host: block by block."""
        bases = np.array([self._memories[p.memory].address + p.at for p in self._pieces], np.uint64)
        steps = np.array([piece.step for piece in self._pieces], np.uint64)
        cache = bases[None, :] + blocks.astype(np.uint64)[:, None] * steps[None, :]
        rows = np.array([[part.ctypes.data for part in self.parts(slot)] for slot in slots])
        count = len(self._pieces) // len(self.pools)
        inside = np.arange(count, dtype=np.uint64) * np.uint64(self.row_blocks * self.piece_bytes)
        return cache.ravel(), (rows.astype(np.uint64)[:, :, None] + inside).ravel()

    def parts(self, slot: int) -> list[Bytes]:
        """What each group has at a slot, as (pages, bytes)."""
        row, place = divmod(slot, self.row_blocks)
        shape = (-1, self.row_blocks, self.piece_bytes)
        return [pool.row(row).reshape(shape)[:, place] for pool in self.pools]

    def places(self, slot: int) -> Iterator[Bytes]:
        """Each page at a slot."""
        for part in self.parts(slot):
            yield from part

    def refresh(self, turn: int) -> None:
        """Other bytes in all rows, so that what an earlier copy has left there cannot pass."""
        for group, pool in enumerate(self.pools):
            for row in range(pool.blocks):
                offcore.fill(pool.row(row), (turn << 32) + (group << 24) + row)

    def rows(self) -> Bytes:
        """What the rows of the loads hold now, until the next call."""
        for rows, (_, slots) in zip(self._before, self.loads, strict=True):
            for row, slot in zip(rows, slots, strict=True):
                np.concatenate(self.parts(slot), out=row.reshape(-1, self.piece_bytes))
        return self._before

    def wrong(self, direction: str, before: Bytes) -> int:
        """Bytes of cache and rows that are not what a copy of this direction has to leave there,
        where rows held `before`."""
        wrong = 0
        if direction != "store":
            for (blocks, slots), rows in zip(self.loads, before, strict=True):
                for row, slot in zip(rows, slots, strict=True):
                    groups = row.reshape(len(self.pools), -1, self.piece_bytes)
                    for part, wanted in zip(self.parts(slot), groups, strict=True):
                        wrong += _differing(part, wanted)
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
            for place, view in zip(self.places(slot), views, strict=True):
                wrong += _differing(place, view[block])
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
        for pool in self.pools:
            pool.close()
