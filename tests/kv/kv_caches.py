"""Caches of every layout in memory of any backend, and what a plain copy of them would do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from targets import Target

from offcore import kv

ROOM = 1 << 18  # bytes for all the tensors of an example


class Places:
    """A piece of memory that caches are carved from: a GPU's, or this process's."""

    def __init__(self, backend: str, target: Target) -> None:
        self.backend = backend
        self._target = target
        self._stack = ExitStack()
        self.pools = 0

    def __enter__(self) -> Places:
        if self.backend == "cuda":
            self._stack.enter_context(self._target.driver())
            comm = self._stack.enter_context(self._target.opened(1))
            self._window = comm.window(ROOM)
        else:
            self._memory = np.zeros(ROOM, np.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, at: int, shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
        """An array of the memory from byte `at` on."""
        kind = np.dtype(dtype)
        end = at + int(np.prod(shape)) * kind.itemsize
        if self.backend == "cuda":
            part = self._window.array(0)[at:end]
            part.shape, part.dtype = shape, kind
            return part
        return self._memory[at:end].view(kind).reshape(shape)

    def read(self) -> np.ndarray:
        if self.backend != "cuda":
            return self._memory.copy()
        image = np.empty(ROOM, np.uint8)
        self._window.read(image)
        return image

    def write(self, image: np.ndarray) -> None:
        if self.backend == "cuda":
            self._window.write(image)
        else:
            self._memory[:] = image

    def pool(self, block_bytes: int, blocks: int, **options: Any) -> kv.HostPool:
        return kv.HostPool(block_bytes, blocks, backend=self.backend, **options)


def place(pool: kv.HostPool, layout: kv.Layout, slot: int) -> np.ndarray:
    """What a slot has of its row, by pieces."""
    shared = layout.row_blocks
    page = layout.copies()[0][1] if shared > 1 else layout.block_bytes
    return pool.row(slot // shared).reshape(-1, shared, page)[:, slot % shared]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a cache: where it lies, its shape, and which axes are blocks and layers."""

    at: int
    shape: tuple[int, ...]
    dtype: str
    block_axis: int
    layer_axis: int | None = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def of(self, image: np.ndarray) -> np.ndarray:
        """It in an image of the memory, as (layers, blocks, rest)."""
        array = image[self.at : self.at + self.nbytes].view(self.dtype).reshape(self.shape)
        if self.layer_axis is None:
            return np.moveaxis(array, self.block_axis, 0)[np.newaxis]
        return np.moveaxis(array, (self.layer_axis, self.block_axis), (0, 1))


@dataclass(frozen=True)
class Cache:
    """The tensors of a cache, by the entries that a Layout takes."""

    entries: list[tuple[Tensor, ...]]
    alone: bool = field(default=False)  # one entry, with all layers

    def layout(self, places: Places, row_blocks: int = 1) -> kv.Layout:
        first = self.entries[0][0]
        arrays = [
            tuple(places.tensor(t.at, t.shape, t.dtype) for t in entry) for entry in self.entries
        ]
        given: Any = [a[0] if len(a) == 1 else a for a in arrays]
        if self.alone:
            given = given[0]
        return kv.Layout(
            given,
            block_axis=first.block_axis,
            layer_axis=first.layer_axis,
            row_blocks=row_blocks,
        )

    def layers(self, image: np.ndarray) -> list[list[np.ndarray]]:
        """Each layer's tensors in an image, as (blocks, rest)."""
        found = []
        for entry in self.entries:
            views = [tensor.of(image) for tensor in entry]
            found += [[view[depth] for view in views] for depth in range(len(views[0]))]
        return found

    def store(self, image: np.ndarray, block: int, layers: slice = slice(None)) -> bytes:
        """What a row of host memory holds of a block."""
        parts = [t[block].tobytes() for layer in self.layers(image)[layers] for t in layer]
        return b"".join(parts)

    def load(self, image: np.ndarray, block: int, row: bytes, layers: slice = slice(None)) -> None:
        """Puts layers of a row into a block of an image."""
        at = 0
        for number, layer in enumerate(self.layers(image)):
            wanted = number in range(*layers.indices(1 << 30))
            for tensor in layer:
                part = tensor[block]
                if wanted:
                    given = np.frombuffer(row[at : at + part.nbytes], part.dtype)
                    tensor[block] = given.reshape(part.shape)
                at += part.nbytes
