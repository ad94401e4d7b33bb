"""Requests in pure Python, on the backend `host`, where threads take the place of kernels.

    python examples/host_put.py

Three ranks in a ring, 200 rounds: the thread of each fills its block, asks for its copy to the next
rank, waits for the previous one's, and looks at every byte. On GPUs a kernel makes the
same calls (nvrtc_put.py, triton_put.py; docs/gpu-driven.md).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import offcore

RANKS, NBYTES, CHUNK, ROUNDS = 3, 1 << 16, 4096, 200
SEND, RECEIVE = 0, 1  # numbers of the registered buffers


def exchange(rank: int, port: Any, send: Any, receive: Any) -> str:
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    wrong = 0
    for k in range(1, ROUNDS + 1):
        send[:] = (k + rank) % 251
        assert port.put_signal(after, RECEIVE, SEND, 0, NBYTES // CHUNK).fault == 0
        assert port.wait(before, RECEIVE, k) == 0
        wrong += int(np.count_nonzero(receive != (k + before) % 251))
        assert port.signal(before, SEND).fault == 0  # its block has been read
        assert port.wait(after, SEND, k) == 0  # so both buffers are free for the next round
    assert wrong == 0
    return f"rank {rank}: {wrong} wrong bytes in {ROUNDS} rounds"


with offcore.Communicator(backend="host", ranks=RANKS) as comm:
    send, receive = comm.empty(NBYTES), comm.empty(NBYTES)  # an array for each rank
    with comm.requests([send, receive], chunk=CHUNK) as requests:
        ports = [requests.host_port(rank) for rank in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as threads:
            for told in threads.map(exchange, range(RANKS), ports, send, receive):
                print(told)
        requests.check()
