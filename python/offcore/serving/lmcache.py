"""LMCache's copies between GPU and host made by offcore.

    LMCACHE_DEVICE_BACKEND=offcore lmcache server ...

LMCache finds the device by the entry point of this package and uses it where the environment names
it. It replaces only `execute_direct_copy_transfer`, which moves objects of token-major layouts:
they become a job of a `kv.BlockTransfer` for each group of layers, in LMCache's stream. An object
is a row of host memory that 256 tokens share, at any address. Other layouts use LMCache's kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offcore import kv
from offcore.errors import Error, error
from offcore.kv.pool import RowsByAddress
from offcore.serving.engines import known, log, say_once

VERSIONS = ("0.5.6",)
NAME = "OffcoreDeviceSpec"
BACKEND = "offcore"
_CUDA = "lmcache.v1.platform.devices.cuda"
_CACHES = 32  # whose transfers are kept, each with 32 MiB of the GPU's

Numbers = NDArray[np.int64]
Place = tuple[str, int | None]  # a backend, and the GPU of the caches


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
            log.info("LMCache: offcore copies KV blocks")

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
    place: Place = ("host", None)
    stream = None
    if device.type == "cuda":
        torch = importlib.import_module("torch")
        stream = torch.cuda.current_stream(device)
        place = ("cuda", stream.device.index)
    kept = copy(direction.name == "H2D", place, stream, host_buffer_alignment, group_specs, objects)
    if kept:
        say_once(f"LMCache keeps its own copies for {kept}")
        group_of, object_of, copies = own
        groups = [group_of(*group) for group in group_specs]
        items = [object_of(*item) for item in objects]
        copies(direction, device, host_buffer_alignment, groups, items)


def copy(
    load: bool,
    place: Place,
    stream: Any,
    alignment: int,
    groups: Sequence[Group],
    objects: Sequence[Object],
) -> str:
    """`transfer` behind a stream of the GPU's, and the stream behind that. Returns for what the
    copies stay LMCache's; empty: it has enqueued them all. If it raises, no copy is under way."""
    by_seams: dict[int, list[Object]] = {}
    for item in objects:
        by_seams.setdefault((item.host_ptr - item.host_offset) % alignment, []).append(item)
    calls = []
    for first, items in by_seams.items():
        for number, group in enumerate(groups):
            cache = _cache(group)
            made = _transfer_of(place, cache, first, alignment)
            if isinstance(made, str):
                return made
            calls.append((made, *_named(number, group, cache, items)))
    jobs: list[kv.Job] = []
    try:
        for made, blocks, slots in calls:
            jobs.append(_start(made, load, blocks, slots, stream))
        for job in jobs:
            if stream is None:
                job.wait()
            else:
                job.wait_stream(stream)
    except BaseException:
        _end(jobs)
        forget()  # where addresses are another cache's by now
        raise
    return ""


def forget() -> None:
    """Closes the transfers that are kept, once nobody uses them."""
    _transfer_of.cache_clear()


def _start(made: Any, load: bool, blocks: Numbers, slots: Numbers, stream: Any) -> kv.Job:
    start = made.load if load else made.store
    try:
        return start(blocks, slots, after=stream)  # type: ignore[no-any-return]
    except Error as failure:
        _, last = np.unique(blocks[::-1], return_index=True)
        if failure.code != "invalid" or not load or len(last) == len(blocks):
            raise
    # The block that engines name where they have none, which nobody reads.
    last = np.sort(len(blocks) - 1 - last)
    return start(blocks[last], slots[last], after=stream)  # type: ignore[no-any-return]


def _end(jobs: Sequence[kv.Job]) -> None:
    """Waits for what is enqueued, as long as it takes: memory is LMCache's again."""
    for job in jobs:
        job.cancel()
    for job in jobs:
        while not job.done():
            with contextlib.suppress(Error):
                job.wait()


class Cache(NamedTuple):
    """What of a group stays the same from call to call."""

    pointers: tuple[int, ...]
    form: str
    planes: int
    layers: int
    blocks: int
    page: int  # bytes of a block's K or V in a layer
    step: int  # from one to the next
    each: int  # blocks of an object


def _cache(group: Group) -> Cache:
    shape = group.shape_desc
    page = shape.bs * shape.nh * shape.hs * shape.element_size
    step = shape.block_stride_elems * shape.element_size or page
    each, rest = divmod(group.slots_per_chunk, shape.bs)
    if rest or not each:
        raise error("invalid", f"LMCache's chunks of {group.slots_per_chunk} tokens have no blocks")
    form = group.engine_kv_format.name
    sizes = shape.kv_size, shape.nl, shape.nb
    return Cache(tuple(group.paged_layer_ptrs), form, *sizes, page, step, each)


def _places(cache: Cache) -> tuple[Numbers, int] | None:
    """Where block 0 of each page is, (planes, layers), and the bytes from a block to the next; None
    for a layout whose blocks are not contiguous."""
    block, name = cache.step, cache.form
    planes = np.arange(cache.planes, dtype=np.int64)[:, np.newaxis]
    layers = np.arange(cache.layers, dtype=np.int64)[np.newaxis]
    pointers = np.asarray(cache.pointers, np.int64)
    if name == "NB_NL_TWO_BS_NH_HS":  # one tensor with all layers
        step = cache.planes * block
        return pointers[0] + planes * block + layers * step, step * cache.layers
    if name == "NL_X_TWO_NB_BS_NH_HS":  # a tensor a layer, K and V apart
        return pointers[layers] + planes * (cache.blocks * block), block
    if name == "NL_X_NB_TWO_BS_NH_HS":  # the same, K and V together
        return pointers[layers] + planes * block, cache.planes * block
    if name in ("NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS", "NL_X_NB_BS_NH_TWO_HS", "NL_X_NB_BS_NH_CS"):
        return pointers[layers] + 0 * planes, block
    if name in ("TWO_X_NL_X_NBBS_NH_HS", "TWO_X_NL_X_NB_BS_NH_HS"):  # K's tensors, then V's
        return pointers[planes * cache.layers + layers], block
    return None


@functools.lru_cache(_CACHES)
def _transfer_of(place: Place, cache: Cache, first: int, alignment: int) -> kv.BlockTransfer | str:
    """Between a cache and its objects; or for what LMCache keeps its own copies."""
    places = _places(cache)
    if places is None:
        return f"layout {cache.form}"
    starts, step = places
    backend, gpu = place
    where = SimpleNamespace(type="cpu" if gpu is None else "cuda", index=gpu)

    def pages(start: int) -> Any:  # of all blocks, as a tensor tells of itself
        return SimpleNamespace(
            data_ptr=lambda: start,
            shape=(cache.blocks, cache.page),
            stride=lambda: (step, 1),
            element_size=lambda: 1,
            device=where,
        )

    try:
        layout = kv.Layout([pages(int(start)) for start in starts.flat], row_blocks=cache.each)
        rows = RowsByAddress(layout.row_bytes, backend, first, alignment)
        # LMCache may free the cache; its threads are not to wait for a forward pass.
        return kv.BlockTransfer(layout, rows, device=gpu, hold=True, adopt=False, crossing_bytes=0)
    except Error as failure:
        if failure.code not in ("invalid", "unsupported"):  # may be over by the next call
            raise
        return f"a cache that offcore.kv does not take: {failure}"


def _named(
    number: int, group: Group, cache: Cache, objects: Sequence[Object]
) -> tuple[Numbers, Numbers]:
    """The blocks of these objects in a group, and their slots."""
    each = cache.each
    end = group.byte_offset_in_object + cache.planes * cache.layers * each * cache.page
    skips = [item.skip_prefix_n_blocks[number] for item in objects]
    for item, skip in zip(objects, skips, strict=True):
        whole = (item.chunk_idx + 1) * each <= len(group.block_ids) and 0 <= skip <= each
        if not whole or end > item.nbytes:
            raise error("invalid", f"LMCache's chunk {item.chunk_idx} is not {each} whole blocks")
    ids = np.array(group.block_ids[: len(group.block_ids) // each * each], np.int64)
    ids = ids.reshape(-1, each)[[item.chunk_idx for item in objects]]
    rows = np.array([item.host_ptr for item in objects], np.int64) + group.byte_offset_in_object
    slots = rows[:, np.newaxis] * each + np.arange(each)
    if not any(skips):
        return ids.ravel(), slots.ravel()
    kept = np.arange(each) >= np.array(skips)[:, np.newaxis]
    return ids[kept], slots[kept]
