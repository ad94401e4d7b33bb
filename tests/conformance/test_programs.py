"""Programs as text, on every backend: each verb, in every form, against a byte-by-byte account."""

import time

import numpy as np
import pytest
from targets import Target

import offcore
from offcore import _core
from oracles import Bytes, noise

RANKS = 3
SIZE = 64
HEADER = f"""\
program verbs machine=m ranks={RANKS} variant=v mode=eager protocol=eager native=yes flags=8 span=4
buffer w window {SIZE}
buffer x window {SIZE}
buffer l local {SIZE}
buffer h host {SIZE}
"""

Arrays = dict[str, list[Bytes]]


def program_of(body: str) -> _core.Program:
    return _core.Program.parse(HEADER + body)


def fresh(seed: int = 0) -> Arrays:
    return {
        name: [noise(SIZE, seed, ord(name), rank) for rank in range(1 if name == "h" else RANKS)]
        for name in "wxlh"
    }


def copied(arrays: Arrays) -> Arrays:
    return {name: [array.copy() for array in of_rank] for name, of_rank in arrays.items()}


def run(session: _core.Session, body: str, arrays: Arrays | None = None) -> _core.RunReport:
    """Unverified: these are single verbs, and no rank tells another that it has ended."""
    return session.run(program_of(body), fresh() if arrays is None else arrays, checked=False)


# Name, program, and what it does as (dst, rank, offset, src, rank, offset, bytes), in this order.
Step = tuple[str, int, int, str, int, int, int]
VERBS: dict[str, tuple[str, list[Step]]] = {
    "plain": (
        "queue 0.0\n copy x[1]+3 <- w[0]+7 bytes=11\n",
        [("x", 1, 3, "w", 0, 7, 11)],
    ),
    "to and from the host": (
        """\
queue 1.0
 copy h[host]+0 <- l[1]+1 bytes=9
 fence
 copy l[1]+20 <- h[host]+4 bytes=9
""",
        [("h", 0, 0, "l", 1, 1, 9), ("l", 1, 20, "h", 0, 4, 9)],
    ),
    "pull": (
        "queue 2.0\n copy l[2]+0 <- w[0]+5 bytes=17\n",
        [("l", 2, 0, "w", 0, 5, 17)],
    ),
    "bcst": (
        "queue 1.0\n copy x[2]+5 <- w[1]+9 bytes=7 rows=3 dst_step=rank src_step=0\n",
        [("x", r, 5, "w", 1, 9, 7) for r in (2, 0, 1)],
    ),
    "fan": (
        "queue 1.0\n copy x[2]+5 <- w[1]+9 bytes=7 rows=2 dst_step=rank src_step=7\n",
        [("x", 2, 5, "w", 1, 9, 7), ("x", 0, 5, "w", 1, 16, 7)],
    ),
    "gather by pulling": (
        "queue 0.0\n copy l[0]+1 <- w[1]+2 bytes=5 rows=3 dst_step=6 src_step=rank\n",
        [("l", 0, 1 + 6 * i, "w", (1 + i) % 3, 2, 5) for i in range(3)],
    ),
    "strided both ways": (
        "queue 0.0\n copy x[1]+40 <- w[0]+0 bytes=4 rows=5 dst_step=-9 src_step=12\n",
        [("x", 1, 40 - 9 * i, "w", 0, 12 * i, 4) for i in range(5)],
    ),
    "one byte many times": (
        "queue 0.0\n copy x[1]+0 <- w[0]+63 bytes=1 rows=64 dst_step=1 src_step=0\n",
        [("x", 1, i, "w", 0, 63, 1) for i in range(64)],
    ),
    "rotated through polls": (
        """\
queue 0.0
 copy x[1]+0 <- w[0]+0 bytes=64
 signal flag[1]:2 = 1
queue 1.0
 poll flag[1]:2 >= 1
 copy x[2]+0 <- x[1]+0 bytes=64
 signal flag[2]:2 = 3
queue 2.0
 poll flag[2]:2 >= 2
 copy w[0]+0 <- x[2]+0 bytes=32
""",
        [("x", 1, 0, "w", 0, 0, 64), ("x", 2, 0, "x", 1, 0, 64), ("w", 0, 0, "x", 2, 0, 32)],
    ),
    "strided flags and the caller": (
        """\
queue 0.0
 copy x[1]+8 <- w[0]+0 bytes=8
 signal flag[1]:4 = 1 rows=2 step=rank
queue 1.0
 poll flag[1]:4 >= 1
 copy l[1]+0 <- x[1]+8 bytes=8
 signal flag[1]:5 = 1 rows=2 step=2
queue 1.caller
 poll flag[1]:5 >= 1 rows=2 step=2
 signal flag[host]:0 = 4
queue 2.0
 poll flag[2]:4 >= 1
 poll flag[host]:0 >= 1
 copy w[1]+0 <- w[2]+0 bytes=8
""",
        [("x", 1, 8, "w", 0, 0, 8), ("l", 1, 0, "x", 1, 8, 8), ("w", 1, 0, "w", 2, 0, 8)],
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs(target: Target, verb: str) -> None:
    body, steps = VERBS[verb]
    arrays = fresh()
    expected = copied(arrays)
    for dst, dst_rank, dst_at, src, src_rank, src_at, nbytes in steps:
        data = expected[src][src_rank][src_at : src_at + nbytes].copy()
        expected[dst][dst_rank][dst_at : dst_at + nbytes] = data
    run(target.session(RANKS), body, arrays)
    for name, of_rank in expected.items():
        for rank, data in enumerate(of_rank):
            assert np.array_equal(arrays[name][rank], data), (name, rank)


@pytest.mark.parametrize("rows", ["", " rows=3 dst_step=10 src_step=20"])
def test_swap(target: Target, rows: str) -> None:
    arrays = fresh()
    expected = copied(arrays)
    for i in range(3 if rows else 1):
        one, other = slice(2 + 10 * i, 9 + 10 * i), slice(20 * i, 20 * i + 7)
        ours, theirs = arrays["x"][2][one].copy(), arrays["w"][0][other].copy()
        expected["x"][2][one], expected["w"][0][other] = theirs, ours
    body = f"queue 0.0\n swap x[2]+2 <-> w[0]+0 bytes=7{rows}\n"
    session = target.session(RANKS)
    if not target.swaps:
        with pytest.raises(offcore.Error) as refused:
            run(session, body, arrays)
        assert refused.value.code == "unsupported"
        return
    run(session, body, arrays)
    for name in "wxl":
        assert np.array_equal(arrays[name], expected[name])


def test_timestamps_are_in_order(target: Target) -> None:
    body = """\
queue 0.0
 timestamp 2
 copy x[1]+0 <- w[0]+0 bytes=64
 timestamp 0
 signal flag[1]:0 = 1
queue 1.caller
 poll flag[1]:0 >= 1
 timestamp 3
"""
    report = run(target.session(RANKS), body)
    stamps = report.timestamps_ns
    assert len(stamps) == 4
    assert stamps[1] == -1
    assert 0 <= stamps[2] <= stamps[0] <= report.time_ns
    assert 0 <= stamps[3] <= report.time_ns
    if target.watched:
        assert stamps[0] <= stamps[3]


def test_report(target: Target) -> None:
    """Every command once, in the order of its queue, inside the run; and the phases add up."""
    body, _ = VERBS["strided flags and the caller"]
    program = program_of(body)
    report = run(target.session(RANKS), body)
    assert report.time_ns > 0
    if not target.watched:
        assert report.commands == []
        assert 0 < report.phases.control_ns <= report.time_ns
        return
    places = [(c.queue, c.command) for c in report.commands]
    sizes = [len(commands) for _, _, commands in program.queues]
    assert sorted(places) == [(q, c) for q, size in enumerate(sizes) for c in range(size)]
    last: dict[int, int] = {}
    for time_of in sorted(report.commands, key=lambda c: (c.queue, c.command)):
        assert last.get(time_of.queue, 0) <= time_of.start_ns <= time_of.end_ns <= report.time_ns
        last[time_of.queue] = time_of.end_ns
    assert report.phases.total_ns == pytest.approx(report.time_ns, rel=0.01, abs=2)


EXCHANGES = [
    (variant, staged, entry)
    for variant in ("pcpy", "bcst", "b2b", "fan", "prelaunch_b2b")
    for staged, entry in ((False, True), (True, False), (True, True))
]


@pytest.mark.parametrize(("variant", "staged", "entry"), EXCHANGES)
def test_epochs_wrap(target: Target, variant: str, staged: bool, entry: bool) -> None:
    """Flag values are compared cyclically: nothing happens at 2^31 or 2^32."""
    machine = offcore.machines.load(target.name(4))
    protocol = _core.Protocol(entry=entry, staged=staged)
    program = _core.plan(_core.moves_all_gather([40] * 4), variant, machine, protocol)
    session = target.session(4)
    for epoch in (0, (1 << 31) - 3, (1 << 32) - 3, (1 << 32) - 1):
        if epoch > 1 << 31 and not target.cyclic:
            with pytest.raises(offcore.Error, match="would wrap") as refused:
                session.run(program, {}, repeat=6, epoch=epoch)
            assert refused.value.code == "unsupported"
            continue
        inputs = [noise(40, epoch, rank) for rank in range(4)]
        arrays = {"in": inputs, "out": [np.zeros(160, np.uint8) for _ in range(4)]}
        report = session.run(program, arrays, repeat=6, epoch=epoch)
        assert len(report.times_ns) == 6
        assert all(np.array_equal(out, np.concatenate(inputs)) for out in arrays["out"])


def test_a_wait_that_nobody_ends(target: Target) -> None:
    """A timeout names the queues that did not end and where; the next program runs all the same."""
    stuck = program_of(
        """\
queue 0.0
 copy x[1]+0 <- w[0]+0 bytes=64
 poll flag[0]:7 >= 2
queue 1.0
 copy x[2]+0 <- w[1]+0 bytes=64
queue 2.caller
 poll flag[2]:1 >= 1
"""
    )
    with pytest.raises(offcore.Error) as refused:
        _core.verify(stuck)
    assert refused.value.code == "verify"
    session = target.session(RANKS)
    began = time.monotonic()
    with pytest.raises(offcore.Error) as failed:
        session.run(stuck, fresh(), timeout_s=0.3, checked=False)
    assert time.monotonic() - began < 5
    assert failed.value.code == "timeout"
    message = str(failed.value)
    assert "queue 0.0 at command 1 (poll flag[0]:7 >= 2)" in message
    assert "queue 2.caller at command 0 (poll flag[2]:1 >= 1)" in message
    assert "queue 1.0" not in message
    arrays = fresh()
    run(session, VERBS["plain"][0], arrays)
    assert np.array_equal(arrays["x"][1][3:14], arrays["w"][0][7:18])
