"""Ranks that call from several threads, each in a lane of its own: their first calls meet in any
order, another one on every rank."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import Error
from oracles import noise
from stores import as_ranks

RANKS = 3
LANES = 4


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [running.result() for running in [pool.submit(work) for work in works]]


class Caller:
    """A rank's thread. All ranks' threads of a lane make the same calls; their pauses differ."""

    def __init__(self, comm: offcore.Communicator, rank: int, lane: int) -> None:
        self.comm, self.rank, self.lane = comm, rank, lane
        self.calls = random.Random(lane)
        self.pauses = random.Random(1000 * rank + lane)
        self.outs = [comm.empty(4096)]  # at the same places on all ranks

    def run(self, calls: int) -> None:
        time.sleep((self.lane + self.rank) % LANES * 0.01)  # each rank begins with another lane
        for turn in range(calls):
            if self.pauses.random() < 0.3:
                time.sleep(self.pauses.random() * 0.01)
            part = self.calls.randrange(1, 4096 // RANKS)
            kind = self.calls.choice(
                ["window", "eager", "array", "credits", "prelaunch_b2b", "view", "next_input"]
            )
            self.call(kind, part, turn)

    def sent(self, part: int, turn: int, rank: int) -> Any:
        return noise(part, self.lane, turn, rank)

    def call(self, kind: str, part: int, turn: int) -> None:
        comm, whole = self.comm, part * RANKS
        inp = self.sent(part, turn, self.rank)
        out = self.outs[0][:whole]
        if kind == "next_input":
            slot = comm.next_input(part, lane=self.lane)
            slot[:] = inp
            inp = slot
        if kind in ("view", "next_input"):
            handle = comm.all_gather_view(inp, lane=self.lane)
        elif kind == "array":
            out = np.empty(whole, np.uint8)
            handle = comm.all_gather(out, inp, lane=self.lane)
        else:
            variant = kind if kind.startswith("prelaunch") else "auto"
            protocol = kind if kind in ("eager", "credits") else "auto"
            handle = comm.all_gather(out, inp, variant=variant, protocol=protocol, lane=self.lane)
        handle.wait()
        wanted = np.concatenate([self.sent(part, turn, rank) for rank in range(RANKS)])
        got = handle.out if kind in ("view", "next_input") else out
        assert np.array_equal(np.asarray(got).reshape(-1), wanted), (kind, self.lane, turn)


def test_first_calls_of_lanes_in_any_order() -> None:
    """Every call is a first one: new sizes, slots that grow, words of prelaunched programs."""

    def work(comm: offcore.Communicator, rank: int) -> int:
        callers = [Caller(comm, rank, lane) for lane in range(LANES)]
        in_threads([lambda caller=caller: caller.run(25) for caller in callers])
        comm.barrier()
        return rank

    assert as_ranks(RANKS, work, timeout=30) == list(range(RANKS))


def test_a_first_call_waits_beside_other_lanes() -> None:
    """Rank 1 makes lane 1's first call only when rank 0 has done all that lane 2 has to do."""

    def work(comm: offcore.Communicator, rank: int) -> list[str]:
        one, two = comm.empty(200), comm.empty(200)
        ended: list[str] = []

        def early() -> None:
            comm.all_gather(one, lane=1).wait()
            ended.append("early")

        def busy() -> None:
            time.sleep(0.1)
            for _ in range(50):
                comm.all_gather(two, lane=2).wait()
            comm.all_gather_view(two[:100], lane=2).wait()
            ended.append("busy")

        if rank == 0:
            in_threads([early, busy])
        else:
            busy()
            early()
        return sorted(ended)

    assert as_ranks(2, work, timeout=10) == [["busy", "early"]] * 2


def test_a_lane_far_ahead_waits_beside_other_lanes() -> None:
    """A rank that has to wait for a peer's records lets the calls that the peer waits for go on."""

    def work(comm: offcore.Communicator, rank: int) -> list[int]:
        buffers = [comm.empty(64) for _ in range(2)]
        for lane in range(2):
            comm.broadcast(buffers[lane], lane=lane).wait()

        def ahead(lane: int) -> int:
            time.sleep(0.2 * (lane != rank))
            handles = [comm.broadcast(buffers[lane], lane=lane) for _ in range(200)]
            return sum(handle.wait().bytes for handle in handles)

        return in_threads([lambda lane=lane: ahead(lane) for lane in range(2)])

    assert as_ranks(2, work, timeout=10) == [[200 * 64] * 2] * 2


def test_calls_of_one_lane_from_several_threads_come_one_after_the_other() -> None:
    """They have no order, so they are alike; whichever is first meets, and the others wait."""

    def work(comm: offcore.Communicator, _: int) -> list[int]:
        out = comm.empty(64)
        at_once = threading.Barrier(4)

        def call() -> int:
            at_once.wait()
            return sum(comm.all_gather(out, lane=3).wait().bytes for _ in range(20))

        return in_threads([call] * 4)

    assert as_ranks(2, work, timeout=20) == [[20 * 64] * 4] * 2


def test_who_calls_elsewhere_is_told_of() -> None:
    """Nobody can know that no other thread comes: at the timeout both calls are named."""

    def work(comm: offcore.Communicator, rank: int) -> tuple[str, str]:
        out = comm.empty(100)
        with pytest.raises(Error) as told:
            comm.all_gather(out, lane=rank + 1).wait()
        time.sleep(1)  # the other one's time is over too
        return str(told.value.code), str(told.value)

    for rank, (code, words) in enumerate(as_ranks(2, work, timeout=1.0)):
        assert code == "timeout"
        assert "this rank began: all_gather ranks=2 in_place=yes counts=50x2 variant=auto " in words
        assert f"lane={rank + 1}" in words
        assert f"; rank {1 - rank} began last: all_gather" in words
        assert f"lane={2 - rank}" in words


def test_close_ends_what_waits() -> None:
    def work(comm: offcore.Communicator, rank: int) -> str:
        out = comm.empty(100)
        comm.barrier()
        if rank == 1:
            time.sleep(1)
            return ""
        began = time.monotonic()
        closing = threading.Timer(0.2, comm.close)
        closing.start()
        with pytest.raises(Error) as told:
            comm.all_gather(out, lane=5)
        assert time.monotonic() - began < 5
        return str(told.value.code)

    code, _ = as_ranks(2, work, timeout=10)
    assert code in ("cancelled", "invalid")
