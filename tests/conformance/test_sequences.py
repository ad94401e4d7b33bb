"""Many calls ahead of any wait: order within a lane, several lanes, prelaunch among other calls."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exchange import PLACES, PROTOCOLS, Ground
from targets import Target

import offcore
from oracles import Bytes, Case, equal_case, kinds_of, noise


def filled(array: Bytes, *seed: int) -> Bytes:
    array[:] = noise(array.size, *seed)
    return array


BYTES = 480  # a rank's buffer: divides by 1, 2, 3, 4, 5, 8 ranks


class Walk:
    """Random operations between a few buffers, mirrored in numpy; each may read the last's output.

    Half of the buffers lie in a window, half are arrays, so that writing directly, staging and
    every protocol alternate. Nothing is waited for unless a promise needs it.
    """

    def __init__(self, comm: offcore.Communicator, seed: int) -> None:
        self.comm = comm
        self.random = random.Random(seed)
        self.ranks = comm.ranks
        self.names = range(4)
        windows = [comm.window(BYTES) for _ in self.names[:2]]
        self.real: list[list[Bytes]] = [[w.array(r) for r in comm.local_ranks] for w in windows]
        self.real += [[comm.host_array(BYTES) for _ in comm.local_ranks] for _ in self.names[2:]]
        self.model = [[noise(BYTES, seed, b, r) for r in range(self.ranks)] for b in self.names]
        for buffer in self.names:
            for rank in range(self.ranks):
                self.real[buffer][rank][:] = self.model[buffer][rank]
        self.handles: list[offcore.Handle] = []
        self.log: list[str] = []

    def step(self) -> None:
        op = self.random.choice(["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
        out, inp = self.random.sample(self.names, 2)
        in_place = op in ("all_gather", "all_to_all", "broadcast") and self.random.random() < 0.4
        root = self.random.randrange(self.ranks)
        part = BYTES // self.ranks
        if op == "all_to_all":
            part //= self.ranks
        if op == "broadcast":
            part = BYTES
        case = equal_case(op, self.ranks, part, in_place, root)
        protocol = self.random.choice(["auto", "barrier", "credits", "eager", "promise"])
        if out >= 2 and protocol == "promise":
            protocol = "auto"
        staged = protocol == "eager" or (out >= 2 and protocol != "promise")
        variant = self.random.choice(["auto", *sorted(kinds_of(case, staged))])
        if protocol == "credits":
            protocol = protocol if self.room > 0 else "barrier"
            self.room -= 1
        elif variant not in ("auto", "pipelined") and self.random.random() < 0.25 and self.room > 0:
            self.room -= 1
            variant = "prelaunch_" + variant
        if protocol == "promise":
            self.settle()
        self.log.append(f"{op} {out} <- {inp} {in_place=} {root=} {variant} {protocol}")
        self.start(case, out, out if in_place else inp, variant, protocol)

    room = 60  # for operations with words of their own, of which there can be 64

    def start(self, case: Case, out: int, inp: int, variant: str, protocol: str) -> None:
        def cut(arrays: list[Bytes], size: Callable[[int], int | None]) -> list[Bytes | None]:
            sizes = [size(r) for r in range(self.ranks)]
            return [None if n is None else arrays[r][:n] for r, n in enumerate(sizes)]

        largest = max(case.out_bytes(r) or 0 for r in range(self.ranks))
        outputs = [array[:largest] for array in self.real[out]]
        inputs = cut(self.real[inp], case.in_bytes)
        sources: list[Any] = cut(self.model[inp], case.in_bytes)
        if case.in_place and case.op == "all_gather":
            part = case.counts[0]
            sources = [self.model[out][r][r * part : (r + 1) * part] for r in range(self.ranks)]
        expected = case.expected([None if s is None else s.copy() for s in sources])
        for rank, data in enumerate(expected):
            if data is not None:
                self.model[out][rank][: data.size] = data
        root = {} if case.op.startswith("all") else {"root": case.root}
        call = getattr(self.comm, case.op)
        given = None if case.in_place else inputs
        self.handles.append(call(outputs, given, variant=variant, protocol=protocol, **root))

    def settle(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    def assert_right(self) -> None:
        self.settle()
        for buffer in self.names:
            for rank in range(self.ranks):
                same = np.array_equal(self.real[buffer][rank], self.model[buffer][rank])
                assert same, f"buffer {buffer} of rank {rank} after:\n" + "\n".join(self.log)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_random_walk(target: Target, ranks: int, seed: int) -> None:
    with target.communicator(ranks) as comm:
        walk = Walk(comm, seed)
        for _ in range(5):
            for _ in range(12):
                walk.step()
            walk.assert_right()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_random_walks(target: Target, ranks: int) -> None:
    for seed in range(1000, 1200):
        with target.communicator(ranks) as comm:
            walk = Walk(comm, seed)
            for _ in range(10):
                for _ in range(20):
                    walk.step()
                walk.assert_right()


@pytest.mark.parametrize("protocol", ["auto", "eager"])
@pytest.mark.parametrize("place", PLACES)
def test_a_long_chain(target: Target, place: str, protocol: str) -> None:
    """Each call reads what the last one wrote; none is waited for but the last."""
    ranks, parts = 4, (40, 7, 1, 22)
    nbytes = sum(parts)
    # Shifting by uneven parts comes back to nothing seen before, unlike a plain transpose.
    rows = [[parts[(q - r) % ranks] for q in range(ranks)] for r in range(ranks)]
    case = Case("all_to_all", ranks, tuple(count for row in rows for count in row))
    with target.communicator(ranks) as comm:
        if place == "window":
            sides = [comm.empty(nbytes) for _ in range(2)]
        else:
            sides = [[comm.host_array(nbytes) for _ in range(ranks)] for _ in range(2)]
        model: list[Any] = [noise(nbytes, 5, rank) for rank in range(ranks)]
        for rank in range(ranks):
            sides[0][rank][:] = model[rank]
        for call in range(401):
            handle = comm.all_to_all_v(
                sides[1 - call % 2], sides[call % 2], rows, protocol=protocol
            )
            model = case.expected(model)
        handle.wait()
        for rank in range(ranks):
            assert np.array_equal(sides[1][rank], model[rank])


def test_lanes_are_apart(target: Target) -> None:
    """Three lanes with operations of their own, all under way at once."""
    ranks = 3
    with target.communicator(ranks) as comm:
        grounds = [Ground(comm, 4096) for _ in range(3)]
        for turn in range(20):
            under_way = []
            for lane, (ground, op) in enumerate(
                zip(grounds, ("all_gather", "all_to_all", "broadcast"), strict=True)
            ):
                case = equal_case(op, ranks, 100 + turn, root=turn % ranks)
                place = PLACES[(turn + lane) % 2]
                under_way.append(ground.prepare(case, place).start(lane=lane))
            for exchange in reversed(under_way):
                exchange.finish()
        assert [ground.calls for ground in grounds] == [20, 20, 20]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_prelaunched_among_other_calls(target: Target, protocol: str) -> None:
    """Two prelaunched operations, repeated hundreds of times, with others of their lane between."""
    ranks = 4
    kinds = ("all_gather", "prelaunch_pcpy"), ("broadcast", "prelaunch_b2b")
    with target.communicator(ranks) as comm:
        grounds = [Ground(comm, 4096) for _ in range(3)]
        armed = [
            grounds[i].prepare(equal_case(op, ranks, 64, in_place=True), "window")
            for i, (op, _) in enumerate(kinds)
        ]
        for turn in range(200):
            for exchange, (_, variant) in zip(armed, kinds, strict=True):
                exchange.refill(turn)
                result = exchange.start(variant, protocol).finish()
                assert (result.armed_ahead, result.mode) == (turn > 0 and target.ahead, "armed")
            if turn % 3 == 0:
                other = equal_case("all_to_all", ranks, 1 + turn % 50)
                assert not grounds[2].run(other, PLACES[turn % 2]).armed_ahead


def test_prelaunched_many_ahead(target: Target) -> None:
    """A prelaunched operation called again before it was waited for."""
    ranks = 3
    with target.communicator(ranks) as comm:
        out = comm.empty(30)
        for rank in range(ranks):
            out[rank][:] = noise(30, rank)
        expected = np.concatenate([out[rank][rank * 10 : rank * 10 + 10] for rank in range(ranks)])
        handles = [comm.all_gather(out, variant="prelaunch_b2b") for _ in range(100)]
        ahead = [handle.wait().armed_ahead for handle in handles]
        assert ahead == [False] + [True] * 99
        assert all(np.array_equal(out[rank], expected) for rank in range(ranks))


def test_dropped_handles(target: Target) -> None:
    """An operation goes on, and keeps its memory, though nobody waits for it."""
    ranks = 3
    with target.communicator(ranks) as comm:
        ground = Ground(comm, 4096)
        for turn in range(50):
            comm.all_gather(
                [comm.host_array(3000) for _ in range(ranks)],
                [filled(comm.host_array(1000), turn, rank) for rank in range(ranks)],
            )
        assert ground.run(equal_case("all_to_all", ranks, 100), "window").bytes == 300


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "scatter"])
def test_what_is_armed_for_other_buffers_never_runs(target: Target, op: str) -> None:
    """The second call takes what the first one armed, the third finds other input than was armed
    for, while the second still runs. What was armed must not start with the third."""
    ranks = 3
    case = equal_case(op, ranks, 48, root=2)
    with target.communicator(ranks) as comm:
        sides = [[comm.host_array(480) for _ in range(ranks)] for _ in range(3)]
        outputs = [side[: case.out_bytes(r)] for r, side in enumerate(sides[2])]
        given = [
            [None if (n := case.in_bytes(r)) is None else side[r][:n] for r in range(ranks)]
            for side in sides[:2]
        ]
        root = {} if op.startswith("all") else {"root": 2}
        for turn in range(60):
            for which in (0, 1):
                for r in range(ranks):
                    filled(sides[which][r], turn, which, r)
            calls = [given[which] for which in (turn % 2, turn % 2, 1 - turn % 2)]
            handles = [
                getattr(comm, op)(outputs, i, variant="prelaunch_pcpy", **root) for i in calls
            ]
            for handle in handles:
                handle.wait()
            for rank, expected in enumerate(case.expected(calls[-1])):
                assert np.array_equal(outputs[rank], expected), (turn, rank)
