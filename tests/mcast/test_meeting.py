"""Ranks find each other at an address, a store, or a group."""

import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from crews import at_once
from offcore._core import Bootstrap

import offcore
from offcore.bootstrap import bootstrap_of
from stores import Store, free_store


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("kind", ["address", "store"])
def test_every_rank_gets_every_rank_s_bytes_at_every_meeting(ranks: int, kind: str) -> None:
    place: Any = free_store() if kind == "address" else Store()

    def body(rank: int) -> Any:
        def run() -> list[list[bytes]]:
            met = bootstrap_of(place, rank, ranks)
            return [met.all_gather(bytes([rank] * turn), 20) for turn in range(4)]

        return run

    expected = [[bytes([rank] * turn) for rank in range(ranks)] for turn in range(4)]
    assert at_once([body(rank) for rank in range(ranks)]) == [expected] * ranks


@pytest.mark.parametrize("kind", ["address", "store"])
def test_who_does_not_come_is_named(kind: str) -> None:
    place: Any = free_store() if kind == "address" else Store()
    present = [0, 2]
    results = at_once(
        [lambda rank=rank: bootstrap_of(place, rank, 4).all_gather(b"", 0.3) for rank in present]
    )
    assert [result.code for result in results] == ["timeout", "timeout"]
    assert all("ranks 1, 3 did not" in str(result) for result in results)


def test_worlds_of_different_sizes_do_not_meet() -> None:
    address = free_store()
    meetings = [Bootstrap.at(address, 0, 2), Bootstrap.at(address, 1, 3)]
    results = at_once([lambda met=met: met.all_gather(b"", 5) for met in meetings])
    assert [result.code for result in results] == ["mismatch", "mismatch"]


def test_worlds_of_different_sizes_do_not_meet_at_a_store() -> None:
    """Nor is who waits for ranks that others do not know of told that those are late."""
    meetings = [bootstrap_of(store, rank, 2 + rank) for store in (Store(),) for rank in range(2)]
    results = at_once([lambda met=met: met.all_gather(b"", 0.3) for met in meetings])
    assert [result.code for result in results] == ["mismatch", "mismatch"]
    assert "rank 1 expects 3 ranks" in str(results[0])


def test_two_processes_with_one_rank_are_told_so() -> None:
    address = free_store()
    results = at_once(
        [lambda r=rank: Bootstrap.at(address, r, 3).all_gather(b"", 5) for rank in (0, 1, 1)]
    )
    assert [result.code for result in results] == ["invalid"] * 3
    assert all("two processes claim to be rank 1" in str(result) for result in results)


def test_strangers_at_the_door_keep_nobody_out() -> None:
    """Silent ones stay, and each of them used to cost a second."""
    address = free_store()
    host, port = address.split(":")
    rubbish = [b""] * 30 + [b"GET / HTTP/1.1\r\n\r\n" * 9, b"OFC2", bytes(4096)]
    staying: list[socket.socket] = []

    def knock() -> None:
        for said in rubbish:
            for _ in range(100):
                try:
                    staying.append(socket.create_connection((host, int(port)), timeout=5))
                    staying[-1].sendall(said)
                    break
                except OSError:
                    time.sleep(0.01)

    def late() -> list[bytes]:
        time.sleep(0.3)
        return Bootstrap.at(address, 1, 2).all_gather(b"one", 8)

    results = at_once([lambda: Bootstrap.at(address, 0, 2).all_gather(b"zero", 8), late, knock])
    assert results[:2] == [[b"zero", b"one"]] * 2
    for one in staying:
        one.close()


RANK = """
import sys
from offcore._core import Bootstrap
print("comes", flush=True)
met = Bootstrap.at(sys.argv[1], int(sys.argv[2]), 3)
print(met.all_gather(sys.argv[3].encode(), 20.0))
"""


def test_a_rank_that_was_killed_while_ranks_meet_may_come_again() -> None:
    address = free_store()

    def start(rank: int, said: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", RANK, address, str(rank), said]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "comes\n"
        return process

    ranks = [start(0, "zero"), start(1, "killed")]
    time.sleep(0.5)
    ranks[1].kill()
    ranks[1].communicate()
    ranks[1:] = [start(1, "one"), start(2, "two")]
    expected = str([b"zero", b"one", b"two"]) + "\n"
    # Not by communicate(), which does not see what came in one piece with the first line.
    assert [rank.stdout.read() for rank in ranks if rank.stdout] == [expected] * 3
    assert [rank.wait(timeout=30) for rank in ranks] == [0] * 3


@pytest.mark.parametrize(
    ("place", "rank", "ranks"),
    [
        ("nowhere", 0, 2),
        ("host:", 0, 2),
        ("host:70000", 0, 2),
        ("127.0.0.1:9", 2, 2),
        (7, 0, 2),
        (Store(), 3, 3),
    ],
    ids=["no port", "an empty port", "a port too large", "no such rank", "no place", "no rank 3"],
)
def test_places_that_are_none_are_refused(place: Any, rank: int, ranks: int) -> None:
    with pytest.raises(offcore.Error) as caught:
        bootstrap_of(place, rank, ranks)
    assert caught.value.code == "invalid"


def test_too_many_bytes_are_refused() -> None:
    for met in (Bootstrap.at(free_store(), 0, 1), bootstrap_of(Store(), 0, 1)):
        with pytest.raises(offcore.Error, match="at most") as caught:
            met.all_gather(bytes((1 << 16) + 1), 1)
        assert caught.value.code == "invalid"
