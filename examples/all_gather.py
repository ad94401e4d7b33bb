"""An all-gather of 8 ranks in one process, on simulated MI300X GPUs, one variant after the other.

    python examples/all_gather.py

Every rank gives 64 KiB and gets 512 KiB. The bytes really move and are checked; the times are
virtual: those of the machine that machines/mi300x-8.json describes.
"""

import numpy as np

import offcore

PART_BYTES = 64 << 10


def main() -> None:
    with offcore.Communicator(backend="sim", machine="mi300x-8", ranks=8) as comm:
        inputs = comm.empty(PART_BYTES)  # one array a rank
        outputs = comm.empty(8 * PART_BYTES)  # in window memory: peers write it directly
        for rank, array in enumerate(inputs):
            array[:] = rank + 1
        expected = np.repeat(np.arange(1, 9, dtype=np.uint8), PART_BYTES)

        print(f"{'variant':>15} {'time us':>8} {'commands':>9} {'engines':>8} {'syncs':>6}")
        for variant in comm.variants("all_gather"):
            for output in outputs:
                output[:] = 0
            result = comm.all_gather(outputs, inputs, variant=variant).wait(timeout=5.0)
            assert all(np.array_equal(output, expected) for output in outputs), variant
            print(
                f"{result.variant:>15} {result.time_us:8.2f} {result.commands:9} "
                f"{result.engines:8} {result.syncs:6}"
            )


if __name__ == "__main__":
    main()
