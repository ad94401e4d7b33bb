"""The host backend in real time: ranks as threads and processes, lanes, deaths, and time limits."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import Error, _core, machines
from stores import as_ranks, free_store


def part(rank: int, call: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.uint32) * 8 + rank + 1000 * call


def gathered(ranks: int, call: int, count: int) -> np.ndarray[Any, Any]:
    return np.concatenate([part(rank, call, count) for rank in range(ranks)])


@pytest.fixture(params=["0", "64"], ids=["own-cores", "cores-to-spare"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers work alone where cores are few; engines come to help them where there are many."""
    monkeypatch.setenv("OFFCORE_HOST_CORES", request.param)


PING_PONG = """\
program pingpong machine=host-2 ranks=2 variant=pcpy mode=eager protocol=eager native=yes {sizes}
buffer out window 64
queue 0.{queue}
{zero}
queue 1.{queue}
{one}
"""


@pytest.mark.parametrize("queue", ["0", "caller"])
def test_no_signal_is_lost(queue: str) -> None:
    rounds = 10_000
    values = range(1, rounds + 1)
    text = PING_PONG.format(
        queue=queue,
        sizes=f"flags=2 span={rounds}",
        zero="\n".join(f"  signal flag[1]:0 = {v}\n  poll flag[0]:0 >= {v}" for v in values),
        one="\n".join(f"  poll flag[1]:0 >= {v}\n  signal flag[0]:0 = {v}" for v in values),
    )
    session = _core.Session("host", machines.load("host-2"), 2)
    report = session.run(_core.Program.parse(text), epoch=2**32 - rounds // 2, timeout_s=60)
    assert len(report.commands) == 4 * rounds


@pytest.mark.parametrize("cpus", [2, 64])
def test_engines_divide_large_copies_where_there_are_cores(
    cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFCORE_HOST_CORES", str(cpus))
    with offcore.Communicator(backend="host", ranks=2) as comm:
        for part_bytes, divided in ((2048, False), (1 << 20, False), ((2 << 20) + 7, True)):
            out = comm.empty((2, part_bytes), "uint8")
            parts = [np.random.default_rng(rank).integers(0, 256, part_bytes, np.uint8)
                     for rank in range(2)]  # fmt: skip
            for rank in range(2):
                out[rank][:] = 0
                out[rank][rank] = parts[rank]
            result = comm.all_gather(out, variant="pcpy").wait()
            assert result.engines == (4 if divided and cpus == 64 else 2)
            for rank in range(2):
                assert (out[rank] == parts).all()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 1024, 300_000])
def test_ranks_may_outnumber_cores(ranks: int, count: int) -> None:
    def work(comm: offcore.Communicator, rank: int) -> bool:
        out = comm.empty(ranks * count, "uint32")
        for call in range(20):
            comm.all_gather(out, part(rank, call, count), variant="pcpy").wait()
            if not np.array_equal(out, gathered(ranks, call, count)):
                return False
        return True

    assert as_ranks(ranks, work) == [True] * ranks


@pytest.mark.usefixtures("cores")
def test_hundreds_of_launches_ahead() -> None:
    calls = 400

    def work(comm: offcore.Communicator, rank: int) -> bool:
        outs = [comm.empty(2 * 64, "uint32") for _ in range(4)]
        handles = [
            comm.all_gather(outs[call % 4], part(rank, call, 64), variant="b2b")
            for call in range(calls)
        ]
        handles[-1].wait()
        assert all(handle.done() for handle in handles)
        return all(
            np.array_equal(outs[call % 4], gathered(2, call, 64))
            for call in range(calls - 4, calls)
        )

    assert as_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("count", [64, 100_000])
def test_progress_without_a_wait(count: int) -> None:
    def work(comm: offcore.Communicator, rank: int) -> bool:
        out = comm.empty(2 * count, "uint32")
        for call in range(5):
            handle = comm.all_gather(out, part(rank, call, count), variant="pcpy")
            deadline = time.monotonic() + 20
            while not handle.done():
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            if not np.array_equal(out, gathered(2, call, count)):
                return False
            handle.wait()
            comm.barrier()
        return True

    assert as_ranks(2, work) == [True, True]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="callers need two cores to part")
def test_callers_that_start_on_one_core_may_go_where_they_could_before() -> None:
    """They leave each other's core by their threads' own masks, which must come back whole."""
    here, store = os.sched_getaffinity(0), free_store()
    waiting = threading.Barrier(2)

    def rank_of(rank: int) -> tuple[set[int], bool]:
        os.sched_setaffinity(0, {min(here)})  # this thread's
        with offcore.Communicator(backend="host", store=store, rank=rank, world_size=2) as comm:
            os.sched_setaffinity(0, here)
            array = comm.empty((2, 16), np.uint32)
            for call in range(200):
                waiting.wait(10)
                array[rank] = part(rank, call, 16)
                comm.all_gather(array).wait()
                right = np.array_equal(array.ravel(), gathered(2, call, 16))
                if not right:
                    break
            return os.sched_getaffinity(0), right

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_of, range(2))) == [(here, True)] * 2


@pytest.mark.usefixtures("cores")
def test_an_operation_goes_on_when_its_handle_is_dropped() -> None:
    def work(comm: offcore.Communicator, rank: int) -> bool:
        out = comm.empty(2 * 1024, "uint32")
        for call in range(50):
            comm.all_gather(out, part(rank, call, 1024), variant="pcpy")
        comm.all_gather(out, part(rank, 50, 1024), variant="pcpy").wait()
        return np.array_equal(out, gathered(2, 50, 1024))

    assert as_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("cores")
def test_lanes_run_side_by_side() -> None:
    lanes = 4

    def work(comm: offcore.Communicator, rank: int) -> bool:
        outs = [comm.empty(2 * 5000, "uint32") for _ in range(lanes)]
        # A lane is made at its first call, by all ranks together.
        for lane in range(lanes):
            comm.all_gather(outs[lane], part(rank, 0, 5000), variant="pcpy", lane=lane).wait()

        def one(lane: int) -> bool:
            for call in range(50):
                sent = part(rank, call + lane, 5000)
                comm.all_gather(outs[lane], sent, variant="pcpy", lane=lane).wait()
                if not np.array_equal(outs[lane], gathered(2, call + lane, 5000)):
                    return False
            return True

        with ThreadPoolExecutor(lanes) as pool:
            return all(pool.map(one, range(lanes)))

    assert as_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("cores")
def test_armed_programs_stay_parked_while_others_run() -> None:
    def work(comm: offcore.Communicator, rank: int) -> bool:
        out = comm.empty(2 * 5000, "uint32")
        for call in range(30):
            for variant in ("prelaunch_pcpy", "pcpy", "prelaunch_b2b"):
                comm.all_gather(out, part(rank, call, 5000), variant=variant).wait()
                if not np.array_equal(out, gathered(2, call, 5000)):
                    return False
        return True

    assert as_ranks(2, work) == [True, True]


@pytest.mark.usefixtures("cores")
def test_a_timeout_names_queue_and_command_and_the_wait_may_be_repeated() -> None:
    entered = threading.Event()

    def work(comm: offcore.Communicator, rank: int) -> str:
        out = comm.empty(2 * 64, "uint32")
        comm.all_gather(out, part(rank, 0, 64), variant="pcpy", protocol="barrier").wait()
        if rank == 1:
            assert entered.wait(20)
        handle = comm.all_gather(out, part(rank, 1, 64), variant="pcpy", protocol="barrier")
        message = ""
        if rank == 0:
            with pytest.raises(Error) as caught:
                handle.wait(timeout=0.2)
            assert caught.value.code == "timeout"
            message = str(caught.value)
            entered.set()
        handle.wait()
        assert np.array_equal(out, gathered(2, 1, 64))
        return message

    message = as_ranks(2, work)[0]
    assert "all_gather did not end within" in message
    assert "queue 0.0 at command" in message
    assert "poll flag[0]:" in message


def test_a_word_never_falls_back() -> None:
    """Rows of a signal are stored one by one: one that comes late must not undo a larger value.
    verify refuses such a program, which then waited for ever after some hundred runs."""
    rows = 4000
    text = f"""program f machine=host-1 ranks=1 variant=v mode=eager protocol=promise native=yes \
flags={rows + 1} span=2
buffer w window 64
queue 0.0
  signal flag[0]:0 = 1 rows={rows} step=1
queue 0.1
  poll flag[0]:0 >= 1
  signal flag[0]:{rows - 1} = 2
queue 0.caller
  poll flag[0]:{rows - 1} >= 2
"""
    program = _core.Program.parse(text)
    with pytest.raises(Error, match="must happen after the smaller value"):
        _core.verify(program)
    session = _core.Session("host", machines.load("host-2"), 1)
    for _ in range(600):
        assert session.run(program, {}, timeout_s=5.0, checked=False).time_ns > 0


def test_memory_that_is_not_there() -> None:
    with offcore.Communicator(backend="host", ranks=2, timeout=10) as comm:
        with pytest.raises(Error, match=r"cannot allocate 1125899906842624 bytes.*available") as e:
            comm.window(2**50)
        assert e.value.code == "memory"


def test_every_rank_hears_of_one_that_has_no_memory() -> None:
    def work(comm: offcore.Communicator, rank: int) -> str:
        with pytest.raises(Error) as caught:
            comm.window(2**50)
        assert caught.value.code == "memory"
        comm.barrier()  # the communicator is none the worse for it
        return str(caught.value)

    messages = as_ranks(2, work)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 0: cannot allocate")


def test_windows_of_different_sizes() -> None:
    def work(comm: offcore.Communicator, rank: int) -> str:
        with pytest.raises(Error) as caught:
            comm.window(4096 * (rank + 1))
        assert caught.value.code == "mismatch"
        return str(caught.value)

    messages = as_ranks(2, work)
    assert messages[0] == messages[1]
    assert "rank 0 of 4096 bytes, rank 1 of 8192 bytes" in messages[0]


def test_failed_windows_leave_nothing_behind() -> None:
    def work(comm: offcore.Communicator, rank: int) -> None:
        for _ in range(20):
            with pytest.raises(Error):
                comm.window(4096 * (rank + 1))

    as_ranks(2, work)
    before = len(os.listdir("/proc/self/fd"))
    as_ranks(2, work)
    assert len(os.listdir("/proc/self/fd")) <= before


RANK = """
import sys, time
import numpy as np
import offcore
store, rank, ranks, count = sys.argv[1], *map(int, sys.argv[2:])
comm = offcore.Communicator(backend="host", store=store, rank=rank, world_size=ranks, timeout=30)
out = comm.empty(count * ranks)
inp = np.full(count, rank + 1, np.uint8)
comm.all_gather(out, inp, variant="pcpy", protocol="barrier").wait()
assert all((out[r * count : (r + 1) * count] == r + 1).all() for r in range(ranks))
print("ready", flush=True)
try:
    while True:
        comm.all_gather(out, inp, variant="pcpy", protocol="barrier").wait()
except offcore.Error as error:
    print(error.code, time.time(), error, flush=True)
comm.close()
"""


@pytest.mark.parametrize("count", [64, 16 << 20])
def test_a_killed_process_is_noticed_within_a_second(count: int) -> None:
    store = free_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, store, str(rank), "3", str(count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        killed = time.time()
        ranks[1].send_signal(signal.SIGKILL)
        for process in (ranks[0], ranks[2]):
            output, _ = process.communicate(timeout=20)
            code, at, message = output.split(" ", 2)
            assert code == "peer", output
            assert float(at) - killed < 1
            assert "rank 1" in message
            assert process.returncode == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.usefixtures("cores")
def test_an_abort_in_the_middle_of_a_large_copy() -> None:
    count = 64 << 20
    with offcore.Communicator(backend="host", ranks=2, timeout=30) as comm:
        out = comm.empty(2 * count)
        inp = [np.full(count, rank, np.uint8) for rank in range(2)]
        handles = [comm.all_gather(out, inp, variant="pcpy", lane=0) for _ in range(8)]
        timer = threading.Timer(0.02, comm.abort)
        timer.start()
        started = time.monotonic()
        with pytest.raises(Error) as caught:
            handles[-1].wait()
        timer.join()
        assert caught.value.code in ("peer", "cancelled")
        assert "queue" in str(caught.value)
        assert time.monotonic() - started < 5
