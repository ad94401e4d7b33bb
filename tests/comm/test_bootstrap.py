"""How communicators' ranks meet: at a store, by a group, at a port; and who does not meet."""

import hmac
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offcore._core import Bootstrap, Rendezvous

import offcore
from offcore import Error, mcast
from offcore.bootstrap import bootstrap_of
from stores import Store, as_ranks

ROOT = str(Path(str(offcore.__file__)).parents[1])
TESTS = str(Path(__file__).parents[1])


def seen(comm: offcore.Communicator, rank: int, base: int = 0) -> list[int]:
    out = comm.empty(comm.ranks)
    comm.all_gather(out, np.full(1, base + rank, np.uint8)).wait()
    comm.barrier()
    return [int(one) for one in out]


@pytest.fixture(autouse=True)
def _no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFCORE_STORE", "MASTER_ADDR", "MASTER_PORT", "OFFCORE_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)


WITHOUT_PORTS = """
import socket
import pytest
from stores import Store, as_ranks
from test_bootstrap import seen

with pytest.raises(OSError), socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), timeout=5)

def work(comm, rank):
    with comm.split(rank % 2) as group:
        return seen(comm, rank), seen(group, rank)

print(*as_ranks(4, work, timeout=20, store=Store()))
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join((ROOT, TESTS, str(Path(__file__).parent)))
    return os.environ | {"PYTHONPATH": path}


@pytest.mark.needs("namespaces", "unshare")
def test_a_store_and_a_split_need_no_port() -> None:
    """In a network namespace where not even the loopback interface is up."""
    command = ["unshare", "-Urn", sys.executable, "-c", WITHOUT_PORTS]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=90)
    even, odd = ("([0, 1, 2, 3], [0, 2])", "([0, 1, 2, 3], [1, 3])")
    assert done.stdout == f"{even} {odd} {even} {odd}\n", done.stderr


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Error as failure:
            return failure

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def test_a_port_that_is_taken_is_told_to_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = f"127.0.0.1:{server.getsockname()[1]}"

        def opened(rank: int) -> Any:
            return offcore.Communicator(
                backend="host", store=store, rank=rank, world_size=2, timeout=1
            )

        told = at_once([lambda: opened(0), lambda: opened(1)])
    assert [failure.code for failure in told] == ["driver", "timeout"]
    assert f"rank 0 cannot listen at {store}" in str(told[0])
    assert "uses this port: choose a free one" in str(told[0])
    assert "the server there does not answer" in str(told[1])


def text(said: bytes) -> bytes:
    return struct.pack("<I", len(said)) + said


def card_of(rank: int, card: bytes, secret: bytes = b"") -> bytes:
    """As core/window/bootstrap.h has it: a code, then rank, random part and card."""
    said = struct.pack("<I", rank) + text(bytes(32)) + text(card)
    return hmac.digest(secret, b"offcore card " + said, "sha256") + said


def meeting(others: list[bytes], ranks: int = 2) -> Bootstrap:
    return Bootstrap("a lock", 0, ranks, lambda own, _: [own, *others])


@pytest.mark.parametrize(
    ("secret", "card"),
    [
        ("one", card_of(1, b"x", b"another")),
        ("one", card_of(1, b"x")),
        ("", card_of(1, b"x", b"one")),
        ("one", card_of(0, b"x", b"one")),
        ("one", card_of(1, b"x", b"one")[:-1]),
        ("one", card_of(1, b"x", b"one").replace(b"x", b"y")),
        ("one", b""),
    ],
    ids=["another's", "none", "only theirs", "rank 0's", "cut", "altered", "empty"],
)
def test_cards_without_the_job_s_secret_are_not_believed(
    secret: str, card: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store hands out whatever anybody wrote there."""
    monkeypatch.setenv("OFFCORE_JOB_SECRET", secret)
    for opening in (
        lambda met: met.meet(b"zero", 1),
        lambda met: Rendezvous(met, 1),
        lambda met: mcast.Communicator(met, interface="lo", timeout=5),
    ):
        with pytest.raises(Error, match="rank 1 has another OFFCORE_JOB_SECRET") as told:
            opening(meeting([card]))
        assert told.value.code == "mismatch"
    good = card_of(1, b"one", secret.encode())
    assert meeting([good]).meet(b"zero", 1)[1] == [b"zero", b"one"]


def test_whoever_replays_or_mixes_cards_breaks_the_meeting_and_no_more() -> None:
    """Ranks have one key only where all have got the same cards, which are new each time."""
    store = Store()
    handed: list[list[bytes]] = [[], []]

    def meet(rank: int, old: bytes | None = None) -> bytes:
        def all_gather(own: bytes, left: float) -> list[bytes]:
            handed[rank].append(own)
            at = bootstrap_of(store, rank, 2)
            said: list[bytes] = at.all_gather(own, left)
            return said if old is None else [said[0], old]

        key: bytes = Bootstrap("a store", rank, 2, all_gather).meet(b"same", 10)[0]
        return key

    first = at_once([lambda: meet(0), lambda: meet(1)])
    second = at_once([lambda: meet(0), lambda: meet(1)])
    assert first[0] == first[1] != second[0] == second[1]
    fooled = at_once([lambda: meet(0, handed[1][0]), lambda: meet(1)])
    assert len({*first, *second, *fooled}) == 4


def test_more_or_fewer_ranks_than_expected_are_a_mismatch() -> None:
    for others in ([], [b"", b""]):
        with pytest.raises(Error, match=f"{1 + len(others)} ranks came to a lock, rank 0 expects"):
            meeting(others).all_gather(b"", 1)


def test_ranks_of_another_host_are_told_so() -> None:
    card = struct.pack("<Q", 12345) + text(b"a socket")
    with pytest.raises(Error, match="rank 1 came to a lock from another host") as told:
        Rendezvous(meeting([card_of(1, card)]), 5)
    assert told.value.code == "invalid"


def test_what_an_all_gather_raises_reaches_the_caller() -> None:
    def fails(*_: Any) -> list[bytes]:
        raise KeyError("of the caller's")

    with pytest.raises(KeyError, match="of the caller's"):
        offcore.Communicator(backend="host", store=Bootstrap("a lock", 0, 2, fails))
    with pytest.raises(RuntimeError, match="bad_cast"):
        Bootstrap("a lock", 0, 1, lambda *_: [7]).all_gather(b"", 1)


def test_a_rank_that_cannot_open_its_group_is_told_to_that_group_alone() -> None:
    def work(comm: offcore.Communicator, rank: int) -> Any:
        options = dict(comm._options)
        if rank == 1:
            comm._options["machine"] = "no-such-machine"
        try:
            with comm.split(rank // 2) as group:  # type: ignore[union-attr]
                first: Any = seen(group, rank)
        except Error as failure:
            first = failure.code, str(failure)
        comm._options = options
        with comm.split(rank % 2) as group:  # type: ignore[union-attr]
            return first, seen(group, rank)

    (zero, even), (one, odd), *others = as_ranks(4, work, timeout=20)
    assert zero == ("peer", "rank 1 could not open its group's communicator")
    assert "no-such-machine" in one[1]
    assert (even, odd) == ([0, 2], [1, 3])
    assert others == [([2, 3], [0, 2]), ([2, 3], [1, 3])]
