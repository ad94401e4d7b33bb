"""A prompt's KV cache fetched from host memory instead of recomputed (DMA-Latte 5.3).

    python examples/kv_fetch.py

The cache of Qwen2.5-0.5B has 24 layers, pages of 8 KiB and 16 tokens per block. A prompt of 4096
tokens is stored, its blocks are erased, and it is fetched into other blocks: first with all layers
in one copy, then layer by layer while the first layers are already in use. Uses copy engines with
torch and a GPU, and threads of the host backend otherwise.
"""

from typing import Any

import numpy as np

import offcore
from offcore import kv

LAYERS, PAGE_BYTES = 24, 8 << 10
CACHE_BLOCKS, PROMPT_BLOCKS = 640, 256


def new_cache(on_gpu: bool) -> Any:
    """Layers outermost, as engines allocate it: (layers, blocks, page)."""
    shape = (LAYERS, CACHE_BLOCKS, PAGE_BYTES)
    if not on_gpu:
        return np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    import torch

    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def current_stream(on_gpu: bool) -> Any:
    """What a store comes after: the work that wrote the blocks."""
    if not on_gpu:
        return None
    import torch

    return torch.cuda.current_stream()


def has_gpu() -> bool:
    """Whether there is a GPU here, and a torch that can use it."""
    if "cuda" not in {name for name, usable, _ in offcore.probe_backends() if usable}:
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def tell(what: str, result: kv.Transferred) -> None:
    print(
        f"{what:>9}: {result.pages} pages in {result.commands} commands ({result.path}), "
        f"{result.submit_us:.0f} us for the caller, {result.gbps:.1f} GB/s"
    )


def main() -> None:
    on_gpu = has_gpu()
    cache = new_cache(on_gpu)
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, PROMPT_BLOCKS, backend="cuda" if on_gpu else "host")
    scattered = np.random.default_rng(1).permutation(CACHE_BLOCKS)
    prompt, others = scattered[:PROMPT_BLOCKS], scattered[-PROMPT_BLOCKS:]
    wanted = cache[:, prompt]  # a copy, to compare with

    with pool, kv.BlockTransfer(layout, pool) as transfer:
        slots = pool.allocate(PROMPT_BLOCKS, timeout=30.0)
        tell("store", transfer.store(prompt, slots, after=current_stream(on_gpu)).wait())
        cache[:, prompt] = 0

        job = transfer.load(others, slots, after=current_stream(on_gpu))
        tell("load", job.wait())
        assert bool((cache[:, others] == wanted).all())

        cache[:, others] = 0
        job = transfer.load(others, slots, by_layer=True, after=current_stream(on_gpu))
        for layer in range(LAYERS):
            job.wait_layer(layer, current_stream(on_gpu))
            assert bool((cache[layer, others] == wanted[layer]).all())  # a layer's computation
        tell("by layer", job.wait())
    print("correct, on a GPU" if on_gpu else "correct, on the host backend")


if __name__ == "__main__":
    main()
