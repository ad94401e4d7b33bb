"""A rank that pushes requests: request_rank.py RANK STORE exchange|wait|otherwise."""

import sys

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


if __name__ == "__main__":
    rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    world = 3 if what == "exchange" else 2
    with offcore.Communicator(backend="host", store=store, rank=rank, world_size=world) as comm:
        if what == "exchange":
            print(exchange(comm, rank))
        elif what == "wait":
            print(wait(comm))
        else:
            print(otherwise(comm, rank))
