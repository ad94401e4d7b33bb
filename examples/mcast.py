"""A broadcast, then an all-gather over UDP multicast, with one process per rank.

    python examples/mcast.py                        # starts three processes on this host
    python examples/mcast.py RANK RANKS HOST:PORT   # one of them; rank 0 listens there

On several hosts, pass the name of their common network interface as a fourth argument.
"""

import socket
import subprocess
import sys

import numpy as np

from offcore import mcast

RANKS = 3
FLOATS = 1 << 18  # of each rank: 1 MiB


def run_rank(rank: int, ranks: int, address: str, interface: str | None) -> None:
    with mcast.Communicator(
        address, rank=rank, world_size=ranks, interface=interface, timeout=20.0
    ) as comm:
        weights = np.full(FLOATS, 1.5 if rank == 0 else 0, np.float32)
        comm.broadcast(weights, root=0).wait()
        assert (weights == 1.5).all()

        gathered = np.zeros((ranks, FLOATS), np.float32)
        result = comm.all_gather(gathered, np.full(FLOATS, rank, np.float32)).wait()
        assert (gathered == np.arange(ranks)[:, None]).all()

        sent = comm.counters["sent_bytes"]
        sys.stdout.write(  # in one piece: other ranks write too
            f"rank {rank} of {ranks}: correct; {result.bytes >> 20} MiB by {result.path}, "
            f"{sent >> 10} KiB sent once for all, {result.fetched_chunks} chunks fetched; "
            f"barrier {result.barrier_us:.0f}, multicast {result.multicast_us:.0f}, recovery "
            f"{result.recovery_us:.0f}, handshake {result.handshake_us:.0f} us\n"
        )
        comm.barrier().wait()


def start_ranks() -> int:
    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(RANKS), address, "lo"])
        for rank in range(RANKS)
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(start_ranks())
    own_rank, world, place, *more = sys.argv[1:]
    run_rank(int(own_rank), int(world), place, more[0] if more else None)
