"""The rendezvous: ranks meet, exchange bytes and descriptors, and learn of each other's end."""

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from offcore._core import Bootstrap, Error, Rendezvous

from stores import free_store, joined


@pytest.fixture
def store() -> str:
    return free_store()


def as_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns or raises, with each rank a thread."""

    def outcome(rank: int) -> Any:
        try:
            return work(rank)
        except Error as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(outcome, range(ranks)))


def meet(store: str, ranks: int) -> list[Rendezvous]:
    met = as_ranks(ranks, lambda rank: joined(store, rank, ranks, timeout_s=20))
    assert all(isinstance(one, Rendezvous) for one in met), met
    return met


def assert_error(outcome: Any, code: str, *texts: str) -> None:
    assert isinstance(outcome, Error), outcome
    assert outcome.code == code, outcome
    for text in texts:
        assert text in str(outcome)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_meet_and_exchange(store: str, ranks: int) -> None:
    met = meet(store, ranks)
    assert [one.rank for one in met] == list(range(ranks))
    blobs = [bytes([rank]) * (rank * 1000) for rank in range(ranks)]
    for round_ in range(20):
        gathered = as_ranks(ranks, lambda r: met[r].all_gather_bytes("blobs", blobs[r], 20))
        assert gathered == [blobs] * ranks, round_
    assert as_ranks(ranks, lambda r: met[r].barrier("end", 20)) == [None] * ranks


def test_jobs_have_different_keys() -> None:
    def keys(store: str) -> list[bytes]:
        return as_ranks(2, lambda rank: Bootstrap.at(store, rank, 2).meet(b"", 20)[0])

    pairs = [keys(free_store()) for _ in range(3)]
    assert all(one == other for one, other in pairs)
    assert len({one for one, _ in pairs}) == 3


def test_the_port_is_free_again_at_once(store: str) -> None:
    for _ in range(5):
        met = meet(store, 3)
        assert as_ranks(3, lambda r, met=met: met[r].barrier("x", 20)) == [None] * 3


def test_large_blobs_cross(store: str) -> None:
    met = meet(store, 3)
    blobs = [os.urandom(8 << 20) for _ in range(3)]
    gathered = as_ranks(3, lambda r: met[r].all_gather_bytes("large", blobs[r], 60))
    assert gathered == [blobs] * 3


def test_blobs_and_tags_have_limits(store: str) -> None:
    alone = meet(store, 1)[0]
    with pytest.raises(Error, match="limits") as caught:
        alone.all_gather_bytes("x", bytes((16 << 20) + 1), 1)
    assert caught.value.code == "invalid"
    with pytest.raises(Error, match="limits"):
        alone.barrier("x" * 5000, 1)


def test_tags_cross_between_threads(store: str) -> None:
    met = meet(store, 4)

    def work(rank: int) -> list[bool]:
        def one(tag: int) -> bool:
            blob = f"{rank}.{tag}".encode()
            got = met[rank].all_gather_bytes(f"tag {tag}", blob, 20)
            return got == [f"{peer}.{tag}".encode() for peer in range(4)]

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(8) if rank % 2 else reversed(range(8))))

    assert as_ranks(4, work) == [[True] * 8] * 4


def test_descriptors_travel(store: str) -> None:
    met = meet(store, 3)
    memories = [os.memfd_create(f"rank {rank}") for rank in range(3)]
    for rank, memory in enumerate(memories):
        os.write(memory, f"from {rank}".encode())
    received = as_ranks(3, lambda r: met[r].exchange_fds("fds", memories[r], 20))
    for rank in range(3):
        assert received[rank][rank] == -1
        for peer in set(range(3)) - {rank}:
            fd = received[rank][peer]
            assert os.pread(fd, 100, 0) == f"from {peer}".encode()
            assert not os.get_inheritable(fd)
            os.close(fd)
    for memory in memories:
        os.close(memory)


def test_a_missing_descriptor_is_a_mismatch(store: str) -> None:
    met = meet(store, 2)
    outcomes = as_ranks(2, lambda r: met[r].exchange_fds("fds", 0 if r == 0 else -1, 20))
    assert_error(outcomes[0], "mismatch", "rank 1")
    os.close(outcomes[1][0])


def test_nothing_leaks(store: str) -> None:
    def once() -> None:
        met = meet(store, 4)
        fds = as_ranks(4, lambda r: met[r].exchange_fds("fds", 0, 20))
        for row in fds:
            for fd in row:
                if fd >= 0:
                    os.close(fd)

    once()
    gc.collect()  # what earlier tests left behind may go meanwhile, so fewer are right as well

    def held(kind: str) -> int:
        return len(os.listdir(f"/proc/self/{kind}"))

    before = {kind: held(kind) for kind in ("fd", "task")}
    for _ in range(3):
        once()
    # A thread that was joined may be on its way out still.
    deadline = time.monotonic() + 5
    while held("task") > before["task"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {kind: max(held(kind) - before[kind], 0) for kind in before} == {"fd": 0, "task": 0}


def test_missing_ranks_are_named_by_everybody(store: str) -> None:
    present = [0, 1, 3, 4]
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda r: _error(lambda: joined(store, r, 6, 1.0)), present))
    assert time.monotonic() - started < 5
    for outcome in outcomes:
        assert_error(outcome, "timeout", f"ranks 2, 5 did not arrive at {store} within")


def _error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Error as error:
        return error


def test_a_missing_rank_0_is_named(store: str) -> None:
    with pytest.raises(Error, match=r"rank 0 did not arrive at .* within 0\.3 s") as caught:
        joined(store, 1, 2, timeout_s=0.3)
    assert caught.value.code == "timeout"


def test_a_missing_rank_at_an_exchange_is_named_and_may_come_later(store: str) -> None:
    met = meet(store, 3)
    with pytest.raises(Error, match=r"ranks 1, 2 did not arrive at 'step' .* within 0\.2 s"):
        met[0].all_gather_bytes("step", b"old", 0.2)
    # The first call of 1 and 2 meets that one, not the next.
    outcomes = as_ranks(
        3,
        lambda r: (
            met[r].all_gather_bytes("step", b"new" if r == 0 else b"first", 20)
            if r
            else met[0].all_gather_bytes("other", b"", 0.1)
        ),
    )
    assert outcomes[1] == outcomes[2] == [b"old", b"first", b"first"]
    outcomes = as_ranks(3, lambda r: met[r].all_gather_bytes("step", b"%d" % r, 20))
    assert outcomes == [[b"0", b"1", b"2"]] * 3


def test_world_sizes_must_agree(store: str) -> None:
    outcomes = as_ranks(2, lambda r: joined(store, r, 2 + r, timeout_s=5))
    for outcome in outcomes:
        assert_error(outcome, "mismatch", "rank 1 expects 3 ranks", "rank 0 expects 2")


def test_a_rank_must_be_unique(store: str) -> None:
    outcomes = as_ranks(3, lambda r: joined(store, min(r, 1), 3, timeout_s=5))
    for outcome in outcomes:
        assert_error(outcome, "invalid", "two processes claim to be rank 1")


def test_two_rank_0s(store: str) -> None:
    outcomes = as_ranks(2, lambda r: joined(store, 0, 2, timeout_s=1))
    assert sorted(outcome.code for outcome in outcomes) == ["driver", "timeout"]
    assert_error(next(o for o in outcomes if o.code == "driver"), "driver", "rank 0", "free one")


@pytest.mark.parametrize(
    "address", ["", "nowhere", ":1", "host:", "127.0.0.1:0", "127.0.0.1:70000", "127.0.0.1:x"]
)
def test_malformed_addresses(address: str) -> None:
    for rank in (0, 1):
        with pytest.raises(Error, match=r"write host:port") as caught:
            joined(address, rank, 2, timeout_s=1)
        assert caught.value.code == "invalid"


def test_ranks_must_lie_in_the_world(store: str) -> None:
    with pytest.raises(Error, match=r"rank is 2; with a world size of 2 it must lie in 0\.\.1"):
        joined(store, 2, 2, timeout_s=1)


def test_a_port_that_is_taken(listener: socket.socket) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Error, match=f"cannot listen at {address}") as caught:
        joined(address, 0, 2, timeout_s=5)
    assert caught.value.code == "driver"


def test_a_server_of_another_kind(listener: socket.socket) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(Error, match="not an offcore rank 0") as caught:
        joined(f"127.0.0.1:{listener.getsockname()[1]}", 1, 2, timeout_s=5)
    assert caught.value.code == "driver"
    thread.join()


def test_a_silent_server(listener: socket.socket) -> None:
    with pytest.raises(Error, match="does not answer") as caught:
        joined(f"127.0.0.1:{listener.getsockname()[1]}", 1, 2, timeout_s=0.3)
    assert caught.value.code == "timeout"


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4096),
        b"OFC1" + b"\xff" * 60,
        b"OFC1" + bytes(2) + bytes(2) + (2**40).to_bytes(8, "little"),
        b"OFC1" + bytes(2) + bytes(2) + (3).to_bytes(8, "little") + b"abc",
        random.Random(1).randbytes(1 << 20),
    ],
    ids=["nothing", "a-byte", "http", "zeros", "no-rank", "endless", "cut-short", "noise"],
)
def test_strangers_do_no_harm(store: str, garbage: bytes) -> None:
    port = int(store.split(":")[1])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(joined, store, 0, 2, 20.0)
        strangers = [_connect(port) for _ in range(3)]
        for stranger in strangers:
            stranger.settimeout(1)
            with contextlib.suppress(OSError):  # hung up on, as it should be
                stranger.sendall(garbage)
        met = [joined(store, 1, 2, 20.0), first.result()]
    for stranger in strangers:
        stranger.close()
    assert as_ranks(2, lambda r: met[1 - r].barrier("x", 20)) == [None, None]


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_rank_that_failed_early_may_come_again(store: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(joined, store, 0, 3, 20.0)
        assert_error(_error(lambda: joined(store, 1, 3, 0.3)), "timeout", "rank 2")
        met = as_ranks(2, lambda r: joined(store, r + 1, 3, 20.0))
        assert [one.rank for one in (first.result(), *met)] == [0, 1, 2]


PEER = """
import sys, time
from offcore._core import Bootstrap, Rendezvous
met = Rendezvous(Bootstrap.at(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), 20.0)
met.barrier("up", 20.0)
print("up", flush=True)
if sys.argv[4] == "leave":
    sys.stdin.readline()
    met.close()
time.sleep(60)
"""


@contextlib.contextmanager
def _beside_peers(
    store: str, *ends: str
) -> Iterator[tuple[Rendezvous, list[subprocess.Popen[str]]]]:
    """Rank 0, and a process for each other rank, once all are up."""
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, store, str(rank), str(len(ends) + 1), end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, end in enumerate(ends, 1)
    ]
    try:
        met = joined(store, 0, len(ends) + 1, 20.0)
        met.barrier("up", 20.0)
        for peer in peers:
            assert peer.stdout is not None
            assert peer.stdout.readline() == "up\n"
        yield met, peers
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


def _tell_to_leave(peer: subprocess.Popen[str]) -> None:
    assert peer.stdin is not None
    peer.stdin.write("leave\n")
    peer.stdin.flush()


def test_a_killed_peer_is_noticed_within_a_second(store: str) -> None:
    with _beside_peers(store, "die", "die") as (met, peers):
        assert met.lost == []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: _error(lambda: met.barrier("never", 20.0)))
            time.sleep(0.1)
            killed = time.monotonic()
            peers[1].send_signal(signal.SIGKILL)
            assert_error(waiting.result(), "peer", "rank 2 died before 'never'")
            assert time.monotonic() - killed < 1
        while met.lost != [2]:
            assert time.monotonic() - killed < 1
            time.sleep(0.001)
        assert_error(_error(lambda: met.barrier("again", 20.0)), "peer", "rank 2 died")


def test_a_goodbye_is_no_loss(store: str) -> None:
    with _beside_peers(store, "leave") as (met, [peer]):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: _error(lambda: met.barrier("never", 20.0)))
            _tell_to_leave(peer)
            assert_error(waiting.result(), "peer", "rank 1 left before 'never'")
        peer.kill()
        peer.wait()
        time.sleep(0.1)
        assert met.lost == []


def test_who_died_is_named_before_who_left(store: str) -> None:
    with _beside_peers(store, "leave", "die") as (met, peers):
        peers[1].send_signal(signal.SIGKILL)
        peers[1].wait()
        _tell_to_leave(peers[0])
        time.sleep(0.2)  # both are gone, and known to be
        assert_error(_error(lambda: met.barrier("never", 20.0)), "peer", "rank 2 died")


def test_nothing_follows_a_close(store: str) -> None:
    met = meet(store, 2)
    met[0].close()
    met[0].close()
    assert_error(_error(lambda: met[0].barrier("x", 5)), "cancelled", "left the rendezvous")
    assert_error(_error(lambda: met[1].barrier("x", 5)), "peer", "rank 0 left")
