"""One rank of a group that makes the same random calls on all ranks and checks its own output.

As a program: `stream.py STORE RANK RANKS SEED CALLS [SETTING=VALUE ...]` runs the calls (0: until
something fails) and prints JSON lines: {"ready": true} after the first calls, at last {"calls": n}
with what went wrong, if anything did.
"""

import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import offcore
from oracles import Bytes, Case, equal_case, kinds_of, noise

BYTES_MAX = 1 << 14
READY_AFTER = 5


class Stream:
    def __init__(self, comm: offcore.Communicator, rank: int, seed: int) -> None:
        self.comm = comm
        self.rank = rank
        self.random = random.Random(seed)  # the same on every rank
        self.window = comm.empty(BYTES_MAX)
        self.calls = 0
        self.armed = 0
        self.known: list[tuple[Case, str, str, bool]] = []

    def next_call(self) -> tuple[Case, str, str, bool]:
        """What every rank calls next: often something that they have called before."""
        rng = self.random
        if self.known and rng.random() < 0.7:
            return rng.choice(self.known)
        ranks = self.comm.ranks
        op = rng.choice(["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
        in_place = op in ("all_gather", "broadcast") and rng.random() < 0.5
        case = equal_case(
            op, ranks, rng.choice([1, 100, BYTES_MAX // ranks]), in_place, rng.randrange(ranks)
        )
        in_window = rng.random() < 0.6 and sum(case.counts) <= BYTES_MAX
        if op == "all_to_all" and case.counts[0] * ranks > BYTES_MAX:
            case = equal_case(op, ranks, 64)
        protocol = rng.choice(["auto", "barrier", "eager"])
        staged = protocol == "eager" or not in_window
        variant = rng.choice(["auto", *sorted(kinds_of(case, staged))])
        if (
            variant not in ("auto", "pipelined")
            and in_window
            and rng.random() < 0.3
            and self.armed < 30
        ):
            self.armed += 1
            variant = "prelaunch_" + variant
        call = (case, variant, protocol, in_window)
        self.known.append(call)
        return call

    def step(self) -> None:
        case, variant, protocol, in_window = self.next_call()
        self.calls += 1
        rank = self.rank
        inputs: list[Bytes | None] = []
        for peer in range(case.ranks):
            size = case.in_bytes(peer)
            inputs.append(None if size is None else noise(size, self.calls, peer))
        sizes = [case.out_bytes(peer) for peer in range(case.ranks)]
        size = max(s for s in sizes if s is not None) if in_window else sizes[rank]
        out: Any = None
        if size is not None:
            out = self.window[:size] if in_window else np.empty(size, np.uint8)
            out[:] = 0
        inp = inputs[rank]
        if case.in_place and inp is not None:
            at = case.own_offset(rank)
            out[at : at + inp.size] = inp
        root = {} if case.op.startswith("all") else {"root": case.root}
        call = getattr(self.comm, case.op)
        given = [None] if case.in_place else [[inp]]
        handle = call([out], *given, variant=variant, protocol=protocol, **root)
        handle.wait()
        expected = case.expected(inputs)[rank]
        if expected is not None and not np.array_equal(out[: expected.size], expected):
            raise AssertionError(f"call {self.calls}: {case} {variant} {protocol}: wrong bytes")


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main(store: str, rank: int, ranks: int, seed: int, calls: int, settings: dict[str, str]) -> int:
    if spare := settings.get("spare_bytes"):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(spare)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    time.sleep(float(settings.get("delay", 0)))
    stream = None
    event: dict[str, Any] = {}
    try:
        comm = offcore.Communicator(
            backend="host", store=store, rank=rank, world_size=ranks,
            timeout=float(settings.get("timeout", 5)),
        )  # fmt: skip
        if settings.get("die") == "met":
            os.kill(os.getpid(), 9)
        stream = Stream(comm, rank, seed)
        while stream.calls < (calls or sys.maxsize):
            stream.step()
            if stream.calls == READY_AFTER:
                say(ready=True)
        comm.close()
    except offcore.Error as error:
        event = {"code": error.code, "message": str(error)}
    except MemoryError as error:
        event = {"code": "memory", "message": str(error)}
    say(calls=stream.calls if stream else -1, at=time.time(), **event)
    return 0


if __name__ == "__main__":
    numbers = map(int, sys.argv[2:6])
    sys.exit(main(sys.argv[1], *numbers, dict(word.split("=") for word in sys.argv[6:])))
