"""A plan at one size, scaled, is the plan at another one wherever its range says so.

What ranks run of a shape that they have planned whole rests on this (core/comm/known_shapes.h).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import PROTOCOLS, VARIANTS, machines, moves_of

import offcore
from offcore import _core
from oracles import Case

OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
KB, MB = 1 << 10, 1 << 20
UNITS = (1, 60, 64, 4 * KB, 128 * KB - 1, 128 * KB, MB, 2 * MB, 16 * MB + 64, 300 * MB, 5 << 30)
FORMS = PROTOCOLS | {
    "captured": _core.Protocol(captured=True),
    "captured, staged": _core.Protocol(staged=True, captured=True),
}
Shape = tuple[str, int, Sequence[int], bool]  # operation, ranks, counts in units, in place


def moves(shape: Shape, unit: int) -> _core.Moves:
    op, ranks, parts, in_place = shape
    number = {"all_to_all": ranks * ranks, "broadcast": 1}.get(op, ranks)
    counts = tuple(unit * parts[i % len(parts)] for i in range(number))
    return moves_of(Case(op, ranks, counts, in_place, ranks // 2))


def counted(program: _core.Program, unit: int) -> tuple[int, ...]:
    counts = program.counts()
    return counts.commands, counts.copies, counts.engines, counts.syncs, counts.bytes // unit


def scaled_and_planned(
    machine: Any, variant: str, protocol: Any, shape: Shape, a: int, b: int
) -> str | tuple[list[Any], list[Any]]:
    """The plan of unit `a`, scaled to `b` where its range holds that, and the plan of `b`; or why
    not: "impossible", "other"."""
    scale = _core.ScaleRange(a)
    try:
        program = _core.plan(moves(shape, a), variant, machine, protocol, scale)
    except offcore.Error as error:
        if error.code != "unsupported":
            raise
        return "impossible"
    if not scale.holds(b):
        return "other"
    whole = _core.plan(moves(shape, b), variant, machine, protocol)
    scaled, planned = [_core.scaled(program, a, b)], [whole]
    for rank in sorted({0, shape[1] // 2, shape[1] - 1}):
        scaled.append(_core.scaled(_core.part_of(program, rank), a, b))
        planned.append(_core.part_of(whole, rank))
    return [*scaled, counted(program, a)], [*planned, counted(whole, b)]


@pytest.mark.parametrize("protocol", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_what_ranges_hold_is_the_same_plan(op: str, protocol: str) -> None:
    found: Counter[str] = Counter()
    for name in ("nvidia-8", "mi300x-8", "host-8"):
        for ranks in (2, 3, 17):
            machine = offcore.machines.load(name)
            machine.ranks, machine.tuned = ranks, []
            for variant in (*VARIANTS, "pcpy:1", "pcpy:3", "bcst:1"):
                in_place = op in ("all_gather", "all_to_all", "broadcast") and len(variant) % 2 == 0
                shape = (op, ranks, [1], in_place)
                for a, b in zip(UNITS, UNITS[1:] + UNITS[:1], strict=True):
                    both = scaled_and_planned(machine, variant, FORMS[protocol], shape, a, b)
                    found[both if isinstance(both, str) else "same"] += 1
                    assert isinstance(both, str) or both[0] == both[1], (name, variant, shape, a, b)
    assert found["same"] > 100


@given(
    machines(),
    st.sampled_from((*VARIANTS, "pcpy:1", "pcpy:2")),
    st.sampled_from(list(FORMS.values())),
    st.tuples(
        st.sampled_from(OPS),
        st.integers(1, 17),
        st.lists(st.sampled_from([0, 1, 1, 2, 5]), min_size=1, max_size=4),
        st.just(False),
    ),
    st.tuples(st.sampled_from(UNITS[:-1]), st.sampled_from(UNITS[:-1])),
    st.integers(1, 3),
)
def test_so_it_is_on_any_machine(
    machine: Any, variant: str, protocol: Any, shape: Shape, units: tuple[int, int], times: int
) -> None:
    machine.ranks, machine.tuned = max(machine.ranks, shape[1]), []
    room = machine.limits.copy_bytes_max // 4 + 1  # for few pieces, where machines are cut down
    a, b = (min(unit, room * shape[1]) * times for unit in units)
    for one in (shape, (*shape[:2], [1], shape[0] == "all_gather")):
        both = scaled_and_planned(machine, variant, protocol, one, a, b)
        assert isinstance(both, str) or both[0] == both[1]


def holds(variant: str, a: int, b: int, protocol: Any, **limits: Any) -> bool:
    machine = offcore.machines.load(limits.pop("machine", "nvidia-8"))
    machine.ranks, machine.tuned = 16, []
    for limit, value in limits.items():
        setattr(machine.limits, limit, value)
    in_place = variant == "swap"
    op = "all_to_all" if in_place else "all_gather"
    scale = _core.ScaleRange(a)
    _core.plan(moves((op, 16, [1], in_place), a), variant, machine, protocol, scale)
    return scale.holds(b)


def test_what_sizes_decide_ends_a_range() -> None:
    barrier, staged = PROTOCOLS["barrier"], PROTOCOLS["eager"]
    assert holds("pcpy", 4, 1 << 30, barrier)
    assert not holds("pcpy", 4, 1 << 47, barrier)  # more than operations may move
    # What a rank keeps gets a queue of its own.
    assert holds("b2b", 4, 128 * KB - 1, barrier)
    assert not holds("b2b", 4, 128 * KB, barrier)
    assert holds("b2b", 128 * KB, 1 << 30, barrier)
    assert not holds("b2b", 128 * KB, 128 * KB - 1, barrier)
    # A copy that is too long, or whose rows lie too far apart.
    assert holds("pcpy", 4, 4096, barrier, copy_bytes_max=4096)
    assert not holds("pcpy", 4, 4097, barrier, copy_bytes_max=4096)
    assert not holds("pcpy", 4097, 8000, barrier, copy_bytes_max=4096)
    # Swaps are aligned, or go by other commands.
    assert holds("swap", 64, 640, barrier, machine="mi300x-8")
    assert not holds("swap", 64, 96, barrier, machine="mi300x-8")
    assert not holds("swap", 96, 640, barrier, machine="mi300x-8")
    # Chunks, and queues that are enqueued in an order of all ranks'.
    assert not holds("pipelined", 1 << 20, 1 << 20, staged)
    assert not holds("pcpy", 4, 8, staged)
    assert holds("bcst:1", 128 * KB, MB, staged)


def test_a_range_is_of_units_that_divide_all_sizes() -> None:
    scale = _core.ScaleRange(3)
    _core.plan(moves(("all_gather", 4, [1], False), 4), "pcpy", offcore.machines.load("nvidia-8"),
               _core.Protocol(), scale)  # fmt: skip
    assert not scale.holds(3)


def test_a_part_is_no_program_of_all_ranks() -> None:
    machine = offcore.machines.load("nvidia-4")
    program = _core.plan(moves(("all_gather", 4, [1], False), 64), "pcpy", machine,
                         _core.Protocol())  # fmt: skip
    part = _core.part_of(program, 2)
    assert {rank for rank, _, _ in part.queues} == {2}
    with pytest.raises(offcore.Error, match="only the queues of rank 2 are here"):
        _core.verify(part)
    session = _core.Session("sim", machine, 4)
    with pytest.raises(offcore.Error, match="where it is the one local rank"):
        session.run(part, checked=False)
