"""A process a rank, in shared memory and real time: all-gather in place, then all-to-all.

    python examples/ranks.py                         # starts two processes itself
    torchrun --nproc-per-node 4 examples/ranks.py    # or let a launcher do it

The environment is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

import os
import subprocess
import sys
import time

import numpy as np

import offcore

RANKS = 2
CALLS = 100
FLOATS = 1 << 18  # of each rank: 1 MiB


def run_rank() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun listens at MASTER_PORT. Rank 0 listens below the ports that systems hand out.
    store = f"{os.environ['MASTER_ADDR']}:{20_000 + int(os.environ['MASTER_PORT']) % 10_000}"
    with offcore.Communicator(
        backend="host", store=store, rank=rank, world_size=ranks, timeout=20.0
    ) as comm:
        gathered = comm.empty((ranks, FLOATS), np.float32)  # window memory, shared by all ranks
        gathered[rank] = rank + 0.5
        comm.all_gather(gathered).wait()
        assert np.array_equal(gathered[:, 0], np.arange(ranks) + 0.5)
        assert (gathered == gathered[:, :1]).all()

        # Part q of rank r's input becomes part r of rank q's output.
        sent = np.stack([np.full(FLOATS // ranks, 10 * rank + q, np.float32) for q in range(ranks)])
        received = comm.empty(sent.shape, np.float32)
        comm.all_to_all(received, sent).wait()
        assert np.array_equal(received[:, 0], 10 * np.arange(ranks) + rank)

        comm.barrier()
        start_s = time.perf_counter()
        handles = [comm.all_gather(gathered) for _ in range(CALLS)]  # enqueued ahead
        for handle in handles:
            result = handle.wait()
        each_us = (time.perf_counter() - start_s) / CALLS * 1e6
        sys.stdout.write(  # in one piece: other ranks write too
            f"rank {rank} of {ranks}: correct; an all-gather of {result.bytes >> 20} MiB in "
            f"{each_us:.0f} us by {result.variant}: {result.commands} commands on "
            f"{result.engines} engines\n"
        )


def start_ranks() -> int:
    port = os.getpid()  # as good as any: nobody listens there
    processes = []
    for rank in range(RANKS):
        own = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in own.items()}
        processes.append(subprocess.Popen([sys.executable, __file__], env=env))
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        sys.exit(start_ranks())
