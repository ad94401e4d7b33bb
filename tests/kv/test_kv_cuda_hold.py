"""Jobs that are enqueued before what they come after has run. On the stand-in driver."""

import pytest
from test_kv_cuda import check_on_gpu


@pytest.mark.parametrize("policy", ["zero_sm", "pack"])
def test_engines_wait_for_what_a_held_job_comes_after(policy: str) -> None:
    """Its copies are enqueued at once, so that a stream can wait for them before they may begin."""
    code = """
    world, gate = World(hold=True, policy=sys.argv[1]), _core.GpuTimer(0)
    stream = driver.stream()
    gate.shut()
    blocks = [5, 9, 63]
    job = world.transfer.store(blocks, [0, 1, 2], after=gate.stream, by_layer=2)
    job.wait_layer(1, stream, timeout=5)
    job.wait_stream(stream, timeout=5)
    assert driver.code("cuStreamQuery", stream) != 0
    behind = world.transfer.store([7], [3])
    assert world.transfer.load([8], [4]).wait(5).blocks == 1  # the other direction
    assert code_of(lambda: job.wait(0.02))[0] == "timeout"
    assert not behind.done() or sys.argv[1] == "pack"  # which has two lanes
    world.fill(2)
    gate.open()
    assert (job.wait(10).blocks, behind.wait(10).blocks) == (3, 1)
    driver("cuStreamSynchronize", stream)
    assert (world.rows([0, 1, 2]) == world.wanted(blocks)).all()
    # What is cancelled before it was enqueued, and what was enqueued, end.
    gate.shut()
    load = world.transfer.load
    jobs = [load([block], [block - 16], after=gate.stream) for block in range(20, 30)]
    jobs[-1].cancel()
    gate.open()
    for job in jobs[:-1]:
        assert job.wait(10).blocks == 1
    jobs[-1].wait(10)
    world.transfer.close()
    """
    check_on_gpu(code, policy)


def test_jobs_by_layer_go_on_together() -> None:
    """What reads a layer of all of them waits for no other layer, and its wait can be enqueued
    while nothing is copied yet, past all bounds on what is enqueued ahead."""
    code = """
    world, gate = World(hold=True, ahead_bytes=1), _core.GpuTimer(0)
    reader, other = _core.GpuTimer(0), driver.stream()
    for slot in world.slots:
        world.pool.row(slot)[:] = slot
    gate.shut()
    parts = np.arange(64).reshape(4, 16)
    load = world.transfer.load
    jobs = [load(part, part, by_layer=True, after=gate.stream) for part in parts]
    for job in jobs:
        job.wait_layer(0, reader.stream, timeout=5)
    jobs[0].wait_layer(1, other, timeout=5)
    assert driver.code("cuStreamQuery", reader.stream) != 0
    # They are in the engine's queue, one layer after the other; without bounds all of it is.
    for layer in (1, 2, 3):
        for job in jobs:
            job.wait_layer(layer, other, timeout=5)
    gate.open()
    assert passed(reader)
    assert (world.read(1)[0] == np.arange(64)[:, np.newaxis]).all()
    assert [job.wait(10).layers for job in jobs] == [4] * 4
    assert (world.read() == np.arange(64)[:, np.newaxis]).all()
    gate.shut()
    jobs = [load(part, part + 64, after=gate.stream) for part in parts]
    for job in jobs:
        job.wait_stream(other, timeout=5)
    gate.open()
    driver("cuStreamSynchronize", other)
    assert (world.read() == np.arange(64, 128)[:, np.newaxis]).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_a_large_job_lets_others_use_its_engine() -> None:
    """An engine takes others' copies when its stream has nothing for it: parts go into two streams,
    each after the one before. Small jobs stay in one."""
    code = """
    from ctypes import c_uint64
    calls = driver.library.fakecuda_calls
    calls.restype = c_uint64
    def streams():
        return calls(b"cuStreamCreateWithPriority")
    world = World(blocks=64, page=128 << 10, hold=True, ahead_bytes=8 << 20)
    gate, reader = _core.GpuTimer(0), driver.stream()
    for slot in world.slots:
        world.pool.row(slot)[:] = slot
    blocks = np.arange(64)
    def held(start, count):
        gate.shut()
        job = start(blocks[:count], world.slots[:count], after=gate.stream)
        job.wait_stream(reader, timeout=5)  # all of it is enqueued
        assert not job.done()
        gate.open()
        assert job.wait(10).blocks == count
    for start in (world.transfer.load, world.transfer.store):
        held(start, 1)
        before = streams()
        held(start, 16)  # 8 MiB
        assert streams() == before
        held(start, 64)  # 32 MiB
        assert streams() == before + 1
        held(start, 64)
        assert streams() == before + 1
    driver("cuStreamSynchronize", reader)
    assert (world.read() == world.slots[:64][None, :, None] % 256).all()
    assert (world.rows(world.slots[:64]) == world.slots[:64, None] % 256).all()
    world.transfer.close()
    """
    check_on_gpu(code)
