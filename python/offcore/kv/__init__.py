"""Paged KV-cache blocks between a GPU and host memory, by copy engines (DMA-Latte 2.1.2, 5.3, 6).

    layout = kv.Layout(caches)                           # tensors, one a layer: (blocks, page...)
    pool = kv.HostPool(layout.block_bytes, blocks=1000)  # pinned host memory, a row a block
    transfer = kv.BlockTransfer(layout, pool)
    slots = pool.allocate(len(blocks))
    transfer.store(blocks, slots).wait()
    transfer.load(other_blocks, slots).wait()

No SM takes part. See docs/kv.md for the layouts, and for what is ordered with what.
"""

from offcore._core import cache_pool
from offcore.kv.layout import Layout
from offcore.kv.pool import HostPool
from offcore.kv.result import Transferred
from offcore.kv.transfer import BlockTransfer, Job

__all__ = ["BlockTransfer", "HostPool", "Job", "Layout", "Transferred", "cache_pool"]
