"""Copies of paged KV-cache blocks on copy engines (DMA-Latte 2.1.2, 5.3, 6).

    layout = kv.Layout(caches)                           # tensors, one per layer: (blocks, page...)
    pool = kv.HostPool(layout.block_bytes, blocks=1000)  # pinned host memory, a row per block
    transfer = kv.BlockTransfer(layout, pool)
    slots = pool.allocate(len(blocks))
    transfer.store(blocks, slots).wait()
    transfer.load(other_blocks, slots).wait()

By default up to 4 SMs pack small pages on GPUs; policy="zero_sm" uses none. See docs/kv.md for
layouts and ordering.
"""

from offcore._core import cache_pool
from offcore.kv.layout import Layout
from offcore.kv.pool import HostPool
from offcore.kv.result import Transferred
from offcore.kv.transfer import BlockTransfer, Job

__all__ = ["BlockTransfer", "HostPool", "Job", "Layout", "Transferred", "cache_pool"]
