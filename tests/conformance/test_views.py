"""Views: right bytes, for exactly as many further calls as promised, whatever else a lane does."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from exchange import GUARD, PLACES, Ground, Padded
from targets import Target

import offcore
from oracles import Bytes, Case, equal_case, kinds_of, noise

OPS = ("all_gather", "all_to_all")
SLOTS = 4
FURTHER = 2  # view calls of the lane for which a view stays valid
PARTS = (0, 1, 3, 64, 100, 1000, 4096, 5003)


class Lender:
    """View calls on noise, and what each must have left."""

    def __init__(self, comm: offcore.Communicator, place: str = "array") -> None:
        self.comm = comm
        self.place = place
        self.calls = 0

    def call(self, op: str, part: int, variant: str = "auto", lane: int = 0) -> "Lent":
        self.calls += 1
        ranks = self.comm.ranks
        case = equal_case(op, ranks, part)
        nbytes = case.in_bytes(0) or 0
        inputs = []
        for rank in range(ranks):
            # Odd alignments, and bytes around that nobody may read for input.
            padded = Padded(self.comm.host_array(nbytes + 2 * GUARD), nbytes)
            padded.fill(self.calls, rank)
            inputs.append(padded)
        call = getattr(self.comm, op + "_view")
        handle = call([padded.body for padded in inputs], variant=variant, lane=lane)
        expected = case.expected([padded.body.copy() for padded in inputs])
        return Lent(case, handle, expected, inputs)


class Lent:
    """A view call, and the bytes that its view must hold."""

    def __init__(self, case: Case, handle: Any, expected: list[Any], inputs: list[Padded]) -> None:
        self.case = case
        self.handle = handle
        self.expected = expected
        self.inputs = inputs

    def seen(self, rank: int) -> Bytes:
        out = self.handle.out
        return np.asarray(out if self.case.ranks == 1 else out[rank]).reshape(-1)

    def intact(self) -> bool:
        ranks = range(self.case.ranks)
        return all(np.array_equal(self.seen(rank), self.expected[rank]) for rank in ranks)

    def check(self) -> offcore.Result:
        result: offcore.Result = self.handle.wait()
        assert self.intact(), self.case
        for padded in self.inputs:
            padded.assert_holds(np.empty(0, np.uint8), f"{self.case}: the input")
        assert (result.op, result.protocol, result.staged) == (self.case.op, "view", False)
        return result


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_size(target: Target, ranks: int, op: str) -> None:
    with target.communicator(ranks) as comm:
        lender = Lender(comm)
        for part in PARTS:  # each grows the ring sooner or later
            result = lender.call(op, part).check()
            assert not result.in_place
            assert result.bytes == part * ranks


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_variant(target: Target, ranks: int, op: str) -> None:
    with target.communicator(ranks) as comm:
        lender = Lender(comm)
        for kind in sorted(kinds_of(equal_case(op, ranks, 96), staged=False)):
            for prefix in ("", "prelaunch_"):
                for _ in range(2 * SLOTS - 1):
                    result = lender.call(op, 96, prefix + kind).check()
                    assert result.variant == prefix + kind
        with pytest.raises(offcore.Error, match="swap") as refused:
            lender.call(op, 96, "swap")
        assert refused.value.code == "unsupported"


def test_prelaunched_views_are_armed_ahead(target: Target) -> None:
    """Each has slots of its own; among other view calls its views hold as long."""
    ranks = 3
    with target.communicator(ranks) as comm:
        lender = Lender(comm)
        inp = comm.empty(100)
        views: list[tuple[int, offcore.View]] = []
        for turn in range(20):
            for rank in range(ranks):
                inp[rank][:] = noise(100, turn, rank)
            views.append((turn, comm.all_gather_view(inp, variant="prelaunch_b2b")))
            assert views[-1][1].wait().armed_ahead == (turn > 0)
            for earlier, view in views[-1 - FURTHER :]:
                wanted = [noise(100, earlier, rank) for rank in range(ranks)]
                for rank in range(ranks):
                    assert np.array_equal(np.asarray(view.out[rank]), wanted)
            lender.call(OPS[turn % 2], 100).check()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "float32", "int64", "complex128"])
def test_shapes_and_dtypes(target: Target, dtype: str) -> None:
    ranks = 3
    with target.communicator(ranks) as comm:
        inp = comm.empty((3, 5, 2), dtype)
        for rank in range(ranks):
            inp[rank][:] = np.arange(30).reshape(3, 5, 2) + 40 * rank
        sent = [np.asarray(array).copy() for array in inp]
        gathered, exchanged = comm.all_gather_view(inp), comm.all_to_all_view(inp)
        exchanged.wait()
        for rank in range(ranks):
            out = gathered.out[rank]
            assert (out.shape, out.dtype) == ((3, 3, 5, 2), np.dtype(dtype))
            assert np.array_equal(np.asarray(out), np.stack(sent))
            out = exchanged.out[rank]
            assert (out.shape, out.dtype) == ((3, 5, 2), np.dtype(dtype))
            assert np.array_equal(np.asarray(out), np.stack([s[rank] for s in sent]))


def test_windows_and_regions(target: Target) -> None:
    """Inputs in window memory are bytes, as everywhere."""
    with target.communicator(2) as comm:
        window = comm.window(300)
        for rank in range(2):
            window.array(rank)[:] = noise(300, rank)
        whole = comm.all_gather_view(window)
        part = comm.all_to_all_view(window.region(101, 64))
        part.wait()
        for rank in range(2):
            assert whole.out[rank].shape == (2, 300)
            assert np.array_equal(np.asarray(whole.out[rank]), [noise(300, r) for r in range(2)])
            mine = [noise(300, r)[101 + 32 * rank : 133 + 32 * rank] for r in range(2)]
            assert np.array_equal(np.asarray(part.out[rank]), np.concatenate(mine))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_view_holds_for_two_further_calls(target: Target, ranks: int) -> None:
    """And is overwritten by the fourth, so that these tests could fail."""
    rng = random.Random(ranks)
    with target.communicator(ranks) as comm:
        lender = Lender(comm)
        kept: list[Lent] = [lender.call("all_gather", 700)]  # the largest first: nothing grows
        for _ in range(40):
            kept.append(lender.call(rng.choice(OPS), rng.choice([1, 7, 64, 100, 300])))
            for lent in kept[-1 - FURTHER :]:
                lent.check()
            if len(kept) > SLOTS:
                fresh, stale = kept[-1], kept[-1 - SLOTS]
                least = min(fresh.expected[0].size, stale.expected[0].size)
                assert np.array_equal(stale.seen(0)[:least], fresh.seen(0)[:least])
                if least > 7:
                    assert not stale.intact()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_walk(target: Target, ranks: int, seed: int) -> None:
    """View calls of any size and variant among ordinary ones, on three lanes, with nothing waited
    for in between: every view is read late, by an ordinary call of its lane that copies it out."""
    rng = random.Random(f"{ranks} {seed}")
    with target.communicator(ranks) as comm:
        lender = Lender(comm)
        valid: list[list[Lent]] = [[], [], []]
        copies: list[tuple[list[Bytes], Lent]] = []
        for step in range(60):
            lane = rng.randrange(3)
            if rng.random() < 0.6 or not valid[lane]:
                op, part = rng.choice(OPS), rng.choice([5, 64, 333, 1000, 3000 * (step % 7 == 6)])
                kinds = sorted(kinds_of(equal_case(op, ranks, 8), staged=False))
                variant = rng.choice(["auto", *kinds, "prelaunch_b2b"] if step < 30 else ["auto"])
                valid[lane].append(lender.call(op, part, variant, lane))
                valid[lane] = valid[lane][-1 - FURTHER :]
                continue
            lent = rng.choice(valid[lane])
            copies.append((copy_out(comm, lent, lane), lent))
        for lane in range(3):
            if valid[lane]:
                comm.all_gather_view(zeros(comm, 8), lane=lane).wait()
        for copied, lent in copies:
            for rank in range(ranks):
                assert np.array_equal(np.asarray(copied[rank]), lent.expected[rank]), lent.case


def zeros(comm: offcore.Communicator, nbytes: int) -> list[Bytes]:
    return [comm.host_array(nbytes) for _ in range(comm.ranks)]


def copy_out(comm: offcore.Communicator, lent: Lent, lane: int) -> list[Bytes]:
    """Enqueues a copy of the view into memory of this test's: rank r's own part of an all-gather of
    views."""
    nbytes = lent.expected[0].size
    whole = zeros(comm, nbytes * comm.ranks)
    comm.all_gather(whole, lent.handle.out, lane=lane)
    return [array[rank * nbytes : (rank + 1) * nbytes] for rank, array in enumerate(whole)]


@pytest.mark.parametrize("place", PLACES)
def test_ordinary_calls_do_not_count(target: Target, place: str) -> None:
    with target.communicator(3) as comm:
        lender, ground = Lender(comm), Ground(comm, 4096)
        lent = [lender.call("all_gather", 200), lender.call("all_to_all", 50)]
        for turn in range(12):
            op = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")[turn % 5]
            ground.run(equal_case(op, 3, 100 + turn), place)
            for other_lane in range(1, 3):
                lender.call("all_gather", 64, lane=other_lane).check()
        lent.append(lender.call("all_gather", 20))
        assert all(view.check().protocol == "view" for view in lent)


def test_views_outlive_growth(target: Target) -> None:
    """When the ring grows nothing is written into the old slots any more."""
    with target.communicator(2) as comm:
        lender = Lender(comm)
        before = [lender.call("all_gather", 400) for _ in range(FURTHER + 1)]
        after = [lender.call("all_gather", 200_000) for _ in range(SLOTS + 1)]
        for lent in before + after[-FURTHER - 1 :]:
            lent.check()
        again = [lender.call("all_to_all", 100_000) for _ in range(SLOTS)]
        assert {lent.handle.out[0].shape for lent in again} == {(200_000,)}
        for lent in before + again[-FURTHER - 1 :]:
            lent.check()


def test_next_input_is_in_place(target: Target) -> None:
    ranks = 4
    with target.communicator(ranks) as comm:
        views = []
        for turn in range(3 * SLOTS):
            inp = comm.next_input((5, 6), "int32")
            for rank in range(ranks):
                inp[rank][:] = np.full((5, 6), 100 * turn + rank)
            view = comm.all_gather_view(inp)
            result = view.wait()
            assert (result.in_place, result.protocol) == (True, "view")
            views.append(view)
            for late, earlier in enumerate(views[-1 : -2 - FURTHER : -1]):
                for rank in range(ranks):
                    got = np.asarray(earlier.out[rank])
                    for peer in range(ranks):
                        assert (got[peer] == 100 * (turn - late) + peer).all()


def test_next_input_copies_less(target: Target) -> None:
    with target.communicator(4) as comm:
        plain = comm.all_gather_view(zeros(comm, 256), variant="pcpy").wait()
        own = comm.all_gather_view(comm.next_input(256), variant="pcpy").wait()
        assert plain.commands - own.commands == 4  # the own slices


def test_next_input_out_of_turn(target: Target) -> None:
    """Another view call has taken the slot: what next_input gave is then an ordinary input."""
    with target.communicator(2) as comm:
        lender = Lender(comm)
        early = comm.next_input(64)
        taken = lender.call("all_gather", 64)
        taken.check()
        view = comm.all_gather_view(early)
        assert not view.wait().in_place
        mine = [taken.expected[0][64 * rank : 64 * rank + 64] for rank in range(2)]
        for rank in range(2):
            assert np.array_equal(np.asarray(view.out[rank]), mine)
        # The slot of the next call, but as the input of a smaller and of a larger one.
        early = comm.next_input(64)
        for rank in range(2):
            early[rank][:] = noise(64, rank)
        for part in (slice(0, 32), slice(32, 64)):
            with pytest.raises(offcore.Error) as refused:
                comm.all_gather_view([array[part] for array in early])
            assert refused.value.code == "invalid"
        # And from before the ring has grown.
        larger = comm.next_input(100_000)
        assert not comm.all_gather_view(early).wait().in_place
        assert not comm.all_gather_view(larger).wait().in_place


def test_what_next_input_gives_is_the_next_slot(target: Target) -> None:
    with target.communicator(2) as comm:
        lender = Lender(comm)
        views = [lender.call("all_gather", 300) for _ in range(SLOTS)]
        for lent in views:
            lent.handle.wait()
        inp = comm.next_input(300)
        for rank in range(2):
            inp[rank][:] = noise(300, 9, rank)
        for rank in range(2):  # it takes the place of the oldest view, and of that one only
            parts = np.split(views[0].seen(rank), 2)
            assert np.array_equal(parts[rank], noise(300, 9, rank))
        for lent in views[1:]:
            lent.check()


def test_an_expired_view_is_no_input(target: Target) -> None:
    with target.communicator(2) as comm:
        lender = Lender(comm)
        views = [lender.call("all_to_all", 50) for _ in range(SLOTS)]
        with pytest.raises(offcore.Error, match="expired") as refused:
            comm.all_to_all_view(views[0].handle.out)
        assert refused.value.code == "invalid"
        comm.all_to_all_view(views[-1].handle.out).wait()


def test_what_is_refused(target: Target) -> None:
    with target.communicator(2) as comm:
        inp = zeros(comm, 64)

        def code_of(call: Any) -> str:
            with pytest.raises(offcore.Error) as failed:
                call()
            return failed.value.code

        assert code_of(lambda: comm.all_gather_view(None)) == "invalid"
        assert code_of(lambda: comm.all_gather_view([None, None])) == "invalid"
        assert code_of(lambda: comm.all_gather_view(inp[:1])) == "invalid"
        assert code_of(lambda: comm.all_gather_view([inp[0], inp[1][:32]])) == "invalid"
        assert code_of(lambda: comm.all_to_all_view([array[:63] for array in inp])) == "invalid"
        assert code_of(lambda: comm.all_gather_view(inp, variant="warp")) == "invalid"
        assert code_of(lambda: comm.all_gather_view(inp, lane=64)) == "invalid"
        assert code_of(lambda: comm.next_input(-1)) == "invalid"
        assert code_of(lambda: comm.next_input(64, lane=64)) == "invalid"
        assert code_of(lambda: comm.next_input(1 << 60)) == "invalid"
        given = comm.next_input(64)
        prelaunched = partial(comm.all_gather_view, given, variant="prelaunch_b2b")
        assert code_of(prelaunched) == "unsupported"
        for op in ("all_gather", "all_to_all", "broadcast"):
            call = getattr(comm, op)
            wanted = "unsupported" if op == "broadcast" else "invalid"
            assert code_of(lambda call=call: call(inp, protocol="view")) == wanted
        Lender(comm).call("all_gather", 32).check()  # nothing of this has left a trace


def test_views_outlive_their_communicator(target: Target) -> None:
    comm = target.communicator(2)
    lent = Lender(comm).call("all_gather", 5000)
    lent.check()
    outs = lent.handle.out
    assert outs is lent.handle.out
    tail = np.empty(10, np.uint8)
    lent.handle.read(tail, offset=9990, rank=1)
    assert np.array_equal(tail, lent.expected[1][-10:])
    for offset, rank in ((9991, 1), (0, 2), (0, None)):
        with pytest.raises(offcore.Error) as refused:
            lent.handle.read(tail, offset, rank)
        assert refused.value.code == "invalid"
    comm.close()
    expected = lent.expected
    del comm, lent
    for rank in range(2):
        assert np.array_equal(np.asarray(outs[rank]).reshape(-1), expected[rank])


def test_phantom_views_have_no_bytes() -> None:
    with offcore.Communicator(backend="sim", ranks=8, phantom=True) as comm:
        inp = comm.window(1 << 30)
        view = comm.all_gather_view(inp)
        assert view.wait().bytes == 8 << 30
        with pytest.raises(offcore.Error, match="phantom"):
            _ = view.out
        with pytest.raises(offcore.Error, match="phantom"):
            comm.next_input(64)
