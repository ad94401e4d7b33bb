"""Host memory for the KV blocks of one model, which outlives the engine's caches."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import kv
from offcore.errors import Error, error
from offcore.serving.engines import log, pool_for

Slots = NDArray[np.int64]
_LARGE_ROW = 64 << 10


@dataclass
class _Entry:
    slot: int
    job: Any  # of the store that is under way; None: it has ended


class HostTier:
    """Blocks of finished requests by the hash of their tokens, and those of swapped-out requests.

    host_bytes: of pinned host memory, registered in the background (0.1 s/GB).
    one_allocation: put the tensors of a cache into one allocation, so that one strided copy moves
        a block over all layers. False leaves them as the engine allocated them.
    options: keyword arguments of `kv.BlockTransfer`.

    Least recently used blocks are evicted first. A tier holds the blocks of one model: `clear` it
    when weights change. Its memory is allocated for the first cache; a cache with another block
    size begins with an empty tier. `counts` has the number of blocks stored, loaded, evicted, not
    stored for lack of room (skipped), swapped_out and swapped_in. All methods are thread-safe.
    """

    def __init__(self, host_bytes: int, *, one_allocation: bool = True, **options: Any) -> None:
        self.host_bytes = host_bytes
        self.one_allocation = one_allocation
        self.options = options
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        self._pool: kv.HostPool | None = None
        self._form: tuple[Any, ...] = ()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the one used last comes last
        self._stores: deque[tuple[Any, list[int]]] = deque()

    def connect(self, caches: Sequence[tuple[Any, Any]], form: tuple[Any, ...]) -> Any:
        """A `kv.BlockTransfer` between a cache and this memory.

        caches: K and V of each layer, (blocks, page...). form: what else must be equal for two
        caches to have the same blocks. Raises `Error`: invalid where not even a block fits.
        """
        layout = kv.Layout(list(caches))
        form = (*form, layout.block_bytes, layout.device)
        with self.lock:
            if self._pool is None or form != self._form:
                blocks = self.host_bytes // layout.block_bytes
                if not blocks:
                    raise error(
                        "invalid",
                        f"host_bytes is {self.host_bytes}; a block takes {layout.block_bytes}",
                    )
                self.clear()
                self._pool = self.pool_of(layout, blocks)
                self._form = form
            made = self.transfer_of(layout, self._pool)
        log.info("transformers: offcore copies KV blocks")
        return made

    def pool_of(self, layout: kv.Layout, blocks: int) -> kv.HostPool:
        """The memory, with a row for each block."""
        return pool_for(layout, blocks)

    def transfer_of(self, layout: kv.Layout, pool: kv.HostPool) -> Any:
        """What copies between them. Pages of 64 KiB and more lose nothing by one engine, whose
        copies can be enqueued ahead; both engines' are not."""
        options = dict(self.options)
        if all(row >= _LARGE_ROW for _, row in layout.copies()):
            options.setdefault("crossing_bytes", 0)
        return kv.BlockTransfer(layout, pool, **options)

    def disconnect(self, transfer: Any) -> None:
        """Ends a transfer once its copies have ended, so that its cache can be freed."""
        with self.lock:
            transfer.close()
            self._reap()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Until all memory is registered; before a cache is connected there is none."""
        if self._pool is not None:
            self._pool.wait_ready(timeout)

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, key: int) -> bool:
        """Whether a block of this hash can be loaded; waits for a store of it under way."""
        with self.lock:
            entry = self._entries.get(key)
            if entry is not None and entry.job is not None:
                self._ended(entry.job, [key])
            return key in self._entries

    def load(
        self,
        transfer: Any,
        blocks: Sequence[int],
        keys: Sequence[int],
        after: Any,
        by_layer: int = 0,
    ) -> Any:
        """Starts to load blocks of these hashes, all of which it holds; returns the job. by_layer:
        so many layers at a time, for streams that wait for each; 0: all together."""
        with self.lock:
            slots = [self._entries[key].slot for key in keys]
            job = transfer.load(blocks, slots, after=after, by_layer=by_layer)
            self._touch(keys)
            self.counts["loaded"] += len(keys)
            return job

    def store(
        self, transfer: Any, blocks: Sequence[int], keys: Sequence[int], after: Any
    ) -> tuple[Any, list[int]]:
        """Starts to store those of the blocks that it does not hold, the first ones where room is
        short. Returns the job (None: nothing to copy) and the blocks that it reads."""
        with self.lock:
            self._reap()
            if not self._serves(transfer):
                return None, []
            absent = {key: block for block, key in zip(blocks, keys, strict=True)}
            absent = {key: block for key, block in absent.items() if key not in self._entries}
            self._touch([key for key in keys if key in self._entries])
            slots = self._room(len(absent))
            self.counts["skipped"] += len(absent) - len(slots)
            if not len(slots):
                return None, []
            stored = list(absent)[: len(slots)]
            read = [absent[key] for key in stored]
            job = transfer.store(read, slots, after=after)
            for key, slot in zip(stored, slots.tolist(), strict=True):
                self._entries[key] = _Entry(slot, job)
            self._touch(stored)
            self._stores.append((job, stored))
            self.counts["stored"] += len(stored)
            return job, read

    def swap_slots(self, transfer: Any, count: int) -> list[int] | None:
        """Rows for all blocks of a request; None where there are not so many."""
        with self.lock:
            if not self._serves(transfer):
                return None
            slots: list[int] = self._room(count).tolist()
            if len(slots) < count:
                self.release(transfer, slots)
                return None
            self.counts["swapped_out"] += count
            return slots

    def release(self, transfer: Any, slots: Sequence[int]) -> None:
        """Gives rows of `swap_slots` back; jobs that use them may still run."""
        if slots:
            transfer.pools[0].free(slots)

    def clear(self) -> None:
        """Forgets all blocks of finished requests, e.g. because the model's weights change."""
        with self.lock:
            entries, self._entries = self._entries, OrderedDict()
            self._stores.clear()
            if self._pool is not None and entries:
                self._pool.free([entry.slot for entry in entries.values()])

    def _serves(self, transfer: Any) -> bool:
        """Whether a cache's blocks have the form of those held; an earlier cache's may not."""
        return self._pool is not None and transfer.pools[0] is self._pool

    def _room(self, count: int) -> Slots:
        """Rows for up to `count` blocks. Others give way, except those whose store is under way."""
        pool = self._pool
        assert pool is not None
        old: list[int] = []
        if count > pool.free_blocks:
            for key, entry in self._entries.items():
                if len(old) == count - pool.free_blocks:
                    break
                if entry.job is None:
                    old.append(key)
        if old:
            pool.free([self._entries.pop(key).slot for key in old])
            self.counts["evicted"] += len(old)
        try:
            return pool.allocate(min(count, pool.free_blocks), timeout=0)
        except Error as refused:  # freed rows are still read by loads
            if refused.code != "memory":
                raise
            return np.empty(0, np.int64)

    def _touch(self, keys: Sequence[int]) -> None:
        """Used now: the first blocks of a prompt last, as others are of no use without them."""
        for key in reversed(keys):
            self._entries.move_to_end(key)

    def _reap(self) -> None:
        while self._stores and self._stores[0][0].done():
            self._ended(*self._stores.popleft())

    def _ended(self, job: Any, keys: Sequence[int]) -> None:
        """Waits for a store, and forgets its blocks if it failed."""
        failure = None
        try:
            job.wait()
        except Error as caught:
            failure = caught
            log.warning("blocks were not stored, and will be computed again: %s", caught)
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.job is not job:
                continue
            entry.job = None
            if failure is not None and self._pool is not None:
                self._pool.free([self._entries.pop(key).slot])
