"""Random machines, moves and collectives, and one way to run a program on any of them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st

import offcore
from offcore import _core
from oracles import BatchMove, Bytes, Case, Memory

MACHINES = ("mi300x-8", "h200-2", "h200-4", "h200-8", "host-1", "host-3", "host-8")
PROTOCOLS = {
    "barrier": _core.Protocol(entry=True, staged=False),
    "promise": _core.Protocol(entry=False, staged=False),
    "eager": _core.Protocol(entry=False, staged=True),
    "barrier, staged": _core.Protocol(entry=True, staged=True),
}
VARIANTS = tuple(_core.variants())
ROOM = 96  # bytes of a buffer of a batch

# Machines that have less than any real one, by (part, field, values).
CUTS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("limits", "copy_bytes_max", (1, 7, 64)),
    ("limits", "rows_max", (1, 2)),
    ("limits", "pitch_bytes_max", (1, 16)),
    ("limits", "swap_align", (1, 4, 64)),
    ("limits", "swap_scratch_bytes", (1, 5, 100)),
    ("native", "strided", (False, True)),
    ("native", "bcst_rows", (1, 2, 3)),
    ("native", "swap", (False, True)),
    ("native", "strided_flags", (False, True)),
)


def machine_of(name: str, cuts: Sequence[tuple[str, str, int]], engines: int) -> _core.Machine:
    machine = offcore.machines.load(name)
    for part, field, value in cuts:
        setattr(getattr(machine, part), field, value)
    machine.engines_peer = min(machine.engines_peer, engines)
    machine.check()
    return machine


@st.composite
def machines(draw: st.DrawFn) -> _core.Machine:
    """A real machine, or one cut down."""
    name = draw(st.sampled_from(MACHINES))
    chosen = draw(st.lists(st.sampled_from(CUTS), max_size=4, unique=True))
    cuts = [(part, field, draw(st.sampled_from(values))) for part, field, values in chosen]
    return machine_of(name, cuts, draw(st.sampled_from([1, 2, 3, 14])))


def any_timing(machine: _core.Machine, seed: int) -> _core.Machine:
    """The same machine at random speeds: other orders of what is unordered."""
    rng = random.Random(seed)
    changed = offcore.machines.load("host-1" if machine.name == "host-1" else machine.name)
    for part in ("native", "limits", "links"):
        setattr(changed, part, getattr(machine, part))
    changed.engines_peer = machine.engines_peer
    changed.flags = machine.flags
    for field in ("fetch_ns", "setup_ns", "issue_ns", "sync_ns", "poll_ns", "doorbell_ns"):
        setattr(changed.cost, field, rng.choice([0, 1, 10, 100, 1000, 10000]))
    changed.cost.overlap = rng.choice([1, 2, 8])
    return changed


@dataclass
class Batch:
    """Moves between buffers of every kind, named as in a program's text."""

    ranks: int
    moves: list[BatchMove]

    KINDS: ClassVar = {"a": "window", "b": "window", "own": "local", "pool": "host"}

    @property
    def places(self) -> list[tuple[str, int]]:
        return [(name, rank) for name in self.KINDS for rank in homes(name, self.ranks)]

    def lowered_from(self) -> _core.Moves:
        ids = {name: i for i, name in enumerate(self.KINDS, 1)}
        buffers = [(name, kind, ROOM) for name, kind in self.KINDS.items()]
        moves = [
            ((ids[d], d_rank, d_at), (ids[s], s_rank, s_at), nbytes)
            for (d, d_rank, d_at), (s, s_rank, s_at), nbytes in self.moves
        ]
        return _core.moves_batch(self.ranks, buffers, moves)

    def memory(self) -> Memory:
        rng = random.Random(len(self.moves))
        return {place: rng.randbytes(ROOM) for place in self.places}


def homes(name: str, ranks: int) -> Sequence[int]:
    return (-1,) if Batch.KINDS[name] == "host" else range(ranks)


@st.composite
def batches(draw: st.DrawFn, apart: bool, ranks_max: int) -> Batch:
    """Random moves that write no byte twice. `apart`: nor one that any of them reads."""
    ranks = draw(st.integers(1, min(ranks_max, 4)))
    rng = draw(st.randoms(use_true_random=False))
    batch = Batch(ranks, [])
    grain = draw(st.sampled_from([1, 4, 16]))
    taken: dict[tuple[str, int], list[tuple[int, int, bool]]] = {p: [] for p in batch.places}

    def clear(place: tuple[str, int], begin: int, end: int, of_reads: bool) -> bool:
        return not any(b < end and begin < e and (w or of_reads) for b, e, w in taken[place])

    for _ in range(draw(st.integers(0, 14))):
        nbytes = grain * rng.randint(0, 3)
        if batch.moves and rng.random() < 0.5:  # carries on from an earlier one
            (dst, dst_rank, dst_at), (src, src_rank, src_at), nbytes = rng.choice(batch.moves)
            step = rng.choice([nbytes, grain, 2 * nbytes])
            dst_at, src_at = dst_at + step, src_at + rng.choice([0, step])
            if rng.random() < 0.5 and dst in "ab":
                dst_rank, dst_at = (dst_rank + 1) % ranks, dst_at - step
        else:
            dst, src = rng.choice(list(Batch.KINDS)), rng.choice(list(Batch.KINDS))
            dst_rank, src_rank = rng.choice(homes(dst, ranks)), rng.choice(homes(src, ranks))
            dst_at, src_at = (grain * rng.randrange(ROOM // grain) for _ in range(2))
        if "own" in (dst, src) and dst_rank != src_rank and -1 not in (dst_rank, src_rank):
            continue  # only the owner's queues see it, and the source's rank pushes
        if max(dst_at, src_at) + nbytes > ROOM:
            continue
        to, what = (dst, dst_rank), (src, src_rank)
        if not clear(to, dst_at, dst_at + nbytes, apart):
            continue
        if apart and not clear(what, src_at, src_at + nbytes, False):
            continue
        if apart and to == what and dst_at < src_at + nbytes and src_at < dst_at + nbytes:
            continue
        taken[to].append((dst_at, dst_at + nbytes, True))
        taken[what].append((src_at, src_at + nbytes, False))
        batch.moves.append(((*to, dst_at), (*what, src_at), nbytes))
    return batch


@st.composite
def collectives(draw: st.DrawFn, ranks_max: int) -> Case:
    ranks = draw(st.integers(1, ranks_max))
    op = draw(st.sampled_from(["all_gather", "all_to_all", "broadcast", "scatter", "gather"]))
    in_place = op in ("all_gather", "all_to_all", "broadcast") and draw(st.booleans())
    number = {"all_to_all": ranks * ranks, "broadcast": 1}.get(op, ranks)
    count = st.sampled_from([0, 1, 3, 16, 64, 65])
    equal = draw(st.booleans()) or (op == "all_to_all" and in_place)
    counts = (
        [draw(count)] * number if equal else draw(st.lists(count, min_size=number, max_size=number))
    )
    return Case(op, ranks, tuple(counts), in_place, draw(st.integers(0, ranks - 1)))


def moves_of(case: Case) -> _core.Moves:
    counts = list(case.counts)
    if case.op == "all_gather":
        return _core.moves_all_gather(counts, case.in_place)
    if case.op == "all_to_all":
        return _core.moves_all_to_all(case.ranks, counts, case.in_place)
    if case.op == "broadcast":
        return _core.moves_broadcast(case.ranks, case.root, counts[0], case.in_place)
    return (_core.moves_scatter if case.op == "scatter" else _core.moves_gather)(case.root, counts)


def run(
    program: _core.Program,
    memory: Memory,
    machine: _core.Machine,
    seed: int = 0,
    backend: str = "sim",
    faults: Sequence[_core.Fault] = (),
) -> tuple[Memory, _core.RunReport]:
    """The contents that a run leaves; buffers that `memory` lacks start as zeros."""
    options = {"seed": seed, "faults": list(faults)} if backend == "sim" else {}
    session = _core.Session(backend, machine, program.ranks, **options)
    arrays = dict(arrays_of(program, memory))
    report = session.run(program, {n: list(a.values()) for n, a in arrays.items()}, checked=False)
    return {
        (n, r): a.tobytes() for n, of_rank in arrays.items() for r, a in of_rank.items()
    }, report


def arrays_of(program: _core.Program, memory: Memory) -> Iterator[tuple[str, dict[int, Bytes]]]:
    for name, kind, nbytes in program.buffers:
        of_rank = {}
        for rank in (-1,) if kind == "host" else range(program.ranks):
            array = np.zeros(nbytes, np.uint8)
            data = np.frombuffer(memory.get((name, rank), b""), np.uint8)
            array[: data.size] = data
            of_rank[rank] = array
        yield name, of_rank
