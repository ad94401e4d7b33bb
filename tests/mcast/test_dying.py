"""Dead, cut off, silent, disagreeing ranks: every operation ends in bounded time, with the right
bytes or with an error."""

from typing import Any

import pytest
from fabrics import (
    SECOND,
    Call,
    Outcome,
    Started,
    all_gather,
    broadcast,
    faults_of,
    group_of,
    reduce_scatter,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from test_lossy import GROUPS, LOSSES, calls

from offcore import _core

FOREVER = (1 << 63) - 1


def make(ranks: int, faults: dict[str, Any] | None = None, **group: Any) -> _core.McastSimNetwork:
    return _core.McastSimNetwork([group_of(ranks, **group)], faults_of(**(faults or {})))


@pytest.mark.parametrize("told_ns", [-1, 20_000], ids=["silently", "with a reset"])
@pytest.mark.parametrize(
    ("call", "group"),
    [
        (broadcast(5, 950, root=2), {}),
        (all_gather([350] * 5), {"chains": 2, "subgroups": 2}),
        (all_gather([350] * 5), {"multicast": False}),
        (reduce_scatter([60] * 5, dtype="bfloat16"), {"share_bytes": 1024}),
    ],
    ids=["broadcast", "all-gather", "ring", "reduce-scatter"],
)
def test_a_rank_killed_at_every_step(call: Call, group: dict[str, Any], told_ns: int) -> None:
    ranks, lossy = 5, {"loss": 0.2, "seed": 3}
    whole = make(ranks, lossy, **group)
    run(whole, [call], ranks)[0].check_all_right()
    for victim in range(ranks):
        ends = set()
        for step in range(whole.calls(victim) + 1):
            fabric = make(ranks, lossy, **group)
            fabric.kill(victim, step, told_ns)
            started = Started(fabric, call, ranks)
            assert fabric.run_until(10 * SECOND)
            outcome = started.outcome()
            outcome.check_bytes_or_error({victim} if fabric.dead(victim) else set())
            others = {outcome.errors[rank] for rank in range(ranks) if rank != victim}
            assert others <= {None, "peer"}
            ends |= others
        assert ends == {None, "peer"}  # early and late enough


@given(data=st.data(), ranks=st.integers(1, 7), faults=LOSSES, group=GROUPS)
def test_anything_at_all_ends_with_bytes_or_an_error(
    data: st.DataObject, ranks: int, faults: dict[str, Any], group: dict[str, Any]
) -> None:
    made = data.draw(st.lists(calls(ranks), min_size=1, max_size=3))
    some = st.sets(st.integers(0, ranks - 1), max_size=3)
    fabric = make(ranks, faults, **group)
    for rank in data.draw(some, "slow"):
        fabric.slow(rank)
    for rank in data.draw(some, "killed"):
        fabric.kill(rank, data.draw(st.integers(0, 200)), data.draw(st.sampled_from([-1, 10_000])))
    for _ in range(data.draw(st.integers(0, 2), "cuts")):
        since = data.draw(st.integers(0, 5_000_000))
        until = data.draw(st.sampled_from([since + 1_000_000, since + SECOND // 10, FOREVER]))
        fabric.cut(data.draw(some), since, until, data.draw(st.booleans()))
    dead = set()
    for outcome in run(fabric, made, ranks, limit_s=30):
        dead |= {rank for rank in range(ranks) if fabric.dead(rank)}
        outcome.check_bytes_or_error(dead)


@pytest.mark.parametrize("from_ns", [0, 10_000, 30_000, 60_000])
def test_a_partition_that_heals_in_time_costs_only_time(from_ns: int) -> None:
    fabric = make(6, chains=2)
    fabric.cut({0, 1, 2}, from_ns, SECOND // 10, True)
    run(fabric, [all_gather([777] * 6)], 6)[0].check_all_right()


def test_a_partition_that_does_not_heal_is_an_error_on_both_sides() -> None:
    fabric = make(6, chains=2)
    fabric.cut({0, 1, 2}, 30_000, FOREVER, True)
    outcome = run(fabric, [all_gather([9777] * 6)], 6)[0]
    assert set(outcome.errors) <= {"peer", "timeout"}
    assert fabric.now_ns < 3 * SECOND


def test_where_only_multicast_is_cut_the_ring_carries_on() -> None:
    fabric = make(6)
    fabric.cut({0, 1, 2}, 0, FOREVER, False)
    outcome = run(fabric, [all_gather([777] * 6)], 6)[0]
    outcome.check_all_right()
    assert all(report and report["fetched_chunks"] == 24 for report in outcome.reports)


def test_a_rank_that_comes_late_is_waited_for_and_one_that_never_comes_is_a_timeout() -> None:
    """Slow is no death: its control thread answers."""
    call = all_gather([100] * 3)
    fabric = make(3)
    buffers = [call.buffer(rank) for rank in range(3)]

    def enter(rank: int) -> _core.McastOperation:
        place = buffers[rank].ctypes.data
        return fabric.submit(rank, call.kind, 0, place, call.counts, buffers[rank])

    early = [enter(0), enter(1)]
    assert not fabric.run_until(SECOND)  # five times what a silent rank gets
    assert not any(operation.ended for operation in early)
    late = enter(2)
    assert fabric.run_until(2 * SECOND)
    assert all(operation.ended for operation in [*early, late])
    assert all((buffer == call.expected()).all() for buffer in buffers)
    alone = enter(1)
    assert fabric.run_until(9 * SECOND)
    with pytest.raises(_core.Error, match="phase barrier, waiting for rank") as caught:
        alone.wait(0)
    assert caught.value.code == "timeout"


@pytest.mark.parametrize(
    "other",
    [all_gather([100, 100, 101]), all_gather([100, 101, 100]), broadcast(3, 300, root=0)],
    ids=["larger", "elsewhere", "another operation"],
)
def test_ranks_that_disagree_are_told(other: Call) -> None:
    fabric = make(3)
    same = all_gather([100] * 3)
    operations = []
    buffers = []
    for rank, call in enumerate([same, same, other]):
        buffers.append(call.buffer(rank))
        place = buffers[-1].ctypes.data
        operations.append(fabric.submit(rank, call.kind, call.root, place, call.counts, buffers))
    assert fabric.run_until(10 * SECOND)
    for operation in operations:
        with pytest.raises(_core.Error) as caught:
            operation.wait(0)
        assert caught.value.code == "mismatch"


def outcomes_after(fabric: _core.McastSimNetwork, call: Call, ranks: int) -> Outcome:
    return run(fabric, [call], ranks)[0]


def test_after_an_error_nothing_can_be_submitted() -> None:
    fabric = make(4)
    fabric.kill(3, 0, 1000)
    assert outcomes_after(fabric, all_gather([100] * 4), 4).errors[:3] == ["peer"] * 3
    buffer = bytearray(100)
    with pytest.raises(_core.Error, match="rank 3") as caught:
        fabric.submit(0, "broadcast", 0, 0, [0] * 4, buffer)
    assert caught.value.code == "peer"


def test_closing_cancels_what_runs_and_tells_the_peers() -> None:
    fabric = make(3)
    started = Started(fabric, broadcast(3, 50_000), 3)
    fabric.run_until(50_000)
    fabric.close(1)
    assert fabric.run_until(SECOND)
    assert started.outcome().errors == ["peer", "cancelled", "peer"]


def test_a_rank_that_has_closed_is_missed_by_those_that_go_on() -> None:
    fabric = make(3)
    outcomes_after(fabric, broadcast(3, 500), 3).check_all_right()
    fabric.close(2)
    assert fabric.run_until(SECOND)
    outcome = outcomes_after(fabric, broadcast(3, 500), 3)
    assert outcome.errors == ["peer", "peer", "cancelled"]
    assert fabric.now_ns < SECOND + 1_000_000  # at once


def test_ranks_may_close_as_soon_as_they_have_done() -> None:
    """Whoever still runs needs nothing of a rank that has ended well."""
    for ranks in (2, 3, 5, 8):
        fabric = make(ranks, {"loss": 0.3})
        started = Started(fabric, all_gather([450] * ranks), ranks)
        closed: set[int] = set()
        while len(closed) < ranks:
            fabric.run_until(fabric.now_ns + 1000)
            ended = {rank for rank in range(ranks) if started.ended(rank)}
            for rank in ended - closed:
                fabric.close(rank)
            closed |= ended
            assert fabric.now_ns < SECOND
        started.outcome().check_all_right()


@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": 0},
        {"rank": 3},
        {"chunk_bytes": 0},
        {"chunk_bytes": 65_001},
        {"subgroups": 0},
        {"subgroups": 65},
        {"chains": 0},
        {"fetch_bytes": 0},
        {"fetches_in_flight": 0},
        {"link_bytes_s": 0.0},
        {"link_bytes_s": float("nan")},
        {"timeout_ns": 0},
        {"silence_ns": 0},
        {"alpha_ns": -1},
    ],
    ids=str,
)
def test_a_group_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    group = group_of(2)
    for name, value in settings.items():
        setattr(group, name, value)
    with pytest.raises(_core.Error) as caught:
        group.check()
    assert caught.value.code == "invalid"
