"""What a process may do with a communicator: fork, be interrupted, run where calls are refused."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from crews import at_once, on_ranks

import offcore
from offcore import mcast
from stores import free_store


def alone(**options: int) -> mcast.Communicator:
    given = {"receive_workers": 1, "send_workers": 1, **options}
    return mcast.Communicator(free_store(), rank=0, world_size=1, interface="lo", **given)


def test_a_forked_child_drops_its_communicator_and_can_use_none() -> None:
    comm = alone()
    comm.barrier().wait()
    if (child := os.fork()) == 0:
        code = 1
        try:
            comm.barrier()
        except offcore.Error as refusal:
            code = 0 if refusal.code == "invalid" and "fork" in str(refusal) else 2
        comm.close()
        del comm
        os._exit(code)
    deadline = time.monotonic() + 10
    ended, status = os.waitpid(child, os.WNOHANG)
    while ended == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (ended, status) == (child, 0)
    comm.barrier().wait()  # the parent's goes on
    comm.close()


def test_a_signal_interrupts_a_wait() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    address = free_store()

    def opening(rank: int) -> object:
        return lambda: mcast.Communicator(
            address, rank=rank, world_size=2, interface="lo", timeout=20
        )

    comms = at_once([opening(0), opening(1)])  # type: ignore[list-item]
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        handle = comms[0].barrier()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        assert time.monotonic() - began < 5
    finally:
        signal.signal(signal.SIGUSR1, before)
    comms[1].barrier().wait()  # it went on
    handle.wait()
    for comm in comms:
        comm.close()


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_close_gives_up_threads_and_sockets_but_not_the_counters() -> None:
    before = held()
    comm = alone()
    comm.barrier().wait()
    assert held() > before
    comm.close()
    deadline = time.monotonic() + 5
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined is listed for a moment
    assert held() <= before
    assert comm.counters["operations"] == 1
    comm.close()
    with pytest.raises(offcore.Error, match="closed") as caught:
        comm.barrier()
    assert caught.value.code == "cancelled"


def test_an_exported_buffer_stays_where_it_is() -> None:
    late = threading.Event()

    def body(comm: mcast.Communicator) -> bytes:
        shard, whole = bytearray(b"01"[comm.rank : comm.rank + 1]), bytearray(2)
        if comm.rank == 1:
            assert late.wait(10)
        handle = comm.all_gather(whole, shard)
        if comm.rank == 0:
            for buffer in (shard, whole):
                with pytest.raises(BufferError):
                    buffer.extend(bytes(1 << 20))
            late.set()
        handle.wait()
        return bytes(whole)

    assert on_ranks(2, body) == [b"01", b"01"]


def test_an_input_is_read_in_its_turn() -> None:
    """All-gather of what a broadcast before it brings, which nobody waits for."""

    def body(comm: mcast.Communicator) -> None:
        value = np.full(100_000, 7 if comm.rank == 0 else 0, np.uint8)
        whole = np.zeros((comm.ranks, value.size), np.uint8)
        comm.broadcast(value, root=0)
        comm.all_gather(whole, value).wait()
        assert (whole == 7).all()

    on_ranks(3, body)


# Answers EPERM to epoll_pwait2, as sandboxes do that do not know it.
REFUSING = """
    import ctypes, os, struct
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 441), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = [ctypes.c_ulong(0)] * 2
    if libc.prctl(38, ctypes.c_ulong(1), *nothing, ctypes.c_ulong(0)) or libc.prctl(
        22, ctypes.c_ulong(2), program, *nothing
    ):
        print("refused")
        raise SystemExit
    from crews import on_ranks
    on_ranks(2, lambda comm: comm.barrier().wait())
    print("done", sum(os.times()[:2]))
"""


def test_a_sandbox_that_refuses_new_calls() -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REFUSING)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                (os.environ.get("PYTHONPATH", ""), *map(str, Path(__file__).parents[:2]))
            ),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    if run.stdout == "refused\n":
        pytest.skip("this kernel takes no seccomp filter")
    assert run.stdout.startswith("done"), run.stderr
