"""SGLang's hierarchical cache with its copies between GPU and host made by offcore.

    OFFCORE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --page-size 64 \\
        --enable-hierarchical-cache --hicache-io-backend direct \\
        --hicache-mem-layout page_first_direct

SGLang finds `register` by the entry point of this package; without OFFCORE_SGLANG it changes
nothing. "1", or a JSON object with arguments of `kv.BlockTransfer`. Host memory, radix tree,
storage and eviction stay SGLang's: its host buffer has a row of all layers for each page, K and V
apart. Layers come in steps, each with SGLang's events. Other caches use SGLang's own copies.
"""

from __future__ import annotations

import importlib
import itertools
import json
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import _core, kv
from offcore.errors import error
from offcore.serving.engines import known, log, pool_for, say_once

VERSIONS = ("0.5.23",)
VARIABLE = "OFFCORE_SGLANG"
ENGINE = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
_STEPS = 4  # in which the layers of a load come
_REGISTERED = 256 << 30  # SGLang registers a larger buffer in parts, over which no copy may go

Pages = NDArray[np.int64]


def register() -> None:
    """SGLang's plugin: wraps what submits transfers, where the environment asks for it."""
    asked = _core.env(VARIABLE)
    if asked in ("", "0"):
        return
    try:
        options = json.loads(asked)
    except ValueError:
        raise error("invalid", f"{VARIABLE} is {asked!r}: 1, or a JSON object") from None
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if not known("SGLang", importlib.import_module("sglang").__version__, VERSIONS):
        return
    around = Around(options if isinstance(options, dict) else {})
    for name in ("submit_device_to_host", "submit_host_to_device"):
        hooks.HookRegistry.register(
            f"{ENGINE}.{name}", getattr(around, name), hooks.HookType.AROUND
        )


class Around:
    """What runs instead of the methods of SGLang's engines for transfers, a cache for each of which
    is opened when it first transfers something."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._caches: weakref.WeakKeyDictionary[Any, Cache] = weakref.WeakKeyDictionary()

    def submit_device_to_host(
        self, original: Callable[..., Any], engine: Any, transfers: list[Any]
    ) -> Any:
        pages = self._pages(engine, transfers)
        if pages is None:
            return original(engine, transfers)
        stream = engine.device_to_host_stream
        with engine._submission(transfers, stream, "device_to_host") as (_, completion):
            self._cache(transfers[0]).store(*pages, stream)
        return completion

    def submit_host_to_device(
        self, original: Callable[..., Any], engine: Any, transfers: list[Any], **how: Any
    ) -> Any:
        pages = self._pages(engine, transfers)
        if pages is None or how["transfer_layer_id_max"] != transfers[0].host_pool.layer_num:
            return original(engine, transfers, **how)
        stream = engine.host_to_device_stream
        after = how.get("start_event")
        with engine._submission(transfers, stream, "host_to_device", after) as (_, completion):
            self._cache(transfers[0]).load(*pages, stream, how.get("on_layer_done"))
        return completion

    def _pages(self, engine: Any, transfers: list[Any]) -> tuple[Pages, Pages] | None:
        """The pages of the device and of the host; None for what stays SGLang's."""
        kept = _kept(engine, transfers)
        if not kept:
            device, host = (
                _pages_of(indices.numpy(), transfers[0].host_pool.page_size)
                for indices in (transfers[0].device_indices, transfers[0].host_indices)
            )
            if device is not None and host is not None:
                return device, host
            kept = "tokens that are no whole pages"
        say_once(f"SGLang keeps its own copies for {kept}, which offcore.serving does not support")
        return None

    def _cache(self, transfer: Any) -> Cache:
        cache = self._caches.get(transfer.host_pool)
        if cache is None:
            cache = self._caches[transfer.host_pool] = Cache(transfer.host_pool, self._options)
        return cache


def _kept(engine: Any, transfers: list[Any]) -> str:
    """What of these transfers stays SGLang's; empty: nothing."""
    if len(transfers) != 1:
        return "several pools at once"
    transfer = transfers[0]
    host = transfer.host_pool
    if type(host).__name__ != "MHATokenToKVPoolHost" or host.layout != "page_first_direct":
        return f"{type(host).__name__} in layout {host.layout}"
    if engine.io_backend != "direct":
        return f"the io backend {engine.io_backend}"
    if transfer.layer_mapper is not None or host.layer_num != host.target_layer_num:
        return "draft models"
    if getattr(transfer.device_pool, "host_transfer_translate", None) is not None:
        return "pools whose pages move"
    if host.dcp_size != 1 or host.shared_allocation_domain is not None:
        return "host memory that ranks share"
    if not host.device_rows_packed or host.kv_buffer.nbytes > _REGISTERED:
        return "strided rows, and host buffers above 256 GiB"
    return ""


def _pages_of(tokens: Pages, page: int) -> Pages | None:
    """The pages that these tokens are, all of each in order; None: they are none."""
    if len(tokens) % page:
        return None
    rows = tokens.astype(np.int64).reshape(-1, page)
    first = rows[:, 0]
    if (first % page).any() or (rows != first[:, np.newaxis] + np.arange(page)).any():
        return None
    return first // page


class Cache:
    """Transfers between a host pool of SGLang's and the tensors on the GPU that it is for."""

    def __init__(self, host: Any, options: dict[str, Any]) -> None:
        torch = importlib.import_module("torch")
        sides = (host.device_k_buffers, host.device_v_buffers)
        row = host.kv_buffer[0][0].nbytes
        layer = row // host.layer_num
        bounds = np.linspace(0, host.layer_num, min(_STEPS, host.layer_num) + 1).astype(int)
        self._steps = [range(first, last) for first, last in itertools.pairwise(bounds)]
        layouts, pools = [], []
        for step in self._steps:
            for plane, tensors in zip(host.kv_buffer, sides, strict=True):
                pages = [_whole_pages(tensors[number], host.page_size) for number in step]
                layout = kv.Layout(pages)
                if layout.block_bytes != len(step) * layer:
                    raise error("invalid", "pages of SGLang's host memory are not the GPU's")
                rows = plane.reshape(-1).view(torch.uint8)[step.start * layer :]
                pools.append(pool_for(layout, host.page_num, memory=rows, row_stride=row))
                layouts.append(layout)
        self._transfer = kv.BlockTransfer(layouts, pools, **{"hold": True, **options})
        self._jobs: list[Any] = []
        for pool in pools:  # SGLang gives rows out, all of them
            pool.wait_ready()
            pool.allocate(pool.blocks)
        log.info("SGLang: offcore copies KV blocks")

    def store(self, device: Pages, host: Pages, stream: Any) -> None:
        """Enqueues it behind the stream, and the stream behind that."""
        for job in self._begin(self._transfer.store, device, host, stream):
            self._follow(job, stream)

    def load(
        self, device: Pages, host: Pages, stream: Any, on_layer_done: Callable[[int], None] | None
    ) -> None:
        """The same; tells of each layer when the stream is behind it."""
        jobs = self._begin(self._transfer.load, device, host, stream)
        for number, step in enumerate(self._steps):
            for job in jobs[2 * number : 2 * number + 2]:
                self._follow(job, stream)
            for layer in step:
                if on_layer_done is not None:
                    on_layer_done(layer)

    def _begin(self, start: Any, device: Pages, host: Pages, stream: Any) -> list[Any]:
        # A failed one has let the stream pass: its blocks must not be used.
        ended = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if not job.done()]
        for job in ended:
            job.wait()
        after = stream if self._transfer.backend == "cuda" else None
        groups = range(len(self._transfer.layouts))
        jobs = [start(device, host, after=after, group=group) for group in groups]
        self._jobs += jobs
        return jobs

    def _follow(self, job: Any, stream: Any) -> None:
        if self._transfer.backend == "cuda":
            job.wait_stream(stream)
        else:
            job.wait()


def _whole_pages(tensor: Any, page: int) -> Any:
    """(pages, tokens and all of them) of a layer's tensor, without what is left behind the last."""
    pages = tensor.shape[0] // page
    return tensor[: pages * page].reshape(pages, -1)
