"""What a benchmark fills in and expects: checked here against plain numpy collectives."""

import numpy as np
import pytest

from offcore.tools.bench.layout import OPS, ROOT, Layout

SEED = 4321


def collective(layout, inputs):
    """The outputs of a collective, by its definition."""
    parts, ranks = layout.counts, range(layout.ranks)
    if layout.op == "broadcast":
        return [inputs[ROOT].copy() for _ in ranks]
    if layout.op == "scatter":
        cuts = np.cumsum(parts)[:-1]
        return [piece.copy() for piece in np.split(inputs[ROOT], cuts)]
    if layout.op == "all_to_all":
        cut = [np.split(inputs[r], np.cumsum(layout.matrix[r])[:-1]) for r in ranks]
        return [np.concatenate([cut[r][q] for r in ranks]) for q in ranks]
    whole = np.concatenate([inputs[r][: parts[r]] for r in ranks])
    if layout.op == "gather":
        return [whole if r == ROOT else np.zeros_like(whole) for r in ranks]
    return [whole.copy() for _ in ranks]


def filled(layout):
    inputs = [np.zeros(layout.in_bytes, np.uint8) for _ in range(layout.ranks)]
    for rank, array in enumerate(inputs):
        layout.fill(rank, array, SEED)
    return inputs


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("ranks", "nbytes"), [(1, 16), (2, 4096), (3, 1000), (8, 5), (8, 1), (4, 0)]
)
def test_a_right_collective_has_no_wrong_bytes(op, ranks, nbytes):
    layout = Layout(op, ranks, nbytes, in_place=False)
    outputs = collective(layout, filled(layout))
    assert [layout.wrong(r, out, SEED) for r, out in enumerate(outputs)] == [0] * ranks


@pytest.mark.parametrize("op", OPS)
def test_every_flipped_byte_is_counted(op):
    layout = Layout(op, 3, 1000, in_place=False)
    outputs = collective(layout, filled(layout))
    flipped = np.linspace(0, len(outputs[ROOT]) - 1, 17, dtype=int)
    outputs[ROOT][flipped] ^= 0x40
    assert layout.wrong(ROOT, outputs[ROOT], SEED) == len(flipped)


def test_stale_and_misplaced_bytes_are_seen():
    layout = Layout("all_gather", 4, 4096, in_place=False)
    output = collective(layout, filled(layout))[0]
    assert layout.wrong(0, output, SEED + (1 << 16)) > 4000
    assert layout.wrong(0, np.roll(output, 1), SEED) > 4000


def test_in_place_all_gather_fills_its_own_part():
    layout = Layout("all_gather", 4, 1002, in_place=True)
    apart = filled(Layout("all_gather", 4, 1002, in_place=False))
    for rank in range(4):
        array = np.zeros(1002, np.uint8)
        layout.fill(rank, array, SEED)
        start = sum(layout.counts[:rank])
        own = array[start : start + layout.counts[rank]]
        assert np.array_equal(own, apart[rank][: layout.counts[rank]])
        assert not array[:start].any()
        assert not array[start + layout.counts[rank] :].any()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_uneven_all_to_all_keeps_the_total_on_every_rank(ranks):
    matrix = np.array(Layout("all_to_all", ranks, 1000003, in_place=False).matrix)
    assert (matrix.sum(axis=0) == 1000003).all()
    assert (matrix.sum(axis=1) == 1000003).all()
