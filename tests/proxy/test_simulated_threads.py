"""What simulated threads of GPUs may ask for, and in which order a full ring takes them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import offcore

NONE, FULL = 0, 2
SEND, RECEIVE = 0, 1


def opened(ranks: int = 2) -> offcore.Communicator:
    return offcore.Communicator(backend="sim", machine="h200-4", ranks=ranks, phantom=True)


def requests_of(comm: Any, limit: float = 1.0, **more: Any) -> Any:
    """A ring as small as it may be."""
    windows = [comm.window(1 << 22) for _ in range(2)]
    return comm.requests(windows, chunk=1024, slots=128, limit=limit, **more)


CALLS: list[Callable[[Any], Any]] = [
    lambda port: port.work(1),
    lambda port: [port.put(1, 0, 0, 0, 1), port.signal(1, 0)],
    lambda port: port.wait(1, 0, 1),
    lambda port: port.flush(1),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_call_of_another_port_is_refused(call: Any, rank: int) -> None:
    """Also one of a rank that there is not: the simulation looked beyond its ranks."""
    with opened(4) as larger, opened() as comm, requests_of(comm) as requests:
        foreign = requests_of(larger).host_port(rank)

        def thread() -> Iterator[Any]:
            yield call(foreign)

        with pytest.raises(offcore.Error, match="of another Requests' port") as refused:
            requests.run(thread())
        assert refused.value.code == "invalid"
        assert requests.stats(0).requests == 0


def test_errors_name_the_argument() -> None:
    with opened() as comm, requests_of(comm) as requests:
        port = requests.host_port(0)
        for call, text in (
            (lambda: port.work(float("nan")), r"work: ns is nan; it must lie in 0\.\.1e15"),
            (lambda: port.work(-1), "work: ns is -1"),
            (lambda: port.received(2, 0), r"received: peer is 2, .* in 0\.\.1 and 0\.\.1"),
            (lambda: requests.run(7), "run: 7 is no generator; pass"),
        ):
            with pytest.raises(offcore.Error, match=text) as refused:
                call()
            assert refused.value.code == "invalid"


def filling(port: Any) -> Iterator[Any]:
    """A warp that fills the ring."""
    for first in range(0, 128, 32):
        yield [port.put(1, RECEIVE, SEND, 2 * (first + lane), 1) for lane in range(32)]


def room_after(call: Callable[[Any], Any], limit: float) -> tuple[Any, int, Any]:
    """What a thread hears that finds the ring full, when it goes on, and a put behind that."""
    told = []
    with opened() as comm, requests_of(comm, limit) as requests:
        port = requests.host_port(0)

        def waits() -> Iterator[Any]:
            began = yield port.work(5750)
            told.append((yield call(port)))
            told.append((yield port.work(0)) - began)
            told.append((yield port.put(1, RECEIVE, SEND, 0, 1)).fault)

        requests.run(filling(port), waits())
    reply, ns, after = told
    return reply, ns, after


def test_a_flush_that_finds_room_just_in_time() -> None:
    """Its limit is over once it has its place: it ran out until the push itself had ended."""
    ticket, ns, _ = room_after(lambda port: port.put(1, RECEIVE, SEND, 0, 0), 1.0)
    with opened() as comm:
        pushed = comm._core.machine.requests.push_ns
    assert ticket.fault == NONE
    assert pushed < ns < 2 * pushed  # it found none at first, and some within the time of a push
    limit = (ns - pushed / 2) * 1e-9
    fault, later, after = room_after(lambda port: port.flush(1, limit_s=1.0), limit)
    assert (fault, after) == (NONE, NONE)
    assert later > ns


def test_a_flush_that_finds_no_room() -> None:
    """Calls behind it are answered as what they are."""
    fault, _, after = room_after(lambda port: port.flush(1), 1e-7)
    assert (fault, after) == (FULL, FULL)


def test_a_full_ring_takes_pushes_in_their_order() -> None:
    """As ring.h, whose places are given out as they are asked for: what needs less room passes
    nobody, so that a warp comes in among many threads that push all the time."""
    threads, each = 200, 60
    with opened() as comm, requests_of(comm, engine="device") as requests:
        port, ended = requests.host_port(0), []

        def single(number: int) -> Iterator[Any]:
            for k in range(each):
                yield port.put(1, RECEIVE, SEND, (number * each + k) % 4096, 1)
            ended.append((yield port.work(0)))

        def warp() -> Iterator[Any]:
            lanes = range(32)
            yield [port.put_bytes(1, RECEIVE, lane << 16, SEND, 0, 1024) for lane in lanes]
            ended.insert(0, (yield port.work(0)))

        requests.run(*map(single, range(threads)), warp())
        requests.check()
    assert ended[0] < min(ended[1:]) / each * 4
