"""A model's weights from rank 0 to all ranks by UDP multicast: each byte leaves rank 0 once.

    torchrun --nproc-per-node 3 examples/weights_broadcast.py
    offcore mcast testbed --hosts 4 -- python examples/weights_broadcast.py    # one rank per host
    python examples/weights_broadcast.py                    # starts three processes itself

Ranks read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. On several hosts, run it with the same
OFFCORE_JOB_SECRET on each. It needs neither torch nor a GPU: weights are in host memory.
"""

import hashlib
import os
import secrets
import socket
import subprocess
import sys
import time

import numpy as np

from offcore import mcast

SHAPES = {"embedding": (4096, 512), "up": (512, 2048), "down": (2048, 512)}
RANKS = 3  # where it starts them itself


def run_rank() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun listens at MASTER_PORT. The ranks meet below the ports that systems hand out.
    host, port = os.environ["MASTER_ADDR"], 20_000 + int(os.environ["MASTER_PORT"]) % 10_000
    alone = socket.gethostbyname(host).startswith("127.")
    floats = sum(int(np.prod(shape)) for shape in SHAPES.values())
    buffer = np.zeros(floats, np.float32)  # all weights in one piece of memory: one broadcast
    if rank == 0:
        buffer[:] = np.random.default_rng(0).standard_normal(floats, np.float32)

    with mcast.Communicator(
        f"{host}:{port}", rank=rank, world_size=ranks, interface="lo" if alone else None, timeout=60
    ) as comm:
        start = time.perf_counter()
        result = comm.broadcast(buffer, root=0).wait()
        seconds = time.perf_counter() - start
        sent = comm.counters["sent_bytes"]
        digests = np.zeros((ranks, 32), np.uint8)
        own = np.frombuffer(hashlib.sha256(buffer.tobytes()).digest(), np.uint8)
        comm.all_gather(digests, own).wait()
        comm.barrier().wait()
    assert (digests == digests[0]).all(), "weights differ"

    weights, begin = {}, 0
    for name, shape in SHAPES.items():  # views, without a copy
        weights[name] = buffer[begin : begin + int(np.prod(shape))].reshape(shape)
        begin += weights[name].size
    how = f"received by {result.path}, {result.fetched_chunks} chunks fetched"
    sys.stdout.write(  # in one piece: other ranks write too
        f"rank {rank} of {ranks}: {len(weights)} tensors, {buffer.nbytes >> 20} MiB in "
        f"{seconds * 1e3:.0f} ms, {how if rank else f'{sent >> 20} MiB sent once for all'}\n"
    )


def start_ranks() -> int:
    port = str(os.getpid())  # as good as any: nobody listens there
    env = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env["OFFCORE_JOB_SECRET"] = secrets.token_hex(16)
    processes = [
        subprocess.Popen([sys.executable, __file__], env=os.environ | env | {"RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        sys.exit(start_ranks())
