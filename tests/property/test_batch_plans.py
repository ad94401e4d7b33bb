"""Random batches x machines x policies: planned, run, right; and entries that are in each other's
way, refused with both of them named."""

import itertools
import random
import re
from typing import Any

import pytest
from commands import assert_within_limits, queues_of
from hypothesis import assume, given
from hypothesis import strategies as st
from worlds import ROOM, Batch, batches, machines, run

import offcore
from offcore import _core
from oracles import BatchMove, Memory, after_moves

POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "merge": st.booleans(),
        "fold": st.booleans(),
        "fold_rows_min": st.integers(0, 5),
        "bcst": st.booleans(),
        "engines": st.integers(0, 3),
        "b2b_bytes_max": st.sampled_from([0, 20, 1 << 30]),
        "sub_batch": st.integers(0, 3),
        "timed": st.booleans(),
    },
)


def listed(batch: Batch) -> _core.Moves:
    """The batch's moves as they are."""
    ids = {name: i for i, name in enumerate(Batch.KINDS, 1)}
    buffers = [(name, kind, ROOM) for name, kind in Batch.KINDS.items()]
    moves = [
        ((ids[d], d_rank, d_at), (ids[s], s_rank, s_at), nbytes)
        for (d, d_rank, d_at), (s, s_rank, s_at), nbytes in batch.moves
    ]
    return _core.moves_listed(batch.ranks, buffers, moves)


def touches(move: BatchMove, swap: bool) -> list[tuple[Any, int, int, bool]]:
    (dst, d_rank, d_at), (src, s_rank, s_at), nbytes = move
    return [
        ((dst, d_rank), d_at, d_at + nbytes, True),
        ((src, s_rank), s_at, s_at + nbytes, swap),
    ]


def conflicts_of(moves: list[BatchMove], swaps: set[int]) -> set[tuple[int, int]]:
    """Pairs of entries of which one writes what the other one reads or writes."""
    found = set()
    sides = [(i, *side) for i, m in enumerate(moves) if m[2] for side in touches(m, i in swaps)]
    for one, other in itertools.combinations(sides, 2):
        apart = one[1] != other[1] or one[2] >= other[3] or other[2] >= one[3]
        if not apart and (one[4] or other[4]):
            found.add((one[0], other[0]))
    return found


def swapped(moves: list[BatchMove], swaps: set[int]) -> list[BatchMove]:
    """The moves that say what a batch does: a swap is two of them."""
    back = [(src, dst, n) for i, (dst, src, n) in enumerate(moves) if i in swaps]
    return moves + back


def engine_queues(program: _core.Program) -> list[Any]:
    return [queue for queue in queues_of(program) if queue.is_engine]


Seams = list[tuple[str, int, int]]


def part_of(place: tuple[str, int, int], seams: Seams) -> int:
    """How many parts of its memory begin before or at a byte."""
    return sum(seam[:2] == place[:2] and seam[2] <= place[2] for seam in seams)


def assert_within_parts(program: _core.Program, ranks: int, seams: Seams) -> None:
    """No command, over all of its rows, goes from one part of a memory into another."""
    for command in (c for queue in queues_of(program) for c in queue.commands if c.moves_data):
        for side in zip(*command.pairs(ranks), strict=True):
            ends = [(n, r, at + more) for n, r, at in side for more in (0, command.bytes - 1)]
            for memory in {end[:2] for end in ends}:
                assert len({part_of(end, seams) for end in ends if end[:2] == memory}) == 1, command


@given(st.data(), machines(), POLICIES)
def test_no_command_crosses_a_seam(
    data: st.DataObject, machine: _core.Machine, policy: dict
) -> None:
    batch = data.draw(batches(True, machine.ranks))
    assume(policy.get("engines", 0) <= machine.engines_peer)
    place = st.sampled_from(batch.places)
    draws = data.draw(st.lists(st.tuples(place, st.integers(0, ROOM)), max_size=6))
    seams = sorted({(*memory, offset) for memory, offset in draws})
    ids = {name: i for i, name in enumerate(Batch.KINDS, 1)}
    crossing = [
        i
        for i, (dst, src, nbytes) in enumerate(batch.moves)
        for name, rank, at in (dst, src)
        if nbytes
        and part_of((name, rank, at), seams) != part_of((name, rank, at + nbytes - 1), seams)
    ]

    def planned() -> _core.Batch:
        parts = [(ids[name], rank, at) for name, rank, at in seams]
        return _core.plan_batch(listed(batch), [], _core.BatchPolicy(**policy), machine, parts)

    if crossing:
        with pytest.raises(offcore.Error, match=rf"entry {crossing[0]} crosses from"):
            planned()
        return
    plan = planned()
    assert_within_parts(plan.program, batch.ranks, seams)
    before = batch.memory()
    after, _ = run(plan.program, before, machine)
    expected = after_moves(before, batch.moves)
    assert all(after[memory] == expected[memory] for memory in expected if memory in after)


@given(st.data(), machines(), POLICIES, st.integers(0, 1 << 30))
def test_batches(data: st.DataObject, machine: _core.Machine, policy: dict, seed: int) -> None:
    batch = data.draw(batches(True, machine.ranks))
    assume(policy.get("engines", 0) <= machine.engines_peer)
    swaps = {i for i in range(len(batch.moves)) if data.draw(st.booleans())}
    if data.draw(st.booleans()) or conflicts_of(batch.moves, swaps):
        swaps = set()
    plan = _core.plan_batch(listed(batch), sorted(swaps), _core.BatchPolicy(**policy), machine)
    assert_within_limits(plan.program, machine)
    filled = [i for i, move in enumerate(batch.moves) if move[2]]
    assert plan.moves - plan.empty == len(filled)
    assert plan.bytes == sum(nbytes for *_, nbytes in batch.moves)
    if not policy.get("merge", True):
        assert plan.merged == 0
    before = batch.memory()
    after, _ = run(plan.program, before, machine, seed)
    expected = after_moves(before, swapped(batch.moves, swaps))
    assert {place: after[place] for place in expected if place in after} == {
        place: data for place, data in expected.items() if place in after
    }, plan.program.text


@given(st.data(), machines(), st.booleans())
def test_entries_in_each_others_way(
    data: st.DataObject, machine: _core.Machine, swap: bool
) -> None:
    """Refused exactly when two entries conflict, naming two that do."""
    batch = data.draw(batches(False, machine.ranks))
    swaps = set(range(len(batch.moves))) if swap else set()
    conflicts = conflicts_of(batch.moves, swaps)
    try:
        _core.plan_batch(listed(batch), sorted(swaps), _core.BatchPolicy(), machine)
        refusal = None
    except offcore.Error as refused:
        refusal = refused
    assert (refusal is None) == (not conflicts)
    if refusal is not None:
        assert refusal.code == "invalid"
        named = [int(number) for number in re.findall(r"entry (\d+)", str(refusal))]
        assert (min(named), max(named)) in conflicts, str(refusal)


def paged(rng: random.Random, order: str, layers: int, blocks: int) -> tuple[list, int, int]:
    """Blocks of a cache whose layers lie apart, to rows that have all layers side by side."""
    page, pool = 8, 16
    stride = page * pool * rng.randint(1, 3)
    ours, theirs = rng.sample(range(pool), blocks), rng.sample(range(pool), blocks)
    moves = [
        ((1, 0, layer * stride + block * page), (2, -1, (row * layers + layer) * page), page)
        for block, row in zip(ours, theirs, strict=True)
        for layer in range(layers)
    ]
    if order == "layers":
        moves = [moves[b * layers + k] for k in range(layers) for b in range(blocks)]
    if order == "shuffled":
        rng.shuffle(moves)
    return moves, layers * stride, pool * layers * page


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("order", ["blocks", "layers", "shuffled"])
@given(st.integers(0, 1 << 30), st.integers(4, 9), st.integers(1, 12))
def test_blocks_fold_over_layers(
    order: str, store: bool, seed: int, layers: int, blocks: int
) -> None:
    """One command a block, in whatever order the entries come."""
    moves, device, host = paged(random.Random(seed), order, layers, blocks)
    if store:
        moves = [(src, dst, nbytes) for dst, src, nbytes in moves]
    buffers = [("device", "local", device), ("host", "host", host)]
    given_moves = _core.moves_listed(1, buffers, moves)
    machine = offcore.machines.load("h200-2")
    plan = _core.plan_batch(given_moves, [], _core.BatchPolicy(), machine)
    [queue] = engine_queues(plan.program)
    # Blocks that lie as their rows do may make longer chains of shorter steps: never more commands.
    assert plan.program.counts().copies <= blocks
    assert sum(command.rows * command.bytes for command in queue.commands) == plan.bytes
    rng = random.Random(seed)
    before: Memory = {("device", 0): rng.randbytes(device), ("host", -1): rng.randbytes(host)}
    named = {1: "device", 2: "host"}
    expected = after_moves(
        before,
        [((named[d], dr, da), (named[s], sr, sa), n) for (d, dr, da), (s, sr, sa), n in moves],
    )
    after, _ = run(plan.program, before, machine)
    assert {place: after[place] for place in expected} == expected


def test_neighbours_merge() -> None:
    moves = [((1, 0, 10 * i), (2, -1, 500 + 10 * i), 10) for i in (3, 1, 2, 0, 9, 8)]
    buffers = [("device", "local", 100), ("host", "host", 1000)]
    listed_moves = _core.moves_listed(1, buffers, moves)
    machine = offcore.machines.load("mi300x-8")
    plan = _core.plan_batch(listed_moves, [], _core.BatchPolicy(timed=False), machine)
    assert (plan.moves, plan.merged, plan.program.counts().copies) == (6, 4, 2)


def test_pitches_that_the_machine_lacks_do_not_fold() -> None:
    machine = offcore.machines.load("h200-2")
    machine.limits.pitch_bytes_max = 1000
    buffers = [("device", "local", 1 << 20), ("host", "host", 1 << 20)]
    for step, folded in ((1000, 8), (1001, 0)):
        moves = [((1, 0, step * i), (2, -1, 20 * i), 10) for i in range(8)]
        plan = _core.plan_batch(
            _core.moves_listed(1, buffers, moves), [], _core.BatchPolicy(), machine
        )
        assert (plan.folded, plan.program.native) == (folded, True)


def h2d(count: int, nbytes: int) -> _core.Moves:
    """Copies that neither merge nor fold."""
    places = [(i * i * nbytes, i * nbytes + i * i * i * nbytes) for i in range(1, count + 1)]
    buffers = [("device", "local", 1 << 44), ("host", "host", 1 << 44)]
    return _core.moves_listed(1, buffers, [((1, 0, d), (2, -1, s), nbytes) for d, s in places])


@pytest.mark.parametrize(
    ("policy", "engines"),
    [
        ({}, 1),
        ({"b2b_bytes_max": 100 << 10}, 2),  # as many as feed the MI300X's link to the host
        ({"engines": 5}, 5),
        ({"engines": 1, "b2b_bytes_max": 0}, 1),
    ],
)
def test_one_engine_for_small_batches_and_several_for_large(policy: dict, engines: int) -> None:
    machine = offcore.machines.load("mi300x-8")
    plan = _core.plan_batch(h2d(64, 4096), [], _core.BatchPolicy(**policy), machine)
    assert plan.program.counts().engines == engines
    assert plan.program.counts().syncs == engines, "one epilogue an engine"
    assert plan.program.variant == ("b2b" if engines == 1 else "pcpy")
    sizes = [sum(c.bytes for c in queue.commands) for queue in engine_queues(plan.program)]
    assert max(sizes) - min(sizes) <= 4096


def test_the_threshold_is_the_whole_batchs() -> None:
    machine = offcore.machines.load("mi300x-8")
    assert machine.batches.b2b_bytes_max == 4 << 20
    for count, engines in ((1024, 1), (1025, 2)):
        plan = _core.plan_batch(h2d(count, 4096), [], _core.BatchPolicy(), machine)
        assert plan.program.counts().engines == engines


def test_engines_by_destination() -> None:
    """Above the threshold no two destinations share an engine."""
    machine = offcore.machines.load("mi300x-8")
    moves = [((1, peer, 100 * k), (1, 0, 10_000 + 1000 * peer + 300 * k), 90)
             for k in range(3) for peer in (1, 2, 3)]  # fmt: skip
    moves += [((2, -1, 0), (1, 0, 0), 50)]
    listed_moves = _core.moves_listed(
        4, [("device", "window", 1 << 20), ("host", "host", 64)], moves
    )
    plan = _core.plan_batch(listed_moves, [], _core.BatchPolicy(b2b_bytes_max=0), machine)
    for queue in engine_queues(plan.program):
        assert len({c.dst[1] for c in queue.commands if c.moves_data}) <= 1
    sent = [c for q in engine_queues(plan.program) for c in q.commands if c.moves_data]
    assert len(sent) == 10


def test_one_source_to_neighbouring_ranks_is_a_broadcast() -> None:
    machine = offcore.machines.load("mi300x-8")
    moves = [((1, rank, 64), (1, 0, 512), 32) for rank in (3, 1, 2, 5)]
    listed_moves = _core.moves_listed(8, [("device", "window", 1024)], moves)
    plan = _core.plan_batch(listed_moves, [], _core.BatchPolicy(), machine)
    data = [c for q in engine_queues(plan.program) for c in q.commands if c.moves_data]
    assert sorted((c.dst[1], c.rows) for c in data) == [(1, 2), (3, 1), (5, 1)]
    assert plan.bcst == 2
    plain = _core.plan_batch(listed_moves, [], _core.BatchPolicy(bcst=False), machine)
    assert (plain.bcst, plain.program.counts().copies) == (0, 4)


def test_sub_batches_are_fenced() -> None:
    machine = offcore.machines.load("h200-2")
    for policy, fences in (({}, 3), ({"sub_batch": 0}, 0), ({"sub_batch": 1}, 99)):
        plan = _core.plan_batch(h2d(100, 4096), [], _core.BatchPolicy(**policy), machine)
        [queue] = engine_queues(plan.program)
        assert sum(command.op == "fence" for command in queue.commands) == fences


def test_what_cannot_be() -> None:
    machine = offcore.machines.load("mi300x-8")
    for swaps, policy, text in (
        ([7], {}, "no entry 7 to swap: the batch has 2"),
        ([], {"engines": 15}, "engines is 15; mi300x-8 has only 14"),
    ):
        with pytest.raises(offcore.Error, match=text) as refused:
            _core.plan_batch(h2d(2, 8), swaps, _core.BatchPolicy(**policy), machine)
        assert refused.value.code == "invalid"


def test_places_beyond_what_a_batch_spans() -> None:
    buffers = [("device", "local", 1 << 60), ("host", "host", 1 << 60)]
    for at, nbytes in ((1 << 52, 8), ((1 << 52) - 4, 8), (0, 1 << 53)):
        moves = _core.moves_listed(1, buffers, [((1, 0, at), (2, -1, 0), nbytes)])
        with pytest.raises(offcore.Error, match="a batch spans at most") as refused:
            _core.plan_batch(moves, [], _core.BatchPolicy(), offcore.machines.load("mi300x-8"))
        assert refused.value.code == "unsupported"


def test_a_batch_of_nothing_is_a_program() -> None:
    for machine in ("mi300x-8", "h200-2"):
        moves = _core.moves_listed(1, [("device", "local", 8)], [((1, 0, 0), (1, 0, 0), 0)])
        plan = _core.plan_batch(moves, [], _core.BatchPolicy(), offcore.machines.load(machine))
        assert (plan.moves, plan.empty, plan.program.counts().commands) == (1, 1, 0)
