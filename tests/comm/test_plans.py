"""What a communicator keeps is bounded, and ranks need not have dropped the same."""

import gc
from typing import Any

import numpy as np
import pytest

import offcore
from oracles import noise
from stores import as_ranks

Comm = offcore.Communicator
MOST = offcore._core.Communicator.plans_max


def knows(comm: Comm, out: Any, counts: list[int]) -> bool:
    places = [(array.ctypes.data, array.nbytes) for array in out]
    return comm._core.knows("all_gather", places, None, counts, "auto")


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_the_plans_used_last_are_kept(backend: str) -> None:
    with offcore.Communicator(backend=backend, ranks=2) as comm:
        out = comm.empty(MOST + 100)
        first = [1, 0]
        comm.all_gather_v(out, None, first).wait()
        for nbytes in range(2, MOST + 50):
            comm.all_gather_v(out, None, [nbytes, 0]).wait()
            if nbytes % 100 == 0:
                comm.all_gather_v(out, None, first).wait()
        assert comm._core.kept == (MOST, 1)
        assert knows(comm, out, first)
        assert knows(comm, out, [MOST, 0])
        assert not knows(comm, out, [2, 0])


def test_what_was_prelaunched_is_kept_for_good() -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        out = comm.empty(MOST + 100)
        how = {"variant": "prelaunch_b2b"}
        comm.all_gather_v(out, None, [1, 0], **how).wait()
        for nbytes in range(2, MOST + 50):
            comm.all_gather_v(out, None, [nbytes, 0]).wait()
        assert comm._core.kept[0] == MOST + 1
        assert comm.all_gather_v(out, None, [1, 0], **how).wait().armed_ahead


def test_an_operation_under_way_outlives_its_plan() -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        out = comm.empty(MOST + 100)
        whole = [noise(2, rank) for rank in range(2)]
        for rank in range(2):
            out[rank][2 * rank : 2 * rank + 2] = whole[rank]
        early = comm.all_gather_v(out, None, [2, 2])
        view = comm.all_gather_view([noise(8, 0), noise(8, 1)])
        others = comm.empty(MOST + 100)
        late = [comm.all_gather_v(others, None, [size, 0]) for size in range(1, MOST + 50)]
        assert early.wait().bytes == 4
        assert all((array[:4] == np.concatenate(whole)).all() for array in out)
        view.wait()
        assert all((array[1] == noise(8, 1)).all() for array in view.out)
        for handle in late:
            handle.wait()


def test_windows_that_are_gone_leave_the_list() -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        kept = comm.empty(8)
        for _ in range(50):
            out = comm.empty(16)
            comm.all_gather(out, [noise(8, 0), noise(8, 1)]).wait()
            del out
            gc.collect()
        assert comm._core.kept[1] <= 3
        comm.all_gather(kept).wait()
        late = comm.empty(16)
        comm.all_gather(late, [noise(8, 2), noise(8, 3)]).wait()
        assert all((array == np.concatenate([noise(8, 2), noise(8, 3)])).all() for array in late)


def test_a_rank_may_have_dropped_what_others_have() -> None:
    """Only the root's outputs change, so only the root drops plans."""

    def work(comm: Comm, rank: int) -> list[int]:
        shared = comm.empty(8)
        room = comm.empty(MOST + 200)

        def gather_all(call: int) -> None:
            comm.all_gather(shared, noise(4, call, rank)).wait()
            assert (shared == np.concatenate([noise(4, call, 0), noise(4, call, 1)])).all()

        gather_all(0)
        for at in range(MOST + 100):
            out = room[at : at + 8] if rank == 0 else None
            comm.gather(out, noise(4, at, rank)).wait()
            if out is not None:
                assert (out == np.concatenate([noise(4, at, 0), noise(4, at, 1)])).all()
        for call in range(1, 4):
            gather_all(call)
        comm.barrier()
        return list(comm._core.kept)

    root, leaf = as_ranks(2, work)
    assert root[0] == MOST
    assert leaf[0] < 10


def test_ranks_that_drop_at_other_times_agree_on_random_sizes() -> None:
    def work(comm: Comm, rank: int) -> None:
        rng = np.random.default_rng(1)
        sizes = rng.integers(1, 2 * MOST, 3 * MOST)
        out = comm.empty(4 * MOST + 200)
        room = comm.empty(600)
        for call, size in enumerate(map(int, sizes)):
            comm.all_gather(out[: 2 * size], np.full(size, (call + rank) % 251, np.uint8)).wait()
            assert out[0] == call % 251
            assert out[2 * size - 1] == (call + 1) % 251
            if call % 7 == 0:  # the root's alone: it drops more than the other rank
                at = (call // 7) % 500
                comm.gather(room[at : at + 8] if rank == 0 else None, noise(4, rank)).wait()
            if call % 5 == 0:
                comm.barrier()

    as_ranks(2, work)


def test_counts_too_long_for_a_record_land_directly() -> None:
    """Ranks compared the places by a text that was cut, and took slots instead."""
    ranks = 6

    def work(comm: Comm, rank: int) -> None:
        counts = np.random.default_rng(2).integers(10_000, 99_999, (ranks, ranks)).tolist()
        out = comm.empty(max(sum(row[to] for row in counts) for to in range(ranks)))
        inp = noise(sum(counts[rank]), rank)
        assert not comm.all_to_all_v(out, inp, counts).wait().staged

    as_ranks(ranks, work)
