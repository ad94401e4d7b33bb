"""Wrong arguments: the code, what the message has to name, and that nothing has happened."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from targets import Target

import offcore

RANKS = 3


class Site:
    """A communicator of three ranks and buffers to pass wrongly."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.comm = target.communicator(RANKS)
        self.window = self.comm.window(300)
        self.out = [self.window.array(r) for r in range(RANKS)]
        self.inp = self.arrays(100)

    def arrays(self, *sizes: int, dtype: str = "uint8") -> list[np.ndarray]:
        sizes = sizes * RANKS if len(sizes) == 1 else sizes
        return [self.comm.host_array(size, dtype) for size in sizes]

    def closed(self) -> offcore.Communicator:
        other = self.target.communicator(RANKS)
        other.close()
        return other

    def aborted(self) -> offcore.Communicator:
        other = self.target.communicator(RANKS)
        other.abort()
        return other


@pytest.fixture(scope="module")
def site(target: Target) -> Site:
    return Site(target)


def read_only(arrays: list[np.ndarray]) -> list[np.ndarray]:
    for array in arrays:
        array.flags.writeable = False
    return arrays


Call = Callable[[Site], Any]
WRONG: dict[str, tuple[Call, str, tuple[str, ...]]] = {
    # sizes
    "output too small": (
        lambda s: s.comm.all_gather(s.arrays(299), s.inp),
        "invalid",
        ("output of rank 0 has 299 bytes", "300 needed"),
    ),
    "output too large": (
        lambda s: s.comm.all_gather(s.arrays(301), s.inp),
        "invalid",
        ("301 bytes", "300 needed"),
    ),
    "one rank's input is short": (
        lambda s: s.comm.all_gather(s.out, s.arrays(100, 100, 99)),
        "invalid",
        ("input of rank 2 has 99 bytes", "100 needed"),
    ),
    "all_gather in place does not divide": (
        lambda s: s.comm.all_gather(s.arrays(100)),
        "invalid",
        ("100 bytes", "3 equal parts", "all_gather_v"),
    ),
    "all_to_all does not divide": (
        lambda s: s.comm.all_to_all(s.arrays(100), s.arrays(100)),
        "invalid",
        ("100 bytes", "3 equal parts", "all_to_all_v"),
    ),
    "all_to_all in place does not divide": (
        lambda s: s.comm.all_to_all(s.arrays(100)),
        "unsupported",
        ("100 bytes", "3 equal parts"),
    ),
    "scatter's input is short": (
        lambda s: s.comm.scatter(s.inp, [None, s.arrays(299)[0], None], root=1),
        "invalid",
        ("input of rank 1 has 299 bytes", "300 needed"),
    ),
    "gather's root has no output": (
        lambda s: s.comm.gather([None] * RANKS, s.inp, root=2),
        "invalid",
        ("output of rank 2 has 0 bytes", "300 needed"),
    ),
    "broadcast's buffers differ": (
        lambda s: s.comm.broadcast(s.arrays(100, 100, 64)),
        "invalid",
        ("rank 2 has 64 bytes", "100 needed"),
    ),
    # counts
    "too few counts": (
        lambda s: s.comm.all_gather_v(s.out, s.inp, [100, 100]),
        "invalid",
        ("2 counts given", "3 needed"),
    ),
    "a row of counts is short": (
        lambda s: s.comm.all_to_all_v(s.out, s.inp, [[1, 2, 3], [1, 2], [1, 2, 3]]),
        "invalid",
        ("8 counts given", "9 needed"),
    ),
    "negative counts": (
        lambda s: s.comm.gather_v(s.out, s.inp, [1, -1, 1]),
        "invalid",
        ("count", "-1"),
    ),
    "no counts": (
        lambda s: s.comm.all_gather_v(s.out, s.inp, []),
        "invalid",
        ("all_gather_v", "pass counts, one for each rank"),
    ),
    "a count that is no number": (
        lambda s: s.comm.all_gather_v(s.out, s.inp, [1.5, 1, 1]),
        "invalid",
        ("whole number", "1.5"),
    ),
    "counts beyond the input": (
        lambda s: s.comm.all_gather_v(s.out, s.inp, [101, 100, 99]),
        "invalid",
        ("input of rank 0 has 100 bytes", "at least 101 needed"),
    ),
    "counts beyond the output": (
        lambda s: s.comm.scatter_v(s.inp, s.arrays(300), [100, 101, 99]),
        "invalid",
        ("output of rank 1 has 100 bytes", "at least 101 needed"),
    ),
    "counts whose sum wraps": (
        lambda s: s.comm.all_gather_v(s.out, s.inp, [1 << 62, 1 << 62, 8]),
        "invalid",
        ("100 bytes", f"{1 << 62} needed"),
    ),
    "counts beyond 64 bits": (
        lambda s: s.comm.all_gather_v(s.out, s.inp, [1 << 70, 1, 1]),
        "invalid",
        ("count", str(1 << 70)),
    ),
    # buffers
    "input overlaps output": (
        lambda s: s.comm.all_gather(s.out, [out[50:150] for out in s.out]),
        "invalid",
        ("rank 0 overlap", "own part"),
    ),
    "scatter onto itself": (
        lambda s: s.comm.scatter([out[:100] for out in s.out], s.out),
        "invalid",
        ("overlap",),
    ),
    "in place on some ranks": (
        lambda s: s.comm.all_gather(s.out, [s.out[0][:100], s.out[1][100:200], s.inp[2]]),
        "invalid",
        ("some local ranks are in place",),
    ),
    "dtypes differ": (
        lambda s: s.comm.all_gather(s.arrays(75, dtype="float32"), s.arrays(25, dtype="int32")),
        "invalid",
        ("float32", "int32"),
    ),
    "dtypes differ between ranks": (
        lambda s: s.comm.broadcast([*s.arrays(8)[:2], np.zeros(1, "int64")]),
        "invalid",
        ("output", "dtypes differ"),
    ),
    "read-only output": (
        lambda s: s.comm.broadcast(read_only(s.arrays(8))),
        "invalid",
        ("rank 0 is read-only",),
    ),
    "every second element": (
        lambda s: s.comm.broadcast([array[::2] for array in s.arrays(8)]),
        "invalid",
        ("not contiguous", "ascontiguousarray"),
    ),
    "a list of numbers": (
        lambda s: s.comm.broadcast([1, 2, 3]),
        "invalid",
        ("int", "array"),
    ),
    "one array for three ranks": (
        lambda s: s.comm.broadcast(np.zeros(8, "uint8")),
        "invalid",
        ("3 ranks", "list of 3 arrays"),
    ),
    "two arrays for three ranks": (
        lambda s: s.comm.broadcast(s.arrays(8)[:2]),
        "invalid",
        ("list of 3 arrays",),
    ),
    "a window of another communicator": (
        lambda s: s.comm.broadcast(s.target.communicator(RANKS).window(300)),
        "invalid",
        ("another communicator",),
    ),
    "a region beyond its window": (
        lambda s: s.comm.broadcast(s.window.region(200, 101)),
        "invalid",
        ("200+101", "300 bytes"),
    ),
    "a rank that a window does not have": (
        lambda s: s.window.array(RANKS),
        "invalid",
        ("rank 3", "[0, 1, 2]"),
    ),
    "a window's share without a rank": (
        lambda s: s.window.array(),
        "invalid",
        ("[0, 1, 2]",),
    ),
    # names and numbers
    "unknown variant": (
        lambda s: s.comm.all_gather(s.out, variant="pcopy"),
        "invalid",
        ("'pcopy'", "pcpy, bcst, swap, b2b, fan"),
    ),
    "engines of a variant": (
        lambda s: s.comm.all_gather(s.out, variant="pcpy:0"),
        "invalid",
        ("'pcpy:0'", "1..256"),
    ),
    "unknown protocol": (
        lambda s: s.comm.all_gather(s.out, protocol="hope"),
        "invalid",
        ("'hope'", "auto, barrier, credits, eager, promise"),
    ),
    "unknown operation": (
        lambda s: s.comm.program("rotate", 4096),
        "invalid",
        ("rotate", "all_gather, all_to_all, broadcast, scatter, gather"),
    ),
    "root beyond the ranks": (
        lambda s: s.comm.broadcast(s.out, root=RANKS),
        "invalid",
        ("root is 3", "0..2"),
    ),
    "negative root": (lambda s: s.comm.broadcast(s.out, root=-1), "invalid", ("root",)),
    "lane beyond the limit": (
        lambda s: s.comm.broadcast(s.out, lane=64),
        "invalid",
        ("lane 64", "below 64"),
    ),
    "negative lane": (lambda s: s.comm.broadcast(s.out, lane=-1), "invalid", ("lane",)),
    "a window of negative size": (lambda s: s.comm.window(-1), "invalid", ("nbytes is -1",)),
    # what the operation cannot have
    "swap out of place": (
        lambda s: s.comm.all_to_all(s.out, s.arrays(300), variant="swap"),
        "unsupported",
        ("swap", "out of place"),
    ),
    "swap outside the windows": (
        lambda s: s.comm.all_to_all(s.arrays(300), variant="swap"),
        "unsupported",
        ("swap", "window"),
    ),
    "swap of a gather": (
        lambda s: s.comm.all_gather(s.out, variant="prelaunch_swap"),
        "unsupported",
        ("swap", "all_gather"),
    ),
    "bcst of different sources": (
        lambda s: s.comm.all_to_all(s.out, s.arrays(300), variant="bcst"),
        "unsupported",
        ("one source with several destinations",),
    ),
    "copies of an exchange in place": (
        lambda s: s.comm.all_to_all(s.out, variant="pcpy"),
        "unsupported",
        ("in place", "use swap or separate buffers"),
    ),
    "scatter in place": (
        lambda s: s.comm.scatter(s.out, None),
        "unsupported",
        ("scatter in place", "pass an input"),
    ),
    "uneven exchange in place": (
        lambda s: s.comm.all_to_all_v(s.out, None, [[1, 2, 3]] * RANKS),
        "unsupported",
        ("in-place all_to_all", "equal counts"),
    ),
    "a promise outside the windows": (
        lambda s: s.comm.all_gather(s.arrays(300), s.inp, protocol="promise"),
        "unsupported",
        ("promise", "window"),
    ),
    # dead communicators
    "a call after close": (
        lambda s: s.closed().broadcast(s.arrays(8)),
        "invalid",
        ("closed",),
    ),
    "a window after close": (lambda s: s.closed().window(8), "invalid", ("closed",)),
    "a barrier after close": (lambda s: s.closed().barrier(), "invalid", ("closed",)),
    "a call after abort": (
        lambda s: s.aborted().broadcast(s.arrays(8)),
        "cancelled",
        ("aborted by this rank",),
    ),
    "a barrier after abort": (lambda s: s.aborted().barrier(), "cancelled", ("aborted",)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls(site: Site, wrong: str) -> None:
    call, code, names = WRONG[wrong]
    for rank, out in enumerate(site.out):
        out[:] = 7 + rank
    with pytest.raises(offcore.Error) as refused:
        call(site)
    assert refused.value.code == code, str(refused.value)
    for name in names:
        assert name in str(refused.value)
    assert all((out == 7 + rank).all() for rank, out in enumerate(site.out))
    # And the communicator works on.
    for rank, array in enumerate(site.inp):
        array[:] = rank
    site.comm.all_gather(site.out, site.inp).wait()
    assert all((out == np.repeat(range(RANKS), 100)).all() for out in site.out)


OPENED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "unknown backend": ({"backend": "tape"}, "invalid", ("tape", "host", "sim")),
    "unknown machine": ({"backend": "sim", "machine": "mi9"}, "invalid", ("mi9", "mi300x-8")),
    "too many ranks": (
        {"backend": "sim", "machine": "h200-4", "ranks": 5},
        "invalid",
        ("h200-4", "4", "5"),
    ),
    "no ranks": ({"backend": "sim", "machine": "h200-4", "ranks": 0}, "invalid", ("ranks",)),
    "negative ranks": ({"backend": "sim", "machine": "h200-4", "ranks": -1}, "invalid", ("ranks",)),
    "ranks beyond a number's room": (
        {"backend": "sim", "machine": "h200-4", "ranks": 65537},
        "invalid",
        ("ranks",),
    ),
    "ranks and a store": (
        {"ranks": 2, "store": "127.0.0.1:1", "rank": 0, "world_size": 2},
        "invalid",
        ("not both",),
    ),
    "a store without a rank": ({"store": "127.0.0.1:1"}, "invalid", ("rank", "OFFCORE_RANK")),
    "faults of real engines": (
        {"backend": "host", "ranks": 2, "faults": [{"kind": "lost_signal"}]},
        "unsupported",
        ("phantom, seed, faults and packets are options of backend sim",),
    ),
    "phantom memory of real engines": (
        {"backend": "host", "ranks": 2, "phantom": True},
        "unsupported",
        ("phantom, seed, faults and packets are options of backend sim",),
    ),
    "unknown fault": (
        {"backend": "sim", "faults": [{"kind": "gremlin"}]},
        "invalid",
        ("gremlin", "lost_signal"),
    ),
    "a fault of a rank that is not": (
        {"backend": "sim", "faults": [{"kind": "lost_signal", "rank": 8}]},
        "invalid",
        ("8", "rank"),
    ),
}


@pytest.mark.parametrize("wrong", OPENED)
def test_wrong_communicators(wrong: str) -> None:
    options, code, names = OPENED[wrong]
    with pytest.raises(offcore.Error) as refused:
        offcore.Communicator(**options)
    assert refused.value.code == code, str(refused.value)
    for name in names:
        assert name in str(refused.value)


def test_a_terabyte(target: Target) -> None:
    """Memory that is not there is refused, and what is there works on."""
    with target.communicator(2) as comm:
        with pytest.raises(offcore.Error) as refused:
            comm.window(1 << 50)
        assert refused.value.code == "memory"
        assert str(1 << 50) in str(refused.value)
        out = comm.empty(8)
        out[0][:] = range(8)
        comm.broadcast(out).wait()
        assert out[1].tolist() == list(range(8))


def test_close_and_abort_may_be_repeated(target: Target) -> None:
    comm = target.communicator(2)
    out = comm.empty(8)
    comm.broadcast(out).wait()
    comm.close()
    comm.close()
    comm.abort()
    out[0][:] = 1  # windows stay as long as they are held
    assert out[0].sum() == 8
