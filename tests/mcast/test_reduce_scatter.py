"""Reduce-scatters: the bits that they give, what they refuse, and that they run beside others."""

from typing import Any

import numpy as np
import pytest
from crews import on_ranks
from fabrics import SECOND, Call, Started, all_gather, faults_of, group_of, reduce_scatter, run

import offcore
from offcore import _core, mcast
from reductions import FLOATS, INTEGERS, OPS, numbers, reduced, stored


def make(ranks: int, faults: dict[str, Any] | None = None, **group: Any) -> _core.McastSimNetwork:
    return _core.McastSimNetwork([group_of(ranks, **group)], faults_of(**(faults or {})))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_dtype_and_operation_gives_the_defined_bits(ranks: int) -> None:
    """Over UDP and TCP; sizes of nothing, of one piece, and of more than are under way at once."""

    def body(comm: mcast.Communicator) -> None:
        for case, (dtype, op) in enumerate((d, o) for d in INTEGERS + FLOATS for o in OPS):
            count = (0, 1, 333, 5_001, 40_001)[(case + case // 5) % 5]
            if (ranks, dtype, op) == (2, "float64", "avg"):
                count = 300_001
            scale = 3.0 if op == "premul_sum" else 1.0
            inputs = [numbers(count * ranks, dtype, rank) for rank in range(ranks)]
            own = slice(comm.rank * count, (comm.rank + 1) * count)
            expected = reduced([one[own] for one in inputs], op, dtype, scale)
            out = np.zeros(count, stored(dtype))
            named = dtype if dtype == "bfloat16" else None
            comm.reduce_scatter(out, inputs[comm.rank], op, scale=scale, dtype=named).wait()
            assert out.tobytes() == expected.tobytes(), (dtype, op)
            mine = inputs[comm.rank].copy()
            result = comm.reduce_scatter(mine[own], mine, op, scale=scale, dtype=named).wait()
            assert mine[own].tobytes() == expected.tobytes(), (dtype, op)  # in place
            assert result.bytes == mine.nbytes
            assert result.path == ("shares" if ranks > 1 and count else "none")
        assert comm.counters["shares"] > 0 or ranks == 1

    on_ranks(ranks, body)


def test_uneven_parts_and_what_is_refused() -> None:
    counts = [0, 5000, 7]

    def body(comm: mcast.Communicator) -> None:
        rank = comm.rank
        inputs = [numbers(sum(counts), "float32", one) for one in range(3)]
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        out = np.zeros(counts[rank], np.float32)
        comm.reduce_scatter_v(out, inputs[rank], counts, "avg").wait()
        expected = reduced([one[own] for one in inputs], "avg", "float32")
        assert out.tobytes() == expected.tobytes()
        inp = np.zeros(6, np.float32)
        for bad, text in (
            (lambda: comm.reduce_scatter(inp[:3], inp), "inp has 24 bytes and out 12, but"),
            (lambda: comm.reduce_scatter(inp[:2].astype(np.int32), inp), "out has dtype int32"),
            (lambda: comm.reduce_scatter(inp[1:3], inp), "out overlaps inp"),
            (lambda: comm.reduce_scatter_v(inp[:2], inp, [2, 2]), "2 counts, but 3 ranks"),
            (lambda: comm.reduce_scatter(np.zeros(2), np.zeros(6), "product"), "unknown reduction"),
            (lambda: comm.reduce_scatter(np.zeros(2), np.zeros(6), scale=2.0), "premul_sum only"),
            (
                lambda: comm.reduce_scatter(np.zeros(2, bool), np.zeros(6, bool)),
                "dtype of a reduction 'bool'",
            ),
        ):
            with pytest.raises(offcore.Error, match=text) as caught:
                bad()
            assert caught.value.code == "invalid"

    on_ranks(3, body)


@pytest.mark.needs("torch")
def test_tensors_of_torch() -> None:
    import torch

    def body(comm: mcast.Communicator) -> bool:
        inp = torch.arange(6, dtype=torch.bfloat16) + comm.rank
        out = torch.zeros(3, dtype=torch.bfloat16)
        comm.reduce_scatter(out, inp, "max").wait()
        return bool((out == torch.arange(6)[3 * comm.rank :][:3] + 1).all())

    assert on_ranks(2, body) == [True, True]


def test_gathers_and_reductions_run_beside_each_other() -> None:
    """In each sequence calls keep their order; which sequence is called first may differ."""
    fabric = make(3, {"loss": 0.1})
    gather, reduction = all_gather([2000] * 3), reduce_scatter([900] * 3)
    late = 2
    buffers: dict[tuple[int, str], Any] = {}
    operations = {}

    def enter(rank: int, call: Call) -> None:
        out, inp = call.buffer(rank), call.input(rank)
        buffers[rank, call.kind] = (out, inp)
        at = inp.ctypes.data if call.reduction else 0
        operations[rank, call.kind] = fabric.submit(
            rank, call.kind, 0, out.ctypes.data, call.counts, out, inp=at, reduction=call.reduction
        )

    for rank in (0, 1, 2):
        if rank != late:
            enter(rank, gather)  # which cannot end yet
        enter(rank, reduction)
    fabric.run_until(SECOND // 10)
    for rank in range(3):
        assert operations[rank, "reduce_scatter"].wait(0)["shares"] == 2
        assert rank == late or not operations[rank, "all_gather"].ended
    enter(late, gather)
    assert fabric.run_until(SECOND)
    for (rank, kind), operation in operations.items():
        operation.wait(0)
        call = gather if kind == "all_gather" else reduction
        assert (buffers[rank, kind][0] == call.expected(rank)).all()


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_each_rank_sends_and_receives_its_shares_once(ranks: int) -> None:
    fabric = make(ranks, share_bytes=64 * 4 * (ranks - 1) * 3)
    for outcome in run(fabric, [reduce_scatter([480] * ranks)] * 2, ranks):
        outcome.check_all_right()
        assert {report["shares"] for report in outcome.reports if report} == {10 * (ranks - 1)}


def test_a_dead_rank_ends_both_sequences() -> None:
    fabric = make(4)
    started = [Started(fabric, call, 4) for call in (all_gather([90_000] * 4),) * 2]
    started += [Started(fabric, reduce_scatter([90_000] * 4), 4)]
    fabric.run_until(50_000)
    fabric.kill(3, 0, 1000)
    assert fabric.run_until(10 * SECOND)
    for one in started:
        assert one.outcome().errors[:3] == ["peer"] * 3


def test_nobody_waits_longer_than_the_timeout() -> None:
    fabric = make(3)
    call = reduce_scatter([100] * 3)
    out, inp = call.buffer(0), call.input(0)
    alone = fabric.submit(
        0, call.kind, 0, out.ctypes.data, call.counts, out, inp=inp.ctypes.data,
        reduction=call.reduction,
    )  # fmt: skip
    assert fabric.run_until(9 * SECOND)
    text = r"a reduce-scatter \(sum of float32\) of 1200 bytes, phase barrier, waiting for rank"
    with pytest.raises(_core.Error, match=text) as caught:
        alone.wait(0)
    assert caught.value.code == "timeout"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (reduce_scatter([100, 100, 101]), "(sum of float32) of 1204 bytes"),
        (reduce_scatter([100, 101, 99]), "(sum of float32) of 1200 bytes"),
        (reduce_scatter([100] * 3, "max"), "(max of float32) of 1200 bytes"),
        (reduce_scatter([100] * 3, dtype="int32"), "(sum of int32) of 1200 bytes"),
        (reduce_scatter([100] * 3, dtype="float64"), "(sum of float64) of 2400 bytes"),
    ],
    ids=["larger", "elsewhere", "operation", "dtype", "wider"],
)
def test_ranks_that_disagree_are_told_how(other: Call, named: str) -> None:
    fabric = make(3)
    same = reduce_scatter([100] * 3)
    operations, kept = [], []
    for rank, call in enumerate([same, other, same]):
        out, inp = call.buffer(rank), call.input(rank)
        kept += [out, inp]
        operations.append(
            fabric.submit(
                rank, call.kind, 0, out.ctypes.data, call.counts, out, inp=inp.ctypes.data,
                reduction=call.reduction,
            )
        )  # fmt: skip
    assert fabric.run_until(10 * SECOND)
    texts = []
    for operation in operations:
        with pytest.raises(_core.Error) as caught:
            operation.wait(0)
        assert caught.value.code == "mismatch"
        texts.append(str(caught.value))
    assert any("of rank 1 is a reduce-scatter " + named in text for text in texts), texts
