"""A host tier whose copies are those of transformers' own OffloadingManager, for serving.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offcore import kv
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
