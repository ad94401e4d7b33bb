"""Captured programs: sequences of them replay in every interleaving of ranks and queues.

An executor that knows nothing of the core runs several programs one after the other on the same
words, again and again, as graphs do: a rank starts its next program as soon as its own queues have
ended, however far the others are. A poll takes its value away in a step of its own. A signal of a
word that still holds one is a lost signal, and a fault.
"""

import random
from collections.abc import Sequence

import pytest
from commands import Cmd, at, queues_of
from hypothesis import given
from hypothesis import strategies as st
from test_mutations import mutate
from worlds import collectives, machines, moves_of

import offcore
from offcore import _core
from oracles import Bytes, Case, noise

CAPTURED = {
    "window": _core.Protocol(captured=True),
    "staged": _core.Protocol(staged=True, captured=True),
}
Word = tuple[str, int, int]


class FaultError(Exception):
    """What no replay may do."""


class Rank:
    """Where one rank is: which launch, and how far each of its queues."""

    def __init__(self) -> None:
        self.launch = -1
        self.next: list[int] = []
        self.waited: list[set[int]] = []  # rows of the poll at hand whose word is taken already


class Replays:
    """Programs, each with its case (or without data), run `replays` times one after the other."""

    def __init__(
        self,
        programs: Sequence[tuple[_core.Program, Case | None]],
        replays: int,
        rng: random.Random,
    ) -> None:
        self.rng = rng
        self.count = len(programs) * replays
        self.cases = [case for _, case in programs]
        self.ranks = programs[0][0].ranks
        self.queues = [
            [[q.commands for q in queues_of(program) if q.rank == rank] for program, _ in programs]
            for rank in range(self.ranks)
        ]
        self.words: dict[Word, int] = {}
        self.memory: dict[tuple[str, int], bytearray] = {}
        for index, (program, _) in enumerate(programs):
            for name, _, nbytes in program.buffers:
                for rank in range(self.ranks):
                    memory = self.memory.setdefault(self.home(index, name, rank), bytearray())
                    memory.extend(bytes(max(0, nbytes - len(memory))))
        self.states = [Rank() for _ in range(self.ranks)]

    def home(self, index: int, name: str, rank: int) -> tuple[str, int]:
        """Buffers are each program's own; slot and scratch are the graph's."""
        return (name if name in ("slot", "scratch") else f"{name} of {index}", rank)

    def run(self) -> None:
        for rank in range(self.ranks):
            self.begin(rank)
        while True:
            todo = [
                (rank, q)
                for rank, state in enumerate(self.states)
                if state.launch < self.count
                for q in range(len(state.next))
                if state.next[q] < len(self.commands(rank)[q])
            ]
            if not todo:
                break
            self.rng.shuffle(todo)
            if not any(self.step(rank, q) for rank, q in todo):
                raise FaultError("deadlock")
        if left := {word for word, value in self.words.items() if value}:
            raise FaultError(f"words that still hold a value: {left}")

    def commands(self, rank: int) -> list[list[Cmd]]:
        launch = self.states[rank].launch
        return self.queues[rank][launch % len(self.cases)] if launch < self.count else []

    def begin(self, rank: int) -> None:
        """The next launch that has commands: its caller fills its memory before."""
        state = self.states[rank]
        while True:
            state.launch += 1
            state.next = [0] * len(self.commands(rank))
            state.waited = [set() for _ in state.next]
            if state.launch >= self.count:
                return
            self.fill(rank)
            if any(self.commands(rank)):
                return
            self.check(rank)

    def step(self, rank: int, q: int) -> bool:
        """One step of a queue, if it can make one; a rank whose queues have ended begins anew."""
        state = self.states[rank]
        commands = self.commands(rank)[q]
        position = state.next[q]
        command = commands[position]
        if command.op == "poll":
            if not self.poll(command, state.waited[q]):
                return False
            if len(state.waited[q]) < 2 * command.rows:
                return True
            state.waited[q].clear()
        elif command.op == "signal":
            for word, _ in command.pairs(self.ranks):
                if self.words.get(word):
                    raise FaultError(f"{word} is signalled and holds a value already")
                self.words[word] = command.value
        elif command.moves_data:
            self.move(command, state.launch % len(self.cases))
        state.next[q] += 1
        if all(n == len(c) for n, c in zip(state.next, self.commands(rank), strict=True)):
            self.check(rank)
            self.begin(rank)
        return True

    def poll(self, command: Cmd, waited: set[int]) -> bool:
        """Sees a row's word, or takes away what was seen: rows by themselves, in any order."""
        rows = list(range(command.rows))
        self.rng.shuffle(rows)
        for row in rows:
            word = at(command.dst, command.dst_step, row, self.ranks)
            if row not in waited:
                if self.words.get(word, 0) == command.value:
                    waited.add(row)
                    return True
            elif ~row not in waited:
                self.words[word] = 0
                waited.add(~row)
                return True
        return False

    def move(self, command: Cmd, index: int) -> None:
        if self.cases[index] is None:
            return
        n = command.bytes
        for (d_name, d_rank, d_at), (s_name, s_rank, s_at) in command.pairs(self.ranks):
            dst = self.memory[self.home(index, d_name, d_rank)]
            src = self.memory[self.home(index, s_name, s_rank)]
            old, new = bytes(dst[d_at : d_at + n]), bytes(src[s_at : s_at + n])
            dst[d_at : d_at + n] = new
            if command.op == "swap":
                src[s_at : s_at + n] = old

    def inputs(self, launch: int, case: Case) -> list[Bytes | None]:
        sizes = [case.in_bytes(rank) for rank in range(case.ranks)]
        return [None if n is None else noise(n, launch, rank) for rank, n in enumerate(sizes)]

    def fill(self, rank: int) -> None:
        launch = self.states[rank].launch
        index = launch % len(self.cases)
        if (case := self.cases[index]) is None:
            return
        out = self.memory[self.home(index, "out", rank)]
        out[:] = noise(len(out), launch, rank, 99).tobytes()
        if (data := self.inputs(launch, case)[rank]) is None:
            return
        start = case.own_offset(rank) if case.in_place else 0
        side = out if case.in_place else self.memory[self.home(index, "in", rank)]
        side[start : start + data.size] = data.tobytes()

    def check(self, rank: int) -> None:
        launch = self.states[rank].launch
        index = launch % len(self.cases)
        if (case := self.cases[index]) is None:
            return
        expected = case.expected(self.inputs(launch, case))[rank]
        if expected is None:
            return
        got = bytes(self.memory[self.home(index, "out", rank)][: expected.size])
        if got != expected.tobytes():
            raise FaultError(f"rank {rank} has wrong bytes after launch {launch}: {case}")


@st.composite
def captured(draw: st.DrawFn, most: int) -> list[tuple[_core.Program, Case]]:
    """Programs of one machine and one number of ranks, as they can lie in one graph."""
    machine = draw(machines().filter(lambda m: m.name != "mi300x-8"))
    ranks = draw(st.integers(1, min(4, machine.ranks)))
    chosen = []
    for _ in range(draw(st.integers(1, most))):
        case = draw(collectives(ranks).filter(lambda c: c.ranks == ranks))
        protocol = CAPTURED[draw(st.sampled_from(list(CAPTURED)))]
        moves = moves_of(case)
        kinds = _core.variants_of(moves, protocol)
        if not kinds:
            continue
        variant = draw(st.sampled_from(kinds))
        one = case.op == "all_to_all" and case.in_place  # only one engine's order keeps chunks
        engines = draw(st.sampled_from(["", "", ":1", ":1" if one else ":2"]))
        chosen.append((_core.plan(moves, variant + engines, machine, protocol), case))
    return chosen


def fault_of(
    programs: Sequence[tuple[_core.Program, Case | None]], seed: int, replays: int = 3
) -> str:
    """What goes wrong; nothing where all is right."""
    try:
        Replays(programs, replays, random.Random(seed)).run()
    except FaultError as fault:
        return str(fault)
    return ""


@given(captured(4), st.integers(0, 1 << 30))
def test_replays_in_any_order_are_right(
    programs: list[tuple[_core.Program, Case]], seed: int
) -> None:
    for program, _ in programs:
        assert (program.mode, program.protocol) == ("capture", "barrier")
    if programs:
        found = fault_of(programs, seed)
        assert not found, (found, [program.text for program, _ in programs])


def accepted(text: str) -> _core.Program | None:
    try:
        program = _core.Program.parse(text)
        _core.verify(program)
    except _core.Error:
        return None
    return program


@given(captured(1), st.integers(0, 1 << 30))
def test_accepted_mutants_replay(programs: list[tuple[_core.Program, Case]], seed: int) -> None:
    rng = random.Random(seed)
    for program, _ in programs:
        for _ in range(8):
            mutant = accepted(mutate(program.text, rng))
            if mutant is not None:
                found = fault_of([(mutant, None)], rng.randrange(1 << 30))
                assert not found, (found, mutant.text)


EAGER_AS_CAPTURED = [
    # What makes an eager program safe is not enough: these enter only where bytes flow, or not.
    ("all_gather", (0, 64, 64), "pcpy", _core.Protocol()),
    ("all_gather", (64, 64, 64), "fan", _core.Protocol(entry=False)),
    ("all_to_all", (0, 8, 0, 8, 0, 8, 8, 8, 8), "b2b", _core.Protocol()),
    ("all_gather", (64, 64, 64), "pcpy", _core.Protocol(entry=False, staged=True)),
    ("broadcast", (64,), "bcst", _core.Protocol(entry=False)),
]


@pytest.mark.parametrize(("op", "counts", "variant", "protocol"), EAGER_AS_CAPTURED)
def test_eager_programs_do_not_replay(
    op: str, counts: tuple[int, ...], variant: str, protocol: _core.Protocol
) -> None:
    """verify refuses what the executor finds faulty; the captured twin is neither."""
    machine = offcore.machines.load("h200-4")
    moves = moves_of(Case(op, 3, counts))
    eager = _core.plan(moves, variant, machine, protocol)
    text = eager.text.replace("mode=eager", "mode=capture")
    for name in ("eager", "promise"):
        text = text.replace(f"protocol={name}", "protocol=barrier")
    program = _core.Program.parse(text)
    assert any(fault_of([(program, None)], seed) for seed in range(200))
    with pytest.raises(_core.Error, match=r"^(replay|entry): ") as refused:
        _core.verify(program)
    assert refused.value.code == "verify"
    twin = _core.plan(moves, variant, machine, CAPTURED["window"])
    assert not any(fault_of([(twin, None)], seed) for seed in range(200))


def test_what_cannot_be_captured() -> None:
    moves = moves_of(Case("all_gather", 3, (8, 8, 8)))
    h200, mi300x = (offcore.machines.load(name) for name in ("h200-4", "mi300x-8"))
    protocol = CAPTURED["window"]
    assert not any(v.startswith("prelaunch") for v in _core.variants_of(moves, protocol))
    with pytest.raises(_core.Error, match="without prelaunch_"):
        _core.plan(moves, "prelaunch_fan", h200, protocol)
    with pytest.raises(_core.Error, match="flags in host memory"):
        _core.plan(moves, "fan", mi300x, protocol)
