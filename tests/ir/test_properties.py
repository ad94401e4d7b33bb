"""Verify against a plain-Python oracle on random programs, and against planted faults.

The oracle decides happens-before by reachability in a graph of all commands and hazards by sets
of bytes: slow, and nothing like the vector clocks and the sweep that it checks.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from offcore import _core

ORDERING = ("poll", "signal", "timestamp", "fence")
CALLER = 99  # sorts last
KINDS = {"in": "local", "out": "window", "pool": "host"}
BYTES = 48
WORDS = 4
SPAN = 4


@dataclass(frozen=True)
class Cmd:
    op: str
    dst: tuple[str, int | str, int] = ("flag", 0, 0)
    src: tuple[str, int | str, int] = ("in", 0, 0)
    bytes: int = 0
    rows: int = 1
    dst_step: int | str = 0
    src_step: int | str = 0
    value: int = 0

    def text(self) -> str:
        dst, src = (
            f"{name}[{rank}]{':' if name == 'flag' else '+'}{offset}"
            for name, rank, offset in (self.dst, self.src)
        )
        many = self.rows != 1
        if self.op in ("copy", "swap"):
            arrow = "<-" if self.op == "copy" else "<->"
            steps = f" rows={self.rows} dst_step={self.dst_step} src_step={self.src_step}"
            return f"{self.op} {dst} {arrow} {src} bytes={self.bytes}{steps * many}"
        if self.op in ("poll", "signal"):
            relation = ">=" if self.op == "poll" else "="
            steps = f" rows={self.rows} step={self.dst_step}"
            return f"{self.op} {dst} {relation} {self.value}{steps * many}"
        return f"timestamp {self.value}" if self.op == "timestamp" else self.op


@dataclass
class Prog:
    ranks: int
    protocol: str = "eager"
    mode: str = "eager"
    size: int = BYTES
    flags: int = WORDS
    span: int = SPAN
    queues: dict[tuple[int, int], list[Cmd]] = field(default_factory=dict)

    def text(self) -> str:
        lines = [
            f"program random machine=m ranks={self.ranks} variant=v mode={self.mode} "
            f"protocol={self.protocol} native=yes flags={self.flags} span={self.span}"
        ]
        lines += [f"buffer {name} {kind} {self.size}" for name, kind in KINDS.items()]
        for (rank, index), commands in sorted(self.queues.items()):
            lines.append(f"queue {rank}.{'caller' if index == CALLER else index}")
            lines += ["  " + command.text() for command in commands]
        return "\n".join(lines) + "\n"


def verdict(program: Prog) -> str:
    """What verify says: nothing when the program is correct."""
    parsed = _core.Program.parse(program.text())
    try:
        _core.verify(parsed)
    except _core.Error as error:
        code, message = error.code, str(error)
    else:
        return ""
    assert code == "verify"
    return message


def rows_of(
    place: tuple[str, int | str, int], step: int | str, rows: int, ranks: int
) -> list[tuple[str, int | str, int]]:
    name, rank, offset = place
    if step == "rank":
        return [(name, (int(rank) + k) % ranks, offset) for k in range(rows)]
    return [(name, rank, offset + k * int(step)) for k in range(rows)]


Place = tuple[tuple[int, int], int]


class Oracle:
    """The rules by definition; `rule` is the first that the program breaks, or ""."""

    def __init__(self, program: Prog) -> None:
        self.program = program
        self.commands: dict[Place, Cmd] = {
            (queue, i): command
            for queue, commands in sorted(program.queues.items())
            for i, command in enumerate(commands)
        }
        self.rule = self.in_bounds() or self.words() or self.match() or self.armed() or self.order()
        self.rule = self.rule or self.rising() or self.entry() or self.hazard()
        self.rule = self.rule or self.exit()

    def words_of(self, command: Cmd) -> list[tuple[str, int | str, int]]:
        return rows_of(command.dst, command.dst_step, command.rows, self.program.ranks)

    def in_bounds(self) -> str:
        ranks = self.program.ranks
        for (queue, _), c in self.commands.items():
            sides = [(c.dst, c.dst_step)] if c.op in ("poll", "signal") else []
            if c.op in ("copy", "swap"):
                sides = [(c.dst, c.dst_step), (c.src, c.src_step)]
            for place, step in sides:
                if step == "rank" and (place[1] == "host" or KINDS.get(place[0]) == "local"):
                    return "shape"
                if step == "rank" and c.rows > ranks:
                    return "bounds"
                for name, rank, offset in rows_of(place, step, c.rows, ranks):
                    size, length = self.program.size, c.bytes
                    if name == "flag":
                        size, length = self.program.flags, 1
                    elif (KINDS[name] == "host") != (rank == "host") or (
                        KINDS[name] == "local" and rank != queue[0]
                    ):
                        return "shape"
                    if offset < 0 or offset + length > size:
                        return "bounds"
        return ""

    def words(self) -> str:
        self.signals: dict[tuple[str, int | str, int], dict[int, Place]] = {}
        for place, command in self.commands.items():
            if command.op == "signal":
                for word in self.words_of(command):
                    if command.value in self.signals.setdefault(word, {}):
                        return "words"
                    self.signals[word][command.value] = place
        return ""

    def match(self) -> str:
        self.releases: dict[Place, list[Place]] = {}
        for place, command in self.commands.items():
            if command.op != "poll":
                continue
            for word in self.words_of(command):
                values = [v for v in self.signals.get(word, {}) if v >= command.value]
                if not values:
                    return "unmatched"
                self.releases.setdefault(place, []).append(self.signals[word][min(values)])
        return ""

    def armed(self) -> str:
        for queue, commands in sorted(self.program.queues.items()):
            if self.program.mode != "armed" or queue[1] == CALLER:
                continue
            if not commands or commands[0].op != "poll":
                return "shape"
            if not any(signal[0] == (queue[0], CALLER) for signal in self.releases[queue, 0]):
                return "deadlock"
        return ""

    def order(self) -> str:
        # Edges: each ordering command with all others of its queue, and signals to polls.
        earlier: dict[Place, set[Place]] = {place: set() for place in self.commands}
        for a, b in combinations(self.commands, 2):
            same = a[0] == b[0]
            if same and (self.commands[a].op in ORDERING or self.commands[b].op in ORDERING):
                earlier[b].add(a)
        for poll, signals in self.releases.items():
            earlier[poll].update(signals)
        self.before: dict[Place, set[Place]] = {}
        left = dict(earlier)
        while left:
            free = [place for place in left if not left[place] - self.before.keys()]
            if not free:
                return "deadlock"
            for place in free:
                del left[place]
                known = earlier[place]
                self.before[place] = known.union(*(self.before[p] for p in known))
        return ""

    def rising(self) -> str:
        for values in self.signals.values():
            for a, b in pairwise(sorted(values)):
                if values[a] not in self.before[values[b]]:
                    return "words"
        return ""

    def touched(self, command: Cmd) -> list[tuple[set[tuple[str, int | str, int]], bool]]:
        """Bytes and whether they are written, row by row; one set for rows that only read."""
        if command.op not in ("copy", "swap"):
            return []
        rows: list[tuple[set[tuple[str, int | str, int]], bool]] = []
        read = set()
        for place, step, writes in (
            (command.dst, command.dst_step, True),
            (command.src, command.src_step, command.op == "swap"),
        ):
            for name, rank, start in rows_of(place, step, command.rows, self.program.ranks):
                row = {(name, rank, start + i) for i in range(command.bytes)}
                if writes:
                    rows.append((row, True))
                else:
                    read |= row
        return [*rows, (read, False)]

    def entry(self) -> str:
        if self.program.protocol != "barrier":
            return ""
        for place, command in self.commands.items():
            for row, _ in self.touched(command):
                owners = {rank for name, rank, _ in row if name == "out"} - {place[0][0]}
                heard = {
                    p[0][0]
                    for p in self.before[place]
                    if self.commands[p].op == "signal" and p[0][1] == CALLER
                }
                if owners - heard:
                    return "entry"
        return ""

    def hazard(self) -> str:
        def meet(first: Cmd, second: Cmd) -> bool:
            return any(
                (a_writes or b_writes) and a & b
                for a, a_writes in self.touched(first)
                for b, b_writes in self.touched(second)
            )

        for command in self.commands.values():
            for (a, a_writes), (b, b_writes) in combinations(self.touched(command), 2):
                if (a_writes or b_writes) and a & b:
                    return "hazard"
        for a, b in combinations(self.commands, 2):
            unordered = a not in self.before[b] and b not in self.before[a]
            if unordered and meet(self.commands[a], self.commands[b]):
                return "hazard"
        return ""

    def exit(self) -> str:
        for place, command in self.commands.items():
            for row, _ in self.touched(command):
                owners = {rank for name, rank, _ in row if name == "out"} - {place[0][0]}
                if owners - {p[0][0] for p in self.commands if place in self.before[p]}:
                    return "exit"
        return ""


def random_slice(rng: random.Random, rank: int, ranks: int) -> tuple[str, int | str, int]:
    name = rng.choice(["in", "out", "out", "pool"])
    owner: int | str = rng.randrange(ranks)
    if KINDS[name] != "window":
        owner = rank if KINDS[name] == "local" else "host"
    return (name, owner, rng.randrange(0, BYTES - 4, 4))


def random_data(rng: random.Random, rank: int, ranks: int) -> Cmd:
    op = rng.choice(["copy", "copy", "copy", "swap"])
    dst, src = random_slice(rng, rank, ranks), random_slice(rng, rank, ranks)
    size = rng.choice([1, 2, 4, 4, 5])
    if rng.random() < 0.7:
        return Cmd(op, dst, src, size)

    def step(name: str) -> int | str:
        if name == "out" and rng.random() < 0.5:
            return "rank"
        return rng.choice([size, -size, 8, 2, 0])

    return Cmd(op, dst, src, size, rng.randint(2, 3), step(dst[0]), step(src[0]))


def random_program(rng: random.Random) -> Prog:
    """A serial schedule dealt out to queues: mostly free of deadlock, then perhaps disturbed."""
    ranks = rng.randint(1, 3)
    program = Prog(
        ranks,
        protocol=rng.choice(["barrier", "eager"]),
        mode=rng.choice(["eager", "eager", "eager", "armed"]),
    )
    queues = [(r, i) for r in range(ranks) for i in (0, 1, CALLER)]
    queues = rng.sample(queues, rng.randint(1, min(5, len(queues))))
    program.queues = {queue: [] for queue in queues}
    values: dict[tuple[str, int | str, int], int] = {}
    for _ in range(rng.randint(1, 14)):
        queue = rng.choice(queues)
        kind = rng.random()
        if kind < 0.4:
            program.queues[queue].append(random_data(rng, queue[0], ranks))
        elif kind < 0.65:
            word = ("flag", rng.choice(["host", *range(ranks)]), rng.randrange(WORDS))
            if values.get(word, 0) == SPAN:
                continue
            values[word] = rng.randint(values.get(word, 0) + 1, SPAN)
            program.queues[queue].append(Cmd("signal", word, value=values[word]))
        elif kind < 0.92 and values:
            word = rng.choice(list(values))
            low = rng.choice([values[word], rng.randint(1, values[word])])
            low = rng.randint(1, SPAN) if rng.random() < 0.05 else low
            program.queues[queue].append(Cmd("poll", word, value=low))
        else:
            program.queues[queue].append(Cmd(rng.choice(["fence", "timestamp"])))
    if rng.random() < 0.2:
        commands = program.queues[rng.choice(queues)]
        rng.shuffle(commands)
    return program


seeds = st.integers(0, 2**64 - 1)


@given(seeds)
def test_random_programs_are_judged_as_the_oracle_judges_them(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng)
    wanted = Oracle(program).rule
    message = verdict(program)
    assert message.partition(":")[0] == wanted, f"{message}\n{program.text()}"


def correct_program(rng: random.Random, protocol: str = "eager") -> Prog:
    """Disjoint copies on random queues, chained by signals and polls that follow one schedule."""
    ranks = rng.randint(2, 6)
    program = Prog(ranks, protocol=protocol, size=4096, flags=256, span=9)
    queues = [(r, i) for r in range(ranks) for i in range(rng.randint(1, 4))]
    callers = [(r, CALLER) for r in range(ranks)]
    # Every rank's caller tells every engine queue that it entered: word = the caller's rank.
    program.queues = {(r, CALLER): [] for r in range(ranks)} | {queue: [] for queue in queues}
    for rank, _ in callers:
        for other in range(ranks):
            word = ("flag", other, rank)
            program.queues[rank, CALLER].append(Cmd("signal", word, value=1))
    for queue in queues:
        entry = Cmd("poll", ("flag", queue[0], 0), rows=ranks, dst_step=1, value=1)
        program.queues[queue].append(entry)
    free = {("out", r): 0 for r in range(ranks)}
    sent: list[tuple[tuple[str, int, int], int]] = []
    written: list[tuple[tuple[int, int], Cmd]] = []
    next_word = ranks
    for _ in range(rng.randint(5, 60)):
        queue = rng.choice(queues)
        commands = program.queues[queue]
        kind = rng.random()
        if kind < 0.6:
            owner, size = rng.randrange(ranks), rng.randint(1, 32)
            dst = ("out", owner, free["out", owner])
            free["out", owner] += size
            src = ("in", queue[0], rng.randrange(0, 4000))
            commands.append(Cmd("copy", dst, src, size))
            written.append((queue, commands[-1]))
        elif kind < 0.8:
            word = ("flag", rng.randrange(ranks), next_word)
            next_word += 1
            for value in range(1, rng.randint(2, 4)):
                commands.append(Cmd("signal", word, value=value))
                sent.append((word, value))
        elif sent:
            word, value = rng.choice(sent)
            commands.append(Cmd("poll", word, value=value))
    # Then every queue reports, and one reads what any of them wrote.
    for number, queue in enumerate(queues):
        word = ("flag", 0, 128 + number)
        program.queues[queue].append(Cmd("signal", word, value=9))
    last = program.queues[queues[0]]
    last.append(Cmd("poll", ("flag", 0, 128), rows=len(queues), dst_step=1, value=5))
    for _, copy in written[:20]:
        last.append(replace(copy, dst=("in", queues[0][0], 4032), src=copy.dst))
        last.append(Cmd("fence"))
    # Every rank's caller waits until all queues have ended.
    for number, queue in enumerate(queues):
        program.queues[queue].append(Cmd("signal", ("flag", "host", number), value=9))
    for caller in callers:
        ended = Cmd("poll", ("flag", "host", 0), rows=len(queues), dst_step=1, value=9)
        program.queues[caller].append(ended)
    return program


@given(seeds, st.sampled_from(["barrier", "eager", "promise"]))
def test_correct_programs_pass(seed: int, protocol: str) -> None:
    rng = random.Random(seed)
    assert verdict(correct_program(rng, protocol)) == ""


def places(program: Prog, *ops: str) -> list[Place]:
    return [
        (queue, i)
        for queue, commands in sorted(program.queues.items())
        for i, command in enumerate(commands)
        if command.op in ops
    ]


@given(seeds)
def test_a_planted_overlap_is_found(seed: int) -> None:
    rng = random.Random(seed)
    program = correct_program(rng)
    queue = rng.choice([queue for queue in program.queues if queue[1] != CALLER])
    program.queues[queue].insert(0, Cmd("copy", ("out", 0, 4064), ("in", queue[0], 0), 8))
    queue, i = rng.choice(places(program, "copy"))
    copy = program.queues[queue][i]
    # A new queue that polls nothing is ordered with nobody.
    at = rng.randrange(copy.bytes)
    intruder = Cmd("copy", (copy.dst[0], copy.dst[1], copy.dst[2] + at), ("pool", "host", 0), 1)
    program.queues[int(copy.dst[1]), 50] = [intruder]
    message = verdict(program)
    assert message.startswith("hazard: ")
    assert intruder.text() in message


@given(seeds)
def test_a_removed_signal_is_found(seed: int) -> None:
    rng = random.Random(seed)
    program = correct_program(rng)
    polled = [
        (queue, i)
        for queue, i in places(program, "signal")
        if queue[1] == CALLER or program.queues[queue][i].value == 9
    ]
    queue, i = rng.choice(polled)
    signal = program.queues[queue].pop(i)
    message = verdict(program)
    assert message.startswith("unmatched: ")
    assert f"[{signal.dst[1]}]" in message


@given(seeds)
def test_a_cycle_of_polls_is_found(seed: int) -> None:
    rng = random.Random(seed)
    program = correct_program(rng)
    queues = [queue for queue in program.queues if queue[1] != CALLER]
    ring = rng.sample(queues, rng.randint(1, min(4, len(queues))))
    for number, queue in enumerate(ring):
        own, previous = (("flag", 0, 200 + n % len(ring)) for n in (number, number - 1))
        program.queues[queue].insert(1, Cmd("signal", own, value=1))
        program.queues[queue].insert(1, Cmd("poll", previous, value=1))
    message = verdict(program)
    assert message.startswith("deadlock: ")
    for rank, index in ring:
        assert f"queue {rank}.{index}, command 1 (poll flag[0]:2" in message


@given(seeds)
def test_a_shift_out_of_bounds_is_found(seed: int) -> None:
    rng = random.Random(seed)
    program = correct_program(rng)
    queue, i = rng.choice(places(program, "copy", "signal", "poll"))
    command = program.queues[queue][i]
    name, rank, offset = command.dst
    size = program.flags if name == "flag" else program.size
    far = rng.choice([size, offset + size, 2**32 + offset, 2**63, 2**64 - 1])
    program.queues[queue][i] = replace(command, dst=(name, rank, far))
    message = verdict(program)
    rank_text = "caller" if queue[1] == CALLER else queue[1]
    assert message.startswith(f"bounds: queue {queue[0]}.{rank_text}, command {i} (")


@given(seeds)
def test_a_missing_entry_is_found(seed: int) -> None:
    rng = random.Random(seed)
    program = correct_program(rng, "barrier")
    queues = [queue for queue in program.queues if queue[1] != CALLER]
    rank, index = rng.choice(queues)
    owner = (rank + rng.randrange(1, program.ranks)) % program.ranks
    intruder = Cmd("copy", ("out", owner, 4000), ("in", rank, 0), 8)
    program.queues[rank, index].insert(0, intruder)
    message = verdict(program)
    assert message.startswith(f"entry: queue {rank}.{index}, command 0 ({intruder.text()})")


@given(seeds)
def test_a_missing_exit_is_found(seed: int) -> None:
    rng = random.Random(seed)
    program = correct_program(rng, rng.choice(["barrier", "eager"]))
    rank, index = rng.choice([queue for queue in program.queues if queue[1] != CALLER])
    owner = (rank + rng.randrange(1, program.ranks)) % program.ranks
    commands = program.queues[rank, index]
    late = Cmd("copy", ("out", owner, 4000), ("in", rank, 0), 8)
    reads = replace(late, dst=("in", rank, 4064), src=late.dst)
    commands.append(rng.choice([late, reads]))
    message = verdict(program)
    where = f"queue {rank}.{index}, command {len(commands) - 1} ({commands[-1].text()})"
    assert message.startswith(f"exit: {where}")
    assert f"no queue of rank {owner} waits" in message
