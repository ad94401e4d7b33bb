"""Lays a case out in memory, runs it, and checks every byte of it and around it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import offcore
from oracles import Bytes, Case, noise

GUARD = 96  # bytes on both sides of every buffer, which nothing may touch
PLACES = ("window", "array")


@dataclass
class Padded:
    """A buffer between two guards."""

    whole: Bytes
    nbytes: int
    before: Bytes

    @property
    def body(self) -> Bytes:
        return self.whole[GUARD : GUARD + self.nbytes]

    def assert_holds(self, expected: Bytes, what: str) -> None:
        """The body holds these bytes, and the guards what they held."""
        wrong = np.flatnonzero(self.body != expected)
        assert wrong.size == 0, f"{what}: {wrong.size} wrong bytes, the first at {wrong[0]}"
        for side in (slice(0, GUARD), slice(GUARD + self.nbytes, None)):
            assert np.array_equal(self.whole[side], self.before[side]), f"{what}: outside touched"


def padded(whole: Bytes, nbytes: int, *seed: int) -> Padded:
    whole[:] = noise(whole.size, *seed)
    return Padded(whole, nbytes, whole.copy())


class Ground:
    """A communicator with a window, large enough for the cases that run on it."""

    def __init__(self, comm: offcore.Communicator, case_bytes_max: int) -> None:
        self.comm = comm
        room = case_bytes_max + 2 * GUARD
        self.window = comm.window(room)
        self.shares = [self.window.array(rank) for rank in comm.local_ranks]
        self.calls = 0

    def run(
        self, case: Case, place: str, variant: str = "auto", protocol: str = "auto"
    ) -> offcore.Result:
        """Starts the case with fresh bytes, waits and checks."""
        return self.prepare(case, place).start(variant, protocol).finish()

    def prepare(self, case: Case, place: str) -> "Exchange":
        self.calls += 1
        return Exchange(self, case, place, self.calls)


class Exchange:
    """A case laid out in memory, once."""

    def __init__(self, ground: Ground, case: Case, place: str, seed: int) -> None:
        self.ground = ground
        self.case = case
        self.what = f"{case} {place}"
        everyone = range(case.ranks)
        self.inputs = [
            None if (n := case.in_bytes(r)) is None else noise(n, seed, r, 1) for r in everyone
        ]
        sizes = [case.out_bytes(r) for r in everyone]
        self.outputs: list[Padded | None] = []
        for r in everyone:
            size = sizes[r] if place == "array" else max(s for s in sizes if s is not None)
            if size is None:
                self.outputs.append(None)
                continue
            room = size + 2 * GUARD
            whole = np.empty(room, np.uint8) if place == "array" else ground.shares[r][:room]
            self.outputs.append(padded(whole, size, seed, r, 2))
        self.sources: list[Padded | None] = [None] * case.ranks
        for r in everyone:
            data, out = self.inputs[r], self.outputs[r]
            if data is None:
                continue
            if case.in_place:
                assert out is not None
                at = case.own_offset(r)
                out.body[at : at + data.size] = data
            else:
                source = padded(np.empty(data.size + 2 * GUARD, np.uint8), data.size, seed, r, 3)
                source.body[:] = data
                self.sources[r] = source

    def arguments(self) -> tuple[Any, Any]:
        out = [None if o is None else o.body for o in self.outputs]
        inp = [None if s is None else s.body for s in self.sources]
        return out, None if self.case.in_place else inp

    def start(self, variant: str = "auto", protocol: str = "auto", lane: int = 0) -> "Exchange":
        case = self.case
        self.what += f" {variant} {protocol}"
        out, inp = self.arguments()
        arguments: list[Any] = [out, inp]
        name = case.op
        if len(set(case.counts)) > 1:
            name += "_v"
            counts: Any = list(case.counts)
            if case.op == "all_to_all":
                counts = np.reshape(counts, (case.ranks, case.ranks)).tolist()
            arguments.append(counts)
        root = {} if case.op.startswith("all") else {"root": case.root}
        call = getattr(self.ground.comm, name)
        self.handle = call(*arguments, variant=variant, protocol=protocol, lane=lane, **root)
        return self

    def finish(self) -> offcore.Result:
        result = self.handle.wait()
        self.check()
        assert result.op == self.case.op
        assert result.in_place == self.case.in_place
        return result

    def check(self) -> None:
        for rank, expected in enumerate(self.case.expected(self.inputs)):
            out, source = self.outputs[rank], self.sources[rank]
            if out is not None:
                wanted = out.before[GUARD : GUARD + out.nbytes].copy()
                if expected is not None:
                    wanted[: expected.size] = expected
                out.assert_holds(wanted, f"{self.what}: output of rank {rank}")
            if source is not None:
                data = self.inputs[rank]
                assert data is not None
                source.assert_holds(data, f"{self.what}: input of rank {rank}")
