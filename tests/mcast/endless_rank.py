"""A rank as a process of its own, which gathers and reduces at the same time until something goes
wrong and then tells what: `endless_rank.py ADDRESS RANK RANKS BYTES OPTIONS`. BYTES 0: it opens
its communicator and waits."""

import json
import sys
import time

import numpy as np

import offcore
from offcore import mcast

address, rank, ranks, count = sys.argv[1], *map(int, sys.argv[2:5])
comm = mcast.Communicator(
    address, rank=rank, world_size=ranks, interface="lo", **json.loads(sys.argv[5])
)
print("open", flush=True)
if count == 0:
    time.sleep(60)
out = np.zeros((ranks, count), np.uint8)
part = np.zeros(count, np.uint8)
given = np.full(ranks * count, rank, np.uint8)
try:
    for step in range(1_000_000):
        reduced = comm.reduce_scatter(part, given)
        comm.all_gather(out, np.full(count, (rank + step) % 251, np.uint8)).wait()
        reduced.wait()
        right = (out == ((np.arange(ranks) + step) % 251)[:, None]).all()
        right = right and (part == sum(range(ranks))).all()
        part[:] = 255
        print("right" if right else "wrong", flush=True)
except offcore.Error as failure:
    print(failure.code, flush=True)
