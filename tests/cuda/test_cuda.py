"""The cuda backend on the stand-in driver: what conformance does not ask. A process for each test,
since a driver is set up once."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from cuda_library import fake_cuda_library

import offcore
import ready
from stores import free_store

HERE = Path(__file__).parent
ROOT = str(Path(str(offcore.__file__)).parents[1])

PRELUDE = """
import atexit, ctypes, os, sys, threading, time, weakref
import numpy as np
import offcore
from offcore import Error

lib = ctypes.CDLL(os.environ["OFFCORE_LIBCUDA"])
for name in ("calls", "done", "live"):
    function = getattr(lib, "fakecuda_" + name)
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p,)

def live():
    kinds = "allocations mappings reservations registrations streams events".split()
    return {kind: lib.fakecuda_live(kind.encode()) for kind in kinds}

def done(*kinds):
    return [lib.fakecuda_done(kind.encode()) for kind in kinds]

def calls(name):
    return lib.fakecuda_calls(name.encode())

def put_word(array, value):  # numpy's own stores are not seen by the thread sanitizer
    assert lib.fakecuda_store32(ctypes.c_uint64(array.ctypes.data), value) == 0

def opened(ranks=2, **options):
    comm = offcore.Communicator(backend="cuda", ranks=ranks, **{"timeout": 5, **options})
    atexit.register(lambda kept=weakref.ref(comm): kept() and kept().close())
    return comm

def look(window, rank=0):
    array = np.empty(window.nbytes, np.uint8)
    window.read(array, rank=rank)
    return array

def code_of(call):
    try:
        call()
    except Error as error:
        return error.code, str(error)
    return "", ""
"""


def environment(env: dict[str, str]) -> dict[str, str]:
    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "PYTHONPATH": ROOT}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # programs may be parked
    # What the conformance suite sets for its own stand-in is not for this one.
    around = {name: told for name, told in os.environ.items() if "OFFCORE_FAKE" not in name}
    return around | given | env


def start(code: str, *args: str, prelude: str = "", **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning:__main__",
            "-c",
            PRELUDE + prelude + textwrap.dedent(code),
            *args,
        ],
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(code: str, *args: str, prelude: str = "", **env: str) -> str:
    with tempfile.NamedTemporaryFile("r") as told:
        streams = [Path(os.devnull), Path(told.name), Path(told.name)]
        code = PRELUDE + prelude + textwrap.dedent(code)
        ended = ready.run(60, ready.script, code, args, environment(env), streams)
        out = told.read()
    assert ended == 0, f"ended with {ended}\n{out}"
    return out


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"OFFCORE_LIBCUDA": "/nowhere/libcuda.so.1"}, ["cannot be opened", "OFFCORE_LIBCUDA"]),
        ({"OFFCORE_FAKE_CUDA_DEVICES": "0"}, ["cuInit", "CUDA_VISIBLE_DEVICES"]),
        ({"OFFCORE_FAKE_CUDA_DRIVER": "11080"}, ["12.0 or newer is needed"]),
        ({"OFFCORE_FAKE_CUDA_NO_PEER": "1"}, ["devices 0 and 1", "no peer access"]),
    ],
)
def test_what_is_missing(env: dict[str, str], names: list[str]) -> None:
    code = """
    os.environ |= eval(sys.argv[1])
    found = {name: (usable, told) for name, usable, told in offcore.probe_backends()}
    usable, told = found["cuda"]
    code, again = code_of(opened)
    assert (usable, code) == (False, "unavailable"), (usable, code)
    assert told in again
    print(told)
    """
    library = env.pop("OFFCORE_LIBCUDA", None)
    told = run(code, repr({"OFFCORE_LIBCUDA": library} if library else {}), **env)
    for name in names:
        assert name in told


def test_an_older_driver_copies_its_own_slice_without_a_batch() -> None:
    code = """
    comm = opened()
    out, inp = comm.window(200), comm.host_array(100)
    inp[:] = 5
    comm.all_gather(out, [inp, inp]).wait()
    assert (look(out, 1) == 5).all()
    assert calls("cuMemcpyBatchAsync") == 0
    """
    assert run(code, OFFCORE_FAKE_CUDA_DRIVER="12080") == ""


def test_nothing_is_left() -> None:
    code = """
    for variant in ("pcpy", "fan", "prelaunch_pcpy", "prelaunch_fan"):
        comm = opened(4)
        out, inp = comm.window(4000), [comm.host_array(1000) for _ in range(4)]
        for protocol in ("barrier", "eager"):
            for _ in range(3):
                comm.all_gather(out, inp, variant=variant, protocol=protocol).wait()
            comm.all_gather(out, inp, variant=variant, protocol=protocol)  # not waited for
        comm.close()
        del comm, out, inp
        assert not any(live().values()), (variant, live())
    """
    assert run(code) == ""


def test_commands_are_few() -> None:
    """What the facts of the copy engines ask for: a strided copy for all peers, one for the flags,
    own slices by a copy engine."""
    code = """
    ranks = 4
    comm = opened(ranks)
    whole, inp = comm.window(4000), comm.window(4000)
    out = whole.region(0, 4000)
    entry_points = "cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpyBatchAsync", "cuStreamBatchMemOp"

    def spent(op, *buffers, **how):
        call = lambda: getattr(comm, op)(*buffers, **how).wait()
        call()
        before = [calls(name) for name in entry_points]
        call()
        counts = [calls(name) - n for name, n in zip(entry_points, before, strict=True)]
        return [count / ranks for count in counts]

    def check(found, wanted):
        assert found == wanted, found

    # Data and flags; a write of the own word, and the waits of the end.
    check(spent("all_gather", out, variant="fan", protocol="promise"), [0, 2, 0, 2])
    # The entry round: flags once more, whose value lies ready, and their waits.
    check(spent("all_gather", out, variant="fan", protocol="barrier"), [0, 3, 0, 3])
    # Three copies on three streams, a word to each peer, one of them in one with all waits.
    check(spent("all_gather", out, variant="pcpy", protocol="promise"), [3, 0, 0, 3])
    # Plain copies are one batch. Beside them words are written, in one call with the waits.
    check(spent("all_gather", out, variant="b2b", protocol="promise"), [0, 0, 1, 1])
    check(spent("all_gather", out, variant="b2b", protocol="barrier"), [0, 0, 1, 3])
    # The own chunk is one more row, or a rectangle of one row that begins at a peer.
    check(spent("all_to_all", out, inp, variant="fan", protocol="promise"), [0, 2, 0, 2])
    check(spent("all_to_all", out, inp, variant="pcpy", protocol="promise"), [3, 1, 0, 3])
    # In copy order no word is written: all values lie ready. To one peer a flag is a plain copy.
    comm.close()
    for ranks, promised, entered in (
        (4, [0, 2, 0, 1], [0, 3, 0, 2]),
        (2, [2, 0, 0, 1], [3, 0, 0, 2]),
    ):
        comm = opened(ranks, signals="copy_order")
        out = comm.window(4000)
        check(spent("all_gather", out, variant="fan", protocol="promise"), promised)
        check(spent("all_gather", out, variant="fan", protocol="barrier"), entered)
        comm.close()
    """
    assert run(code) == ""


@pytest.mark.parametrize("ranks", [2, 3])
def test_flag_values_lie_ready_or_are_written(ranks: int) -> None:
    """Values are put in place while calls go on, for thousands of calls; where the GPUs are too far
    behind for that, signals write them."""
    code = """
    ranks = int(sys.argv[1])
    comm = opened(ranks, signals="copy_order", timeout=30)
    out = comm.window(ranks * 64)
    writes = lambda: calls("cuStreamBatchMemOp")

    def spent(turns, streams=()):
        before = writes()
        comm._streams = lambda: list(streams)  # as offcore.torch gives them
        for turn in range(turns):
            handle = comm.all_gather(out, variant="fan", protocol="barrier")
            if not streams:
                handle.wait()
        del comm._streams
        return (writes() - before) / ranks / turns

    def right(turn):
        for rank in range(ranks):
            out.write(np.full(64, turn + rank, np.uint8), rank * 64, rank)
        comm.barrier()
        comm.all_gather(out, variant="fan").wait()
        for rank in range(ranks):
            assert (look(out, rank).reshape(ranks, 64) == [[turn + r] for r in range(ranks)]).all()

    right(1)
    assert spent(2500) == 2  # the waits of both ends
    right(2)
    gates = [offcore._core.GpuTimer(rank) for rank in range(ranks)]
    for gate in gates:  # the GPUs stand still: what follows piles up
        gate.shut()
    ahead = spent(2500, [gate.stream for gate in gates])
    assert 2 < ahead < 4, ahead
    for gate in gates:
        gate.open()
    comm.all_gather(out, variant="fan").wait()  # and all before it
    right(3)
    assert spent(100) == 2
    """
    assert run(code, str(ranks), OFFCORE_FAKE_CUDA_QUEUE_DEPTH="100000") == ""


@pytest.mark.parametrize("signals", ["fenced", "copy_order"])
def test_signal_forms(signals: str) -> None:
    code = """
    comm = opened(3, signals=sys.argv[1])
    out = comm.window(3000)
    for turn in range(200):
        for rank in range(3):
            out.write(np.full(1000, turn + rank, np.uint8), rank * 1000, rank)
        result = comm.all_gather(out, variant="fan").wait()
        assert result.signals == sys.argv[1]
        for rank in range(3):
            got = look(out, rank).reshape(3, 1000)
            assert (got == [[(turn + r) % 256] for r in range(3)]).all()
        comm.barrier()
    """
    assert run(code, signals) == ""


def test_what_is_parked_has_no_effect_in_the_end() -> None:
    code = """
    comm = opened(2)
    out = comm.window(2 * 1000)
    for rank in range(2):
        out.write(np.full(1000, rank + 1, np.uint8), rank * 1000, rank)
    for _ in range(3):
        result = comm.all_gather(out, variant="prelaunch_b2b").wait()
    assert result.armed_ahead
    for rank in range(2):  # the engines hold the next call, which nobody makes
        out.write(np.full(1000, 77, np.uint8), rank * 1000, rank)
    comm.close()
    for rank in range(2):
        got = look(out, rank).reshape(2, 1000)
        assert (got[rank] == 77).all() and (got[1 - rank] == 2 - rank).all()
    """
    assert run(code) == ""


def test_nothing_is_parked_where_channels_are_few() -> None:
    code = """
    comm = opened(2)
    out = comm.window(2 * 1000)
    for turn in range(3):
        for rank in range(2):
            out.write(np.full(1000, turn + rank, np.uint8), rank * 1000, rank)
        assert not comm.all_gather(out, variant="prelaunch_b2b").wait().armed_ahead
        for rank in range(2):
            assert (look(out, rank).reshape(2, 1000) == [[turn], [turn + 1]]).all()
        comm.barrier()
    """
    assert run(code, CUDA_DEVICE_MAX_CONNECTIONS="8") == ""


def test_parked_for_other_buffers() -> None:
    code = """
    comm = opened(2)
    out = comm.window(2 * 1000)
    ahead = []
    for turn in range(12):
        inp = [comm.host_array(1000) for _ in range(2)]
        for rank in range(2):
            inp[rank][:] = 10 * turn + rank
        ahead.append(comm.all_gather(out, inp, variant="prelaunch_fan").wait().armed_ahead)
        for rank in range(2):
            got = look(out, rank).reshape(2, 1000)
            assert (got == [[10 * turn], [10 * turn + 1]]).all(), turn
        comm.barrier()
    assert not any(ahead)
    """
    assert run(code) == ""


def test_out_of_memory() -> None:
    code = """
    comm = opened(2)
    code, told = code_of(lambda: comm.window(1 << 30))
    assert code == "memory" and "free" in told, (code, told)
    out = comm.window(100)
    out.write(np.arange(100, dtype=np.uint8), rank=0)
    comm.broadcast(out).wait()
    assert (look(out, 1) == range(100)).all()
    """
    assert run(code, OFFCORE_FAKE_CUDA_MEMORY="256M") == ""


def test_fork() -> None:
    code = """
    comm = opened(2)
    if (child := os.fork()) == 0:
        code, told = code_of(opened)
        os._exit(0 if code == "invalid" and "fork" in told else 1)
    assert os.waitpid(child, 0)[1] == 0
    comm.barrier()
    """
    assert run(code) == ""


def test_pageable_memory_is_refused() -> None:
    code = """
    comm = opened(2)
    out = comm.window(200)
    code, told = code_of(lambda: comm.all_gather(out, [np.zeros(100, np.uint8)] * 2))
    assert code == "invalid" and "host_array" in told, (code, told)
    """
    assert run(code) == ""


def test_abort_releases_the_streams() -> None:
    """A rank that waits for one which never comes is let go by its own abort."""
    code = """
    store, rank = sys.argv[1], int(sys.argv[2])
    comm = offcore.Communicator(backend="cuda", store=store, rank=rank, world_size=2, timeout=20)
    out = comm.window(2000)
    comm.all_gather(out).wait()
    if rank == 1:
        time.sleep(3)
        sys.exit()
    handle = comm.all_gather(out)
    threading.Timer(0.3, comm.abort).start()
    began = time.monotonic()
    code, told = code_of(handle.wait)
    assert code in ("peer", "cancelled"), (code, told)
    assert time.monotonic() - began < 2
    comm.close()
    del comm, out, handle
    assert not any(live().values()), live()
    """
    store = free_store()
    group = [start(code, store, str(rank)) for rank in (0, 1)]
    assert finish(group, {0: 0})


@pytest.mark.parametrize("variant", ["fan", "pcpy", "prelaunch_b2b"])
def test_a_killed_peer(variant: str) -> None:
    code = """
    store, rank, variant = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    comm = offcore.Communicator(backend="cuda", store=store, rank=rank, world_size=3, timeout=20)
    out = comm.window(3 * 100000)
    for turn in range(20):
        comm.all_gather(out, variant=variant).wait()
    print("ready", flush=True)
    code = told = ""
    began = time.monotonic()
    while not code and time.monotonic() - began < 15:
        code, told = code_of(lambda: comm.all_gather(out, variant=variant).wait())
    assert code == "peer" and "rank 2" in told, (code, told)
    comm.close()
    del comm, out
    assert not any(live().values()), live()
    """
    store = free_store()
    group = [start(code, store, str(rank), variant) for rank in range(3)]
    for process in group:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    group[2].send_signal(signal.SIGKILL)
    assert finish(group, {0: 0, 1: 0, 2: -signal.SIGKILL})


def test_a_launch_that_fails_half_way() -> None:
    code = """
    comm = opened(3)
    out = comm.window(3000)
    codes = []
    for _ in range(10):
        code, told = code_of(lambda: comm.all_gather(out, variant="fan").wait())
        codes.append(code)
    first = next(i for i, code in enumerate(codes) if code)
    assert codes[first] == "memory", codes  # what the driver was told to say
    assert set(codes[first + 1 :]) <= {"cancelled", "peer"}, codes
    comm.close()
    del comm, out
    assert not any(live().values()), live()
    """
    assert run(code, OFFCORE_FAKE_CUDA_FAIL="cuMemcpy2DAsync:17") == ""


@pytest.mark.parametrize("stream", ["own", "default", "mixed"])
def test_callers_streams(stream: str) -> None:
    """An operation is in the order of the stream that it is given, whichever that is."""
    code = """
    class Streamed(offcore.Communicator):
        given = ()
        def _streams(self):
            return list(self.given)

    driver = ctypes.CDLL(os.environ["OFFCORE_LIBCUDA"])
    lib.cuStreamWaitValue32_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32,
                                           ctypes.c_uint)
    comm = Streamed(backend="cuda", ranks=2, timeout=5)
    out, word = comm.window(2000), comm.host_array(1, "uint32")

    def streams():
        made = []
        for device in range(2):
            context, stream = ctypes.c_void_p(), ctypes.c_void_p()
            assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
            assert lib.cuCtxPushCurrent_v2(context) == 0
            assert lib.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
            made.append(stream.value)
        return made

    mode = sys.argv[1]
    sets = [streams(), streams()] if mode != "default" else [[1, 1]]
    for turn in range(1, 30):
        comm.given = sets[turn % len(sets)] if mode != "mixed" or turn % 3 else ()
        held = mode == "own"
        if held:  # nothing of the operation may run before the caller's stream gets there
            address = word.__array_interface__["data"][0]
            for stream in comm.given:
                assert lib.cuStreamWaitValue32_v2(stream, address, turn, 0) == 0
        handle = comm.all_gather(out, variant=("fan", "pcpy", "prelaunch_fan")[turn % 3])
        if held:
            time.sleep(0.005)
            assert not handle.done()
        for rank in range(2):
            out.write(np.full(1000, turn + rank, np.uint8), rank * 1000, rank) if held else None
        put_word(word, turn)
        handle.wait()
        if held:
            for rank in range(2):
                assert (look(out, rank).reshape(2, 1000) == [[turn], [turn + 1]]).all()
    comm.close()
    """
    assert run(code, stream) == ""


def finish(group: list[subprocess.Popen[str]], codes: dict[int, Any]) -> bool:
    try:
        for rank, process in enumerate(group):
            told, _ = process.communicate(timeout=40)
            if rank in codes:
                assert process.returncode == codes[rank], f"rank {rank}: {told}"
        return True
    finally:
        for process in group:
            process.kill()
