"""Layouts of KV blocks: tensors of the usual shapes as the core's list of pieces.

A piece is a part of one layer that is contiguous for a block: (address, step from a block to the
next, bytes, layer, tensor). A block's row in host memory is its pieces side by side, in this order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offcore import _core
from offcore.errors import error
from offcore.operands import checked

_PIECES_MAX = 1 << 16
_HOST = -1

Piece = tuple[int, int, int, int, int]


@dataclass
class _Memory:
    """An array's memory. device: the GPU, -1 for the host, None where the array does not say."""

    address: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]  # in bytes
    itemsize: int
    device: int | None


def _memory_of(array: Any) -> _Memory:
    if hasattr(array, "data_ptr"):  # a torch tensor
        if array.device.type not in ("cpu", "cuda"):
            raise error("invalid", f"a cache lies on {array.device}, not on a GPU or the host")
        itemsize = array.element_size()
        steps = tuple(step * itemsize for step in array.stride())
        device = array.device.index if array.device.type == "cuda" else _HOST
        return _Memory(array.data_ptr(), tuple(array.shape), steps, itemsize, device)
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise error("invalid", "a cache holds Python objects, whose bytes are addresses")
        if not array.flags.writeable:
            raise error("invalid", "a cache is read-only: loads write into it")
        return _Memory(array.ctypes.data, array.shape, array.strides, array.itemsize, _HOST)
    facts = getattr(array, "__cuda_array_interface__", None)
    if facts is None:
        kinds = "torch tensors, numpy arrays, or objects with CUDA's array interface"
        raise error("invalid", f"a cache is a {type(array).__name__}: pass {kinds}")
    shape = tuple(facts["shape"])
    itemsize = np.dtype(facts["typestr"]).itemsize
    dense = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return _Memory(facts["data"][0], shape, facts.get("strides") or dense, itemsize, None)


def _axis(name: str, axis: int, memory: _Memory) -> int:
    if not -len(memory.shape) <= axis < len(memory.shape):
        raise error("invalid", f"{name} is {axis}, but a cache has shape {memory.shape}")
    return axis % len(memory.shape)


def _places(memory: _Memory, axes: Sequence[int]) -> tuple[list[int], int]:
    """What a block has of a tensor besides its block and layer axes: where its contiguous parts
    begin, and their bytes."""
    rest = [axis for axis in axes if memory.shape[axis] != 1]
    page = memory.itemsize
    for axis in sorted(rest, key=lambda axis: memory.steps[axis]):
        if memory.steps[axis] != page:
            break
        page *= memory.shape[axis]
        rest.remove(axis)
    if math.prod(memory.shape[axis] for axis in rest) > _PIECES_MAX:
        why = "a block is in too many pieces: is block_axis right?"
        raise error("invalid", f"a cache of shape {memory.shape}: {why}")
    steps = [[k * memory.steps[axis] for k in range(memory.shape[axis])] for axis in rest]
    return [sum(parts) for parts in itertools.product(*steps)], page


def _pieces_of(memory: _Memory, block_axis: int, layer_axis: int | None) -> list[list[Piece]]:
    """A tensor's pieces by layer. The layer and the tensor are numbered later."""
    if 0 in memory.shape or any(
        step <= 0 for step, size in zip(memory.steps, memory.shape, strict=True) if size > 1
    ):
        why = "no memory of its own for each element: it is empty, expanded or flipped"
        raise error("invalid", f"a cache of shape {memory.shape} has {why}")
    blocks = _axis("block_axis", block_axis, memory)
    layers = None if layer_axis is None else _axis("layer_axis", layer_axis, memory)
    if blocks == layers:
        raise error("invalid", f"block_axis and layer_axis are both {blocks}")
    rest = [axis for axis in range(len(memory.shape)) if axis not in (blocks, layers)]
    places, page = _places(memory, rest)
    block_step = memory.steps[blocks] if memory.shape[blocks] > 1 else page
    count, step = (1, 0) if layers is None else (memory.shape[layers], memory.steps[layers])
    return [
        [(memory.address + layer * step + place, block_step, page, 0, 0) for place in places]
        for layer in range(count)
    ]


class Layout:
    """The layout of the blocks of a KV cache in tensors, and in a row of host memory.

    caches: a sequence with one tensor per layer, or with a tuple of tensors per layer (separate K
        and V, pages of several sizes); with `layer_axis`, one tensor with all layers, or a tuple of
        such tensors.
    block_axis: the axis of the blocks in every tensor; its length is the same in all.
    layer_axis: the axis of the layers, in tensors that have all of them.
    row_blocks: blocks that share a row of shape (pieces, row_blocks, page), with pages of one size.
        Pieces: what of a block is contiguous. Slot r * row_blocks + i is place i of row r.

    | tensors | arguments |
    |---|---|
    | one per layer: (blocks, page...) | `Layout(tensors)` |
    | one per layer, separate K and V: (2, blocks, page...) | `Layout(tensors, block_axis=1)` |
    | layers outermost: (layers, blocks, page...) | `Layout(tensor, block_axis=1, layer_axis=0)` |
    | contiguous over layers: (blocks, layers, page...) | `Layout(tensor, layer_axis=1)` |
    | K and V tensors for each layer | `Layout([(k0, v0), (k1, v1), ...])` |

    Torch tensors and numpy arrays of any dtype and strides are accepted. A row contains the layers
    of a block, contiguous and in order. Raises `Error`: invalid for caches with different numbers
    of blocks, overlapping memory, several devices, or pages of several sizes that share rows.
    """

    def __init__(
        self,
        caches: Any,
        *,
        block_axis: int = 0,
        layer_axis: int | None = None,
        row_blocks: int = 1,
    ) -> None:
        entries = _tensors(caches) if layer_axis is None else [tuple(_tensors(caches))]
        self.tensors = [tensor for entry in entries for tensor in _tensors(entry)]
        memories = [_memory_of(tensor) for tensor in self.tensors]
        devices = {memory.device for memory in memories}
        counts = {memory.shape[_axis("block_axis", block_axis, memory)] for memory in memories}
        if len(devices) != 1 or len(counts) != 1:
            what = "all tensors of a cache must have the same number of blocks and device"
            raise error("invalid", f"{what}: here {sorted(counts)} on {devices or 'none'}")
        self.device: int | None = devices.pop()
        numbered = enumerate(_pieces_of(memory, block_axis, layer_axis) for memory in memories)
        pieces: list[Piece] = []
        layer = 0
        for entry in entries:
            own = list(itertools.islice(numbered, len(_tensors(entry))))
            depths = {len(layers) for _, layers in own}
            if len(depths) != 1:
                raise error("invalid", f"tensors differ in their layers: {sorted(depths)}")
            for depth in range(depths.pop()):
                for tensor, layers in own:
                    pieces += [(*piece[:3], layer, tensor) for piece in layers[depth]]
                layer += 1
        self.row_blocks = checked("row_blocks", row_blocks, 1 << 16, first=1)
        self._core = _core.kv_layout(pieces, counts.pop(), self.row_blocks)

    @property
    def blocks(self) -> int:
        """Number of blocks in the caches."""
        return self._core.blocks

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._core.layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with all its layers."""
        return self._core.block_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of host memory, for `HostPool`: `row_blocks` blocks."""
        return self.row_blocks * self.block_bytes

    def copies(self) -> list[tuple[int, int]]:
        """(rows, bytes of a row) of each copy of one block, strided if rows > 1. Tensors in several
        GPU allocations require more copies, since none crosses allocations."""
        return self._core.folds()

    def __repr__(self) -> str:
        return f"Layout({self.blocks} blocks of {self.block_bytes} bytes, {self.layers} layers)"


def _tensors(entry: Any) -> Sequence[Any]:
    return entry if isinstance(entry, (list, tuple)) else (entry,)
