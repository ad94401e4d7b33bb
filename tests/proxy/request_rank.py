"""A rank that pushes requests: request_rank.py RANK STORE exchange|wait|otherwise|counts|alone."""

import sys
import time

import numpy as np

import offcore

CHUNK = 512
ROUNDS = 100


def exchange(comm: offcore.Communicator, rank: int) -> str:
    send, receive = (comm.empty(comm.ranks * CHUNK) for _ in range(2))
    with comm.requests([send, receive], chunk=CHUNK) as requests:
        port = requests.host_port()
        peers = [peer for peer in range(comm.ranks) if peer != rank]
        for turn in range(1, ROUNDS + 1):
            send[rank * CHUNK :][:CHUNK] = (turn + rank) % 251
            tickets = [port.put_signal(peer, 1, 0, rank, 1) for peer in peers]
            for peer in peers:
                assert port.wait(peer, 1, turn) == 0
                assert np.all(receive[peer * CHUNK :][:CHUNK] == (turn + peer) % 251), (turn, peer)
            for ticket in tickets:
                assert port.wait_sent(ticket) == 0
            comm.barrier()
        requests.drain()
    return "right"


def wait(comm: offcore.Communicator) -> str:
    with comm.requests([comm.window(CHUNK)]) as requests:
        comm.barrier()
        print("ready", flush=True)
        fault = requests.host_port().wait(1 - comm.local_ranks[0], 0, 1, limit_s=30)
        try:
            requests.check()
        except offcore.Error as error:
            return f"{fault} {error.code}"
    return f"{fault} no error"


def otherwise(comm: offcore.Communicator, rank: int) -> str:
    window = comm.window(4096)
    try:
        comm.requests([window], chunk=64 << rank)
    except offcore.Error as error:
        return f"{error.code} {error}"
    return "no error"


def counts(comm: offcore.Communicator, rank: int) -> str:
    """All-to-alls whose counts this rank alone knows."""
    out, inp = (comm.empty(64 * comm.ranks, "uint32") for _ in range(2))
    own = np.zeros(comm.ranks, "int64")
    received = np.zeros_like(own)
    rng = np.random.default_rng(9)
    for turn in range(30):
        matrix = rng.integers(0, 64, (comm.ranks, comm.ranks))
        own[:] = matrix[rank]
        inp[:] = np.arange(len(inp)) + 1000 * rank + turn
        comm.all_to_all_v(out, inp, own, counts_on_device=True, received=received).wait()
        wanted = []
        for source in range(comm.ranks):
            at = matrix[source][:rank].sum()
            wanted.append(np.arange(at, at + matrix[source][rank]) + 1000 * source + turn)
        assert np.array_equal(out[: matrix[:, rank].sum()], np.concatenate(wanted)), (turn, rank)
        assert np.array_equal(received, matrix[:, rank])
    return "right"


def alone(comm: offcore.Communicator, rank: int) -> str:
    """The other rank opens, and is killed before its second call."""
    out, inp, own = comm.empty(64), comm.empty(64), np.ones(2, "int64")
    comm.all_to_all_v(out, inp, own, counts_on_device=True).wait()
    print("ready", flush=True)
    if rank == 1:
        time.sleep(60)
    codes = []
    for _ in range(2):
        try:
            comm.all_to_all_v(out, inp, own, counts_on_device=True).wait()
        except offcore.Error as error:
            codes.append(error.code)
    return ", then ".join(codes)


if __name__ == "__main__":
    rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    world = 3 if what in ("exchange", "counts") else 2
    with offcore.Communicator(backend="host", store=store, rank=rank, world_size=world) as comm:
        if what == "exchange":
            print(exchange(comm, rank))
        elif what in ("counts", "alone"):
            print({"counts": counts, "alone": alone}[what](comm, rank))
        elif what == "wait":
            print(wait(comm))
        else:
            print(otherwise(comm, rank))
