"""Programs as Python sees them: their text taken apart, judged by a machine's limits, and run.

None of this uses the core beyond a program's printed queues: it is what the core is checked by.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from offcore import _core
from oracles import Memory

Step = int | None  # None: one rank
Place = tuple[str, int, int]  # buffer, rank (-1: the host), offset

DATA = re.compile(
    r"(copy|swap) (\S+)\[(\w+)\]\+(\d+) (?:<-|<->) (\S+)\[(\w+)\]\+(\d+) bytes=(\d+)"
    r"(?: rows=(\d+) dst_step=(\S+) src_step=(\S+))?"
)
FLAG = re.compile(r"(poll|signal) flag\[(\w+)\]:(\d+) >?= (\d+)(?: rows=(\d+) step=(\S+))?")


@dataclass(frozen=True)
class Cmd:
    op: str
    dst: Place = ("flag", 0, 0)
    src: Place = ("flag", 0, 0)
    bytes: int = 0
    rows: int = 1
    dst_step: Step = 0
    src_step: Step = 0
    value: int = 0

    @property
    def moves_data(self) -> bool:
        return self.op in ("copy", "swap")

    def pairs(self, ranks: int) -> Iterator[tuple[Place, Place]]:
        """dst and src of every row."""
        for row in range(self.rows):
            yield at(self.dst, self.dst_step, row, ranks), at(self.src, self.src_step, row, ranks)


def at(place: Place, step: Step, row: int, ranks: int) -> Place:
    name, rank, offset = place
    if step is None:
        return name, (rank + row) % ranks, offset
    return name, rank, offset + row * step


def rank_of(text: str) -> int:
    return -1 if text == "host" else int(text)


def step_of(text: str | None) -> Step:
    return None if text == "rank" else int(text or 0)


def parse_command(text: str) -> Cmd:
    if m := DATA.fullmatch(text):
        dst = (m[2], rank_of(m[3]), int(m[4]))
        src = (m[5], rank_of(m[6]), int(m[7]))
        rows = int(m[9] or 1)
        return Cmd(m[1], dst, src, int(m[8]), rows, step_of(m[10]), step_of(m[11]))
    if m := FLAG.fullmatch(text):
        word = ("flag", rank_of(m[2]), int(m[3]))
        return Cmd(m[1], word, rows=int(m[5] or 1), dst_step=step_of(m[6]), value=int(m[4]))
    assert text == "fence" or text.startswith("timestamp "), text
    return Cmd(text.split()[0])


@dataclass(frozen=True)
class Queue:
    rank: int
    index: int | str
    commands: list[Cmd]

    @property
    def is_engine(self) -> bool:
        return self.index != "caller"


def queues_of(program: _core.Program) -> list[Queue]:
    return [
        Queue(rank, index, [parse_command(text) for text in commands])
        for rank, index, commands in program.queues
    ]


def is_native(command: Cmd, machine: _core.Machine) -> bool:
    """Whether the machine has such a data command, whatever its size."""
    native, limits = machine.native, machine.limits
    if command.op == "swap":
        aligned = command.dst[2] % limits.swap_align == 0 == command.src[2] % limits.swap_align
        possible = native.swap and limits.swap_align <= limits.copy_bytes_max
        return possible and aligned and command.rows == 1
    if command.op != "copy" or command.rows == 1:
        return True
    if command.src_step == 0 and command.dst_step is None:
        return command.rows <= native.bcst_rows
    pitches = [abs(s) for s in (command.dst_step, command.src_step) if s is not None]
    fits = all(pitch <= limits.pitch_bytes_max for pitch in pitches)
    return native.strided and command.rows <= limits.rows_max and fits


def assert_within_limits(program: _core.Program, machine: _core.Machine) -> None:
    """No engine gets a command that the machine does not have, or one that is too large for it."""
    for queue in queues_of(program):
        if not queue.is_engine:
            continue
        assert 0 <= int(queue.index) < machine.engines_peer
        for command in queue.commands:
            if command.moves_data:
                assert is_native(command, machine), command
                assert command.bytes <= machine.limits.copy_bytes_max, command
            else:
                assert command.rows == 1 or machine.native.strided_flags, command


class Interpreter:
    """Runs a program queue by queue, as far as each gets: one of the orders that are allowed."""

    def __init__(self, program: _core.Program, memory: Memory) -> None:
        self.ranks = program.ranks
        self.queues = queues_of(program)
        self.memory = {place: bytearray(data) for place, data in memory.items()}
        self.words: dict[Place, int] = {}

    def run(self) -> Memory:
        next_command = [0] * len(self.queues)
        while True:
            before = list(next_command)
            for i, queue in enumerate(self.queues):
                while next_command[i] < len(queue.commands):
                    if not self.execute(queue.commands[next_command[i]]):
                        break
                    next_command[i] += 1
            if next_command == before:
                break
        stuck = [q for i, q in enumerate(self.queues) if next_command[i] < len(q.commands)]
        assert not stuck, "deadlock"
        return {place: bytes(data) for place, data in self.memory.items()}

    def execute(self, command: Cmd) -> bool:
        if command.op == "poll":
            return all(
                self.words.get(word, 0) >= command.value for word, _ in command.pairs(self.ranks)
            )
        if command.op == "signal":
            for word, _ in command.pairs(self.ranks):
                self.words[word] = command.value
        elif command.moves_data:
            self.move(command)
        return True

    def move(self, command: Cmd) -> None:
        n = command.bytes
        rows = list(command.pairs(self.ranks))
        read = [(self.cut(dst, n), self.cut(src, n)) for dst, src in rows]
        for (dst, src), (old, new) in zip(rows, read, strict=True):
            self.memory[dst[:2]][dst[2] : dst[2] + n] = new
            if command.op == "swap":
                self.memory[src[:2]][src[2] : src[2] + n] = old

    def cut(self, place: Place, nbytes: int) -> bytes:
        name, rank, offset = place
        return bytes(self.memory[name, rank][offset : offset + nbytes])
