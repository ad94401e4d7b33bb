"""Weights gathered one layer ahead with views, which need no buffers of the caller.

    python examples/views.py

Every rank holds a shard of each layer. While one layer is used, the next one is gathered. A view is
valid for two further view calls, so the current layer is not overwritten.
"""

import numpy as np

import offcore

RANKS = 4
LAYERS = 12
FLOATS = 1 << 14  # of a shard


def main() -> None:
    shards = [
        [np.full(FLOATS, 100 * layer + rank, np.float32) for rank in range(RANKS)]
        for layer in range(LAYERS)
    ]
    with offcore.Communicator(backend="host", ranks=RANKS) as comm:
        ahead = comm.all_gather_view(shards[0])
        for layer in range(LAYERS):
            view = ahead
            if layer + 1 < LAYERS:
                ahead = comm.all_gather_view(shards[layer + 1])
            result = view.wait()
            for rank in range(RANKS):
                assert np.array_equal(view.out[rank], np.stack(shards[layer]))
        print(
            f"{LAYERS} layers of {result.bytes >> 10} KiB by {result.variant}, "
            f"protocol {result.protocol}: correct"
        )


if __name__ == "__main__":
    main()
