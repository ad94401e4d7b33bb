"""all_to_all_v whose counts only the ranks' own processors know, on backend host."""

import signal
from typing import Any

import numpy as np
import pytest
from test_requests import start

import offcore
from stores import free_store

RANKS, ROW = 3, 40


def opened(comm: Any, rows: int, kind: str = "int64") -> tuple[list[Any], ...]:
    made = [comm.empty((rows, ROW)) for _ in range(2)]
    counts, received = ([np.zeros(RANKS, kind) for _ in range(RANKS)] for _ in range(2))
    return (*made, counts, received)


def expected(matrix: Any, inputs: list[Any], rank: int) -> Any:
    parts = []
    for source in range(RANKS):
        at = int(matrix[source][:rank].sum())
        parts.append(inputs[source][at : at + int(matrix[source][rank])])
    return np.concatenate(parts)


@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_counts_that_change_with_every_call(kind: str) -> None:
    rng = np.random.default_rng(5)
    with offcore.Communicator(backend="host", ranks=RANKS) as comm:
        out, inp, counts, received = opened(comm, 96, kind)
        for turn in range(40):
            matrix = rng.integers(0, 32, (RANKS, RANKS)) * (rng.random((RANKS, RANKS)) < 0.7)
            for rank in range(RANKS):
                counts[rank][:] = matrix[rank]
                inp[rank][:] = rng.integers(0, 256, inp[rank].shape, "uint8")
                out[rank][:] = 0
            told = None if turn % 4 == 3 else received
            handle = comm.all_to_all_v(out, inp, counts, counts_on_device=True, received=told)
            handle.wait()
            assert handle.done()
            for rank in range(RANKS):
                wanted = expected(matrix, inp, rank)
                np.testing.assert_array_equal(out[rank][: len(wanted)], wanted)
                assert (out[rank][len(wanted) :] == 0).all()
                if told is not None:
                    assert (received[rank] == matrix[:, rank]).all()


@pytest.mark.parametrize("row", [[0, 90, 7], [90, 0, 0], [1 << 62, 1 << 62, 1 << 62]])
def test_counts_without_room(row: list[int]) -> None:
    """Told on all ranks, nothing is sent, and the next call works."""
    with offcore.Communicator(backend="host", ranks=RANKS) as comm:
        out, inp, counts, _ = opened(comm, 96)
        counts[2][:] = row
        for rank in range(RANKS):
            counts[rank][0] += 10
            inp[rank][:] = rank + 1
        handle = comm.all_to_all_v(out, inp, counts, counts_on_device=True)
        with pytest.raises(offcore.Error, match="nothing was sent") as told:
            handle.wait()
        assert told.value.code == "invalid"
        for rank in range(RANKS):
            assert not out[rank].any()
            counts[rank][:] = 1
        comm.all_to_all_v(out, inp, counts, counts_on_device=True).wait()
        for rank in range(RANKS):
            assert out[rank][:3, 0].tolist() == [1, 2, 3]


def test_what_is_refused() -> None:
    with offcore.Communicator(backend="host", ranks=RANKS) as comm:
        out, inp, counts, _ = opened(comm, 96)

        def refusal(code: str, *args: Any, **named: Any) -> str:
            with pytest.raises(offcore.Error) as refused:
                comm.all_to_all_v(*args, counts_on_device=True, **named)
            assert refused.value.code == code
            return str(refused.value)

        plain = [np.zeros((96, ROW), "uint8") for _ in range(RANKS)]
        assert "lies in no window" in refusal("invalid", plain, inp, counts)
        assert "overlap" in refusal("invalid", out, out, counts)
        assert "int32 or int64" in refusal("invalid", out, inp, [c.astype("int16") for c in counts])
        assert "one for each rank" in refusal("invalid", out, inp, [c[:2] for c in counts])
        narrow = [c.astype("int32") for c in counts]
        assert "int32 or int64" in refusal("invalid", out, inp, counts, received=narrow)
        short = [c[:2] for c in counts]
        assert "one for each rank" in refusal("invalid", out, inp, counts, received=short)
        assert not comm._exchanges  # what is refused here opens nothing, which is collective
    with offcore.Communicator(backend="sim", ranks=RANKS) as comm:
        out, inp, counts, _ = opened(comm, 96)
        assert "no engine" in refusal("unsupported", out, inp, counts)


def test_ranks_of_other_processes() -> None:
    store = free_store()
    group = [start(rank, store, "counts") for rank in range(3)]
    assert [rank.communicate(timeout=60)[0] for rank in group] == ["right\n"] * 3


def test_a_peer_is_killed() -> None:
    store = free_store()
    group = [start(rank, store, "alone") for rank in range(2)]
    assert group[1].stdout is not None
    assert group[1].stdout.readline() == "ready\n"
    group[1].send_signal(signal.SIGKILL)
    assert group[0].communicate(timeout=60)[0] == "ready\npeer, then peer\n"
    group[1].communicate()
