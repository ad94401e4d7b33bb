"""Host tiers whose copies are others', for serving.py: those of transformers' own
OffloadingManager, and driver calls for pages as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from offcore import _core, kv
from offcore.serving.host_tier import HostTier


class TorchJob:
    """What `kv.Job` is to the adapter: the copies are in the compute stream already."""

    def __init__(self, stream: Any) -> None:
        self._event = stream.record_event() if stream is not None else None

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout: float | None = None) -> None:
        if self._event is not None:
            self._event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        """The copies and all that follows are in one stream."""

    def wait_layer(self, layer: int, stream: Any) -> None:
        """The same: all layers have come before."""


class TorchTransfer:
    """Copies as the engine's OffloadingManager makes them, between a cache and rows of a pool."""

    def __init__(self, layout: kv.Layout, pool: kv.HostPool) -> None:
        self.pools = [pool]
        self._views = layout.tensors
        gpu = self._views[0].device.type == "cuda"
        # One pinned tensor for each of the cache's, as the engine has them.
        self._rows = [
            torch.empty((pool.blocks, view.shape[1]), dtype=view.dtype, pin_memory=gpu)
            for view in self._views
        ]

    @staticmethod
    def _runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
        """(slot, place, count) of consecutive slots."""
        ends = [
            i for i in range(1, len(slots) + 1) if i == len(slots) or slots[i] != slots[i - 1] + 1
        ]
        return [(slots[a], a, b - a) for a, b in zip([0, *ends], ends, strict=False)]

    def load(
        self, blocks: Sequence[int], slots: Any, after: Any = None, by_layer: int = 0
    ) -> TorchJob:
        places = self._runs([int(slot) for slot in slots])
        with torch.cuda.stream(after):  # of None: no change
            device = self._views[0].device
            chosen = torch.as_tensor(blocks, dtype=torch.long).to(device, non_blocking=True)
            staging = torch.empty_like(self._views[0][: len(blocks)])
            for view, rows in zip(self._views, self._rows, strict=True):
                for slot, place, count in places:
                    part = staging[place : place + count]
                    part.copy_(rows[slot : slot + count], non_blocking=True)
                view.index_copy_(0, chosen, staging)
            return TorchJob(after)

    def store(self, blocks: Sequence[int], slots: Any, after: Any = None) -> TorchJob:
        places = self._runs([int(slot) for slot in slots])
        with torch.cuda.stream(after):  # of None: no change
            device = self._views[0].device
            chosen = torch.as_tensor(blocks, dtype=torch.long).to(device, non_blocking=True)
            for view, rows in zip(self._views, self._rows, strict=True):
                gathered = view.index_select(0, chosen)
                for slot, place, count in places:
                    part = gathered[place : place + count]
                    rows[slot : slot + count].copy_(part, non_blocking=True)
            return TorchJob(after)

    def close(self) -> None:
        if self._views and self._views[0].device.type == "cuda":
            torch.cuda.synchronize()
        self._views, self._rows = [], []


class TorchTier(HostTier):
    """A tier whose copies are the engine's."""

    def pool_of(self, layout: kv.Layout, blocks: int) -> kv.HostPool:
        return kv.HostPool(64, blocks, backend="host")  # it only numbers the rows

    def transfer_of(self, layout: kv.Layout, pool: kv.HostPool) -> Any:
        pool.wait_ready()
        return TorchTransfer(layout, pool)


class DriverJob(TorchJob):
    """Copies in a stream of their own."""

    def wait_stream(self, stream: Any) -> None:
        if self._event is not None:
            stream.wait_event(self._event)

    def wait_layer(self, layer: int, stream: Any) -> None:
        self.wait_stream(stream)


class DriverTransfer:
    """Pages as they lie, in a stream for each direction.

    copy: what enqueues them: a driver's call for each (`copy_by_loop`) or for all
        (`copy_by_batch`). On a CPU they are copied at once.
    """

    def __init__(self, layout: kv.Layout, pool: kv.HostPool, copy: Any) -> None:
        self.pools = [pool]
        self._copy = copy
        views = layout.tensors
        self._gpu = views[0].device.type == "cuda"
        self._device = views[0].device.index or 0
        self._streams = [torch.cuda.Stream() for _ in "hd"] if self._gpu else [None, None]
        self._nbytes = views[0].shape[1] * views[0].element_size()
        self._bases = np.array([view.data_ptr() for view in views], np.uint64)
        steps = [view.stride(0) * view.element_size() for view in views]
        self._steps = np.array(steps, np.uint64)
        self._inside = np.arange(len(views), dtype=np.uint64) * np.uint64(self._nbytes)
        self._rows: dict[int, int] = {}  # addresses, by slot

    def _row(self, slot: int) -> int:
        if slot not in self._rows:
            self._rows[slot] = self.pools[0].row(slot).ctypes.data
        return self._rows[slot]

    def _start(self, load: bool, blocks: Sequence[int], slots: Any, after: Any) -> DriverJob:
        numbers = np.asarray(blocks, np.uint64)[:, np.newaxis]
        rows = np.array([self._row(int(slot)) for slot in slots], np.uint64)[:, np.newaxis]
        cache = (self._bases + numbers * self._steps).ravel()
        host = (rows + self._inside).ravel()
        dsts, srcs = (cache, host) if load else (host, cache)
        stream = self._streams[load]
        if stream is None:
            _core.copy_by_hand(dsts, srcs, self._nbytes)
            return DriverJob(None)
        if after is not None:
            stream.wait_stream(after)
        self._copy(dsts, srcs, self._nbytes, self._device, stream.cuda_stream)
        return DriverJob(stream)

    def load(
        self, blocks: Sequence[int], slots: Any, after: Any = None, by_layer: int = 0
    ) -> DriverJob:
        return self._start(True, blocks, slots, after)

    def store(self, blocks: Sequence[int], slots: Any, after: Any = None) -> DriverJob:
        return self._start(False, blocks, slots, after)

    def close(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()
        self._rows.clear()


class DriverTier(HostTier):
    """A tier with the cache as the engine allocates it, whose copies are calls of a driver."""

    def __init__(self, host_bytes: int, copy: Any) -> None:
        super().__init__(host_bytes, one_allocation=False)
        self._copy = copy

    def transfer_of(self, layout: kv.Layout, pool: kv.HostPool) -> Any:
        pool.wait_ready()
        return DriverTransfer(layout, pool, self._copy)
