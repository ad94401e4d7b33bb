"""Transfers on a GPU: what comes after a stream, what a stream waits for, what drivers do wrong. On
the stand-in driver, a process for each test."""

from pathlib import Path

import pytest
from test_cuda import run

FAKES = str(Path(__file__).parents[1] / "fakes")

WORLD = f"""
sys.path.append({FAKES!r})
from cuda_driver import Driver
from offcore import _core, kv
driver = Driver(os.environ["OFFCORE_LIBCUDA"])
driver.start(0)
NEVER = 1 << 62  # bytes that no page has

class Gpu:
    def __init__(self, address, shape, strides=None):
        self.__cuda_array_interface__ = dict(
            data=(address, False), shape=shape, strides=strides, typestr="|u1", version=3)

class World:
    def __init__(self, layers=4, blocks=64, page=4096, at=None, **options):
        self.shape = (layers, blocks, page)
        self.at = at or driver.memory((layers * blocks * page + (2 << 20) - 1) >> 21 << 21)
        layout = kv.Layout(Gpu(self.at, self.shape), block_axis=1, layer_axis=0)
        self.pool = kv.HostPool(
            layout.block_bytes, 2 * blocks, backend="cuda", chunk_bytes=8 * layout.block_bytes)
        self.slots = self.pool.allocate(2 * blocks, timeout=20)
        options.setdefault("policy", "zero_sm")
        self.transfer = kv.BlockTransfer(layout, self.pool, verify=True, **options)
        self.fill(1)

    def fill(self, seed):
        self.image = np.random.default_rng(seed).integers(0, 256, self.shape, np.uint8)
        driver.put(self.at, self.image.tobytes())

    def read(self, layers=None):  # the first ones, while jobs write the others
        held = self.image[:layers]
        return np.frombuffer(driver.read(self.at, held.size), np.uint8).reshape(held.shape)

    def rows(self, slots):
        return np.stack([self.pool.row(slot) for slot in slots])

    def wanted(self, blocks):
        return self.image[:, blocks].transpose(1, 0, 2).reshape(len(blocks), -1)

    def meet(self):  # jobs that share blocks and rows come one after the other
        jobs = [self.transfer.store([1, 2], [0, 1]), self.transfer.load([2, 3], [0, 1]),
                self.transfer.store([3], [2], priority=5)]
        for job in jobs:
            job.wait(10)
        first, second = self.wanted([1])[0], self.wanted([2])[0]
        assert (self.rows([0, 1, 2]) == np.stack([first, second, second])).all()

def passed(watch):
    watch.start()
    watch.stop()
    return watch.elapsed_us(10) >= 0
"""


def check_on_gpu(code: str, *args: str, **env: str) -> None:
    assert run(code, *args, prelude=WORLD, **env) == ""


@pytest.mark.parametrize("event", [False, True])
def test_a_store_comes_after_a_streams_work(event: bool) -> None:
    code = """
    world, gate = World(), _core.GpuTimer(0)
    gate.shut()
    after = gate.stream
    if sys.argv[1] == "True":
        class Event: cuda_event = driver.event(2)
        driver("cuEventRecord", Event.cuda_event, gate.stream)
        after = Event
    blocks = [5, 9, 63]
    job = world.transfer.store(blocks, [0, 1, 2], after=after)
    # It holds up neither its own direction nor the other, and can wait for ever.
    assert world.transfer.store([7], [3]).wait().blocks == 1
    assert world.transfer.load([8], [4]).wait().blocks == 1
    assert code_of(lambda: job.wait(0.05))[0] == "timeout"
    assert "nothing is enqueued" in code_of(lambda: job.wait_layer(0, timeout=0.01))[1]
    # Nor does what it meets go first.
    meets = world.transfer.load([9], [5], priority=9)
    assert code_of(lambda: meets.wait(0.05))[0] == "timeout"
    world.fill(2)
    gate.open()
    assert job.wait(10).blocks == 3
    assert (world.rows([0, 1, 2]) == world.wanted(blocks)).all()
    assert meets.wait(10).blocks == 1
    world.transfer.close()
    """
    check_on_gpu(code, str(event))


def test_an_event_is_of_no_use_to_a_job_any_more() -> None:
    """It may be recorded anew, or destroyed, once the call has returned."""
    code = """
    world, gate, later = World(), _core.GpuTimer(0), _core.GpuTimer(0)
    class Event: cuda_event = driver.event(2)
    for turn in range(3):
        gate.shut()
        later.shut()
        driver("cuEventRecord", Event.cuda_event, gate.stream)
        job = world.transfer.store([5], [turn], after=Event)
        driver("cuEventRecord", Event.cuda_event, later.stream)
        if turn == 2:
            driver("cuEventDestroy", Event.cuda_event)
        assert code_of(lambda: job.wait(0.02))[0] == "timeout"
        gate.open()
        assert job.wait(10).blocks == 1
        later.open()
    assert (world.rows(range(3)) == world.wanted([5])).all()
    # One that never passes holds up no other, nor does its job's end wait for it.
    gate.shut()
    Event.cuda_event = driver.event(2)
    driver("cuEventRecord", Event.cuda_event, gate.stream)
    stuck = world.transfer.store([6], [3], after=Event)
    Event.cuda_event = driver.event(2)
    driver("cuEventRecord", Event.cuda_event, later.stream)
    assert world.transfer.store([7], [4], after=Event).wait(10).blocks == 1
    stuck.cancel()
    assert stuck.wait(10).cancelled
    gate.open()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_what_cannot_be_waited_for() -> None:
    code = """
    world = World()
    class Never: cuda_event = 0
    assert code_of(lambda: world.transfer.load([0], [0], after=Never)) == (
        "invalid", "after: the event was never recorded; record it in a stream")
    assert code_of(lambda: world.transfer.load([0], [0], after=-1))[0] == "invalid"
    stream, graphs = driver.stream(), []
    with driver.capture(stream, graphs):
        code, told = code_of(lambda: world.transfer.load([0], [0], after=stream))
        assert (code, "cannot be part of a graph" in told) == ("unsupported", True), told
        gate = _core.GpuTimer(0)
        gate.shut()
        job = world.transfer.load([1], [1], after=gate.stream)
        for wait in (lambda: job.wait_stream(stream), lambda: job.wait_layer(0, stream)):
            code, told = code_of(wait)
            assert (code, "a graph cannot wait" in told) == ("unsupported", True), told
        gate.open()
        job.wait(10)
        driver("cuMemsetD8Async", world.at, 1, 16, stream)
    driver("cuGraphLaunch", graphs[0], stream)
    driver("cuStreamSynchronize", stream)  # it writes where the load below does
    class Event: cuda_event = driver.event(2)
    driver("cuStreamBeginCapture", stream, 1)
    driver("cuEventRecord", Event.cuda_event, stream)
    code, told = code_of(lambda: world.transfer.load([0], [0], after=Event))
    assert (code, "cannot be part of a graph" in told) == ("unsupported", True), told
    spoiled = driver.code("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_uint64()))
    assert spoiled in (901, 904), spoiled
    assert world.transfer.load([0], [0]).wait().blocks == 1
    host = kv.HostPool(4 * 4096, 4, backend="host")
    for pool, caches, options in [
        (host, Gpu(world.at, (8, 4 * 4096)), {"device": 0}),
        (world.pool, np.zeros((8, 4 * 4096), np.uint8), {}),
    ]:
        assert code_of(lambda: kv.BlockTransfer(caches, pool, **options))[0] == "invalid"
    pageable = np.zeros((8, 4 * 4096), np.uint8)
    pretends = Gpu(pageable.ctypes.data, pageable.shape)
    with kv.BlockTransfer(pretends, world.pool) as transfer:
        code, told = code_of(lambda: transfer.load([0], [0]).wait())
        assert (code, "ordinary host memory" in told) == ("invalid", True), told
    """
    check_on_gpu(code)


def test_a_job_is_cancelled_before_it_begins() -> None:
    code = """
    world, gate = World(), _core.GpuTimer(0)
    gate.shut()
    job = world.transfer.load([1, 2], [0, 1], after=gate.stream)
    world.pool.free([0, 1])
    assert world.pool.leaving_blocks == 2
    job.cancel()
    result = job.wait(10)
    assert (result.cancelled, result.blocks, result.bytes, result.path) == (True, 0, 0, "none")
    assert code_of(lambda: job.wait_layer(0))[0] == "cancelled"
    assert code_of(lambda: job.wait_stream(gate.stream))[0] == "cancelled"
    assert (world.read() == world.image).all()
    assert world.pool.free_blocks == 2
    # So are all by a close.
    job = world.transfer.load([1, 2], [2, 3], after=gate.stream)
    assert code_of(lambda: world.transfer.close(timeout=0.05))[0] == "timeout"
    world.transfer.close(cancel=True)
    assert job.wait().cancelled
    world.pool.close()
    """
    check_on_gpu(code)


def test_a_stream_waits_for_layers() -> None:
    code = """
    world = World(ahead_bytes=1)
    gate, reader = _core.GpuTimer(0), _core.GpuTimer(0)
    for slot in world.slots:
        world.pool.row(slot)[:] = slot
    slots = np.arange(64)
    gate.shut()
    job = world.transfer.load(slots, slots, by_layer=True, after=gate.stream)
    assert code_of(lambda: job.wait_layer(0, reader.stream, timeout=0.05))[0] == "timeout"
    threading.Timer(0.05, gate.open).start()
    for layer in range(4):
        job.wait_layer(layer, reader.stream, timeout=10)
        assert passed(reader)
        assert (world.read(layer + 1)[layer] == slots[:, np.newaxis]).all(), layer
    assert job.wait().layers == 4
    # A job that is done makes nobody wait; the default stream will do as well.
    job.wait_stream(0)
    # All layers at once: the caller waits for the submission only, past all bounds.
    job = world.transfer.load(slots, slots + 64)
    class Stream: cuda_stream = reader.stream
    job.wait_stream(Stream)
    assert passed(reader)
    assert (world.read() == (slots + 64)[:, np.newaxis]).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_jobs_that_meet_keep_their_order_on_a_gpu() -> None:
    """The driver's engines are late at random: copies that are not ordered would be seen."""
    code = """
    world = World(ahead_bytes=3 * 4096)
    for turn in range(60):
        world.pool.row(0)[:] = turn
        world.pool.row(1)[:] = turn + 100
        jobs = [
            world.transfer.load([1], [0], by_layer=turn % 3),
            world.transfer.store([1], [2], priority=turn % 2),
            world.transfer.load([1], [1], priority=1),
            world.transfer.store([1], [3], by_layer=turn % 2),
            world.transfer.load([2], [3], priority=2),
            world.transfer.store([2], [0], priority=3),
        ]
        for job in jobs[::-1]:
            job.wait(10)
        assert (world.rows([2]) == turn).all()
        assert (world.rows([0, 1, 3]) == turn + 100).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_pages_one_by_one_are_handed_over_in_sub_batches() -> None:
    code = """
    world = World(plain_from=1)
    blocks = np.random.default_rng(0).permutation(64)[:40]
    result = world.transfer.store(blocks, np.arange(40)).wait()
    assert (result.path, result.commands, result.pages) == ("plain", 160, 160)
    assert (world.rows(range(40)) == world.wanted(blocks)).all()
    result = world.transfer.load(blocks, np.arange(40)[::-1]).wait()
    assert (result.path, result.commands) == ("plain", 160)
    assert (world.read()[:, blocks] == world.image[:, blocks[::-1]]).all()
    """
    check_on_gpu(code)


@pytest.mark.parametrize("how", ["one", "allocated", "mapped"])
def test_layers_in_tensors_of_their_own(how: str) -> None:
    """At equal steps, which is more than a driver copies by one command."""
    code = """
    how, MIB = sys.argv[1], 1 << 20
    if how == "one":
        at = driver.get(ctypes.c_uint64, "cuMemAlloc", 8 * MIB)
    elif how == "mapped":
        at = driver.map([driver.create(2 * MIB) for _ in range(4)], 2 * MIB)
    else:
        each = [driver.get(ctypes.c_uint64, "cuMemAlloc", 2 * MIB) for _ in range(4)]
        at = each[0]
        assert each == list(range(at, at + 8 * MIB, 2 * MIB))
    tensors = [Gpu(at + k * 2 * MIB, (2, 64, 100)) for k in range(4)]
    layout = kv.Layout(tensors, block_axis=1)
    pool = kv.HostPool(layout.block_bytes, 16, backend="cuda")
    pool.allocate(16, timeout=10)
    image = np.random.default_rng(0).integers(0, 256, (4, 2, 64, 100), np.uint8)
    for k in range(4):
        driver.put(at + k * 2 * MIB, image[k].tobytes())
    transfer = kv.BlockTransfer(layout, pool, plain_from=NEVER)
    result = transfer.store([3, 60, 7], [0, 1, 2]).wait()
    assert result.commands == 3 * (4 if how == "allocated" else 2), result
    for slot, block in enumerate([3, 60, 7]):
        assert (pool.row(slot) == image[:, :, block].reshape(-1)).all()
    pool.row(0)[:] = 9
    result = transfer.load([5], [0]).wait()
    assert (result.path, result.commands) == ("strided", 4 if how == "allocated" else 2)
    for k in range(4):
        got = np.frombuffer(driver.read(at + k * 2 * MIB, 12800), np.uint8).reshape(2, 64, 100)
        assert (got[:, 5] == 9).all() and (got[:, 4] == image[k, :, 4]).all()
    transfer.close()
    """
    check_on_gpu(code, how)


@pytest.mark.parametrize("page", [8 << 10, 16 << 10, 32 << 10])
def test_k_and_v_apart_in_tensors_of_their_own(page: int) -> None:
    """As vLLM allocates them. A strided copy of two pages takes longer than two copies of a batch,
    so that all pages are submitted in batches."""
    code = """
    page, blocks = int(sys.argv[1]), 32
    layers = [driver.get(ctypes.c_uint64, "cuMemAlloc", 2 * blocks * page + k) for k in range(6)]
    layout = kv.Layout([Gpu(at, (2, blocks, page)) for at in layers], block_axis=1)
    image = np.random.default_rng(3).integers(0, 256, (6, 2, blocks, page), np.uint8)
    for at, layer in zip(layers, image):
        driver.put(at, layer.tobytes())
    pool = kv.HostPool(layout.block_bytes, blocks, backend="cuda")
    slots, named = pool.allocate(blocks, timeout=20), np.random.default_rng(4).permutation(blocks)
    with kv.BlockTransfer(layout, pool, policy="zero_sm") as transfer:
        stored = transfer.store(named, slots).wait(20)
        rows = np.stack([pool.row(slot) for slot in slots])
        assert (rows.reshape(blocks, 6, 2, page) == image[:, :, named].transpose(2, 0, 1, 3)).all()
        loaded = transfer.load(named, slots[::-1]).wait(20)
    image[:, :, named] = image[:, :, named[::-1]]
    for at, layer in zip(layers, image):
        assert driver.read(at, 2 * blocks * page) == layer.tobytes()
    for result in (stored, loaded):
        assert (result.path, result.calls["strided"]) == ("plain", 0), result
        assert result.calls["batched"] + result.calls["plain"] == 12 * blocks, result
        assert result.calls["batches"] <= 12 * blocks / 16, result
    """
    check_on_gpu(code, str(page))


@pytest.mark.parametrize("step", [3 << 30, (5 << 30) + 4096, (1 << 31) - 4096])
def test_layers_further_apart_than_a_pitch(step: int) -> None:
    code = """
    step, MIB = int(sys.argv[1]), 1 << 20
    at = driver.reserve((2 * step + 4 * MIB + 2 * MIB - 1) >> 21 << 21)
    for k in range(3):
        place = at + (k * step >> 21 << 21)  # whole granules; a layer may begin inside one
        driver("cuMemMap", place, 4 * MIB, 0, driver.create(4 * MIB), 0)
        driver.set_access(place, 4 * MIB, [0])
        data = np.full(64 * 512, k + 1, np.uint8)
        driver.put(at + k * step, data.tobytes())
    caches = Gpu(at, (3, 64, 512), (step, 512, 1))
    layout = kv.Layout(caches, block_axis=1, layer_axis=0)
    assert layout.copies() == [(3, 512)]
    pool = kv.HostPool(layout.block_bytes, 16, backend="cuda")
    pool.allocate(16, timeout=10)
    with kv.BlockTransfer(layout, pool, plain_from=NEVER) as transfer:
        before = calls("cuMemcpy3DAsync"), calls("cuMemcpy2DAsync"), calls("cuMemcpyAsync")
        transfer.store([3, 63, 7], [0, 1, 2]).wait()
        pool.row(3)[:] = np.arange(1536) // 512 + 7
        transfer.load([20], [3]).wait()
        spent = np.subtract(
            (calls("cuMemcpy3DAsync"), calls("cuMemcpy2DAsync"), calls("cuMemcpyAsync")), before)
    assert spent.tolist() == ([4, 0, 0] if step >= 1 << 31 else [0, 4, 0]), spent
    assert (pool.row(1) == np.arange(1536) // 512 + 1).all()
    for k in range(3):
        got = np.frombuffer(driver.read(at + k * step, 64 * 512), np.uint8).reshape(64, 512)
        assert (got[20] == k + 7).all() and (np.delete(got, 20, 0) == k + 1).all()
    """
    check_on_gpu(code, str(step))


def test_a_chunk_that_cannot_be_registered() -> None:
    code = """
    pool = kv.HostPool(4096, 40, backend="cuda", chunk_bytes=10 * 4096)
    code, told = code_of(lambda: pool.wait_ready(10))
    assert (code, "has 20 rows and gets no more" in told) == ("memory", True), told
    assert pool.progress == (20, 20)
    slots = pool.allocate(20)
    code, told = code_of(lambda: pool.allocate(1, timeout=0))
    assert (code, "gets no more" in told) == ("memory", True), told
    pool.grow(30)
    assert pool.allocate(30, timeout=10).tolist() == list(range(20, 50))
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_FAIL="cuMemHostRegister:3")


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize(("call", "ahead"), [(1, 1), (5, 1), (1, 1 << 20), (6, 1 << 20)])
def test_a_call_that_the_driver_refuses_fails_its_job_alone(
    load: bool, call: int, ahead: int
) -> None:
    """The first one of a transfer or a later one, of a part that is one call or several."""
    code = """
    load, call, ahead = eval(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    world = World(ahead_bytes=ahead, plain_from=NEVER)
    for slot in world.slots:
        world.pool.row(slot)[:] = slot
    start = world.transfer.load if load else world.transfer.store
    named = [[k, k + 8, k + 3] for k in (0, 16, 32, 48)]
    slots = [[k, k + 9, k + 3] for k in (0, 16, 32, 48)]
    jobs = [start(*pair) for pair in zip(named, slots)]
    codes = [code_of(lambda: job.wait(10)) for job in jobs]
    wanted = [("driver" if (call - 1) // 3 == k else "") for k in range(4)]
    assert [code for code, told in codes] == wanted, codes
    assert all("CUDA_ERROR_UNKNOWN" in told for code, told in codes if code), codes
    for k in range(4):
        if wanted[k]:
            # What of it was enqueued has ended, so its slots and blocks can be used at once.
            world.pool.free(slots[k])
            assert (world.pool.leaving_blocks, world.pool.free_blocks) == (0, 3)
        elif load:
            got = world.read()[:, named[k]]
            assert (got == np.array(slots[k])[np.newaxis, :, np.newaxis]).all(), k
        else:
            assert (world.rows(slots[k]) == world.wanted(named[k])).all(), k
    # Both directions go on.
    assert world.transfer.store([1, 2], [7, 20]).wait(10).blocks == 2
    assert world.transfer.load([5], [7]).wait(10).blocks == 1
    assert (world.read()[:, 5] == world.read()[:, 1]).all()
    world.transfer.close()
    world.pool.close()
    """
    check_on_gpu(
        code, str(load), str(call), str(ahead), OFFCORE_FAKE_CUDA_FAIL=f"cuMemcpy2DAsync:{call}:999"
    )


def test_a_refused_job_ends_behind_what_is_enqueued_of_it() -> None:
    code = """
    world = World(blocks=16, page=1 << 18, plain_from=NEVER)
    blocks = [5, 3, 9, 1, 0, 2, 4, 15]
    assert code_of(lambda: world.transfer.store(blocks, np.arange(8)).wait(10))[0] == "driver"
    assert (world.rows(range(7)) == world.wanted(blocks[:7])).all()
    world.transfer.close()
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_FAIL="cuMemcpy2DAsync:8:999")


def test_a_gpu_that_fails_ends_every_job() -> None:
    code = """
    world = World(ahead_bytes=1)
    jobs = [world.transfer.load(np.arange(32), np.arange(32)) for _ in range(3)]
    codes = [code_of(lambda: job.wait(20))[0] for job in jobs]
    assert "driver" in codes and set(codes) <= {"", "driver"}, codes
    assert code_of(lambda: world.transfer.store([40], [40]).wait(20))[0] == "driver"
    world.transfer.close(timeout=20)
    world.pool.close()
    print("ended")
    """
    told = run(code, prelude=WORLD, OFFCORE_FAKE_CUDA_FAIL="copy:20:700")
    assert told == "ended\n"


def test_nothing_is_left_behind() -> None:
    code = """
    import gc
    first = World(layers=2)  # what stays as long as the process
    first.transfer.close()
    at, before = first.at, live()
    before.pop("events")  # are the GPU's, and used again by whoever copies there next
    for turn in range(12):
        world, all_of = World(layers=2, at=at), np.arange(64)
        jobs = [world.transfer.load(all_of, all_of, by_layer=turn % 3) for _ in range(3)]
        if turn % 3 == 0:
            world.transfer.close()
            world.pool.close()
        elif turn % 3 == 1:
            jobs[0].wait()
        del world, jobs
        gc.collect()
        after = live()
        assert after.pop("events") < 24, turn
        assert after == before, (turn, after, before)
    """
    check_on_gpu(code)


@pytest.mark.parametrize("how", ["pass", "sys.exit(0)", "gate.open()"])
def test_a_process_ends_with_copies_under_way(how: str) -> None:
    code = f"""
    world, gate = World(blocks=512, ahead_bytes=1 << 20), _core.GpuTimer(0)
    gate.shut()
    jobs = [world.transfer.load(np.arange(512), np.arange(512)),
            world.transfer.store(np.arange(512), np.arange(512, 1024), after=gate.stream)]
    {how}
    """
    check_on_gpu(code)


def test_other_threads_go_on_while_a_dropped_transfer_waits() -> None:
    """Among them the one that it waits for: it ends, and leaves nothing to its thread."""
    code = """
    world = World()
    world.meet()
    world.transfer.close()
    del world.transfer
    before = live()
    layout = kv.Layout(Gpu(world.at, world.shape), block_axis=1, layer_axis=0)
    transfer = kv.BlockTransfer(layout, world.pool, policy="zero_sm")
    lib.fakecuda_hold_host_engines(1)
    job = transfer.store([1, 2], [0, 1])
    threading.Timer(0.3, lib.fakecuda_hold_host_engines, (0,)).start()
    del job, transfer
    assert live() == before, (live(), before)
    """
    check_on_gpu(code)
