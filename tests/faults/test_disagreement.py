"""Ranks that disagree find out: an error that names both calls, never a hang or wrong bytes."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import offcore
from oracles import noise

Comm = offcore.Communicator
TIMEOUT_S = 1.5


class Desk:
    """What a rank has at hand: buffers at the same places on all ranks."""

    def __init__(self, comm: Comm, rank: int) -> None:
        self.comm = comm
        self.rank = rank
        self.one = comm.empty(400)
        self.two = comm.empty(400)


Call = Callable[[Desk], Any]


def failure_of(work: Callable[[], Any]) -> offcore.Error:
    """The error that some work must end with."""
    with pytest.raises(offcore.Error) as failed:
        work()
    return failed.value


def in_order(desk: Desk, *names: str) -> None:
    for name in names:
        CALLS[name](desk).wait()


def then_meet(desk: Desk, call: Call) -> None:
    """A call, and then one that all ranks make alike: whose own call ended well hears there."""
    call(desk).wait()
    desk.comm.barrier()


CALLS: dict[str, Call] = {
    "all_gather": lambda d: d.comm.all_gather(d.one),
    "all_gather of two": lambda d: d.comm.all_gather(d.two),
    "all_gather from one": lambda d: d.comm.all_gather(d.two, d.one[:200]),
    "small all_gather": lambda d: d.comm.all_gather(d.one[:200]),
    "all_to_all": lambda d: d.comm.all_to_all(d.one),
    "all_to_all from two": lambda d: d.comm.all_to_all(d.one, d.two),
    "broadcast": lambda d: d.comm.broadcast(d.one),
    "broadcast from 1": lambda d: d.comm.broadcast(d.one, root=1),
    "pcpy": lambda d: d.comm.all_gather(d.one, variant="pcpy"),
    "b2b": lambda d: d.comm.all_gather(d.one, variant="b2b"),
    "prelaunch_b2b": lambda d: d.comm.all_gather(d.one, variant="prelaunch_b2b"),
    "eager": lambda d: d.comm.all_gather(d.one, protocol="eager"),
    "promise": lambda d: d.comm.all_gather(d.one, protocol="promise"),
    "view": lambda d: d.comm.all_gather_view(d.one[:200]),
    "small view": lambda d: d.comm.all_gather_view(d.one[:100]),
    "view of next_input": lambda d: d.comm.all_gather_view(d.comm.next_input(200)),
    "all_to_all view": lambda d: d.comm.all_to_all_view(d.one),
    "uneven": lambda d: d.comm.all_gather_v(d.one, None, [1, 3]),
    "uneven the other way": lambda d: d.comm.all_gather_v(d.one, None, [3, 1]),
}
PAIRS = [
    ("all_gather", "all_to_all"),
    ("all_gather", "small all_gather"),
    ("all_gather", "all_gather from one"),
    ("all_to_all", "all_to_all from two"),
    ("all_gather", "broadcast"),
    ("broadcast", "broadcast from 1"),
    ("pcpy", "b2b"),
    ("b2b", "prelaunch_b2b"),
    ("eager", "promise"),
    ("all_gather", "eager"),
    ("uneven", "uneven the other way"),
    ("all_gather from one", "view"),
    ("view", "all_to_all view"),
    ("view", "small view"),
    ("view", "view of next_input"),
]


def disagree(as_threads: Any, first: str, second: str, warm: tuple[str, ...]) -> list[Any]:
    """Rank 0 makes the first call and rank 1 the second; both errors."""

    def work(comm: Comm, rank: int) -> Any:
        desk = Desk(comm, rank)
        in_order(desk, *warm)
        began = time.monotonic()
        error = failure_of(lambda: then_meet(desk, CALLS[(first, second)[rank]]))
        assert time.monotonic() - began < TIMEOUT_S + 2
        return error

    return as_threads(2, work, TIMEOUT_S)


@pytest.mark.parametrize("known", ["unknown", "known", "half known"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_different_calls(as_threads: Any, first: str, second: str, known: str) -> None:
    warm = {"unknown": (), "known": (first, second), "half known": (first,)}[known]
    errors = disagree(as_threads, first, second, warm)
    codes = {error.code for error in errors}
    assert "mismatch" in codes, errors
    assert codes <= {"mismatch", "peer", "cancelled"}, errors
    message = next(str(error) for error in errors if error.code == "mismatch")
    assert "rank 0 makes " in message
    assert "rank 1 makes " in message
    assert message.count("ranks=2") == 2


def test_crossed_order(as_threads: Any) -> None:
    """The same calls in another order, all of them known."""
    order = ("all_gather", "broadcast", "all_to_all from two")

    def work(comm: Comm, rank: int) -> str:
        desk = Desk(comm, rank)
        in_order(desk, *order * 3)
        return failure_of(lambda: in_order(desk, *order[:: -1 if rank else 1])).code

    codes = set(as_threads(2, work, TIMEOUT_S))
    assert "mismatch" in codes
    assert codes <= {"mismatch", "peer", "cancelled"}


def test_one_call_too_few(as_threads: Any) -> None:
    """Who waits for a call that the other never makes is told where it stands."""

    def work(comm: Comm, rank: int) -> tuple[str, str]:
        desk = Desk(comm, rank)
        in_order(desk, "all_gather", "broadcast")
        if rank == 1:
            time.sleep(TIMEOUT_S + 1)
            return "", ""
        error = failure_of(lambda: in_order(desk, "all_gather"))
        return error.code, str(error)

    (code, message), _ = as_threads(2, work, TIMEOUT_S)
    assert code == "timeout"
    assert "queue 0." in message
    assert "poll flag[" in message


def test_an_unknown_call_too_few(as_threads: Any) -> None:
    def work(comm: Comm, rank: int) -> tuple[str, str]:
        desk = Desk(comm, rank)
        if rank == 1:
            time.sleep(TIMEOUT_S + 1)
            return "", ""
        error = failure_of(lambda: in_order(desk, "all_gather"))
        return error.code, str(error)

    (code, message), _ = as_threads(2, work, TIMEOUT_S)
    assert code == "timeout"
    assert "rank 1 has not reached call 0 of lane 0" in message


def test_different_lanes(as_threads: Any) -> None:
    """Another thread might come yet: it takes the timeout, which names both lanes."""

    def work(comm: Comm, rank: int) -> tuple[str, str]:
        desk = Desk(comm, rank)
        error = failure_of(lambda: comm.all_gather(desk.one, lane=rank + 1).wait())
        return error.code, str(error)

    outcomes = as_threads(2, work, TIMEOUT_S)  # the second may hear that the first has left
    assert {code for code, _ in outcomes} <= {"timeout", "peer"}
    message = next(message for code, message in outcomes if code == "timeout")
    assert "lane=1" in message
    assert "lane=2" in message


def test_a_window_against_a_call(as_threads: Any) -> None:
    def work(comm: Comm, rank: int) -> str:
        desk = Desk(comm, rank)
        return failure_of(lambda: comm.window(64) if rank else in_order(desk, "all_gather")).code

    codes = as_threads(2, work, TIMEOUT_S)  # the second hears that the first has left
    assert "timeout" in codes
    assert set(codes) <= {"timeout", "peer"}


def test_next_input_against_a_call(as_threads: Any) -> None:
    """Where the slots have to grow next_input is a call like any other."""

    def work(comm: Comm, rank: int) -> tuple[str, str]:
        desk = Desk(comm, rank)
        in_order(desk, "view", "broadcast")
        error = failure_of(
            lambda: comm.next_input(1 << 20) if rank else then_meet(desk, CALLS["broadcast"])
        )
        return error.code, str(error)

    outcomes = as_threads(2, work, TIMEOUT_S)
    codes = [code for code, _ in outcomes]
    assert "mismatch" in codes
    assert set(codes) <= {"mismatch", "peer", "cancelled"}
    message = next(message for code, message in outcomes if code == "mismatch")
    assert "next_input ranks=2 counts=1048576x2" in message


PLACES: dict[str, Callable[[Desk], Any]] = {
    "window": lambda d: d.one,
    "another window": lambda d: d.two,
    "later in the window": lambda d: d.one[100:],
    "array": lambda d: np.empty(400, np.uint8),
}


@pytest.mark.parametrize("second", [*PLACES][1:])
@pytest.mark.parametrize("variant", ["auto", "pcpy", "prelaunch_b2b"])
def test_different_places_work(as_threads: Any, second: str, variant: str) -> None:
    """Where a rank's output lies is its own affair: what is not alike goes through slots."""

    def work(comm: Comm, rank: int) -> list[bool]:
        desk = Desk(comm, rank)
        staged = []
        for turn in range(20):
            place = PLACES[("window", second)[rank]]
            out = place(desk)[:300]
            sent = noise(150, rank, turn)  # other memory at every call
            staged.append(comm.all_gather(out, sent, variant=variant).wait().staged)
            assert np.array_equal(out, np.concatenate([noise(150, r, turn) for r in range(2)]))
        return staged

    assert as_threads(2, work) == [[True] * 20] * 2


def test_a_place_that_changes_on_one_rank(as_threads: Any) -> None:
    """Known at one place of a window, then elsewhere on one rank only: that is a disagreement."""

    def work(comm: Comm, rank: int) -> tuple[str, str]:
        desk = Desk(comm, rank)
        in_order(desk, "all_gather")
        call = CALLS["all_gather of two" if rank else "all_gather"]
        error = failure_of(lambda: then_meet(desk, call))
        return error.code, str(error)

    outcomes = as_threads(2, work, TIMEOUT_S)
    assert "mismatch" in [code for code, _ in outcomes]
    message = next(message for code, message in outcomes if code == "mismatch")
    assert "out=window 0+0" in message
    assert "out=window 1+0" in message


def test_an_abort_reaches_everybody(as_threads: Any) -> None:
    def work(comm: Comm, rank: int) -> tuple[str, str]:
        desk = Desk(comm, rank)
        in_order(desk, "broadcast")
        if rank == 2:
            time.sleep(0.1)
            comm.abort()
        began = time.monotonic()
        error = failure_of(lambda: in_order(desk, *["broadcast"] * 1_000_000))
        assert time.monotonic() - began < TIMEOUT_S
        return error.code, str(error)

    outcomes = as_threads(3, work, TIMEOUT_S)
    assert [code for code, _ in outcomes] == ["peer", "peer", "cancelled"]
    assert all("rank 2" in message for _, message in outcomes[:2])


def test_the_far_ahead(as_threads: Any) -> None:
    """A rank may call hundreds of times before the others do; records do not run over."""

    def work(comm: Comm, rank: int) -> int:
        desk = Desk(comm, rank)
        in_order(desk, "broadcast")
        if rank == 1:
            time.sleep(0.3)
        handles = []
        for turn in range(500):
            if turn % 97 == 0:  # the others are under way, and read or write the buffer
                if handles:
                    handles[-1].wait()
                desk.one[:] = turn % 251 if rank == 0 else 255
                comm.barrier()
            handles.append(CALLS["broadcast"](desk))
            if turn % 97 == 60:
                handles[-1].wait()
                assert (desk.one == (turn - 60) % 251).all()
        return sum(handle.wait().bytes > 0 for handle in handles)

    assert as_threads(2, work) == [500] * 2
