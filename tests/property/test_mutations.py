"""Verify on damaged programs: whatever it accepts runs to the same bytes in every timing.

Real plans are taken, and a few commands are dropped, doubled, moved, exchanged or given other
numbers. Most of that is refused. What is accepted need not do what the plan did, but it must do one
thing: the simulator, at random speeds and with slow engines, and real threads must all end, and end
with what a plain interpreter leaves.
"""

import random
import re
from collections import Counter

import pytest
from commands import Interpreter, queues_of
from hypothesis import given
from hypothesis import strategies as st
from worlds import PROTOCOLS, any_timing, batches, collectives, machines, moves_of, run

import offcore
from offcore import _core
from oracles import Memory

NUMBER = re.compile(r"(?<=[\[+:= ])-?\d+\b|\brank\b|\bhost\b")


def mutate(text: str, rng: random.Random) -> str:
    """The program's text with one to three faults."""
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        commands = [i for i, line in enumerate(lines) if line.startswith("  ")]
        if not commands:
            break
        i, j = rng.choice(commands), rng.choice(commands)
        kind = rng.randrange(6)
        if kind == 0:
            del lines[i]
        elif kind == 1:
            lines.insert(j, lines[i])
        elif kind == 2:
            lines.insert(j, lines.pop(i))
        elif kind == 3:
            lines[i], lines[j] = lines[j], lines[i]
        elif kind == 4:
            lines[i] = other_number(lines[i], lines[j], rng)
        else:  # a neighbour: the order within a queue
            lines[i - 1 : i + 1] = reversed(lines[i - 1 : i + 1])
    return "\n".join(lines) + "\n"


def other_number(line: str, other: str, rng: random.Random) -> str:
    """The command with one of its numbers changed, perhaps to one that another command has."""
    found = list(NUMBER.finditer(line))
    if not found:
        return line
    number = rng.choice(found)
    values = [m[0] for m in NUMBER.finditer(other)]
    if number[0].lstrip("-").isdigit():
        old = int(number[0])
        values += [str(old + d) for d in (-16, -8, -1, 1, 4, 16)] + [str(old * 2), str(old // 2)]
    return line[: number.start()] + rng.choice(values or ["0"]) + line[number.end() :]


def verdict(text: str) -> tuple[str, _core.Program | None]:
    try:
        program = _core.Program.parse(text)
        _core.verify(program)
    except _core.Error as error:
        return (str(error).split(":")[0] if error.code == "verify" else error.code), None
    return "accepted", program


def contents(program: _core.Program, seed: int) -> Memory:
    rng = random.Random(seed)
    return {
        (name, rank): rng.randbytes(nbytes)
        for name, kind, nbytes in program.buffers
        for rank in ((-1,) if kind == "host" else range(program.ranks))
    }


def slow_engines(program: _core.Program, rng: random.Random) -> list[_core.Fault]:
    queues = rng.sample(program.queues, min(2, len(program.queues)))
    return [
        _core.Fault("slow_engine", rank=rank, queue=index, factor=rng.choice([3, 50, 1000]))
        for rank, index, _ in queues
    ]


def assert_one_outcome(program: _core.Program, machine: _core.Machine, seed: int) -> None:
    rng = random.Random(seed)
    before = contents(program, seed)
    expected = Interpreter(program, before).run()
    for _ in range(3):
        timed = any_timing(machine, rng.randrange(1 << 30))
        after, _ = run(program, before, timed, rng.randrange(4), faults=slow_engines(program, rng))
        assert after == expected, program.text
    if rng.random() < 0.1:
        host = offcore.machines.load("host-8")
        host.engines_peer = max(host.engines_peer, machine.engines_peer)
        after, _ = run(program, before, host, backend="host")
        assert after == expected, program.text


@st.composite
def plans(draw: st.DrawFn) -> tuple[_core.Program, _core.Machine]:
    """A plan of a small collective or batch that its machine can run."""
    machine = draw(machines())
    if draw(st.booleans()):
        moves = moves_of(draw(collectives(min(machine.ranks, 4))))
    else:
        moves = draw(batches(True, machine.ranks)).lowered_from()
    protocol = draw(st.sampled_from(list(PROTOCOLS.values())))
    variant = draw(st.sampled_from(_core.variants_of(moves, protocol) or ["auto"]))
    if variant == "auto":
        variant, protocol = "b2b", PROTOCOLS["eager"]
    return _core.plan(moves, variant, machine, protocol), machine


@given(plans(), st.integers(0, 1 << 30))
def test_accepted_mutants_have_one_outcome(
    plan: tuple[_core.Program, _core.Machine], seed: int
) -> None:
    program, machine = plan
    rng = random.Random(seed)
    for _ in range(8):
        _, mutant = verdict(mutate(program.text, rng))
        if mutant is not None:
            assert_one_outcome(mutant, machine, rng.randrange(1 << 30))


@given(plans(), st.integers(0, 1 << 30))
def test_plans_have_one_outcome_that_owners_wait_for(
    plan: tuple[_core.Program, _core.Machine], seed: int
) -> None:
    """When a rank's own queues have ended, nobody touches its memory any more."""
    program, machine = plan
    rng = random.Random(seed)
    assert_one_outcome(program, machine, seed)
    faults = slow_engines(program, rng)
    _, report = run(program, contents(program, seed), any_timing(machine, seed), faults=faults)
    queues = queues_of(program)
    ended = Counter({rank: 0 for rank in range(program.ranks)})
    for time in report.commands:
        rank = queues[time.queue].rank
        ended[rank] = max(ended[rank], time.end_ns)
    for time in report.commands:
        command = queues[time.queue].commands[time.command]
        if command.moves_data:
            for sides in command.pairs(program.ranks):
                for _, owner, _ in sides:
                    assert owner < 0 or time.end_ns <= ended[owner], (command, program.text)


def test_mutants_are_found() -> None:
    """The faults above meet every rule of the verifier, and some do no harm."""
    machine = offcore.machines.load("mi300x-8")
    seen: Counter[str] = Counter()
    rng = random.Random(7)
    for op, variant, protocol in (
        ("all_gather", "pcpy", "barrier"),
        ("all_to_all", "prelaunch_b2b", "barrier, staged"),
        ("broadcast", "fan", "eager"),
    ):
        counts = [64] * {"all_gather": 4, "all_to_all": 16, "broadcast": 1}[op]
        moves = {
            "all_gather": lambda c: _core.moves_all_gather(c),
            "all_to_all": lambda c: _core.moves_all_to_all(4, c),
            "broadcast": lambda c: _core.moves_broadcast(4, 1, c[0]),
        }[op](counts)
        text = _core.plan(moves, variant, machine, PROTOCOLS[protocol]).text
        seen.update(verdict(mutate(text, rng))[0] for _ in range(400))
    rules = {"bounds", "shape", "words", "unmatched", "deadlock", "hazard", "entry", "exit"}
    assert rules | {"accepted", "invalid"} == set(seen), seen
    assert seen["accepted"] < sum(seen.values()) / 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_many_mutants_of_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    machine = offcore.machines.load(rng.choice(["mi300x-8", "h200-8", "host-8"]))
    for variant in _core.variants():
        for moves in (
            _core.moves_all_gather([5, 16, 1, 8]),
            _core.moves_all_to_all(4, [8] * 16, True),
            _core.moves_all_to_all(4, list(range(16))),
        ):
            for protocol in PROTOCOLS.values():
                if _core.why_not(moves, variant, protocol):
                    continue
                program = _core.plan(moves, variant, machine, protocol)
                for _ in range(200):
                    _, mutant = verdict(mutate(program.text, rng))
                    if mutant is not None:
                        assert_one_outcome(mutant, machine, rng.randrange(1 << 30))
