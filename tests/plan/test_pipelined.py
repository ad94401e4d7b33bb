"""Staged moves in chunks: what a slot holds, what overlaps, and when they are chosen."""

import pytest

from offcore import _core, machines
from offcore.comm.programs import program_of

MIB = 1 << 20
EAGER = _core.Protocol(entry=False, staged=True)
DEPTH = 4  # chunks of a peer that a slot holds


def pipelined(op, ranks, nbytes, chunk, machine="h100-8", in_place=False):
    return program_of(
        machines.load(machine), op, ranks, nbytes, f"pipelined{chunk}", in_place, "eager"
    )


def slot_bytes(program):
    [line] = [line for line in str(program).splitlines() if line.startswith("buffer slot")]
    return int(line.split()[-1])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_a_slot_holds_a_few_chunks_of_each_peer(op, ranks):
    program = pipelined(op, ranks, ranks * ranks * 16 * MIB, ":1M")
    assert slot_bytes(program) == DEPTH * (ranks - 1) * MIB
    assert program.flag_span > DEPTH  # it goes round


def test_a_slot_that_the_cost_model_sizes_is_bounded():
    for ranks, chunk in ((2, 16), (4, 48), (8, 48)):  # of all peers, in step from 3 ranks on
        for nbytes in (64 * MIB, 1 << 30, 16 << 30):
            program = pipelined("all_gather", ranks, nbytes, "")
            assert slot_bytes(program) <= DEPTH * chunk * MIB
            assert str(program.variant).startswith("pipelined:")


def test_signals_and_polls_of_neighbours_are_one_command():
    program = pipelined("all_gather", 8, 8 * 8 * MIB, ":1M", in_place=True)
    lines = [line.split()[0] for line in str(program).splitlines() if line.startswith("  ")]
    chunks = 8 * 8  # of all ranks
    free = 8 * (8 - DEPTH)
    assert lines.count("signal") == chunks + free
    assert lines.count("copy") == 2 * 7 * chunks


def test_ranges_that_are_exchanged_are_sent_before_they_are_overwritten():
    """Without its wait for that, a rank's draining queue is found to be a hazard."""
    program = pipelined("all_to_all", 2, 8 * MIB, ":1M", in_place=True)
    _core.verify(program)
    lines = str(program).splitlines(keepends=True)
    own = [i for i, line in enumerate(lines) if "poll" in line and " x2 " in line]
    text = "".join(lines)
    assert own or "rows=2" in text  # a poll of the peer's word and of the rank's own
    machine = machines.load("h100-2")
    machine.engines_peer = 1
    moves = _core.moves_all_to_all(2, [4096] * 4, True)
    one = _core.plan(moves, "pipelined:512", machine, EAGER)
    queues = [line.split()[1] for line in str(one).splitlines() if line.startswith("queue")]
    assert queues == ["0.0", "1.0"]  # where a rank has one engine it sends and drains by turns


def test_chosen_where_a_slot_in_one_piece_would_be_too_large():
    for name in ("h100-2", "nvidia-2", "mi300x-8"):
        machine = machines.load(name)
        ranks = machine.ranks
        part = 65 * MIB // ranks
        moves = _core.moves_all_gather([part] * ranks, False)
        assert _core.choose(moves, part * ranks, machine, EAGER) == ("pipelined", False)
        held = _core.moves_all_gather([4096] * ranks, False)
        assert _core.choose(held, 4096 * ranks, machine, EAGER)[0] != "pipelined"
        window = _core.Protocol(entry=True, staged=False)
        assert _core.choose(moves, part * ranks, machine, window)[0] != "pipelined"


def test_the_estimate_agrees_with_the_simulator():
    for name in ("h100-2", "h200-4", "mi300x-8"):
        machine = machines.load(name)
        for op in ("all_gather", "all_to_all"):
            for nbytes in (16 * MIB, 256 * MIB):
                program = pipelined(op, machine.ranks, nbytes, ":2M", name)
                session = _core.Session("sim", machine, machine.ranks, phantom=True)
                simulated = session.run(program).time_ns
                estimate = _core.estimate(program, machine).total_ns
                assert estimate == pytest.approx(simulated, rel=0.35), (name, op, nbytes)


@pytest.mark.parametrize(
    ("variant", "form", "reason"),
    [
        ("pipelined", (True, False), "use protocol eager"),
        ("pipelined:100", (False, True), "a multiple of 256"),
        ("prelaunch_pipelined", (False, True), "and pipelined"),
    ],
)
def test_refused(variant, form, reason):
    moves = _core.moves_all_gather([4096, 4096], False)
    with pytest.raises(_core.Error, match=reason):
        _core.plan(moves, variant, machines.load("h100-2"), _core.Protocol(*form))


def test_too_many_chunks_are_refused_before_any_is_made():
    for nbytes in (8 << 30, 1 << 40, 64 << 40):
        with pytest.raises(_core.Error, match="more than 16384 here: pass a larger size"):
            pipelined("all_gather", 2, nbytes, ":256")


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce", "reduce"])
@pytest.mark.parametrize("staged", [False, True])
def test_captured_reductions_are_not_cut(op: str, staged: bool) -> None:
    """All commands of a graph follow each other: cuts would only add signals."""
    machine = machines.load("h100-2")
    parts = [128 << 20] * 2
    spans = {}
    for captured in (False, True):
        form = _core.Protocol(staged=staged, captured=captured)
        program = _core.plan_reduction(op, parts, "sum", "bfloat16", "auto", machine, form)
        spans[captured] = program.flag_span
    assert spans[True] == 1 < spans[False]
