"""Ctrl-C ends every wait at once, and a process ends although its daemon threads wait."""

import os
import subprocess
import sys
import textwrap

import pytest

from stores import free_store

LIMIT_S = 60
PRELUDE = """
import contextlib, os, signal, sys, threading, time
import numpy as np
import offcore
from offcore import _core, batch, kv, mcast

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
LONG_S = 40.0  # of waits that Ctrl-C is to end
store = sys.argv[1]

def rank(number, timeout=LONG_S):
    return offcore.Communicator(
        backend="host", store=store, rank=number, world_size=2, timeout=timeout
    )

def at(number):
    return _core.Bootstrap.at(store, number, 2)

def thread(call):
    threading.Thread(target=call, daemon=True).start()

def stop_after(seconds=0.5):
    main = threading.main_thread().ident
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.daemon = True
    timer.start()

def peers(work=lambda comm: None):
    # A rank of this process, and another one that meets it and then does not take part.
    met = threading.Event()
    def other():
        comm = rank(1)
        comm.barrier()
        work(comm)
        met.set()
        time.sleep(LONG_S)
        comm.close()
    thread(other)
    comm = rank(0)
    comm.barrier()
    work(comm)
    met.wait()
    return comm

def stuck_pool():
    pool = kv.HostPool(64, 4, backend="host")
    pool.allocate(4)
    pool.timeout = LONG_S
    return pool
"""
OUT, PART = "np.zeros((2, 8), np.uint8)", "np.zeros(8, np.uint8)"
BOTH = f"[{OUT} for _ in range(2)], [{PART} for _ in range(2)]"
# What is made before, and the wait.
WAITS = {
    "a first call": ("comm = peers()", f"comm.all_gather({OUT}, {PART})"),
    "a window": ("comm = peers()", "comm.window(64)"),
    "a handle": (
        f"comm = peers(lambda comm: comm.all_gather({OUT}, {PART}).wait());"
        f"handle = comm.all_gather({OUT}, {PART})",
        "handle.wait()",
    ),
    "a barrier": ("comm = peers()", "comm.barrier()"),
    "a rank that does not come": ("", "rank(0)"),
    "a rank 0 that does not come": ("", "rank(1)"),
    "an all-gather of the caller's": ("", "_core.Bootstrap('a lock', 0, 2, lambda *_: "
                                          "time.sleep(LONG_S)).meet(b'', LONG_S)"),
    "an exchange": ("m = [None, None]\n"
                    "thread(lambda: m.__setitem__(1, _core.Rendezvous(at(1), LONG_S)))\n"
                    "m[0] = _core.Rendezvous(at(0), LONG_S)", "m[0].barrier('x', LONG_S)"),
    "another thread's turn": ("comm = peers(); thread(comm.barrier); time.sleep(0.2)",
                              "comm.barrier()"),
    "rows of a pool": ("pool = stuck_pool()", "pool.allocate(1)"),
    "a multicast group": ("", "mcast.Communicator(store, rank=0, world_size=2, interface='lo',"
                              " timeout=LONG_S)"),
    "a multicast operation": ("""
def opened(number):
    return mcast.Communicator(store, rank=number, world_size=2, interface='lo', timeout=LONG_S)
held = []
thread(lambda: held.append(opened(1)))
group = opened(0)""", "group.barrier().wait()"),
}  # fmt: skip


def run(code: str, quiet: bool = True) -> str:
    """What a process of its own prints. `quiet`: nothing on stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), free_store()],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert not (quiet and ended.stderr), ended.stderr
    return ended.stdout


@pytest.mark.parametrize("wait", WAITS)
def test_control_c_ends_it(wait: str) -> None:
    made, call = WAITS[wait]
    code = f"""
stop_after()
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - began < 10)
os._exit(0)
"""
    assert run(made + "\nbegan = time.monotonic()" + code) == "interrupted True\n"


def test_a_wait_goes_on_after_a_handler_that_raises_nothing() -> None:
    code = f"""
    signal.signal(signal.SIGINT, lambda *_: print("heard"))
    comm = peers(lambda comm: comm.all_gather({OUT}, {PART}).wait())
    handle = comm.all_gather({OUT}, {PART})
    stop_after(0.3)
    try:
        handle.wait(1.0)
    except offcore.Error as error:
        print(error.code)
    os._exit(0)
    """
    assert run(code) == "heard\ntimeout\n"


def test_what_a_handler_raises_comes_out() -> None:
    code = f"""
    class Mine(Exception):
        pass
    def handler(*_):
        raise Mine("from the handler")
    signal.signal(signal.SIGINT, handler)
    comm = peers(lambda comm: comm.all_gather({OUT}, {PART}).wait())
    handle = comm.all_gather({OUT}, {PART})
    stop_after(0.3)
    try:
        handle.wait()
    except Mine as mine:
        print(mine, mine.__context__)
    try:
        handle.wait(0.1)  # it is still under way
    except offcore.Error as error:
        print(error.code)
    os._exit(0)
    """
    assert run(code) == "from the handler None\ntimeout\n"


def test_a_wait_is_not_disturbed_where_it_ends_in_time() -> None:
    code = f"""
    comm = offcore.Communicator(backend="host", ranks=2)
    comm.all_gather({BOTH}).wait()
    stop_after(0.2)
    try:
        while True:
            comm.all_gather({BOTH}).wait()
    except KeyboardInterrupt:
        print("interrupted")
    comm.all_gather({BOTH}).wait()
    """
    assert run(code) == "interrupted\n"


DAEMONS = {
    "calls": f"""
        comm = offcore.Communicator(backend="host", ranks=2)
        def work():
            while True:
                comm.all_gather({BOTH}).wait()
    """,
    "a handle": f"""
        comm = peers(lambda comm: comm.all_gather({OUT}, {PART}).wait())
        work = comm.all_gather({OUT}, {PART}).wait
    """,
    "a pool": """
        pool = stuck_pool()
        def work():
            while True:
                with contextlib.suppress(offcore.Error):
                    pool.allocate(1, timeout=0.001)
    """,
    "a rendezvous": """
        def work():
            while True:
                with contextlib.suppress(offcore.Error):
                    rank(0, timeout=0.001)
    """,
    "simulations": """
        comm = offcore.Communicator(backend="sim", ranks=8)
        def work():
            while True:
                comm.barrier()
    """,
    "multicast": """
        group = mcast.Communicator(store, rank=0, world_size=1, interface="lo")
        def work():
            while True:
                group.barrier().wait()
    """,
    "batches": """
        dst, src = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
        def work():
            while True:
                batch.batch_copy([dst], [src], backend="host").wait()
    """,
}


@pytest.mark.parametrize("what", DAEMONS)
def test_a_process_ends_beside_a_daemon_that_waits(what: str) -> None:
    code = """
    thread(work)
    time.sleep(0.3)  # and the interpreter ends
    """
    # Python may begin to tell of a daemon that it ends amid its own code.
    assert run(textwrap.dedent(DAEMONS[what]) + textwrap.dedent(code), quiet=False) == ""
