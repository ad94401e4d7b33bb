"""Children of ranks: they neither speak for a rank nor hide its death, and end well."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stores import free_store

LIMIT_S = 60
PRELUDE = """
import gc, multiprocessing, os, signal, sys, threading, time
import numpy as np
import offcore
from offcore import kv, mcast

def rank(number, timeout=10):
    return offcore.Communicator(
        backend="host", store=sys.argv[1], rank=number, world_size=2, timeout=timeout
    )

def refusal(call):
    try:
        call()
    except offcore.Error as error:
        return error.code
    return "nothing"
"""


def run(code: str, *words: str) -> str:
    """What a process of its own prints."""
    ended = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), free_store(), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def test_a_child_does_not_hide_that_its_rank_was_killed() -> None:
    code = """
    other = os.fork()
    comm = rank(0 if other else 1)
    comm.barrier()
    if not other:
        if os.fork() == 0:
            os.close(1)
            os.close(2)  # the pipes' reader waits for nobody who lives on
            time.sleep(10)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(other, 0)
    began = time.monotonic()
    print(refusal(lambda: comm.barrier()), time.monotonic() - began < 5)
    """
    assert run(code) == "peer True\n"


@pytest.mark.parametrize("how", ["comm.barrier()", "comm.close()", "del comm, out", "sys.exit(0)"])
def test_a_child_does_not_speak_for_its_rank(how: str) -> None:
    code = f"""
    other = os.fork()
    mine = 0 if other else 1
    comm = rank(mine)
    out = comm.empty((2, 8), "uint8")
    comm.all_gather(out, np.full(8, mine, np.uint8)).wait()
    if mine == 0:
        child = os.fork()
        if child == 0:
            try:
                if {how == "comm.barrier()"}:
                    mine = np.full(8, 99, np.uint8)
                    assert refusal(lambda: comm.all_gather(out, mine)) == "invalid"
                else:
                    {how}
                gc.collect()
            except SystemExit:
                raise  # by way of the interpreter's end
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    for call in range(10, 20, 2):
        comm.all_gather(out, np.full(8, call + mine, np.uint8)).wait()
        assert out.tolist() == [[call] * 8, [call + 1] * 8]
    if mine == 0:
        assert os.waitpid(other, 0)[1] == 0
        print("well")
    """
    assert run(code) == "well\n"


@pytest.mark.parametrize("bytes_", ["1000", "3000000"])
@pytest.mark.parametrize("how", ["exit", "drop", "process", "pool"])
def test_children_of_a_process_with_engines_end_well(how: str, bytes_: str) -> None:
    code = """
    how, size = sys.argv[2], int(sys.argv[3])
    comm = offcore.Communicator(backend="host", ranks=2, timeout=10)
    outs = [np.zeros(2 * size, np.uint8) for _ in range(2)]
    ins = [np.ones(size, np.uint8) for _ in range(2)]
    comm.all_gather(outs, ins).wait()
    forks = multiprocessing.get_context("fork")
    if how == "process":
        started = [forks.Process(target=gc.collect) for _ in range(3)]
        for process in started:
            process.start()
        for process in started:
            process.join(20)
        assert [process.exitcode for process in started] == [0] * 3
    elif how == "pool":
        with forks.Pool(2) as pool:
            assert pool.map(abs, range(-9, 9), chunksize=1) == [abs(i) for i in range(-9, 9)]
    else:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                if how == "drop":
                    del comm, outs
                    gc.collect()
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
    comm.all_gather(outs, ins).wait()
    assert all((out == 1).all() for out in outs)
    """
    assert run(code, how, bytes_) == ""


def test_a_fork_amid_calls_of_other_threads() -> None:
    """Locks that those threads hold are nobody's in the child."""
    code = """
    comm = offcore.Communicator(backend="host", ranks=2, timeout=20)
    pool = kv.HostPool(64, 100, backend="host")
    ending = threading.Event()
    def call():
        outs = [np.zeros(16, np.uint8) for _ in range(2)]
        while not ending.is_set():
            comm.all_gather(outs, [np.ones(8, np.uint8)] * 2).wait()
            pool.free(pool.allocate(3))
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            assert refusal(lambda: pool.allocate(1)) == "invalid"
            assert refusal(comm.barrier) == "invalid"
            comm.close()
            pool.close()
            with offcore.Communicator(backend="host", ranks=2) as own:
                own.barrier()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    ending.set()
    for thread in threads:
        thread.join()
    """
    assert run(code) == ""


def test_a_child_may_copy_batches_of_its_own() -> None:
    code = """
    from offcore import batch
    dst, src = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    def copy():
        dst[:] = 0
        batch.batch_copy([dst], [src], backend="host").wait()
        assert (dst == 1).all()
    copy()
    begun = batch.batch_copy([dst], [src], backend="host")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        assert refusal(begun.wait) == "invalid"
        copy()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    begun.wait()
    """
    assert run(code) == ""


def test_jobs_and_rendezvous_and_groups() -> None:
    code = """
    from offcore import _core
    cache = np.ones((2, 8, 64), np.uint8)
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 8, backend="host")
    transfer = kv.BlockTransfer(layout, pool)
    slots = pool.allocate(4)
    job = transfer.store([0, 1, 2, 3], slots)
    row = pool.row(int(slots[0]))
    meeting = _core.Rendezvous(_core.Bootstrap.at(sys.argv[1], 0, 1), 5)
    group = mcast.Communicator(sys.argv[1], rank=0, world_size=1, interface="lo")
    running = group.barrier()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        calls = [
            lambda: transfer.load([0], slots[:1]), lambda: job.wait(1), lambda: job.wait_layer(0),
            lambda: pool.allocate(1), lambda: pool.row(int(slots[0])), lambda: pool.free(slots),
            lambda: kv.BlockTransfer(layout, pool),
            lambda: meeting.barrier("x", 1), lambda: group.barrier(), lambda: running.wait(1),
        ]
        told = [refusal(call) for call in calls]
        assert told == ["invalid"] * len(calls), told
        transfer.close()
        pool.close()
        meeting.close()
        group.close()
        del transfer, pool, meeting, group, job, running, row, slots
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert job.wait(10).blocks == 4
    running.wait(5)
    meeting.barrier("y", 5)
    group.barrier().wait(5)
    group.close()
    transfer.close()
    """
    assert run(code) == ""


@pytest.mark.needs("torch")
def test_data_loaders() -> None:
    code = """
    import torch
    from torch.utils.data import DataLoader
    other = os.fork()
    mine = 0 if other else 1
    comm = rank(mine)
    out = comm.empty((2, 8), "uint8")
    class Numbers(torch.utils.data.Dataset):
        def __init__(self):
            self.comm = comm  # as a trainer's data set may hold anything
        def __len__(self):
            return 16
        def __getitem__(self, index):
            return torch.full((4,), index)
    for epoch in range(2):
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            comm.all_gather(out, np.full(8, mine, np.uint8)).wait()
            assert out.tolist() == [[0] * 8, [1] * 8]
    comm.barrier()
    comm.close()
    if mine == 0:
        assert os.waitpid(other, 0)[1] == 0
    """
    assert run(code) == ""
