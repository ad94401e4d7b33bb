"""Fetching scattered blocks of a cache from the host: one call for all of them.

    python examples/batch.py

First on a simulated MI300X, whose memory is only sizes here: how 256 copies to random places fare
one by one, back to back on one engine, and spread over two. Then with real bytes, by software
engines: blocks of a cache whose layers lie apart, which fold into one strided copy a block.
"""

import numpy as np

import offcore
from offcore import BatchPolicy

COPIES = 256
POLICIES = {
    "one by one": BatchPolicy(engines=1, sub_batch=1),
    "back to back": BatchPolicy(engines=1),
    "two engines": BatchPolicy(engines=2),
    "chosen": BatchPolicy(),
}


def simulated() -> None:
    rng = np.random.default_rng(1)
    print(f"{COPIES} copies, host to GPU, us (simulated MI300X)")
    print(f"{'bytes':>8} " + " ".join(f"{name:>14}" for name in POLICIES) + "  chosen engines")
    for nbytes in (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10):
        slots = rng.permutation(4 * COPIES)
        dsts = [(0, int(slot) * nbytes) for slot in slots[:COPIES]]
        srcs = [("host", int(slot) * nbytes) for slot in slots[COPIES : 2 * COPIES]]
        results = [
            offcore.batch_copy(
                dsts, srcs, [nbytes] * COPIES, machine="mi300x-8", policy=policy
            ).wait()
            for policy in POLICIES.values()
        ]
        times = " ".join(f"{result.time_us:14.1f}" for result in results)
        print(f"{nbytes:8} {times}  {results[-1].engines:14}")


def real() -> None:
    layers, blocks, page = 28, 64, 4096
    rng = np.random.default_rng(2)
    cache = np.zeros((layers, 2 * blocks, page), np.uint8)
    pool = rng.integers(0, 256, (2 * blocks, layers, page), np.uint8)  # a row holds all layers
    wanted = list(zip(rng.permutation(2 * blocks), rng.permutation(2 * blocks), strict=True))[
        :blocks
    ]
    dsts = [cache[layer, block] for layer in range(layers) for block, _ in wanted]
    srcs = [pool[row, layer] for layer in range(layers) for _, row in wanted]
    result = offcore.batch_copy(dsts, srcs).wait(timeout=10.0)
    assert all(np.array_equal(cache[:, block], pool[row]) for block, row in wanted)
    print(
        f"{result.entries} entries of {page} bytes, correct: {result.commands} commands, "
        f"{result.folded} entries folded, {result.merged} merged"
    )


if __name__ == "__main__":
    simulated()
    real()
