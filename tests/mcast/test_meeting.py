"""Ranks find each other at an address, a store, or a group."""

import socket
import struct
import threading
import time
from typing import Any

import pytest
from crews import at_once, free_address

import offcore
from offcore.meeting import AddressMeeting, StoreMeeting, meeting_of


class Store:
    """As much of a torch.distributed store as a meeting needs."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()

    def add(self, key: str, number: int) -> int:
        with self._changed:
            self._values[key] = self._values.get(key, 0) + number
            return int(self._values[key])

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], limit: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), limit.total_seconds()):
                raise RuntimeError("wait timeout")

    def get(self, key: str) -> bytes:
        return bytes(self._values[key])


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("kind", ["address", "store"])
def test_every_rank_gets_every_rank_s_bytes_at_every_meeting(ranks: int, kind: str) -> None:
    place: Any = free_address() if kind == "address" else Store()

    def body(rank: int) -> Any:
        def run() -> list[list[bytes]]:
            met = meeting_of(place, rank, ranks)
            return [met.all_gather(bytes([rank] * turn), 20) for turn in range(4)]

        return run

    expected = [[bytes([rank] * turn) for rank in range(ranks)] for turn in range(4)]
    assert at_once([body(rank) for rank in range(ranks)]) == [expected] * ranks


@pytest.mark.parametrize("kind", ["address", "store"])
def test_who_does_not_come_is_named(kind: str) -> None:
    place: Any = free_address() if kind == "address" else Store()
    present = [0, 2]
    results = at_once(
        [lambda rank=rank: meeting_of(place, rank, 4).all_gather(b"", 0.3) for rank in present]
    )
    assert [result.code for result in results] == ["timeout", "timeout"]
    assert "rank 1, 3" in str(results[0])


def test_worlds_of_different_sizes_do_not_meet() -> None:
    address = free_address()
    meetings = [AddressMeeting(address, 0, 2), AddressMeeting(address, 1, 3)]
    results = at_once([lambda met=met: met.all_gather(b"", 5) for met in meetings])
    assert [result.code for result in results] == ["mismatch", "mismatch"]


def test_strangers_at_the_door_keep_nobody_out() -> None:
    address = free_address()
    host, port = address.split(":")
    hello = struct.Struct(">8sIII")
    rubbish = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        hello.pack(b"ocmeet1\n", 9, 2, 4) + b"mine",
        hello.pack(b"ocmeet1\n", 1, 2, 1 << 30),
        hello.pack(b"ocmeet1\n", 0, 2, 4) + b"mine",
    ]

    def knock() -> None:
        for said in rubbish:
            for _ in range(100):
                try:
                    with socket.create_connection((host, int(port)), timeout=5) as visitor:
                        visitor.sendall(said)
                    break
                except OSError:
                    time.sleep(0.01)

    def late() -> list[bytes]:
        time.sleep(0.3)
        return AddressMeeting(address, 1, 2).all_gather(b"one", 10)

    results = at_once([lambda: AddressMeeting(address, 0, 2).all_gather(b"zero", 10), late, knock])
    assert results[:2] == [[b"zero", b"one"]] * 2


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
        meeting_of(place, rank, ranks)
    assert caught.value.code == "invalid"


def test_too_many_bytes_are_refused() -> None:
    for met in (AddressMeeting(free_address(), 0, 1), StoreMeeting(Store(), 0, 1)):
        with pytest.raises(offcore.Error, match="at most") as caught:
            met.all_gather(bytes((1 << 16) + 1), 1)
        assert caught.value.code == "invalid"
