"""What happens around transfers: processes that are killed, engines that start anew, and host
memory that cannot be registered."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_cuda import environment
from test_kv_cuda import check_on_gpu

from offcore import kv

WORKER = """
import mmap, os, sys
import numpy as np
from offcore import kv

path, backend = sys.argv[1:]
if backend == "cuda":
    sys.path.append(os.environ["FAKES"])
    from cuda_driver import Driver
    driver = Driver(os.environ["OFFCORE_LIBCUDA"])
    driver.start(0)

    class Gpu:
        __cuda_array_interface__ = dict(
            data=(driver.memory(4 << 20), False), shape=(4, 64, 4096), typestr="|u1", version=3)
    caches = Gpu()
else:
    caches = np.full((4, 64, 4096), 5, np.uint8)
memory = mmap.mmap(os.open(path, os.O_RDWR), 0)
pool = kv.HostPool(4 * 4096, 128, backend=backend, memory=memory)
slots = pool.allocate(128, timeout=20)
pool.row(64)[:] = 9
transfer = kv.BlockTransfer(caches, pool, block_axis=1, layer_axis=0, ahead_bytes=1 << 16)
print("ready", flush=True)
while True:  # stores into the first half of the rows, loads of the second
    jobs = [transfer.store(range(32), slots[:32]), transfer.load(range(32, 64), slots[64:96])]
    jobs += [transfer.store(range(32), slots[32:64]) for _ in range(8)]
    for job in jobs:
        job.wait(20)
"""


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_a_worker_killed_with_jobs_in_flight(tmp_path: Path, backend: str) -> None:
    """The memory that it shared goes on: rows that it had not named are as they were, and the next
    worker takes it over."""
    path = tmp_path / "rows"
    path.write_bytes(bytes(128 * 4 * 4096))
    given = environment({"FAKES": str(Path(__file__).parents[1] / "fakes")})
    left = set(os.listdir("/dev/shm"))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    rows = np.frombuffer(memory, np.uint8).reshape(128, -1)
    for turn in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), backend],
            env=os.environ | given,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            time.sleep(0.03 * (turn + 1))
            worker.send_signal(signal.SIGKILL)
            assert worker.wait(20) == -signal.SIGKILL
        assert (rows[64] == 9).all()
        assert not rows[65:].any()
        rows[64] = 0
    cache = np.zeros((4, 64, 4096), np.uint8)
    rows[:64] = np.arange(64)[:, np.newaxis]
    with kv.HostPool(4 * 4096, 128, backend="host", memory=memory) as pool:
        slots = pool.allocate(128, timeout=20)
        with kv.BlockTransfer(cache, pool, block_axis=1, layer_axis=0) as transfer:
            assert transfer.load(range(64), slots[:64]).wait(20).blocks == 64
    assert (cache == np.arange(64)[np.newaxis, :, np.newaxis]).all()
    assert set(os.listdir("/dev/shm")) <= left


def test_an_engine_that_starts_anew() -> None:
    """Its cache is freed once its transfer is closed, with jobs in flight, and the next one lies at
    the same addresses: rows of the tier are loaded into that, and nothing is written any more by
    what was before."""
    code = """
    kind = ctypes.c_uint64
    at = driver.get(kind, "cuMemAlloc", 4 * 64 * 4096)
    world = World(at=at, ahead_bytes=1 << 16)
    blocks, places = np.arange(64), [at]
    world.transfer.store(blocks, blocks).wait(10)
    rows = world.rows(blocks)
    for turn in range(6):
        # Loads into blocks that a later engine uses otherwise, and stores of what is not yet.
        jobs = [world.transfer.load(blocks, blocks + 64) for _ in range(3)]
        jobs += [world.transfer.store(blocks, blocks + 64) for _ in range(3)]
        world.transfer.close(cancel=True)
        assert all(job.done() for job in jobs)
        driver("cuMemFree", places[-1])
        places.append(driver.get(kind, "cuMemAlloc", 4 * 64 * 4096))
        world.at = places[-1]
        world.fill(turn + 5)
        layout = kv.Layout(Gpu(world.at, world.shape), block_axis=1, layer_axis=0)
        world.transfer = kv.BlockTransfer(layout, world.pool, policy="zero_sm", verify=True)
        named = np.random.default_rng(turn).permutation(64)
        result = world.transfer.load(named[:32], blocks[:32]).wait(10)
        got = world.read()
        image = world.image.copy()
        image[:, named[:32]] = rows[:32].reshape(32, 4, 4096).transpose(1, 0, 2)
        assert (got == image).all(), turn
        assert (world.rows(blocks) == rows).all()
    assert len(set(places)) == 1, "the stand-in gives freed addresses again"
    """
    check_on_gpu(code)


def test_host_memory_that_is_registered_in_smaller_chunks() -> None:
    """As far as a limit lets it, and the error names that; what it had can be used."""
    code = """
    import mmap, resource
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    pool = kv.HostPool(1 << 20, 256, backend="cuda", chunk_bytes=64 << 20)
    code, told = code_of(lambda: pool.wait_ready(20))
    assert code == "memory" and "has 112 rows and gets no more" in told, told
    assert f"RLIMIT_MEMLOCK (ulimit -l) is {limit}; of " in told, told
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told, told
    slots = pool.allocate(112)
    assert slots.tolist() == list(range(112))
    assert all((np.diff([pool.row(s).ctypes.data for s in slots[k:k + 16]]) == 1 << 20).all()
               for k in range(0, 112, 16))
    pool.close()
    # Memory of others, in chunks that begin with a page.
    memory = mmap.mmap(-1, 128 << 20)
    pool = kv.HostPool(1 << 20, 128, backend="cuda", memory=memory)
    code, told = code_of(lambda: pool.wait_ready(20))
    assert (code, "has 112 rows" in told) == ("memory", True), told
    pool.close()
    # What is registered as a whole, or is small, is not.
    pool = kv.HostPool((1 << 20) - 1, 127, backend="cuda", memory=memoryview(memory)[1:])
    code, told = code_of(lambda: pool.wait_ready(20))
    assert (code, "has 0 rows" in told) == ("memory", True), told
    pool.close()
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_PINNED="120M")
