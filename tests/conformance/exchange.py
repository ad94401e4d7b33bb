"""Lays a case out in memory, runs it, and checks every byte of it and around it."""

from typing import Any

import numpy as np

import offcore
from oracles import Bytes, Case, given, noise

GUARD = 96  # bytes on both sides of every buffer, which nothing may touch
PLACES = ("window", "array")
PROTOCOLS = ("auto", "barrier", "promise", "eager")


class Padded:
    """A buffer between two guards."""

    def __init__(self, whole: Bytes, nbytes: int) -> None:
        self.whole = whole
        self.nbytes = nbytes

    def fill(self, *seed: int) -> None:
        self.before = noise(self.whole.size, *seed)
        self.whole[:] = self.before

    @property
    def body(self) -> Bytes:
        return self.whole[GUARD : GUARD + self.nbytes]

    def assert_holds(self, expected: Bytes, what: str) -> None:
        """The body begins with these bytes; all else is as it was."""
        wanted = self.before.copy()
        wanted[GUARD : GUARD + expected.size] = expected
        wrong = np.flatnonzero(self.whole != wanted)
        assert wrong.size == 0, f"{what}: {wrong.size} wrong bytes, the first at {wrong[0] - GUARD}"


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
        self.place = place
        everyone = range(case.ranks)
        sizes = [case.out_bytes(rank) for rank in everyone]
        if place == "window":  # all ranks pass the same part of it, whether they need it or not
            sizes = [max(size for size in sizes if size is not None)] * case.ranks
        self.outputs = [
            None if size is None else self.buffer(ground.shares[rank], size, place)
            for rank, size in enumerate(sizes)
        ]
        self.sources = [
            None
            if case.in_place or (size := case.in_bytes(rank)) is None
            else self.buffer(None, size, "array")
            for rank in everyone
        ]
        self.refill(seed)

    def buffer(self, share: Bytes | None, nbytes: int, place: str) -> Padded:
        room = nbytes + 2 * GUARD
        own = share is None or place == "array"
        whole = self.ground.comm.host_array(room) if own else share[:room]
        return Padded(whole, nbytes)

    def refill(self, seed: int) -> None:
        """Fresh bytes everywhere."""
        self.inputs: list[Bytes | None] = [None] * self.case.ranks
        for rank, (out, source) in enumerate(zip(self.outputs, self.sources, strict=True)):
            nbytes = self.case.in_bytes(rank)
            for padded in (out, source):
                if padded is not None:
                    padded.fill(seed, rank, padded is out)
            if nbytes is None:
                continue
            at = self.case.own_offset(rank) if self.case.in_place else 0
            body = given(out if self.case.in_place else source).body
            self.inputs[rank] = body[at : at + nbytes].copy()

    def arguments(self) -> tuple[Any, Any]:
        out = [None if o is None else o.body for o in self.outputs]
        inp = [None if s is None else s.body for s in self.sources]
        return out, None if self.case.in_place else inp

    def start(self, variant: str = "auto", protocol: str = "auto", lane: int = 0) -> "Exchange":
        case = self.case
        self.what = f"{case} {self.place} {variant} {protocol}"
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
        self._assert_outputs(self.case.expected(self.inputs))

    def assert_untouched(self) -> None:
        """Every byte is as it was laid out."""
        self._assert_outputs([None] * self.case.ranks)

    def _assert_outputs(self, contents: list[Bytes | None]) -> None:
        nothing = np.empty(0, np.uint8)
        for rank, expected in enumerate(contents):
            out, source = self.outputs[rank], self.sources[rank]
            if out is not None:
                wanted = nothing if expected is None else expected
                out.assert_holds(wanted, f"{self.what}: output of rank {rank}")
            if source is not None:
                source.assert_holds(nothing, f"{self.what}: input of rank {rank}")
