"""What a credit does in time: a peer enters when the output was released, and never before."""

import threading
import time
from typing import Any

import numpy as np
import pytest

import offcore
from stores import as_ranks

COUNT = 256


@pytest.mark.parametrize("released", [False, True])
def test_a_peer_writes_once_the_output_is_released(released: bool) -> None:
    peer_called = threading.Event()

    def work(comm: offcore.Communicator, rank: int) -> Any:
        out = comm.empty(2 * COUNT)
        if rank == 0:
            window_of_zero.append(out)

        def call(turn: int) -> offcore.Handle:
            own = np.full(COUNT, 10 * turn + rank, np.uint8)
            return comm.all_gather(out, own, variant="pcpy", protocol="credits")

        first = call(1)
        first.wait()
        if released:
            first.release()
        if rank == 1:
            second = call(2)
            if released:  # its bytes arrive although rank 0 has not called
                until = time.monotonic() + 30
                while int(window_of_zero[0][COUNT]) != 21 and time.monotonic() < until:
                    time.sleep(0.001)
            peer_called.set()
            second.wait()
            return True
        assert peer_called.wait(30)
        if not released:
            time.sleep(0.05)  # for a peer that comes too soon
        seen = out[COUNT:].copy()
        call(2).wait()
        assert (out[:COUNT] == 20).all()
        assert (out[COUNT:] == 21).all()
        return bool((seen == (21 if released else 11)).all())

    window_of_zero: list[np.ndarray[Any, Any]] = []
    assert as_ranks(2, work) == [True, True]
