"""Who reads a view late: intact for two further view calls, and not for three."""

import gc
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offcore
from oracles import noise

Comm = offcore.Communicator
PART = 3000
FURTHER = 2  # view calls of the lane for which a view stays valid


def sent(turn: int, rank: int) -> Any:
    return noise(PART, turn, rank)


def gathered(turn: int, ranks: int) -> Any:
    return np.stack([sent(turn, rank) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("variant", ["auto", "pcpy", "prelaunch_b2b"])
def test_the_slow_read_what_was_sent(as_threads: Any, ranks: int, variant: str) -> None:
    """One rank is late at every call, and reads after as many further calls as it may; the others
    are as far ahead of it as they can be."""

    def work(comm: Comm, rank: int) -> int:
        views: deque[offcore.View] = deque(maxlen=FURTHER + 1)
        checked = 0
        for turn in range(30):
            views.append(comm.all_gather_view(sent(turn, rank), variant=variant))
            views[0].wait()
            if rank == turn // 10 % ranks:
                time.sleep(0.01)
            if turn >= FURTHER:
                assert np.array_equal(views[0].out, gathered(turn - FURTHER, ranks)), turn
                checked += 1
        views[-1].wait()
        return checked

    assert as_threads(ranks, work) == [30 - FURTHER] * ranks


@pytest.mark.parametrize(("further", "intact"), [(FURTHER, True), (FURTHER + 1, False)])
def test_one_call_too_late(as_threads: Any, further: int, intact: bool) -> None:
    """Rank 0 makes one call more than a ring has slots; rank 1 stops early and looks at its first
    view for long."""
    over = threading.Event()

    def work(comm: Comm, rank: int) -> bool:
        last = FURTHER + 2
        views = [
            comm.all_gather_view(sent(turn, rank))
            for turn in range(1 + (last if rank == 0 else further))
        ]
        seen = True
        if rank == 1:
            views[0].wait()
            end = time.monotonic() + (0.3 if intact else 5)
            while seen and time.monotonic() < end:
                seen = np.array_equal(views[0].out, gathered(0, 2))
                time.sleep(0.001)
            views += [
                comm.all_gather_view(sent(turn, rank)) for turn in range(further + 1, last + 1)
            ]
            over.set()
        views[-1].wait()
        assert over.wait(10)
        assert np.array_equal(views[last].out, gathered(last, 2))
        return seen

    assert as_threads(2, work) == [True, intact]


@pytest.mark.parametrize("call", ["all_gather", "all_gather_view"])
def test_operands_outlive_their_owners(as_threads: Any, call: str) -> None:
    """Rank 0 drops its buffers and its handle before rank 1 has come: they live until the end."""
    dropped = threading.Event()

    def work(comm: Comm, rank: int) -> bool:
        def start(turn: int) -> tuple[Any, weakref.ref[Any]]:
            inp = sent(turn, rank)
            out = [np.empty((2, PART), np.uint8)] if call == "all_gather" else []
            return getattr(comm, call)(*out, inp), weakref.ref(inp)

        start(0)[0].wait()
        if rank == 1:
            assert dropped.wait(10)
            for turn in (1, 2, 3):
                start(turn)[0].wait()
            return True
        handle, alive = start(1)
        del handle
        gc.collect()
        scribble = [noise(PART, 99, i) for i in range(50)]
        assert alive() is not None
        dropped.set()
        start(2)[0].wait()
        time.sleep(0.2)  # an engine's thread may be the last to hold it
        start(3)[0].wait()  # what has ended by now is let go of
        return alive() is None and len(scribble) == 50

    assert as_threads(2, work) == [True, True]


def test_windows_outlive_their_owners(as_threads: Any) -> None:
    """As arrays do."""
    gc.collect()  # what other tests left is not unmapped meanwhile
    dropped = threading.Event()

    def shares_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:")

    def start(comm: Comm, rank: int) -> tuple[offcore.Handle, int]:
        out, inp = comm.window(1 << 20), comm.window(1 << 19)
        comm.all_gather(out, inp).wait()  # the next needs nobody to begin it
        comm.barrier()
        mapped = shares_mapped()
        comm.barrier()
        assert rank == 0 or dropped.wait(10)
        return comm.all_gather(out, inp), mapped

    def work(comm: Comm, rank: int) -> bool:
        handle, mapped = start(comm, rank)
        if rank == 0:
            del handle
            gc.collect()
            assert shares_mapped() == mapped
            dropped.set()
        else:
            handle.wait()
            del handle
        comm.barrier()
        comm.all_gather(comm.window(1 << 20)).wait()  # what has ended is let go of
        comm.barrier()
        return shares_mapped() < mapped

    assert as_threads(2, work) == [True, True]
