"""Faults by seed: each shows, none corrupts or hangs, and errors say where a launch stands."""

import numpy as np
import pytest

import offcore
from offcore import _core, machines
from random_faults import random_fault

RANKS = 4
CHUNK = 4096
PROMISE = _core.Protocol(entry=False)


def gather(variant: str = "pcpy") -> _core.Program:
    moves = _core.moves_all_gather([CHUNK] * RANKS)
    return _core.plan(moves, variant, machines.load("mi300x-8"), PROMISE)


def run(
    *faults: _core.Fault, variant: str = "pcpy", seed: int = 0, repeat: int = 1
) -> tuple[object, int]:
    """An all-gather under these faults: its report and the number of wrong bytes."""
    sent = [np.full(CHUNK, rank + 1, np.uint8) for rank in range(RANKS)]
    out = [np.zeros(CHUNK * RANKS, np.uint8) for _ in range(RANKS)]
    session = _core.Session("sim", machines.load("mi300x-8"), RANKS, seed=seed, faults=list(faults))
    report = session.run(gather(variant), {"in": sent, "out": out}, repeat=repeat)
    want = np.concatenate(sent)
    return report, sum(int((data != want).sum()) for data in out)


def test_slow_engine_slows_and_stays_right() -> None:
    healthy, _ = run(variant="b2b")
    slow, wrong = run(_core.Fault("slow_engine", rank=1, queue=0, factor=10), variant="b2b")
    assert wrong == 0
    assert slow.time_ns > 2 * healthy.time_ns


def test_late_signal_delays_and_stays_right() -> None:
    healthy, _ = run(variant="b2b")
    late, wrong = run(_core.Fault("late_signal", rank=3, queue=0, ns=1_000_000), variant="b2b")
    assert wrong == 0
    assert late.time_ns > 1_000_000
    assert late.time_ns - healthy.time_ns <= 1_000_000


def test_late_signal_of_a_later_launch() -> None:
    fault = _core.Fault("late_signal", rank=3, queue=0, nth=2, ns=1_000_000)
    late, _ = run(fault, variant="b2b", repeat=4)
    assert [time > 1_000_000 for time in late.times_ns] == [False, False, True, False]


def test_lost_signal_is_a_timeout_that_names_queue_and_command() -> None:
    with pytest.raises(offcore.Error) as raised:
        run(_core.Fault("lost_signal", rank=2, queue=0))
    assert raised.value.code == "timeout"
    assert "stuck: queue " in str(raised.value)
    assert ".caller at command " in str(raised.value)
    assert "(poll flag[host]:" in str(raised.value)


def test_lost_start_word_leaves_armed_queues_at_their_poll() -> None:
    with pytest.raises(offcore.Error) as raised:
        run(_core.Fault("lost_signal", rank=0, queue="caller"), variant="prelaunch_b2b")
    assert raised.value.code == "timeout"
    assert "queue 0.0 at command 0 (poll flag[host]:" in str(raised.value)


def test_flipped_byte_is_one_wrong_byte() -> None:
    for seed in range(10):
        _, wrong = run(_core.Fault("flipped_byte", rank=1, queue=1), seed=seed)
        assert wrong == 1


@pytest.mark.parametrize("at_ns", [0, 1000, 5000, 9000])
def test_dead_rank_is_named_to_all(at_ns: int) -> None:
    with pytest.raises(offcore.Error) as raised:
        run(_core.Fault("dead_rank", rank=2, ns=at_ns))
    assert raised.value.code == "peer"
    assert "rank 2 is dead" in str(raised.value)
    assert "queue 2." in str(raised.value)


def test_dead_rank_after_the_end_strikes_the_next_launch() -> None:
    healthy, _ = run()
    fault = _core.Fault("dead_rank", rank=2, ns=healthy.time_ns + 1)
    assert run(fault)[1] == 0
    with pytest.raises(offcore.Error) as raised:
        run(fault, repeat=2)
    assert raised.value.code == "peer"


def test_random_faults_never_pass_unseen_nor_corrupt_otherwise() -> None:
    healthy = {variant: run(variant=variant)[0].time_ns for variant in ("pcpy", "prelaunch_b2b")}
    kinds = set()
    for seed in range(60):
        variant = ("pcpy", "prelaunch_b2b")[seed % 2]
        fault = _core.Fault(**random_fault(seed, gather(variant)))
        kinds.add(fault.kind)
        if fault.kind == "lost_signal" or fault.kind == "dead_rank":
            # A rank may die after it has done its part; then the next launch notices.
            with pytest.raises(offcore.Error) as raised:
                run(fault, variant=variant, seed=seed, repeat=8)
            code = "timeout" if fault.kind == "lost_signal" else "peer"
            assert raised.value.code == code, repr(fault)
            continue
        report, wrong = run(fault, variant=variant, seed=seed)
        assert wrong == (1 if fault.kind == "flipped_byte" else 0), repr(fault)
        if fault.kind == "slow_engine":
            assert report.time_ns >= healthy[variant]
    assert kinds == {"slow_engine", "late_signal", "lost_signal", "flipped_byte", "dead_rank"}


def test_deadlock_is_a_timeout_not_a_hang() -> None:
    program = _core.Program.parse(
        "program test machine=m ranks=2 variant=v mode=eager protocol=promise native=yes "
        "flags=2 span=1\n"
        "queue 0.0\n  poll flag[0]:0 >= 1\n  signal flag[1]:0 = 1\n"
        "queue 1.0\n  poll flag[1]:0 >= 1\n  signal flag[0]:0 = 1\n"
    )
    session = _core.Session("sim", machines.load("h200-2"), 2)
    with pytest.raises(offcore.Error) as raised:
        session.run(program, checked=False)
    assert raised.value.code == "timeout"
    assert "queue 0.0 at command 0 (poll flag[0]:0 >= 1)" in str(raised.value)
    assert "queue 1.0 at command 0 (poll flag[1]:0 >= 1)" in str(raised.value)
    with pytest.raises(offcore.Error) as unplanned:
        _core.estimate(program, machines.load("h200-2"))
    assert unplanned.value.code == "verify"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _core.Fault("gone"), "unknown fault 'gone': known are slow_engine"),
        (lambda: _core.Fault("lost_signal", queue="all"), 'a number or "caller"'),
        (lambda: run(_core.Fault("dead_rank", rank=9)), "no such rank"),
        (lambda: run(_core.Fault("slow_engine", factor=0)), "factor must be above 0"),
        (lambda: run(_core.Fault("late_signal", ns=-1)), "ns not below"),
    ],
)
def test_bad_faults(make: object, message: str) -> None:
    with pytest.raises(offcore.Error) as raised:
        make()
    assert raised.value.code == "invalid"
    assert message in str(raised.value)
