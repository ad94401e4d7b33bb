"""LMCache's copies between GPU and host made by offcore.

    LMCACHE_DEVICE_BACKEND=offcore lmcache server ...

LMCache finds the device by the entry point of this package and uses it where the environment names
it. It is LMCache's CUDA device but for `execute_direct_copy_transfer`, by which LMCache moves the
objects of token-major layouts: its pages become one `offcore.batch_copy`, in LMCache's stream.
Other layouts go by LMCache's own kernel, as ever.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offcore.batch import batch_copy
from offcore.errors import error
from offcore.serving.engines import known, say_once

VERSIONS = ("0.5.6",)
NAME = "OffcoreDeviceSpec"
BACKEND = "offcore"
_CUDA = "lmcache.v1.platform.devices.cuda"

Numbers = NDArray[np.int64]


class Group(NamedTuple):
    """LMCache's DirectCopyGroupSpec: layers of one shape, and the blocks of all objects."""

    paged_layer_ptrs: Sequence[int]
    shape_desc: Any
    engine_kv_format: Any
    slots_per_chunk: int
    byte_offset_in_object: int
    block_ids: Sequence[int]


class Object(NamedTuple):
    """LMCache's DirectCopyObject: host memory of one chunk."""

    host_ptr: int
    host_offset: int  # within what is registered in pieces
    nbytes: int
    chunk_idx: int
    skip_prefix_n_blocks: Sequence[int]


def __getattr__(name: str) -> Any:
    """The device is a subclass of LMCache's, which is imported when it is first asked for."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[NAME] = made = _spec()
    return made


def _spec() -> type:
    own: Any = importlib.import_module(_CUDA).CudaDeviceSpec

    class OffcoreDeviceSpec(own):  # type: ignore[misc]
        @property
        def backend_name(self) -> str:
            return BACKEND

        @property
        def ops_cls(self) -> type:
            return _ops(super().ops_cls)

        def is_available(self) -> bool:
            chosen = os.environ.get("LMCACHE_DEVICE_BACKEND", "").strip().lower() == BACKEND
            return chosen and bool(super().is_available())

    return OffcoreDeviceSpec


def _ops(own: Any) -> type:
    version = importlib.import_module("lmcache._version").__version__
    if not known("LMCache", version, VERSIONS):
        return own  # type: ignore[no-any-return]

    class OffcoreDeviceOps(own):  # type: ignore[misc]
        def ensure_native(self) -> None:
            ops: Any = self
            bound = ops._native_bound
            super().ensure_native()
            if bound:
                return
            if not hasattr(ops, "execute_direct_copy_transfer"):
                say_once("LMCache keeps its own copies: its extension has none by copy engines")
                return
            names = ("DirectCopyGroupSpec", "DirectCopyObject", "execute_direct_copy_transfer")
            kept = [getattr(ops, name) for name in names]
            new = (Group, Object, functools.partial(transfer, kept))
            for name, value in zip(names, new, strict=True):
                setattr(ops, name, value)

    return OffcoreDeviceOps


def transfer(
    own: Sequence[Callable[..., Any]],
    direction: Any,
    device: Any,
    host_buffer_alignment: int,
    group_specs: Sequence[Group],
    objects: Sequence[Object],
) -> None:
    """Copies the blocks of all objects, or from them, in the device's current stream.

    own: what LMCache's extension has for a group, an object, and this.
    host_buffer_alignment: no copy goes over a multiple of it, counted by `host_offset`.
    """
    unknown = [g.engine_kv_format.name for g in group_specs if _places(g) is None]
    if unknown:
        say_once(f"LMCache keeps its own copies for layout {unknown[0]}")
        group_of, object_of, copies = own
        groups = [group_of(*group) for group in group_specs]
        items = [object_of(*item) for item in objects]
        copies(direction, device, host_buffer_alignment, groups, items)
        return
    parts = [part for item in objects for part in _pages(item, group_specs)]
    if not parts:
        return
    host, gpu, offsets, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    host, gpu, sizes = _cut(host, gpu, offsets, sizes, host_buffer_alignment)
    load = direction.name == "H2D"
    where: dict[str, Any] = {"backend": "host"}
    if device.type == "cuda":
        torch = importlib.import_module("torch")
        where = {"backend": "cuda", "stream": torch.cuda.current_stream(device)}
    ends = (gpu, host) if load else (host, gpu)
    handle = batch_copy(*ends, sizes, kind="h2d" if load else "d2h", **where)
    if device.type != "cuda":  # there is no stream that orders it
        handle.wait()


def _places(group: Group) -> tuple[Numbers, int] | None:
    """Where block 0 of each page is, (planes, layers), and the bytes from a block to the next; None
    for a layout whose blocks are not contiguous."""
    shape = group.shape_desc
    page = shape.bs * shape.nh * shape.hs * shape.element_size
    block = shape.block_stride_elems * shape.element_size or page
    planes = np.arange(shape.kv_size, dtype=np.int64)[:, np.newaxis]
    layers = np.arange(shape.nl, dtype=np.int64)[np.newaxis]
    pointers = np.asarray(group.paged_layer_ptrs, np.int64)
    name = group.engine_kv_format.name
    if name == "NB_NL_TWO_BS_NH_HS":  # one tensor with all layers
        step = shape.kv_size * block
        return pointers[0] + planes * block + layers * step, step * shape.nl
    if name == "NL_X_TWO_NB_BS_NH_HS":  # a tensor a layer, K and V apart
        return pointers[layers] + planes * (shape.nb * block), block
    if name == "NL_X_NB_TWO_BS_NH_HS":  # the same, K and V together
        return pointers[layers] + planes * block, shape.kv_size * block
    if name in ("NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS", "NL_X_NB_BS_NH_TWO_HS", "NL_X_NB_BS_NH_CS"):
        return pointers[layers] + 0 * planes, block
    if name in ("TWO_X_NL_X_NBBS_NH_HS", "TWO_X_NL_X_NB_BS_NH_HS"):  # K's tensors, then V's
        return pointers[planes * shape.nl + layers], block
    return None


def _pages(
    item: Object, groups: Sequence[Group]
) -> Iterator[tuple[Numbers, Numbers, Numbers, Numbers]]:
    """Of a chunk and each group: addresses in host memory and on the GPU, places in what is
    registered in pieces, and bytes, of all pages."""
    for group, skip in zip(groups, item.skip_prefix_n_blocks, strict=True):
        shape = group.shape_desc
        place = _places(group)
        assert place is not None  # it was looked at before
        page = shape.bs * shape.nh * shape.hs * shape.element_size
        blocks = group.slots_per_chunk // shape.bs
        first = item.chunk_idx * blocks
        ids = np.asarray(group.block_ids[first + skip : first + blocks], np.int64)
        plane = group.slots_per_chunk // shape.bs * page
        end = group.byte_offset_in_object + shape.kv_size * shape.nl * plane
        if group.slots_per_chunk % shape.bs or len(ids) != blocks - skip or end > item.nbytes:
            raise error("invalid", f"LMCache's chunk {item.chunk_idx} is not {blocks} whole blocks")
        if ids.size and not 0 <= ids.min() <= ids.max() < shape.nb:
            raise error("invalid", f"LMCache names blocks {ids.tolist()} of a cache of {shape.nb}")
        starts, step = place
        gpu = starts[..., np.newaxis] + ids * step
        rows = np.arange(shape.kv_size * shape.nl, dtype=np.int64).reshape(*starts.shape, 1)
        at = rows * plane + (np.arange(skip, blocks, dtype=np.int64) * page)
        at = (group.byte_offset_in_object + at).ravel()
        sizes = np.full(at.shape, page, np.int64)
        yield item.host_ptr + at, gpu.ravel(), item.host_offset + at, sizes


def _cut(
    host: Numbers, gpu: Numbers, offsets: Numbers, sizes: Numbers, most: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Entries that go over no multiple of `most`."""
    cut = [(host, gpu, sizes)]
    while True:
        host, gpu, sizes = cut[-1]
        left = most - offsets % most
        over = sizes > left
        cut[-1] = (host, gpu, np.minimum(sizes, left))
        if not over.any():
            host, gpu, sizes = (np.concatenate(column) for column in zip(*cut, strict=True))
            return host, gpu, sizes
        left = left[over]
        offsets = offsets[over] + left
        cut.append((host[over] + left, gpu[over] + left, sizes[over] - left))
