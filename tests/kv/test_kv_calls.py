"""How the driver is told of KV copies: the calls that each way takes, and the kernel that copies
instead of engines where a caller asks for it. On the stand-in driver."""

import numpy as np
import pytest
from test_kv_cuda import check_on_gpu
from test_kv_pool import check_refused

from offcore import kv


def test_calls_are_counted() -> None:
    """Folded: a strided copy a block. By layer: pages in calls of up to 256."""
    code = """
    world = World(layers=4, blocks=128, plain_from=NEVER, linger=60.0)
    blocks = np.random.default_rng(5).permutation(128)[:70]
    slots = np.random.default_rng(6).permutation(256)[:70]
    counted = lambda: {name: calls(name) for name in (
        "cuMemcpyBatchAsync", "cuMemcpyAsync", "cuMemcpy2DAsync")}
    before = counted()
    result = world.transfer.store(blocks, slots).wait()
    assert result.calls == {"batches": 0, "batched": 0, "plain": 0, "strided": 70,
                            "crossed": 0, "kernels": 0, "packs": 0}
    spent = {name: counted()[name] - before[name] for name in before}
    assert spent == {"cuMemcpyBatchAsync": 0, "cuMemcpyAsync": 0, "cuMemcpy2DAsync": 70}
    assert result.path == "strided" and 0 < result.enqueue_us
    for start in (world.transfer.store, world.transfer.load):
        before = counted()
        result = start(blocks, slots, by_layer=True).wait()
        # Each layer has 70 pages, in one call. Small ones to a GPU: in one of 4, of 64, and of 2.
        batches = 12 if start == world.transfer.load else 4
        wanted = dict(batches=batches, batched=280, plain=0, strided=0, crossed=0, kernels=0,
                      packs=0)
        assert result.calls == wanted, result
        spent = {name: counted()[name] - before[name] for name in before}
        wanted = dict(cuMemcpyBatchAsync=batches, cuMemcpyAsync=0, cuMemcpy2DAsync=0)
        assert spent == wanted
    assert (world.rows(slots) == world.wanted(blocks)).all()
    assert (world.read() == world.image).all()
    """
    check_on_gpu(code)


@pytest.mark.parametrize(("page", "told"), [(32 << 10, 5), (16 << 10, 1)])
def test_the_first_calls_of_large_pages_are_short(page: int, told: int) -> None:
    """The engine begins sooner: 100 pages as 4 times 16 and 36, not as one call. A load of smaller
    ones begins with 4, which keep the engine busy until the next call: on an idle stream a driver
    copies small pages on the CPU."""
    code = """
    page, told = int(sys.argv[1]), int(sys.argv[2])
    world = World(layers=1, blocks=128, page=page, plain_from=NEVER)
    blocks, slots = np.random.default_rng(5).permutation(128)[:100], np.arange(0, 200, 2)
    for start in (world.transfer.store, world.transfer.load):
        before = calls("cuMemcpyBatchAsync")
        result = start(blocks, slots).wait()
        small = page < 32 << 10 and start == world.transfer.load
        # 4, 64 and 32; or 4 and 60 by the caller, and 4 and 32. A store: 100, or 64 and 36.
        wanted = {3, 4} if small else {told, 2} if page < 32 << 10 else {told}
        assert (result.calls["batched"], result.calls["plain"]) == (100, 0), result
        assert result.path == "plain"
        assert calls("cuMemcpyBatchAsync") - before == result.calls["batches"] in wanted, result
    assert (world.rows(slots) == world.wanted(blocks)).all()
    assert (world.read() == world.image).all()
    """
    check_on_gpu(code, str(page), str(told))


def test_pages_go_one_by_one_while_an_engine_is_behind() -> None:
    """Blocks of 672 KiB are told sooner than they are copied: of most of them the pages in calls of
    many, which leave the engine fewer pauses; not where a stream waits for them to be told."""
    code = """
    world = World(layers=24, blocks=128, page=28 << 10, crossing_bytes=0)
    blocks, slots = np.random.default_rng(7).permutation(128), np.arange(128)[::-1]
    result = world.transfer.store(blocks, slots).wait()
    assert (result.path, result.calls["plain"]) == ("mixed", 0), result
    assert result.calls["strided"] + result.calls["batched"] // 24 == 128, result
    assert result.calls["batched"] > 16 * result.calls["batches"], result
    assert (world.rows(slots) == world.wanted(blocks)).all()
    world.image[:, blocks[::-1]] = world.image[:, blocks].copy()
    assert world.transfer.load(blocks[::-1], slots).wait().path == "mixed"
    assert (world.read() == world.image).all()
    # What may not begin yet in the other direction is no reason to hurry.
    gate, reader = _core.GpuTimer(0), _core.GpuTimer(0)
    gate.shut()
    waits = world.transfer.load(blocks[:1], slots[:1], after=gate.stream)
    assert world.transfer.store(blocks[1:], slots[1:]).wait().path == "mixed"
    assert code_of(lambda: waits.wait(1e-6))[0] == "timeout"
    gate.open()
    waits.wait()
    gate.shut()
    job = world.transfer.load(blocks, slots, after=gate.stream)
    threading.Timer(0.05, gate.open).start()
    job.wait_stream(reader.stream)
    assert passed(reader)
    assert job.wait().calls["strided"] == 128, job.wait()
    """
    check_on_gpu(code)


def test_the_caller_begins_while_the_thread_wakes() -> None:
    """At least the first part, of 16 copies, is enqueued when the call returns: unless the thread
    woke in time to take it from the caller."""
    code = """
    world = World(layers=4, blocks=128, plain_from=NEVER)
    blocks, slots = np.random.default_rng(5).permutation(128), np.arange(128)[::-1]
    begun = 0
    for turn in range(8):
        time.sleep(0.05)
        before = calls("cuMemcpy2DAsync")
        job = world.transfer.store(blocks[:100], slots[:100])
        begun += calls("cuMemcpy2DAsync") - before >= 16
        result = job.wait()
        assert result.commands == calls("cuMemcpy2DAsync") - before == 100
        assert (world.rows(slots[:100]) == world.wanted(blocks[:100])).all()
    assert begun >= 4, begun
    """
    check_on_gpu(code)


def test_of_a_large_job_the_caller_begins_nothing() -> None:
    """What its thread takes to wake is little of that: the call returns at once."""
    code = """
    world = World(layers=2, blocks=66, page=512 << 10, plain_from=NEVER)
    blocks = np.random.default_rng(5).permutation(66)
    begun = []
    for turn in range(8):
        time.sleep(0.05)
        before = calls("cuMemcpy2DAsync")
        job = world.transfer.store(blocks, np.arange(66)[::-1])
        begun.append(calls("cuMemcpy2DAsync") - before)
        job.wait()
    assert 0 in begun, begun  # unless the thread was awake in time
    assert (world.rows(np.arange(66)[::-1]) == world.wanted(blocks)).all()
    """
    check_on_gpu(code)


def test_a_kernel_copies_where_it_is_asked_for() -> None:
    code = """
    world = World(layers=5, blocks=64, page=4096 + 16, kernel=True)
    rng = np.random.default_rng(1)
    launches = 0
    for turn, by_layer in enumerate((False, True, 2, False, True)):
        blocks, slots = rng.permutation(64)[:40], rng.permutation(128)[:40]
        engines = calls("cuMemcpyBatchAsync") + calls("cuMemcpyAsync") + calls("cuMemcpy2DAsync")
        before = calls("cuLaunchKernel")
        stored = world.transfer.store(blocks, slots, by_layer=by_layer).wait()
        assert stored.path == "kernel" and stored.calls["kernels"] > 0, stored
        assert stored.calls["kernels"] == calls("cuLaunchKernel") - before
        assert engines == (
            calls("cuMemcpyBatchAsync") + calls("cuMemcpyAsync") + calls("cuMemcpy2DAsync"))
        assert (world.rows(slots) == world.wanted(blocks)).all()
        others = rng.permutation(64)[:40]
        world.image[:, others] = world.image[:, blocks].copy()
        loaded = world.transfer.load(others, slots, by_layer=by_layer).wait()
        assert loaded.path == "kernel"
        assert (world.read() == world.image).all(), turn
    # Both at once, and jobs that meet.
    world.meet()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_what_the_kernel_does_not_take_goes_by_engines() -> None:
    """It moves 16 bytes at a time; the result says that engines took part."""
    code = """
    for page, path in ((4096 + 8, "strided"), (4096, "kernel")):
        world = World(blocks=32, page=page, kernel=True)
        result = world.transfer.store([3, 9, 4], [0, 5, 1]).wait()
        assert result.path == path, result
        assert (world.rows([0, 5, 1]) == world.wanted([3, 9, 4])).all()
        world.transfer.close()
    """
    check_on_gpu(code)


@pytest.mark.parametrize("call", ["cuModuleLoadData:1", "cuLaunchKernel:2"])
def test_a_kernel_that_the_driver_refuses(call: str) -> None:
    code = """
    if "Load" in sys.argv[1]:
        assert code_of(lambda: World(kernel=True))[0] == "driver"
    else:
        world = World(kernel=True)
        assert world.transfer.store([1], [0]).wait().path == "kernel"
        assert code_of(lambda: world.transfer.store([2], [1]).wait(10))[0] == "driver"
        assert world.transfer.store([2], [1]).wait().path == "kernel"
        assert (world.rows([0, 1]) == world.wanted([1, 2])).all()
    """
    check_on_gpu(code, call, OFFCORE_FAKE_CUDA_FAIL=f"{call}:1")


def test_only_gpus_have_the_kernel() -> None:
    pool = kv.HostPool(64, 4, backend="sim")
    layout = kv.Layout(np.zeros((4, 64), np.uint8))
    check_refused(lambda: kv.BlockTransfer(layout, pool, kernel=True), "unsupported", "needs GPUs")


def test_peers_copy_pages_too() -> None:
    """The driver's calls that a measurement is made beside."""
    code = """
    world, watch = World(), _core.GpuTimer(0)
    pages = [(layer, block) for layer in range(4) for block in (3, 60, 7)]
    device = np.array([world.at + (l * 64 + b) * 4096 for l, b in pages], np.uint64)
    rows = {block: world.pool.row(slot) for slot, block in enumerate((3, 60, 7))}
    host = np.array([rows[b].ctypes.data + l * 4096 for l, b in pages], np.uint64)
    for turn, copy in enumerate((_core.copy_by_loop, _core.copy_by_batch)):
        world.fill(turn)
        copy(host, device, 4096, 0, watch.stream)
        assert passed(watch)
        assert (world.rows([0, 1, 2]) == world.wanted([3, 60, 7])).all()
        world.fill(9)
        copy(device, host, 4096, 0, watch.stream)
        assert passed(watch)
        assert (world.read()[:, [3, 60, 7]].transpose(1, 0, 2).reshape(3, -1)
                == world.rows([0, 1, 2])).all()
    assert calls("cuMemcpyBatchAsync") == 2
    short = device[:3]
    assert code_of(lambda: _core.copy_by_loop(host, short, 4096, 0, watch.stream))[0] == "invalid"
    """
    check_on_gpu(code)


def test_a_driver_without_batches() -> None:
    code = """
    world, watch = World(plain_from=1), _core.GpuTimer(0)
    result = world.transfer.store(np.arange(0, 64, 2), np.arange(32)[::-1].copy()).wait()
    assert result.calls["batches"] == 0 and result.calls["plain"] == 128, result
    place = np.zeros(1, np.uint64)
    assert code_of(lambda: _core.copy_by_batch(place, place, 8, 0, watch.stream))[0] == (
        "unsupported")
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_LACKS="cuMemcpyBatchAsync")
