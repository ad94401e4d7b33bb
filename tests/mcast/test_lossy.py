"""Whatever the network does to datagrams, every rank ends with the right bytes."""

from itertools import combinations
from typing import Any

import pytest
from fabrics import (
    SECOND,
    Call,
    all_gather,
    broadcast,
    faults_of,
    group_of,
    reduce_scatter,
    run,
    run_once,
)
from hypothesis import given
from hypothesis import strategies as st

from offcore import _core

# Around what a chunk of 100 bytes holds: empty, one byte, odd sizes, just less, exact, just more.
SIZES = [0, 1, 7, 99, 100, 101, 199, 200, 201, 999, 1000, 1001, 2950]

LOSSES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63),
        "loss": st.sampled_from([0, 0, 0.01, 0.1, 0.5, 1]),
        "burst_begin": st.sampled_from([0, 0.02, 0.2]),
        "burst_end": st.sampled_from([0.1, 0.5]),
        "duplicate": st.sampled_from([0, 0.1, 1]),
        "reorder": st.sampled_from([0, 0.1, 0.9]),
        "reorder_ns": st.sampled_from([1_000, 50_000, 5_000_000]),
        "jitter_ns": st.sampled_from([0, 10_000, 3_000_000]),
        "together": st.sampled_from([1, 3, 64]),
        "scatter": st.sampled_from([0, 0.5, 1]),
        "queue_bytes": st.sampled_from([200, 2_000, 65_536]),
        "drain_bytes_s": st.sampled_from([1e6, 1e8]),
    }
)
GROUPS = st.fixed_dictionaries(
    {
        "subgroups": st.integers(1, 4),
        "chains": st.integers(1, 5),
        "multicast": st.sampled_from([True, True, True, False]),
        "sealed": st.booleans(),
        "chunk_bytes": st.sampled_from([1, 7, 64, 100, 1440]),
        "alpha_ns": st.sampled_from([0, 10_000, 1_000_000]),
        "fetch_bytes": st.sampled_from([1, 150, 4096]),
        "fetches_in_flight": st.integers(1, 4),
        "share_bytes": st.sampled_from([64, 2_000, 16 << 20]),
    }
)


@st.composite
def calls(draw: st.DrawFn, ranks: int) -> Call:
    seed = draw(st.integers(0, 1000))
    kind = draw(st.sampled_from(["broadcast", "all_gather", "all_gather_v", "reduce_scatter"]))
    if kind == "broadcast":
        return broadcast(ranks, draw(st.sampled_from(SIZES)), draw(st.integers(0, ranks - 1)), seed)
    if kind == "all_gather":
        return all_gather([draw(st.sampled_from(SIZES))] * ranks, seed)
    sizes = st.lists(st.sampled_from(SIZES), min_size=ranks, max_size=ranks)
    if kind == "reduce_scatter":
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
        return reduce_scatter(draw(sizes), draw(st.sampled_from(["sum", "max"])), dtype, seed)
    return all_gather(draw(sizes), seed)


@given(data=st.data(), ranks=st.integers(1, 9), faults=LOSSES, group=GROUPS)
def test_any_loss_ends_with_the_right_bytes(
    data: st.DataObject, ranks: int, faults: dict[str, Any], group: dict[str, Any]
) -> None:
    made = data.draw(st.lists(calls(ranks), min_size=1, max_size=3))
    slow = data.draw(st.sets(st.integers(0, ranks - 1)))
    fabric = _core.McastSimNetwork([group_of(ranks, **group)], faults_of(**faults))
    for rank in slow:
        fabric.slow(rank)
    for outcome in run(fabric, made, ranks):
        outcome.check_all_right()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["broadcast", "all_gather"])
@pytest.mark.parametrize("chains", [1, 3])
def test_every_loss_of_one_and_two_datagrams(kind: str, chains: int, count: int) -> None:
    """3 ranks, 4 chunks a block, the last one short."""
    ranks, nbytes = 3, 350
    sources = range(ranks) if kind == "all_gather" else [1]
    call = all_gather([nbytes] * ranks) if kind == "all_gather" else broadcast(ranks, nbytes, 1)
    ways = [
        (receiver, source, psn)
        for source in sources
        for receiver in range(ranks)
        for psn in range(4)
        if receiver != source
    ]
    for lost in combinations(ways, count):
        fabric = _core.McastSimNetwork([group_of(ranks, chains=chains)], faults_of())
        for receiver, source, psn in lost:
            fabric.drop(receiver, source, psn)
        outcome = run(fabric, [call], ranks)[0]
        outcome.check_all_right()
        fetched = [report["fetched_chunks"] for report in outcome.reports if report]
        lost_at = [sum(receiver == rank for receiver, _, _ in lost) for rank in range(ranks)]
        assert fetched == lost_at, lost  # what was missing, and nothing else


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13, 188])
def test_without_a_loss_nothing_is_fetched_and_each_byte_is_sent_once(ranks: int) -> None:
    fabric = _core.McastSimNetwork([group_of(ranks, subgroups=2, chains=3)], faults_of())
    run(fabric, [all_gather([777] * ranks)], ranks)[0].check_all_right()
    for rank in range(ranks):
        counters = fabric.counters(rank)
        assert counters["sent_bytes"] == 777
        assert counters["datagrams"] == (ranks - 1) * 8
        assert counters["datagram_bytes"] == (ranks - 1) * 777
        assert counters["fetched_chunks"] == counters["duplicates"] == counters["cutoffs"] == 0


@pytest.mark.parametrize("ranks", [2, 3, 6, 31])
def test_with_multicast_off_everything_goes_through_the_ring(ranks: int) -> None:
    fabric = _core.McastSimNetwork([group_of(ranks, multicast=False)], faults_of())
    run(fabric, [all_gather([2950] * ranks)], ranks)[0].check_all_right()
    for rank in range(ranks):
        counters = fabric.counters(rank)
        assert counters["sent_datagrams"] == counters["datagrams"] == 0
        assert counters["fetched_chunks"] == (ranks - 1) * 30
        assert counters["served_chunks"] == (ranks - 1) * 30  # the ring's load is even


def test_a_deaf_rank_does_not_burden_the_root() -> None:
    """Its left neighbour serves it, not the root (section III-C)."""
    ranks = 6
    fabric = _core.McastSimNetwork([group_of(ranks)], faults_of())
    for psn in range(20):
        fabric.drop(3, 0, psn)
    run(fabric, [broadcast(ranks, 2000)], ranks)[0].check_all_right()
    served = [fabric.counters(rank)["served_chunks"] for rank in range(ranks)]
    assert served == [0, 0, 20, 0, 0, 0]


def test_a_loss_at_all_leaves_goes_down_the_ring() -> None:
    ranks = 6
    fabric = _core.McastSimNetwork([group_of(ranks)], faults_of())
    for rank in range(1, ranks):
        fabric.drop(rank, 0, 7)
    run(fabric, [broadcast(ranks, 2000)], ranks)[0].check_all_right()
    served = [fabric.counters(rank)["served_chunks"] for rank in range(ranks)]
    assert served == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("first_op", [2**32 - 2, 2**63 - 1, 2**64 - 3])
def test_operations_past_the_ends_of_words(first_op: int) -> None:
    calls = [all_gather([250] * 4, seed) for seed in range(6)]
    fabric = _core.McastSimNetwork(
        [group_of(4, first_op=first_op)], faults_of(loss=0.2, duplicate=0.2, reorder=0.3)
    )
    for outcome in run(fabric, calls, 4):
        outcome.check_all_right()


@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 6), loss=st.sampled_from([0, 0.2]))
def test_two_communicators_at_once(seed: int, ranks: int, loss: float) -> None:
    """Their datagrams reach each other's receivers; they differ in the tag alone, or in more."""
    one = group_of(ranks, tag=7)
    other = group_of(ranks, tag=8, subgroups=1 + seed % 3)
    fabric = _core.McastSimNetwork([one, other], faults_of(seed=seed, loss=loss, duplicate=0.1))
    pairs = [(all_gather([999] * ranks, 1), 0), (all_gather([999] * ranks, 2), 1)]
    started = []
    for call, communicator in pairs:
        for rank in range(ranks):
            buffer = call.buffer(rank)
            operation = fabric.submit(
                rank,
                call.kind,
                0,
                buffer.ctypes.data,
                call.counts,
                buffer,
                communicator=communicator,
            )
            started.append((operation, buffer, call))
    assert fabric.run_until(60 * SECOND)
    for operation, buffer, call in started:
        operation.wait(0)
        assert (buffer == call.expected()).all()
    strangers = [fabric.counters(0, communicator)["foreign"] for communicator in (0, 1)]
    assert all(count > 0 for count in strangers) or loss > 0


def test_a_cutoff_that_comes_too_early_waits_while_chunks_come() -> None:
    """The link is ten times slower than the timer believes."""
    fabric = _core.McastSimNetwork(
        [group_of(3, link_bytes_s=1e7, alpha_ns=2_000_000)],
        faults_of(drain_bytes_s=1e6, queue_bytes=1 << 20),
    )
    fabric.slow(1)
    outcome = run(fabric, [broadcast(3, 10_000)], 3)[0]
    outcome.check_all_right()
    report = outcome.reports[1]
    assert report is not None
    assert report["cutoffs"] > 0
    assert report["fetched_chunks"] == 0


def test_where_all_last_chunks_have_come_a_loss_costs_only_the_settling_time() -> None:
    group = {"alpha_ns": SECOND // 10, "settle_ns": 50_000}
    fabric = _core.McastSimNetwork([group_of(3, **group)], faults_of())
    fabric.drop(2, 0, 4)
    outcome = run(fabric, [broadcast(3, 1000)], 3)[0]
    outcome.check_all_right()
    report = outcome.reports[2]
    assert report is not None
    assert report["fetched_chunks"] == report["lost_chunks"] == 1
    assert report["multicast_ns"] < 1_000_000


def test_late_datagrams_answer_requests_that_wait() -> None:
    """Cut off much too early, one chunk asked for at a time: what a rank is asked for reaches it by
    multicast, while all that it asks for itself waits in the same way, around the ring."""
    group = {"chains": 4, "chunk_bytes": 1, "fetch_bytes": 1, "fetches_in_flight": 1, "alpha_ns": 0}
    call = all_gather([99] * 7)
    run_once(7, call, {"loss": 0.1, "seed": 0, "together": 1}, **group).check_all_right()


def test_the_same_seed_is_the_same_run() -> None:
    faults = {"loss": 0.3, "jitter_ns": 20_000, "duplicate": 0.2, "seed": 5}
    one = run_once(5, all_gather([777] * 5), faults)
    assert one.reports == run_once(5, all_gather([777] * 5), faults).reports
    assert one.reports != run_once(5, all_gather([777] * 5), faults | {"seed": 6}).reports
