"""A forked child has nothing of what its parent opened, and does no harm to it."""

import gc
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from targets import Target

import offcore
from offcore import _core

LIMIT_S = 30


def in_child(work: Callable[[], None]) -> None:
    """Runs it in a forked child, which then ends."""
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=told)
                told.flush()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        assert status == 0, told.read() or f"status {status}"


def check_refused(call: Callable[[], Any], name: str = "") -> None:
    with pytest.raises(offcore.Error) as raised:
        call()
    assert raised.value.code == "invalid", raised.value
    assert f"{name} was opened before this process forked" in str(raised.value)


@pytest.fixture
def comm(target: Target) -> offcore.Communicator:
    return target.communicator(2)


def test_a_child_can_call_nothing(target: Target, comm: offcore.Communicator) -> None:
    out, parts = comm.empty((2, 8), "uint8"), comm.empty(8, "uint8")
    window = comm.window(64)
    core = comm._core  # some of what follows has no other name
    comm.all_gather(out, parts).wait()
    begun = comm.all_gather(out, parts)

    def work() -> None:
        for call in (
            lambda: comm.all_gather(out, parts),
            lambda: comm.all_gather_view(parts),
            lambda: comm.window(64),
            lambda: comm.empty(8, "uint8"),
            comm.barrier,
            comm.abort,
            lambda: core.check(),
            lambda: core.host_array(64),
        ):
            check_refused(call)
        check_refused(lambda: window.read(np.empty(64, np.uint8), rank=0), "the window")
        check_refused(begun.done, "the operation")
        check_refused(lambda: begun.wait(1), "the operation")

    in_child(work)
    begun.wait()
    comm.all_gather(out, parts).wait()
    comm.close()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_child_gives_nothing_up(comm: offcore.Communicator, how: str) -> None:
    out, parts = comm.empty((2, 8), "uint8"), comm.empty(8, "uint8")
    held: dict[str, Any] = {"comm": comm, "out": out, "parts": parts}
    held["handles"] = [comm.all_gather(out, parts), comm.all_gather_view(parts)]

    def work() -> None:
        nonlocal comm, out, parts
        if how == "close":
            comm.close()
        held.clear()
        del comm, out, parts
        gc.collect()

    in_child(work)
    assert [handle.wait().op for handle in held["handles"]] == ["all_gather"] * 2
    comm.all_gather(out, parts).wait()
    comm.close()


def test_a_child_opens_its_own(target: Target, comm: offcore.Communicator) -> None:
    """Unless a driver does not survive a fork."""

    def work() -> None:
        if target.backend in ("cuda", "sdma"):
            with target.driver():
                check_refused(
                    lambda: offcore.Communicator(
                        backend=target.backend, machine=target.name(2), ranks=2
                    )
                )
            return
        with target.communicator(2) as own:
            own.barrier()

    comm.barrier()
    in_child(work)
    comm.barrier()
    comm.close()


def test_a_child_has_no_session(target: Target) -> None:
    session = target.session(2)
    text = f"program none machine={target.name(2)} ranks=2 variant=pcpy mode=eager protocol=eager "
    program = _core.Program.parse(text + "native=yes flags=0 span=0\n")
    in_child(lambda: check_refused(lambda: session.run(program), "the session"))


def test_a_child_keeps_no_descriptor(comm: offcore.Communicator) -> None:
    comm.barrier()

    def names() -> list[str]:
        found = []
        for number in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{number}"))
            except OSError:  # that of the listing
                continue
        return [name for name in found if "offcore" in name]

    def work() -> None:
        assert names() == []

    in_child(work)
    comm.close()
