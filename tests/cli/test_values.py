"""What a benchmark of reductions fills in and expects: checked here against another definition."""

import numpy as np
import pytest

import offcore
from offcore.tools.bench.layout import Layout
from offcore.tools.bench.values import DTYPES, REDUCTIONS, Values
from reductions import OPS, reduced, stored

SEED = 4321
BYTES = 24_000


def filled(layout):
    inputs = [np.zeros(layout.nbytes, np.uint8) for _ in range(layout.ranks)]
    for rank, array in enumerate(inputs):
        layout.fill(rank, array, SEED)
    return inputs


def result_of(layout):
    kind = stored(layout.values.dtype)
    inputs = [array.view(kind) for array in filled(layout)]
    dtype, reduction = layout.values.dtype, layout.values.reduction
    return reduced(inputs, reduction, dtype, layout.values.scale).view(np.uint8)


def wrong_of(layout, whole, seed=SEED):
    """Wrong bytes by rank, where each is given its part of that result."""
    found = []
    for rank in range(layout.ranks):
        begin, nbytes = layout.reduced_by(rank)
        output = np.zeros(layout.out_bytes, np.uint8)
        at = begin if layout.in_place else 0
        output[at : at + nbytes] = whole[begin : begin + nbytes]
        found.append(layout.wrong(rank, output, seed))
    return found


def test_all_reductions_are_known():
    assert sorted(REDUCTIONS) == sorted(OPS)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_right_result_has_no_wrong_byte(ranks, dtype, reduction):
    values = Values(dtype, reduction)
    for op, in_place in (("reduce_scatter", False), ("reduce_scatter", True), ("all_reduce", True)):
        layout = Layout(op, ranks, BYTES + 8, in_place, values)
        assert wrong_of(layout, result_of(layout)) == [0] * ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_sums_are_exact_in_any_order(ranks, dtype):
    layout = Layout("all_reduce", ranks, BYTES, False, Values(dtype, "sum"))
    inputs = [array.view(stored(dtype)) for array in filled(layout)]
    assert np.array_equal(reduced(inputs, "sum", dtype), reduced(inputs[::-1], "sum", dtype))
    assert len({array.tobytes() for array in inputs}) == ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_missing_stale_or_misplaced_is_seen(dtype):
    layout = Layout("all_reduce", 4, BYTES, False, Values(dtype, "sum"))
    elements = BYTES // stored(dtype).itemsize
    whole = result_of(layout)
    inputs = [array.view(stored(dtype)) for array in filled(layout)]
    less = reduced(inputs[:3], "sum", dtype).view(np.uint8)
    twice = reduced([*inputs[:3], inputs[2]], "sum", dtype).view(np.uint8)
    moved = np.roll(whole.view(stored(dtype)), 1).view(np.uint8)
    for output in (less, twice, moved):
        assert layout.wrong(1, output, SEED) > elements // 2
    assert layout.wrong(1, whole, SEED + 1) > elements // 2


def test_every_flipped_byte_is_counted_also_far_from_the_start():
    layout = Layout("reduce", 2, 12 << 20, False, Values("float32", "sum"))
    whole = result_of(layout)
    whole[np.linspace(0, len(whole) - 1, 17, dtype=int)] ^= 0x40
    assert [layout.wrong(rank, whole, SEED) for rank in range(2)] == [17, 0]


def test_parts_are_whole_elements():
    layout = Layout("reduce_scatter", 3, 40, False, Values("float32", "sum"))
    assert layout.counts == [16, 12, 12]
    assert not layout.even
    with pytest.raises(offcore.Error, match="42 bytes are not a whole number") as refused:
        Values("float32", "sum").check_bytes(42)
    assert refused.value.code == "invalid"
