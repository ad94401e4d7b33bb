"""Ranks that have no part in a side of an operation: None there, whatever the others pass."""

from typing import Any

import numpy as np
import pytest

import offcore
from oracles import noise
from stores import as_ranks

RANKS = 3
Comm = offcore.Communicator


def source(seed: int, nbytes: int = 12) -> Any:
    return noise(nbytes, seed)


def root_only(comm: Comm, rank: int, root: int, value: Any) -> Any:
    return value if rank == root else None


@pytest.mark.parametrize("absent", [None, [None]])
@pytest.mark.parametrize("place", ["window", "array"])
def test_a_scatter_needs_no_input_on_leaves(absent: Any, place: str) -> None:
    def work(comm: Comm, rank: int) -> None:
        out = comm.empty(4) if place == "window" else np.zeros(4, np.uint8)
        for call, root in enumerate((0, 0, 2, 0)):
            whole = source(call)
            result = comm.scatter(out, whole if rank == root else absent, root=root).wait()
            assert (out == whole[4 * rank : 4 * rank + 4]).all()
            assert not result.in_place

    as_ranks(RANKS, work)


def test_a_scatter_of_uneven_parts_needs_no_input_on_leaves() -> None:
    def work(comm: Comm, rank: int) -> None:
        counts = [1, 0, 5]
        out, whole = np.zeros(5, np.uint8), source(1, 6)
        comm.scatter_v(out, whole if rank == 1 else None, counts, root=1).wait()
        begin = sum(counts[:rank])
        assert (out[: counts[rank]] == whole[begin : begin + counts[rank]]).all()

    as_ranks(RANKS, work)


def test_the_root_of_a_scatter_needs_an_input() -> None:
    def work(comm: Comm, rank: int) -> None:
        if rank == 0:
            with pytest.raises(offcore.Error, match="pass an input and an output") as failed:
                comm.scatter(np.zeros(4, np.uint8), None)
            assert failed.value.code == "unsupported"

    as_ranks(2, work)


FORMS = ["in", "out", "in", "out", "out", "in"]


@pytest.mark.parametrize("variant", ["auto", "pcpy", "bcst", "b2b", "fan"])
@pytest.mark.parametrize("place", ["window", "array"])
@pytest.mark.parametrize("nbytes", [12, 5 << 20])
def test_a_broadcast_needs_no_input_on_leaves(variant: str, place: str, nbytes: int) -> None:
    """The root changes between in place and not: its leaves, which pass nothing, cannot tell."""

    def work(comm: Comm, rank: int) -> None:
        out = comm.empty(nbytes) if place == "window" else np.zeros(nbytes, np.uint8)
        for call, form in enumerate(FORMS):
            whole = source(call, nbytes)
            inp = None
            if rank == 1:
                out[:] = whole if form == "in" else 0
                inp = None if form == "in" else whole
            comm.broadcast(out, inp, root=1, variant=variant).wait()
            assert (out == whole).all()
            comm.barrier()

    as_ranks(RANKS, work)


@pytest.mark.parametrize("given", [True, False])
def test_an_input_on_the_leaves_of_a_broadcast_is_ignored(given: bool) -> None:
    def work(comm: Comm, rank: int) -> None:
        out = comm.empty(12)
        for call in range(3):
            whole = source(call)
            inp = whole if rank == 0 or given else out[3:9]
            comm.broadcast(out, inp).wait()
            assert (out == whole).all()
            comm.barrier()

    as_ranks(RANKS, work)


@pytest.mark.parametrize("how", [{"variant": "prelaunch_b2b"}, {"protocol": "credits"}])
def test_a_prelaunched_broadcast_keeps_the_form_that_its_leaves_saw(how: dict[str, str]) -> None:
    """Either form works; a root that changes it under leaves that pass nothing is told so."""

    def work(comm: Comm, rank: int) -> str:
        one, two = comm.empty(12), comm.empty(12)
        for call in range(4):
            for out, form in ((one, "in"), (two, "out")):
                whole = source(call)
                if form == "in" and rank == 0:
                    out[:] = whole
                inp = whole if form == "out" and rank == 0 else None
                comm.broadcast(out, inp, **how).wait()
                assert (out == whole).all()
                comm.barrier()
        try:
            comm.broadcast(one, source(9) if rank == 0 else None, **how).wait()
        except offcore.Error as error:
            return f"{error.code}: {error}"
        return ""

    errors = as_ranks(2, work, timeout=5)
    assert errors[0].startswith("mismatch")
    assert "pass an input on all ranks or on none" in errors[0]
    assert errors[1].startswith(("mismatch", "peer")), errors


@pytest.mark.parametrize("how", [{"variant": "prelaunch_b2b"}, {"protocol": "credits"}])
def test_a_prelaunched_broadcast_has_both_forms_where_all_ranks_name_one(
    how: dict[str, str],
) -> None:
    def work(comm: Comm, rank: int) -> None:
        out = comm.empty(12)
        for call in range(6):
            whole = source(call)
            if call % 2 == 0 and rank == 0:
                out[:] = whole
            comm.broadcast(out, None if call % 2 == 0 else whole, **how).wait()
            assert (out == whole).all()
            comm.barrier()

    as_ranks(2, work)


@pytest.mark.parametrize("variant", ["auto", "prelaunch_pcpy"])
def test_a_gather_whose_root_has_another_output_each_time(variant: str) -> None:
    def work(comm: Comm, rank: int) -> None:
        windows = [comm.empty(12) for _ in range(3)]
        arrays = [np.zeros(12, np.uint8) for _ in range(2)]
        for call, out in enumerate([windows[0], arrays[0], *windows, *arrays, windows[0]]):
            inp = source(10 * call + rank, 4)
            comm.gather(root_only(comm, rank, 2, out), inp, root=2, variant=variant).wait()
            if rank == 2:
                expected = np.concatenate([source(10 * call + peer, 4) for peer in range(RANKS)])
                assert (out == expected).all()

    as_ranks(RANKS, work)


@pytest.mark.parametrize("empty", ["view", "array", "none"])
@pytest.mark.parametrize("place", ["window", "array"])
@pytest.mark.parametrize("variant", ["auto", "pcpy", "b2b", "fan", "prelaunch_b2b"])
def test_an_in_place_all_gather_to_which_a_rank_adds_nothing(
    empty: str, place: str, variant: str
) -> None:
    counts = [4, 0, 3]

    def work(comm: Comm, rank: int) -> None:
        out = comm.empty(7) if place == "window" else np.zeros(7, np.uint8)
        begin = sum(counts[:rank])
        for call in range(3):
            out[:] = 0
            own = out[begin : begin + counts[rank]]
            own[:] = 10 * call + rank + 1
            inp: Any = own
            if counts[rank] == 0 and empty != "view":
                inp = np.zeros(0, np.uint8) if empty == "array" else None
            comm.barrier()
            comm.all_gather_v(out, inp, counts, variant=variant).wait()
            assert out.tolist() == [10 * call + 1] * 4 + [10 * call + 3] * 3
            comm.barrier()

    as_ranks(RANKS, work)


def test_an_in_place_all_gather_of_one_process_with_an_empty_part() -> None:
    counts = [4, 0, 3]
    with offcore.Communicator(backend="host", ranks=3) as comm:
        out = comm.empty(7)
        parts = [out[0][:4], out[1][4:4], out[2][4:]]
        for rank, part in enumerate(parts):
            part[:] = rank + 1
        result = comm.all_gather_v(out, parts, counts).wait()
        assert result.in_place
        assert all(whole.tolist() == [1, 1, 1, 1, 3, 3, 3] for whole in out)


def test_one_process_may_leave_out_the_inputs_of_leaves() -> None:
    with offcore.Communicator(backend="host", ranks=3) as comm:
        out = comm.empty(4)
        whole = source(1)
        comm.scatter(out, [None, whole, None], root=1).wait()
        assert all((out[rank] == whole[4 * rank : 4 * rank + 4]).all() for rank in range(3))
        comm.broadcast(out, [None, whole[:4], None], root=1).wait()
        assert all((part == whole[:4]).all() for part in out)
        out[2][:] = 7
        assert comm.broadcast(out, [whole[:4], None, None], root=2).wait().in_place
        assert all((part == 7).all() for part in out)
