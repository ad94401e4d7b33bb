"""Random moves and collectives x variants x machines x protocols: planned, verified, run, right."""

from typing import Any

import numpy as np
import pytest
from commands import assert_within_limits, is_native, queues_of
from hypothesis import given
from hypothesis import strategies as st
from worlds import PROTOCOLS, VARIANTS, Batch, batches, collectives, machines, moves_of, run

from offcore import _core
from oracles import Case, Memory, after_moves, kinds_of, noise

CHUNKS = st.sampled_from(["", ":256", ":512"])


def check_program(
    moves: _core.Moves, variant: str, machine: _core.Machine, protocol: _core.Protocol
) -> _core.Program:
    """Plans, and checks what holds whatever the moves are."""
    program = _core.plan(moves, variant, machine, protocol)
    assert_within_limits(program, machine)
    data = [
        c for q in queues_of(_core.lower(moves, variant, machine, protocol)) for c in q.commands
    ]
    assert program.native == all(is_native(c, machine) for c in data if c.moves_data)
    engines: dict[int, int] = {}
    for queue in queues_of(program):
        engines[queue.rank] = engines.get(queue.rank, 0) + queue.is_engine
    if variant.endswith("b2b"):
        assert max(engines.values(), default=0) <= 1
    assert program.mode == ("armed" if variant.startswith("prelaunch") else "eager")
    return program


def assert_outcome(program: _core.Program, machine: _core.Machine, before: Memory,
                   expected: Memory, seed: int) -> None:  # fmt: skip
    after, _ = run(program, before, machine, seed)
    for place, data in expected.items():
        if place in after:
            assert after[place][: len(data)] == data, (place, program.text)


def plan_or_refusal(*arguments: Any) -> _core.Program | str:
    """The program, or the code of the error."""
    try:
        return _core.plan(*arguments)
    except _core.Error as refused:
        return str(refused.code)


@given(st.data(), machines(), st.integers(0, 1 << 30))
def test_moves_apart(data: st.DataObject, machine: _core.Machine, seed: int) -> None:
    """Moves without conflicts can always be done, and every way of doing them is right."""
    batch = data.draw(batches(True, machine.ranks))
    moves, before = batch.lowered_from(), batch.memory()
    expected = after_moves(before, batch.moves)
    for variant in VARIANTS:
        for protocol in PROTOCOLS.values():
            if _core.why_not(moves, variant, protocol):
                continue
            program = check_program(moves, variant, machine, protocol)
            assert_outcome(program, machine, before, expected, seed)


@given(st.data(), machines(), st.integers(0, 1 << 30))
def test_any_moves(data: st.DataObject, machine: _core.Machine, seed: int) -> None:
    """Moves that are in each other's way are refused, or done as if all had read first."""
    batch = data.draw(batches(False, machine.ranks))
    moves, before = batch.lowered_from(), batch.memory()
    for variant in VARIANTS:
        for protocol in PROTOCOLS.values():
            program = plan_or_refusal(moves, variant, machine, protocol)
            if isinstance(program, str):
                assert program in ("verify", "unsupported")
                continue
            assert_outcome(program, machine, before, after_moves(before, batch.moves), seed)


def memory_of(case: Case) -> tuple[Memory, Memory]:
    """What a collective's buffers hold before and after."""
    before: Memory = {}
    inputs = []
    outputs = [case.out_bytes(r) for r in range(case.ranks)]
    for rank in range(case.ranks):
        size = case.in_bytes(rank)
        inputs.append(None if size is None else noise(size, rank, size))
        if not case.in_place and size:
            before["in", rank] = inputs[-1].tobytes()
        whole = noise(outputs[rank] or 0, rank, 99)
        if case.in_place and inputs[-1] is not None:
            at = case.own_offset(rank)
            whole[at : at + size] = inputs[-1]
        before["out", rank] = whole.tobytes()
    after = dict(before)
    for rank, data in enumerate(case.expected(inputs)):
        if data is not None:
            after["out", rank] = np.asarray(data).tobytes()
    return before, after


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(st.data(), machines(), st.integers(0, 1 << 30))
def test_collectives(protocol: str, data: st.DataObject, machine: _core.Machine, seed: int) -> None:
    case = data.draw(collectives(min(machine.ranks, 5)))
    moves = moves_of(case)
    before, expected = memory_of(case)
    entering = PROTOCOLS[protocol]
    possible = _core.variants_of(moves, entering)
    if sum(case.counts):
        kinds = {variant.removeprefix("prelaunch_") for variant in possible}
        wanted = kinds_of(case, staged="staged" in protocol or protocol == "eager")
        assert kinds >= wanted
        assert kinds <= wanted | {"bcst", "swap"}
    engines = data.draw(st.sampled_from(["", ":1", ":2", ":3"]))
    for name in VARIANTS:
        variant = name + (data.draw(CHUNKS) if name == "pipelined" else engines)
        if _core.why_not(moves, variant, entering):
            continue
        program = check_program(moves, variant, machine, entering)
        assert_outcome(program, machine, before, expected, seed)


@given(batches(False, 4))
def test_merged_moves_are_the_same_bytes(batch: Batch) -> None:
    names = list(Batch.KINDS)

    def bytes_of(moves):
        return sorted(
            ((d, d_rank, d_at + i), (s, s_rank, s_at + i))
            for (d, d_rank, d_at), (s, s_rank, s_at), nbytes in moves
            for i in range(nbytes)
        )

    merged = [
        ((names[d - 1], *d_rest), (names[s - 1], *s_rest), nbytes)
        for (d, *d_rest), (s, *s_rest), nbytes in batch.lowered_from().moves
    ]
    assert bytes_of(merged) == bytes_of(batch.moves)
    assert all(nbytes > 0 for *_, nbytes in merged)
    assert len(merged) <= len(batch.moves)


@pytest.mark.parametrize(
    ("dst", "src", "nbytes", "names"),
    [
        ((3, 0, 0), (1, 0, 0), 4, ("move 1", "dst", "buffer 3", "1 to 2")),
        ((0, 0, 0), (1, 0, 0), 4, ("move 1", "dst", "buffer 0")),
        ((1, 2, 0), (1, 0, 0), 4, ("move 1", "dst", "rank 2", "2 ranks")),
        ((1, 0, 0), (2, 0, 0), 4, ("move 1", "src", "pool is a host buffer")),
        ((1, 0, 0), (1, -1, 0), 4, ("move 1", "src", "w is a window buffer")),
        ((1, 0, 61), (1, 1, 0), 4, ("move 1", "dst", "leaves w of 64 bytes")),
        ((1, 0, 0), (1, 1, (1 << 64) - 4), 4, ("move 1", "src", "leaves w of 64 bytes")),
        ((1, 0, 0), (1, 1, 0), 1 << 63, ("move 1", "leaves w of 64 bytes")),
        ((300, 0, 0), (1, 1, 0), 4, ("buffer 300",)),
        ((1, 1 << 20, 0), (1, 1, 0), 4, ("rank 1048576",)),
    ],
)
def test_moves_outside_their_buffers(
    dst: Any, src: Any, nbytes: int, names: tuple[str, ...]
) -> None:
    good = ((2, -1, 0), (1, 1, 0), 8)
    buffers = [("w", "window", 64), ("pool", "host", 64)]
    with pytest.raises(_core.Error) as refused:
        _core.moves_batch(2, buffers, [good, (dst, src, nbytes)])
    assert refused.value.code == "invalid"
    for name in names:
        assert name in str(refused.value)
