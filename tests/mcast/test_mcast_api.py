"""offcore.mcast over UDP on the loopback interface."""

import re
import threading
from typing import Any

import numpy as np
import pytest
from crews import at_once, on_ranks

import offcore
from offcore import mcast
from stores import free_store

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"subgroups": 3, "chains": 2, "receive_workers": 2, "send_workers": 1},
    {"multicast": False},
    {"sealed": True, "spin_us": 0},
    {"gso": False, "gro": False, "datagram_bytes": 1400},
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_operation_of_every_size(ranks: int, options: dict[str, Any]) -> None:
    def body(comm: mcast.Communicator) -> None:
        mine = comm.rank
        for count in (0, 1, 5, 333, 70_001):
            array = np.full(count, 7 + count if mine == ranks - 1 else 0, np.int32)
            comm.broadcast(array, root=ranks - 1).wait()
            assert (array == 7 + count).all()
            out = np.zeros((ranks, count), np.float64)
            comm.all_gather(out, np.full(count, float(mine))).wait(timeout=10)
            assert (out == np.arange(ranks)[:, None]).all()
            out[:] = -1
            out[mine] = mine
            comm.all_gather(out).wait()  # in place
            assert (out == np.arange(ranks)[:, None]).all()
            counts = [count * (rank % 2) + rank for rank in range(ranks)]
            gathered = np.zeros(sum(counts), np.uint16)
            comm.all_gather_v(gathered, np.full(counts[mine], mine, np.uint16), counts).wait()
            assert (gathered == np.repeat(np.arange(ranks), counts)).all()

    on_ranks(ranks, body, **options)


def test_results_say_which_path_ran() -> None:
    def body(comm: mcast.Communicator) -> tuple[mcast.Result, mcast.Result]:
        out = np.zeros((3, 50_000), np.uint8)
        gathered = comm.all_gather(out, np.ones(50_000, np.uint8)).wait()
        return gathered, comm.barrier().wait()

    for gathered, barrier in on_ranks(3, body):
        assert (gathered.op, gathered.ranks, gathered.bytes) == ("all_gather", 3, 150_000)
        assert "multicast" in gathered.path
        assert gathered.datagrams > 0
        # One phase may take none: what was sent may all be there when it begins.
        assert gathered.barrier_us + gathered.multicast_us + gathered.handshake_us > 0
        assert (barrier.op, barrier.bytes, barrier.path) == ("barrier", 0, "none")
    for gathered, _ in on_ranks(3, body, multicast=False):
        assert gathered.path == "ring"
        assert gathered.datagrams == 0
        assert gathered.fetched_chunks > 0
    for gathered, _ in on_ranks(1, body_of_one):
        assert gathered.path == "none"


def body_of_one(comm: mcast.Communicator) -> tuple[mcast.Result, mcast.Result]:
    return comm.all_gather(np.zeros(10), np.ones(10)).wait(), comm.barrier().wait()


def test_operations_queue_up_behind_their_handles() -> None:
    def body(comm: mcast.Communicator) -> bool:
        arrays = [np.full(2000, step if comm.rank == 0 else 255, np.uint8) for step in range(50)]
        handles = [comm.broadcast(array) for array in arrays]
        handles[-1].wait()
        assert all(handle.done() for handle in handles)  # they end in order
        for handle in handles:
            assert handle.wait() is handle.wait()
        return all((array == step).all() for step, array in enumerate(arrays))

    assert on_ranks(3, body) == [True] * 3


def test_two_communicators_at_once_and_their_threads() -> None:
    def body(comm: mcast.Communicator) -> bool:
        whole = np.zeros((2, 300_000), np.uint8)
        for step in range(10):
            comm.all_gather(whole, np.full(300_000, 10 * step + comm.rank, np.uint8)).wait()
            assert (whole == 10 * step + np.arange(2)[:, None]).all()
        return True

    def one() -> Any:
        return on_ranks(2, body, receive_workers=1, send_workers=1)

    assert at_once([one, one]) == [[True] * 2] * 2


def test_a_wait_that_is_too_short_can_be_repeated() -> None:
    late = threading.Event()

    def body(comm: mcast.Communicator) -> str:
        if comm.rank == 1:
            assert late.wait(10)
        handle = comm.barrier()
        code = "none"
        if comm.rank == 0:
            with pytest.raises(offcore.Error, match="it goes on") as caught:
                handle.wait(timeout=0.02)
            code = caught.value.code
            assert not handle.done()
            late.set()
        handle.wait()
        return code

    assert on_ranks(2, body) == ["timeout", "none"]


def test_a_rank_that_leaves_is_an_error_for_the_others() -> None:
    address = free_store()
    codes: list[Any] = [None, None]

    def run(rank: int) -> None:
        comm = mcast.Communicator(address, rank=rank, world_size=2, interface="lo", timeout=10)
        comm.barrier().wait()
        if rank == 1:
            comm.close()
            return
        with pytest.raises(offcore.Error, match="rank 1") as caught:
            comm.barrier().wait()
        codes[0] = caught.value.code
        with pytest.raises(offcore.Error) as caught:
            comm.barrier()
        codes[1] = caught.value.code

    assert at_once([lambda: run(0), lambda: run(1)]) == [None, None]
    assert codes == ["peer", "peer"]


@pytest.mark.parametrize(
    "one", [{"chains": 3}, {"port": 20_001}, {"multicast_group": "239.192.7.7"}], ids=str
)
def test_ranks_must_open_alike(one: dict[str, Any]) -> None:
    address = free_store()

    def open_with(rank: int, options: dict[str, Any]) -> Any:
        return lambda: mcast.Communicator(
            address, rank=rank, world_size=2, interface="lo", timeout=5, **options
        )

    results = at_once([open_with(0, {}), open_with(1, one)])
    assert [getattr(result, "code", None) for result in results] == ["mismatch"] * 2
    assert next(iter(one)) in str(results[0])


def test_wrong_arguments_are_refused_and_harm_nothing() -> None:
    def body(comm: mcast.Communicator) -> None:
        whole = np.zeros((2, 10), np.int32)
        readonly = np.zeros(20, np.int32)
        readonly.flags.writeable = False
        wrong: list[tuple[Any, str]] = [
            (lambda: comm.broadcast(whole, root=2), "root"),
            (lambda: comm.broadcast(whole[:, ::2], root=0), "contiguous"),
            (lambda: comm.broadcast(readonly, root=1 - comm.rank), "read-only"),
            (lambda: comm.broadcast("text"), "array"),
            (lambda: comm.broadcast(np.array([[], {}], object), root=comm.rank), "Python objects"),
            (lambda: comm.all_gather(np.zeros(9, np.uint8), np.zeros(4, np.uint8)), "divide"),
            (lambda: comm.all_gather(whole, np.zeros(9, np.int32)), "inp has 36 bytes"),
            (lambda: comm.all_gather(whole, np.zeros(10, np.float32)), "dtype"),
            (lambda: comm.all_gather_v(whole, whole[0], [10]), "1 counts"),
            (lambda: comm.all_gather_v(whole, whole[0], [10, 11]), "counts make"),
            (lambda: comm.all_gather_v(whole, whole[0], [-1, 21]), "count"),
        ]
        for call, message in wrong:
            with pytest.raises(offcore.Error, match=message) as caught:
                call()
            assert caught.value.code == "invalid"
        comm.barrier().wait()

    on_ranks(2, body)


@pytest.mark.parametrize(
    "options",
    [
        {"chains": 0},
        {"subgroups": 65},
        {"interface": "no-such"},
        {"link_gbitps": 0.0},
        {"timeout": float("inf")},
        {"timeout": -1.0},
        {"silence": float("nan")},
        {"alpha_us": 1e20},
        {"receive_workers": -1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    given = {"interface": "lo", **options}
    with pytest.raises(offcore.Error) as caught:
        mcast.Communicator(free_store(), rank=0, world_size=1, **given)
    assert caught.value.code == "invalid"


def test_metrics_are_prometheus_text() -> None:
    def body(comm: mcast.Communicator) -> tuple[str, dict[str, int]]:
        comm.all_gather(np.zeros(2000, np.uint8), np.ones(1000, np.uint8)).wait()
        return comm.metrics(), comm.counters

    for rank, (text, counters) in enumerate(on_ranks(2, body)):
        values = {}
        for line in text.splitlines():
            if match := re.fullmatch(r'(\w+)\{rank="(\d)"(?:,phase="(\w+)")?\} (\S+)', line):
                assert int(match[2]) == rank
                values[match[1], match[3]] = float(match[4])
            else:
                assert re.fullmatch(r"# (HELP \w+ .+|TYPE \w+ (counter|gauge))", line)
        assert values["offcore_mcast_operations_total", None] == counters["operations"] == 1
        assert values["offcore_mcast_bytes_total", None] == 2000
        assert values["offcore_mcast_sent_bytes_total", None] == 1000
        phase = values["offcore_mcast_phase_seconds_total", "multicast"]
        assert phase == pytest.approx(counters["multicast_ns"] / 1e9)
