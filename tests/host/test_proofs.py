"""Who may take part where ranks meet: processes of one user, or that prove to know one secret."""

import contextlib
import hmac
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from offcore._core import Bootstrap, Error

from stores import free_store, joined

KNOCK, CHALLENGE, HELLO, PROGRESS, ROSTER, REFUSAL, GREETING = range(7)
SECRET = "a secret that is longer than the 64 bytes that fit a block of SHA-256, and so is hashed"
STRANGER = 65534
ACCEPTS = 0x10000  # SO_ACCEPTCON in /proc/net/unix


class Frames:
    """A connection that speaks core/window/address.h, written after that header."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(10)
        self.socket = connected
        self.nonces = b""

    def send(self, kind: int, payload: bytes) -> None:
        self.socket.sendall(struct.pack("<4sHHQ", b"OFC2", kind, 0, len(payload)) + payload)

    def code(self, secret: str, kind: int, payload: bytes) -> bytes:
        said = struct.pack("<H", kind) + text(self.nonces) + text(payload)
        return hmac.digest(secret.encode(), said, "sha256")

    def send_sealed(self, secret: str, kind: int, payload: bytes) -> None:
        self.send(kind, payload + self.code(secret, kind, payload))

    def receive(self) -> tuple[int, bytes]:
        head = self.socket.recv(16, socket.MSG_WAITALL)
        if len(head) < 16:
            return -1, b""
        magic, kind, _, nbytes = struct.unpack("<4sHHQ", head)
        assert magic == b"OFC2"
        return kind, self.socket.recv(nbytes, socket.MSG_WAITALL)

    def knock(self, secret: bool) -> tuple[bytes, str]:
        """The challenge, and the Unix socket that it sends a rank to."""
        nonce = os.urandom(32)
        self.send(KNOCK, text(nonce) + struct.pack("<QB", 0, secret))
        kind, said = self.receive()
        assert kind == CHALLENGE
        (length,) = struct.unpack_from("<I", said, 36 + 8 + 1)
        name = said[49 : 49 + length]
        self.nonces = nonce + said[4:36]
        return said, name.decode()


def meet(store: str, rank: int, ranks: int, card: bytes, timeout_s: float) -> list[bytes]:
    return Bootstrap.at(store, rank, ranks).all_gather(card, timeout_s)


def text(said: bytes) -> bytes:
    return struct.pack("<I", len(said)) + said


def hello(rank: int, ranks: int, store: str, card: bytes) -> bytes:
    return struct.pack("<IIH", rank, ranks, int(store.split(":")[1])) + text(card)


def reach(store: str) -> Frames:
    host, port = store.split(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            return Frames(socket.create_connection((host, int(port)), timeout=10))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def reach_unix(name: str) -> Frames:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect("\0" + name)
    return Frames(connected)


def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Error as error:
        return error


@contextlib.contextmanager
def waiting_store(timeout_s: float = 30.0) -> Iterator[tuple[str, Future[Any]]]:
    """Rank 0 of two, which waits for rank 1."""
    store = free_store()
    with ThreadPoolExecutor(1) as pool:
        yield store, pool.submit(outcome_of, lambda: meet(store, 0, 2, b"zero", timeout_s))


def assert_they_meet(store: str, first: "Future[Any]") -> None:
    assert meet(store, 1, 2, b"one", 20.0) == [b"zero", b"one"]
    assert first.result() == [b"zero", b"one"]


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OFFCORE_JOB_SECRET", SECRET)
    return SECRET


def own_doors() -> set[str]:
    """The names of the Unix sockets at which this process listens."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(os.readlink(descriptor))
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & ACCEPTS and f"socket:[{inode}]" in own:
            names.add(path[0][1:])
    return names


def new_doors(before: set[str], count: int) -> set[str]:
    """Those that were opened since, once there are so many: rank 0 opens one after another."""
    deadline = time.monotonic() + 10
    while len(own_doors() - before) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return own_doors() - before


def test_silent_strangers_keep_nobody_waiting() -> None:
    """At every door that rank 0 opens; each of them used to cost a second."""
    store, before = free_store(), own_doors()
    silent = []
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(joined, store, 0, 2, 8.0)
        silent += [reach(store).socket for _ in range(100)]
        for name in new_doors(before, 2):
            silent += [reach_unix(name).socket for _ in range(100)]
        met = [joined(store, 1, 2, 8.0), first.result()]
    assert [one.rank for one in met] == [1, 0]
    for one in silent:
        one.close()


def test_more_strangers_than_descriptors_do_not_end_the_meeting() -> None:
    code = (
        "import resource, sys\n"
        "from offcore._core import Bootstrap\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "print(Bootstrap.at(sys.argv[1], 0, 2).all_gather(b'zero', 30.0))\n"
    )
    store = free_store()
    first = subprocess.Popen([sys.executable, "-c", code, store], stdout=subprocess.PIPE, text=True)
    silent = [reach(store) for _ in range(200)]
    assert meet(store, 1, 2, b"one", 20.0) == [b"zero", b"one"]
    assert first.communicate(timeout=20)[0] == "[b'zero', b'one']\n"
    for one in silent:
        one.socket.close()


def test_who_only_reaches_the_port_gets_no_place() -> None:
    with waiting_store() as (store, first):
        thief = reach(store)
        _, name = thief.knock(secret=False)
        assert name  # where the kernel tells whose process comes
        with contextlib.suppress(OSError):
            thief.send_sealed("", HELLO, hello(1, 2, store, b"thief"))
        with contextlib.suppress(ConnectionError):
            assert thief.receive() == (-1, b"")
        assert_they_meet(store, first)


CLAIM = """
import os, sys
sys.path[:0] = {tests!r}
from test_proofs import HELLO, hello, reach, reach_unix  # before: the user may not read Python
os.setgroups([]); os.setgid({user}); os.setuid({user})
store, name = sys.argv[1], sys.argv[2]
inside = reach_unix(name)
try:
    inside.knock(secret=False)
    inside.send_sealed("", HELLO, hello(1, 2, store, b"thief"))
    print("got", inside.receive()[0])
except (AssertionError, OSError):
    print("nothing")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_no_place() -> None:
    with waiting_store() as (store, first):
        _, name = reach(store).knock(secret=False)
        folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
        code = CLAIM.format(user=STRANGER, tests=folders)
        command = [sys.executable, "-c", code, store, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
        assert done.stdout == "nothing\n"
        assert_they_meet(store, first)


AS_RANK = """
import os, sys
import numpy, offcore
if int(sys.argv[3]) != os.geteuid():
    os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
try:
    with offcore.Communicator(
        backend="host", store=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=3.0
    ) as comm:
        window = comm.empty(16)
        comm.barrier()
        print("joined")
except offcore.Error as error:
    print(error.code, error)
"""


def as_users(*users: int, secrets: tuple[str, ...] = ("", "")) -> list[str]:
    """What a rank of each user says of two that meet."""
    store = free_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AS_RANK, store, str(rank), str(user)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OFFCORE_JOB_SECRET": secret},
        )
        for rank, (user, secret) in enumerate(zip(users, secrets, strict=True))
    ]
    for rank in ranks:  # however long they take to start
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    return [rank.communicate(timeout=60)[0].strip() for rank in ranks]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_ranks_of_two_users_need_a_secret() -> None:
    first, second = as_users(0, STRANGER)
    assert first.startswith("timeout rank 1 did not arrive")
    assert f"turned away: a process of user {STRANGER}" in first
    assert second.startswith("invalid")
    assert "OFFCORE_JOB_SECRET" in second
    assert as_users(0, STRANGER, secrets=(SECRET, SECRET)) == ["joined", "joined"]


def test_ranks_that_have_different_secrets_do_not_meet() -> None:
    me = os.geteuid()
    first, second = as_users(me, me, secrets=(SECRET, "another"))
    assert "rank 1 did not arrive" in first
    assert second.startswith("mismatch")
    assert "another OFFCORE_JOB_SECRET" in second
    for pair in ((SECRET, ""), ("", SECRET)):
        first, second = as_users(me, me, secrets=pair)
        assert "turned away: a process with" in first
        assert second.startswith("mismatch rank 0 at ")


def test_a_rank_by_the_book_is_let_in(secret: str) -> None:
    """Written from the header, with Python's HMAC: every frame of both sides has its code."""
    with waiting_store() as (store, first):
        rank = reach(store)
        said, name = rank.knock(secret=True)
        assert name == ""
        assert said[-32:] == rank.code(secret, CHALLENGE, said[:-32])
        rank.send_sealed(secret, HELLO, hello(1, 2, store, b"one"))
        for expected in (PROGRESS, ROSTER):
            kind, said = rank.receive()
            assert kind == expected
            assert said[-32:] == rank.code(secret, kind, said[:-32])
        assert said[:-32] == text(b"zero") + text(b"one")
        assert first.result() == [b"zero", b"one"]


@pytest.mark.parametrize("wrong", ["no secret", "another's", "altered", "another time's"])
def test_who_does_not_prove_the_secret_gets_no_place(secret: str, wrong: str) -> None:
    with waiting_store() as (store, first):
        thief = reach(store)
        thief.knock(secret=wrong != "no secret")
        said = hello(1, 2, store, b"thief")
        code = thief.code("" if wrong == "no secret" else secret, HELLO, said)
        if wrong == "another's":
            code = thief.code("a guess", HELLO, said)
        elif wrong == "altered":
            said = hello(1, 2, store, b"THIEF")
        elif wrong == "another time's":  # recorded at an earlier knock
            earlier, thief = thief, reach(store)
            thief.knock(secret=True)
            code = earlier.code(secret, HELLO, said)
        thief.send(HELLO, said + code)
        assert thief.receive() == (-1, b"")
        assert_they_meet(store, first)


def test_a_rank_believes_no_store_that_does_not_prove_the_secret(secret: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        store = f"127.0.0.1:{listener.getsockname()[1]}"
        rank = pool.submit(outcome_of, lambda: meet(store, 1, 2, b"one", 20.0))
        false = Frames(listener.accept()[0])
        _, knock = false.receive()
        false.nonces = knock[4:36] + bytes(32)
        said = text(bytes(32)) + struct.pack("<QB", 0, 1) + text(b"")
        false.send_sealed("a guess", CHALLENGE, said)
        assert false.receive() == (-1, b"")  # it has said nothing of itself
        error = rank.result()
        assert error.code == "mismatch"
        assert "another OFFCORE_JOB_SECRET" in str(error)
        false.socket.close()


def test_ranks_that_are_led_to_another_job_get_no_place_there() -> None:
    """Whoever holds the port of one job can name the Unix socket of another of the same user."""
    with waiting_store() as (store, first):
        _, name = reach(store).knock(secret=False)
        led = reach_unix(name)
        led.knock(secret=False)
        led.send_sealed("", HELLO, hello(1, 2, "127.0.0.1:1", b"of another job"))
        assert led.receive() == (-1, b"")
        assert_they_meet(store, first)


def test_greetings_without_the_key_of_the_meeting_are_not_believed() -> None:
    store, before = free_store(), own_doors()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(joined, store, 0, 2, 20.0)
        reach(store).socket.close()
        forged = []
        for name in new_doors(before, 2):
            forged.append(reach_unix(name))
            forged[-1].send_sealed("", GREETING, struct.pack("<HH", 1, 0))
        met = [joined(store, 1, 2, 20.0), first.result()]
    with ThreadPoolExecutor(2) as pool:
        blobs = list(pool.map(lambda one: one.all_gather_bytes("x", b"%d" % one.rank, 20.0), met))
    assert blobs == [[b"0", b"1"]] * 2


def test_descriptors_of_strangers_are_not_kept() -> None:
    with waiting_store() as (store, first):
        _, name = reach(store).knock(secret=False)
        before = len(os.listdir("/proc/self/fd"))
        givers = [reach_unix(name) for _ in range(20)]
        for giver in givers:
            socket.send_fds(giver.socket, [b"OFC2"], [0, 1, 2])
            assert giver.receive() == (-1, b"")
        assert len(os.listdir("/proc/self/fd")) <= before + len(givers)
        assert_they_meet(store, first)


def test_a_secret_is_not_shown(secret: str) -> None:
    command = [sys.executable, "-m", "offcore.tools.cli", "doctor"]
    for more in ([], ["--json", "-"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100)
        assert "OFFCORE_JOB_SECRET" in done.stdout
        assert secret not in done.stdout + done.stderr
