"""Nothing that a stranger sends to the group crashes, corrupts or stalls a collective; what is
well-formed is taken at the offsets that core/mcast/wire.h names."""

import random
import struct
from collections.abc import Iterator

import pytest
from fabrics import SECOND, Started, all_gather, broadcast, faults_of, group_of
from hypothesis import given
from hypothesis import strategies as st

from offcore import _core

TAG = 0x1234567890ABCDEF
SECRET = bytes(range(16))
WRONG = ("foreign", "stale", "malformed", "forged")


def datagram(
    chunk: bytes,
    psn: int = 0,
    tag: int = TAG,
    op: int = 1,
    source: int = 0,
    subgroup: int = 0,
    nbytes: int | None = None,
    sealed: bytes | None = None,
    magic: int = 0x4F43,
    version: int = 1,
    flags: int | None = None,
) -> bytes:
    flags = (1 if sealed else 0) if flags is None else flags
    length = len(chunk) if nbytes is None else nbytes
    head = struct.pack(">HBBIQQIHH", magic, version, flags, psn, tag, op, source, subgroup, length)
    if sealed:
        head += struct.pack(">Q", _core.mcast_siphash(sealed, head + chunk))
    return head + chunk


def test_siphash_is_that_of_the_paper() -> None:
    """Vectors of the reference implementation: key 00..0f, input 00, 01, 02, ..."""
    expected = {
        0: 0x726FDB47DD0E0E31,
        1: 0x74F839C593DC67FD,
        7: 0xAB0200F58B01D137,
        8: 0x93F5F5799A932462,
        15: 0xA129CA6149BE45E5,
        63: 0x958A324CEB064572,
    }
    got = {size: _core.mcast_siphash(SECRET, bytes(range(size))) for size in expected}
    assert got == expected


@pytest.mark.parametrize("sealed", [False, True])
def test_a_datagram_by_the_book_is_taken(sealed: bool) -> None:
    """Made by hand, before the root sends: its chunk is in place, the root's is a duplicate."""
    call = broadcast(2, 250)
    fabric = _core.McastSimNetwork([group_of(2, sealed=sealed)], faults_of())
    started = Started(fabric, call, 2)
    fabric.run_until(5_010)  # the barrier is over
    chunk = call.expected()[100:200].tobytes()
    made = datagram(chunk, psn=1, sealed=SECRET if sealed else None)
    fabric.inject(1, 0, made, len(made))
    assert (started.buffers[1][100:200] == call.expected()[100:200]).all()
    assert fabric.run_until(SECOND)
    started.outcome().check_all_right()
    counters = fabric.counters(1)
    assert (counters["datagrams"], counters["duplicates"]) == (3, 1)


@pytest.mark.parametrize(
    ("wrong", "counted"),
    [
        ({"magic": 0x4F44}, "foreign"),
        ({"version": 2}, "foreign"),
        ({"flags": 1}, "foreign"),
        ({"tag": TAG ^ 1}, "foreign"),
        ({"tag": TAG ^ 1 << 63}, "foreign"),
        ({"op": 0}, "stale"),
        ({"op": 2}, "stale"),
        ({"op": 1 + 2**32}, "stale"),
        ({"op": 1 + 2**63}, "stale"),
        ({"source": 1}, "malformed"),  # the receiver itself
        ({"source": 2}, "malformed"),
        ({"source": 2**32 - 1}, "malformed"),
        ({"subgroup": 1}, "malformed"),
        ({"psn": 3}, "malformed"),
        ({"psn": 2**32 - 1}, "malformed"),
        ({"psn": 2}, "malformed"),  # the last chunk is shorter
        ({"chunk": bytes(99)}, "malformed"),
        ({"chunk": bytes(101)}, "malformed"),
        ({"chunk": b""}, "malformed"),
        ({"nbytes": 99}, "malformed"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_dropped_and_counted(wrong: dict[str, int], counted: str) -> None:
    call = broadcast(2, 250)
    fabric = _core.McastSimNetwork([group_of(2)], faults_of())
    started = Started(fabric, call, 2)
    fabric.run_until(5_010)
    made = datagram(**{"chunk": bytes(100), "psn": 1} | wrong)  # type: ignore[arg-type]
    fabric.inject(1, 0, made, len(made))
    assert {name: fabric.counters(1)[name] for name in WRONG if fabric.counters(1)[name]} == {
        counted: 1
    }
    assert (started.buffers[1] == call.buffer(1)).all()  # untouched
    assert fabric.run_until(SECOND)
    started.outcome().check_all_right()


def strangers(seed: int, count: int, sealed: bool) -> Iterator[tuple[int, bytes, int]]:
    """(subgroup, bytes, bytes of a segment) by somebody who knows the format. Sealed: who also
    knows the tag and every number of the operation, but not the secret."""
    rng = random.Random(seed)
    for _ in range(count):
        subgroup = rng.randrange(2)
        good = datagram(
            rng.randbytes(rng.choice([100, 100, 50, 1])),
            psn=rng.choice([5 * subgroup, 5 * subgroup + 1, 9, rng.getrandbits(32)]),
            op=rng.choice([1, 2, 2**32 + 1, rng.getrandbits(64)]),
            source=rng.choice([0, 1, 2, 3, rng.getrandbits(32)]),
            subgroup=rng.choice([subgroup, subgroup, subgroup, 1 - subgroup, 2]),
            tag=TAG,
            sealed=rng.randbytes(16) if sealed else None,
        )
        way = rng.randrange(6)
        if way == 0:
            good = rng.randbytes(rng.choice([0, 1, 8, 31, 32, 33, 40, 140, 1500]))
        elif way == 1:
            good = good[: rng.randrange(len(good))]
        elif way == 2:
            good += rng.randbytes(rng.randrange(1, 200))
        elif way == 3:
            at = rng.randrange(len(good))
            good = good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :]
        elif way == 4:
            good = good * rng.randrange(1, 4)
        if not sealed and good[16:24] in (struct.pack(">Q", 1), struct.pack(">Q", 2)):
            good = good[:8] + struct.pack(">Q", TAG ^ 1 << rng.randrange(64)) + good[16:]
        segment = rng.choice([len(good), len(good), 132, 140, 0, 1, 33, 2**32 - 1])
        if segment < len(good) and not sealed:
            good = good.replace(struct.pack(">Q", TAG), struct.pack(">Q", TAG + 1))
        yield rng.choice([subgroup, subgroup, subgroup, 1 - subgroup]), good, segment


def check_strangers(count: int, sealed: bool) -> None:
    """While collectives of 4 ranks run over a lossy network."""
    ranks, done, round_ = 4, 0, 0
    wrong = dict.fromkeys(WRONG, 0)
    while done < count:
        fabric = _core.McastSimNetwork(
            [group_of(ranks, subgroups=2, chains=2, sealed=sealed)],
            faults_of(loss=0.05, duplicate=0.05, jitter_ns=5000, seed=round_),
        )
        before = Started(fabric, all_gather([950] * ranks, round_), ranks)
        after = Started(fabric, broadcast(ranks, 950, 1, round_), ranks)
        for subgroup, made, segment in strangers(round_, 400, sealed):
            fabric.inject(done % ranks, subgroup, made, segment)
            done += 1
            fabric.run_until(fabric.now_ns + 150)
        assert fabric.run_until(fabric.now_ns + SECOND)
        before.outcome().check_all_right()
        after.outcome().check_all_right()
        for rank in range(ranks):
            counters = fabric.counters(rank)
            assert counters["failed"] == 0
            wrong = {name: total + counters[name] for name, total in wrong.items()}
        round_ += 1
    reached = WRONG if sealed else ("foreign", "stale")  # the checks that they got as far as
    assert all(wrong[name] > count // 2000 for name in reached), wrong


@pytest.mark.parametrize("sealed", [False, True])
def test_strangers_datagrams(sealed: bool) -> None:
    check_strangers(2_500, sealed)


@pytest.mark.long
@pytest.mark.parametrize("sealed", [False, True])
def test_very_many_datagrams_of_strangers(sealed: bool) -> None:
    check_strangers(50_000, sealed)


def message(rng: random.Random) -> bytes:
    """Any message but one that brings data, which only comes through a connection of a peer's."""
    kind = rng.choice([0, 1, 2, 3, 5, 6, 7, 9])
    number = lambda: rng.choice([0, 1, 2, 3, 9, 10, 2**31, 2**32 - 1])  # noqa: E731
    return struct.pack(
        ">HBBIQIIIIQQ",
        0x4F43,
        1,
        kind,
        number(),
        rng.choice([0, 1, 2, 3, 2**64 - 1]),
        number(),
        number(),
        number(),
        0,
        rng.getrandbits(64),
        0,
    )


@given(seed=st.integers(0, 2**32))
def test_a_peer_gone_mad_ends_in_bytes_or_an_error(seed: int) -> None:
    """Rank 3 is one of us and says anything: the others neither crash nor stall. What it says may
    be taken for the truth, for who knows the secret is trusted: bytes are not looked at here."""
    rng = random.Random(seed)
    fabric = _core.McastSimNetwork([group_of(4, subgroups=2)], faults_of(loss=0.1, seed=seed))
    started = Started(fabric, all_gather([950] * 4), 4)
    for _ in range(60):
        assert fabric.inject_message(rng.randrange(3), 3, message(rng))
        fabric.run_until(fabric.now_ns + 700)
    assert fabric.run_until(10 * SECOND)
    outcome = started.outcome()
    for rank in range(3):
        assert (outcome.reports[rank] is None) != (outcome.errors[rank] is None)


def test_a_reply_that_is_not_what_was_asked_for_is_dropped() -> None:
    fabric = _core.McastSimNetwork([group_of(2)], faults_of())
    fabric.drop(1, 0, 3)
    fabric.cut({0}, 40_000, SECOND // 20, True)  # the real reply is late
    started = Started(fabric, broadcast(2, 950), 2)
    fabric.run_until(SECOND // 40)
    assert fabric.counters(1)["refused_messages"] == 0
    for psn, chunks, nbytes in [(3, 1, 0), (3, 1, 99), (3, 2, 200), (4, 1, 100), (9, 1, 50)]:
        reply = struct.pack(">HBBIQIIIIQQ", 0x4F43, 1, 4, 0, 1, 0, psn, chunks, 0, 0, nbytes)
        assert fabric.inject_message(1, 0, reply)
    assert fabric.counters(1)["refused_messages"] == 5
    assert not started.ended(1)
    assert fabric.run_until(SECOND)
    started.outcome().check_all_right()


@pytest.mark.parametrize(
    "wrong",
    [
        struct.pack(">HBB", 0x4F44, 1, 1),
        struct.pack(">HBB", 0x4F43, 2, 1),
        struct.pack(">HBB", 0x4F43, 1, 12),
        struct.pack(">HBB", 0x4F43, 1, 255),
        struct.pack(">HBB24xB", 0x4F43, 1, 1, 2),
        struct.pack(">HBB36xQ", 0x4F43, 1, 1, 1),  # data after what brings none
        struct.pack(">HBB36xQ", 0x4F43, 1, 4, (64 << 20) + 1),  # more than anybody asks for
    ],
    ids=["magic", "version", "kind", "kind 255", "sequence", "data", "too much data"],
)
def test_what_is_no_message_is_told_apart(wrong: bytes) -> None:
    fabric = _core.McastSimNetwork([group_of(2)], faults_of())
    assert not fabric.inject_message(0, 1, wrong.ljust(48, b"\0"))
    assert not fabric.inject_message(0, 1, wrong)  # too short
