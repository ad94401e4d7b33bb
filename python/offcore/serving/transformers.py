"""transformers' continuous batching with KV blocks kept in and swapped to host memory.

    tier = offcore.serving.transformers.enable(model, 16 << 30)
    model.generate_batch(prompts, ...)        # as before
    print(tier.counts)

Blocks of finished requests are stored under the engine's hash. A later prompt with the same prefix
loads them instead of recomputing them, even in a later call of `generate_batch` with a new cache.
Requests that are preempted because the cache is full are swapped out to the same memory and back.
Copies overlap with the model on copy engines; the compute stream waits only for blocks that it is
about to read or overwrite, and for large loads layer by layer. Sampling and scheduling remain with
the engine.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from offcore.errors import error
from offcore.serving.engines import fits, known, layers_together, say_once
from offcore.serving.host_tier import HostTier

VERSIONS = ("5.17",)
_PACKAGE = "transformers.generation.continuous_batching"
# What the engine must offer for the parts here to take its place: module, function, arguments.
_SEAMS = (
    ("cache", "PagedAttentionCache.free_blocks", "request_id"),
    ("cache", "PagedAttentionCache.search_prefix_match", "request_id prompt_ids"),
    ("cache_manager", "BlockManager.get_free_blocks", "n_blocks last_block_id shareable group_id"),
    ("cache_manager", "BlockManager.compute_hash", "parent_hash tokens group_id"),
    (
        "offloading_manager",
        "OffloadingManager.__init__",
        "cache scheduler cpu_offload_space_gib safety_threshold compute_stream distributed_helper",
    ),
    ("offloading_manager", "OffloadingManager._offload_to_cpu", "victims"),
    ("offloading_manager", "OffloadingManager._return_cpu_blocks", "request_id"),
    ("offloading_manager", "OffloadingManager.restore_scheduled_requests", "requests_in_batch"),
)
# The tier of a model, by its text config, which caches are made with. The config is kept, so that
# its id stays its own.
_tiers: dict[int, tuple[Any, HostTier]] = {}
_replaced: dict[str, Any] = {}  # names of the engine's module, and what they stood for


def enable(
    model: Any, host: int | HostTier = 8 << 30, *, one_allocation: bool = True, **options: Any
) -> HostTier:
    """Adds a `HostTier` to a model's continuous batching; the engine's next cache uses it.

    host: bytes of pinned host memory, or an existing tier (then without other arguments).
    one_allocation, options: of `HostTier`.

    Prefixes are kept if the engine shares them: all layers have full attention, and
    `allow_block_sharing` is on. Swapping requires neither, and ignores `cpu_offload_space`. With
    tensor parallelism, and on devices other than CUDA GPUs and CPUs, the engine uses its own
    copies, which is logged once. Raises `Error`: unsupported if transformers is missing.
    """
    if not isinstance(host, HostTier):
        tier = HostTier(host, one_allocation=one_allocation, **options)
    elif options or not one_allocation:
        raise error("invalid", "a tier has its arguments already: pass them to HostTier")
    else:
        tier = host
    if _install():
        config = model.config.get_text_config()
        _tiers[id(config)] = (config, tier)
    return tier


def disable(model: Any) -> None:
    """Restores the engine's own copies from the next cache on; existing caches keep their tier."""
    _tiers.pop(id(model.config.get_text_config()), None)
    if not _tiers:
        api = importlib.import_module(f"{_PACKAGE}.continuous_api") if _replaced else None
        for name in list(_replaced):
            setattr(api, name, _replaced.pop(name))


def _install() -> bool:
    """Puts the classes below in front of the engine's; false where these are not known."""
    if _replaced:
        return True
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError:
        raise error("unsupported", "transformers is not installed") from None
    if not known("transformers", version, VERSIONS):
        return False
    for module, name, arguments in _SEAMS:
        owner, function = name.split(".")
        engine_class = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), owner)
        if not fits("transformers", getattr(engine_class, function), arguments.split()):
            return False
    api = importlib.import_module(f"{_PACKAGE}.continuous_api")
    for name, part in (("PagedAttentionCache", _Cache), ("OffloadingManager", _Swapping)):
        _replaced[name] = getattr(api, name)
        setattr(api, name, type(name, (part, _replaced[name]), {}))
    return True


class _Blocks:
    """Before a BlockManager: hands blocks out only after the stores that still read them."""

    stream: Any = None
    reads: dict[int, list[Any]]  # jobs by block

    def get_free_blocks(
        self, n_blocks: int, last_block_id: int | None, shareable: bool, group_id: int
    ) -> list[int] | None:
        engine: Any = super()
        blocks: list[int] | None
        blocks = engine.get_free_blocks(n_blocks, last_block_id, shareable, group_id)
        self.order(blocks or ())
        return blocks

    def note(self, job: Any, blocks: Iterable[int]) -> None:
        """A job reads these blocks."""
        self.reads = {
            block: left
            for block, jobs in self.reads.items()
            if (left := [one for one in jobs if not one.done()])
        }
        for block in blocks:
            self.reads.setdefault(block, []).append(job)

    def order(self, blocks: Iterable[int]) -> None:
        """What is enqueued from now on may write to these blocks."""
        jobs = {id(job): job for block in blocks for job in self.reads.pop(block, ())}
        for job in jobs.values():
            if not job.done():
                job.wait_stream(self.stream)


class _Layers(list[Any]):
    """The tensors of a cache by layer. Who takes one out is about to enqueue what uses it."""

    def __init__(self, tensors: Iterable[Any], arrive: Any) -> None:
        super().__init__(tensors)
        self._arrive = arrive

    def __getitem__(self, layer: Any) -> Any:
        self._arrive([layer] if isinstance(layer, int) and layer >= 0 else range(len(self)))
        return super().__getitem__(layer)

    def __iter__(self) -> Any:
        self._arrive(range(len(self)))
        return super().__iter__()


class _Cache:
    """Before a PagedAttentionCache: stores what is complete when a request ends, loads what the
    next ones begin with."""

    tier: HostTier | None = None
    transfer: Any = None
    stream: Any = None  # that the model runs in
    _block_manager: Any
    # Of the engine's.
    block_size: int
    device: Any
    group_cache_managers: list[Any]
    key_cache: list[Any]
    value_cache: list[Any]
    num_blocks: int
    use_prefix_sharing: bool
    _total_prefix_length: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _, tier = _tiers.get(id(vars(self)["config"]), (None, None))
        manager = self._block_manager
        on = self.key_cache[0].device.type
        if tier is None:
            return
        if manager.tp_on or on not in ("cpu", "cuda"):
            why = "tensor parallelism" if manager.tp_on else f"device {on}"
            say_once(f"transformers keeps its own copies: offcore does not support {why}")
            return
        if tier.one_allocation:
            _merge(self)
        shape = (self.num_blocks + 2, -1)
        caches = [
            (keys.view(shape), values.view(shape))
            for keys, values in zip(self.key_cache, self.value_cache, strict=True)
        ]
        # Hashes are of a whole block's tokens: of no use for blocks of another size.
        self.transfer = tier.connect(caches, (self.block_size, self.key_cache[0].dtype))
        self.tier = tier
        weakref.finalize(self, tier.disconnect, self.transfer)
        own: Any = type("BlockManager", (_Blocks, type(manager)), {})
        self._block_manager = own(manager.num_blocks, manager.block_size, manager.tp_on)
        self._block_manager.reads = {}
        self._loading: list[tuple[Any, int]] = []  # jobs for the next batch, layers of a step
        self._coming: list[tuple[Any, set[int]]] = []  # layers that the stream does not wait for
        self._loaded: list[Any] = []  # jobs that are to be seen end
        self._batching = kwargs.get("continuous_batching_config", args[1] if args[1:] else None)
        self.key_cache = _Layers(self.key_cache, self._arrive)
        self.value_cache = _Layers(self.value_cache, self._arrive)
        self.swapped: set[str] = set()  # requests whose blocks are swapped out, not kept

    def attach(self, stream: Any) -> None:
        """The stream that the model runs in; None on a CPU."""
        self.stream = self._block_manager.stream = stream

    def _step(self, blocks: Sequence[int]) -> int:
        """How many layers of a load come together; 0: all, as where the model is captured or
        compiled, and so does not take layers out one after the other."""
        given = self._batching
        graphs = getattr(given, "use_cuda_graph", None)
        eager = graphs is not None and not (any(graphs) if isinstance(graphs, tuple) else graphs)
        names = ("varlen_compile_config", "decode_compile_config", "default_compile_level")
        if not eager or any(getattr(given, name, None) for name in names):
            return 0
        nbytes = len(blocks) * self.transfer.pools[0].block_bytes
        return layers_together(len(self.key_cache), nbytes)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Loads rows of the tier into blocks, before the next batch."""
        step = self._step(blocks)
        job = self.transfer.load(blocks, slots, after=self.stream, by_layer=step)
        self._loading.append((job, step))

    def join(self) -> None:
        """Makes the next batch wait for the loads, where they come by layer when it takes a layer
        out. Raises `Error` for those that failed."""
        for job, step in self._loading:
            if step:
                self._coming.append((job, set(range(len(self.key_cache)))))
            else:
                job.wait_stream(self.stream)
            self._loaded.append(job)
        self._loading.clear()
        for job in [one for one in self._loaded if one.done()]:
            self._loaded.remove(job)
            self._coming = [one for one in self._coming if one[0] is not job]
            job.wait()

    def _arrive(self, layers: Iterable[int]) -> None:
        """The stream waits for these layers of the loads that the batch needs."""
        for job, left in self._coming:
            for layer in left.intersection(layers):
                job.wait_layer(layer, self.stream)
                left.remove(layer)

    def free_blocks(self, request_id: str) -> None:
        if self.tier is not None and self.use_prefix_sharing and request_id not in self.swapped:
            table = self.group_cache_managers[0].block_table.get(request_id, ())
            described = self._block_manager._id_to_block
            hashes = {block: described[block].hash for block in table}
            whole = [block for block, key in hashes.items() if key is not None]
            keys = [hashes[block] for block in whole]
            job, read = self.tier.store(self.transfer, whole, keys, self.stream)
            self._block_manager.note(job, read)
        engine: Any = super()
        engine.free_blocks(request_id)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        engine: Any = super()
        found: int = engine.search_prefix_match(request_id, prompt_ids)
        if self.tier is None:
            return found
        with self.tier.lock:
            more = self._fetch(self.tier, request_id, prompt_ids, found // self.block_size)
        self._total_prefix_length += more
        if found + more == len(prompt_ids):  # then the engine computes the last token again
            self._block_manager.order(self.group_cache_managers[0].block_table[request_id][-1:])
        return found + more

    def _fetch(self, tier: HostTier, request_id: str, prompt: list[int], have: int) -> int:
        """Loads what follows the blocks found in the cache; returns how many tokens that is."""
        manager, size = self._block_manager, self.block_size
        tables = self.group_cache_managers[0].block_table
        table = list(tables[request_id]) if have else []
        key = manager._id_to_block[table[-1]].hash if table else None
        wanted: list[tuple[int, int | None]] = []  # hashes; blocks where the cache has them
        for first in range(have * size, len(prompt) // size * size, size):
            key = manager.compute_hash(key, prompt[first : first + size], 0)
            block = manager._hash_to_id.get(key)
            if block is None and not tier.holds(key):
                break
            wanted.append((key, block))
        shared = [block for _, block in wanted if block is not None]
        absent = [key for key, block in wanted if block is None]
        idle = sum(manager._id_to_block[block].ref_count == 0 for block in shared)
        to_compute = len(prompt) // size + 1 - have - len(wanted)
        if not absent or len(absent) + idle + to_compute > manager.num_free_blocks:
            return 0
        for block in shared:
            manager.increase_ref_count(block)
        fresh = manager.get_free_blocks(len(absent), table[-1] if table else None, True, 0)
        unused = iter(fresh)
        for key, block in wanted:
            if block is None:
                block = next(unused)
                manager._id_to_block[block].hash = key
                manager._hash_to_id[key] = block
            table.append(block)
        tables[request_id] = table
        step = self._step(fresh)
        job = tier.load(self.transfer, fresh, absent, self.stream, step)
        self._loading.append((job, step))
        return len(wanted) * size


class _Swapping:
    """Before an OffloadingManager: swaps preempted requests through the cache's tier."""

    # Of the engine's.
    cache: Any
    _request_id_to_cpu_blocks: dict[str, list[int]]
    _request_id_to_group_block_counts: dict[str, list[int]]

    def __init__(self, *, cache: Any, compute_stream: Any, **given: Any) -> None:
        self.tier: HostTier | None = getattr(cache, "tier", None)
        if self.tier is not None:
            cache.attach(compute_stream)
            given["cpu_offload_space_gib"] = 0.0  # the tier's memory takes its place
        engine: Any = super()
        engine.__init__(cache=cache, compute_stream=compute_stream, **given)

    def _tables(self, request_id: str) -> list[list[int]]:
        """A request's blocks in each group of layers."""
        return [one.block_table.get(request_id, []) for one in self.cache.group_cache_managers]

    def _offload_to_cpu(self, victims: list[Any]) -> set[str]:
        engine: Any = super()
        if self.tier is None:
            swapped: set[str] = engine._offload_to_cpu(victims)
            return swapped
        cache = self.cache
        blocks: list[int] = []
        slots: list[int] = []
        out: set[str] = set()
        for state in victims:
            tables = self._tables(state.request_id)
            own = [block for table in tables for block in table]
            rows = self.tier.swap_slots(cache.transfer, len(own)) if own else None
            if rows is None:
                continue
            self._request_id_to_cpu_blocks[state.request_id] = rows
            self._request_id_to_group_block_counts[state.request_id] = [*map(len, tables)]
            state.is_cpu_offloaded = True
            out.add(state.request_id)
            blocks += own
            slots += rows
        if blocks:
            job = cache.transfer.store(blocks, slots, after=cache.stream)
            cache._block_manager.note(job, blocks)
        cache.swapped |= out
        return out

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        engine: Any = super()
        if self.tier is None:
            engine.restore_scheduled_requests(requests_in_batch)
            return
        cache = self.cache
        blocks: list[int] = []
        slots: list[int] = []
        for future in requests_in_batch:
            state = future.state
            if not state.is_cpu_offloaded:
                continue
            tables = self._tables(state.request_id)  # allocated anew, and maybe some more
            rows, counts = self._taken_back(state.request_id)
            for table, count in zip(tables, counts, strict=True):
                blocks += table[:count]
            slots += rows
            state.is_cpu_offloaded = False
            state.allocated_blocks = max(map(len, tables))
            if cache.allow_block_sharing:  # all blocks before this batch get their hashes again
                future.complete_blocks += state.position_offset // cache.block_size
        if blocks:
            cache.load(blocks, slots)
            self.tier.release(cache.transfer, slots)
            self.tier.counts["swapped_in"] += len(blocks)
        cache.join()

    def _taken_back(self, request_id: str) -> tuple[list[int], list[int]]:
        self.cache.swapped.discard(request_id)
        rows = self._request_id_to_cpu_blocks.pop(request_id)
        return rows, self._request_id_to_group_block_counts.pop(request_id)

    def _return_cpu_blocks(self, request_id: str) -> tuple[list[int], list[int]]:
        engine: Any = super()
        if self.tier is None:
            returned: tuple[list[int], list[int]] = engine._return_cpu_blocks(request_id)
            return returned
        rows, counts = self._taken_back(request_id)
        self.tier.release(self.cache.transfer, rows)
        return rows, counts

    def reset(self) -> None:
        engine: Any = super()
        engine.free_all_waiting_cpu_caches()
        for request_id in list(self._request_id_to_cpu_blocks) if self.tier is not None else ():
            self._return_cpu_blocks(request_id)
        engine.reset()


def _merge(cache: Any) -> None:
    """Puts the tensors of a cache, which holds nothing yet, into one allocation."""
    torch = importlib.import_module("torch")
    first = cache.key_cache[0]
    count, shape, like = 2 * len(cache.key_cache), first.shape, {"dtype": first.dtype}
    like["device"] = first.device
    del first
    cache.key_cache.clear()
    cache.value_cache.clear()
    if like["device"].type == "cuda":
        torch.cuda.empty_cache()  # or the new allocation has no room beside the old ones
    try:
        parts = list(torch.empty((count, *shape), **like).unbind())
    except torch.OutOfMemoryError:
        say_once("the KV cache stays in several allocations: GPU memory is fragmented")
        parts = [torch.empty(shape, **like) for _ in range(count)]
    for part in parts:
        torch._dynamo.mark_static_address(part)
        # The engine reads zeros here for padding.
        part.view(cache.num_blocks + 2, -1)[cache.num_blocks].zero_()
    cache.key_cache.extend(parts[0::2])
    cache.value_cache.extend(parts[1::2])
