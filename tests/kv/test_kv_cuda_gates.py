"""Streams that wait for copies which are not enqueued yet. On the stand-in driver."""

from textwrap import dedent

import pytest
from test_kv_cuda import check_on_gpu

# What a stream finds of the cache behind a gate: a copy within the GPU, in that stream.
SEEN = """
class Seen:
    def __init__(self, world):
        self.world, self.stream = world, driver.stream()
        self.at = driver.memory((world.image.size + (2 << 20) - 1) >> 21 << 21)

    def look(self, layers=range(4), blocks=range(64)):  # which no job writes meanwhile
        _, per_layer, page = self.world.shape
        for layer in layers:
            start = (layer * per_layer + blocks[0]) * page
            driver("cuMemcpyAsync", self.at + start, self.world.at + start, len(blocks) * page,
                   self.stream)

    def stands(self):
        return driver.code("cuStreamQuery", self.stream) == 600

    def image(self):
        driver("cuStreamSynchronize", self.stream)
        return np.frombuffer(driver.read(self.at, self.world.image.size), np.uint8).reshape(
            self.world.shape)

def numbered(**options):
    world = World(**options)
    for slot in world.slots:
        world.pool.row(slot)[:] = slot
    return world
"""


def check_gates(code: str, *args: str, **env: str) -> None:

    check_on_gpu(SEEN + dedent(code), *args, **env)


@pytest.mark.parametrize("policy", ["zero_sm", "pack"])
def test_a_stream_stands_before_layers_that_are_not_enqueued(policy: str) -> None:
    """The caller goes on at once; each layer opens for itself."""
    code = """
    world, gate = numbered(policy=sys.argv[1], ahead_bytes=1), _core.GpuTimer(0)
    seen = [Seen(world) for _ in range(4)]
    blocks = np.arange(64)
    gate.shut()
    job = world.transfer.load(blocks, blocks, by_layer=True, after=gate.stream)
    for layer, one in enumerate(seen):
        job.wait_layer(layer, one.stream, gate=True)
        job.wait_layer(layer, one.stream, gate=True)  # once more is the same
        one.look([layer])
    time.sleep(0.05)
    assert all(one.stands() for one in seen) and not job.done()
    gate.open()
    for layer, one in enumerate(seen):
        assert (one.image()[layer] == blocks[:, np.newaxis]).all(), layer
    assert job.wait(10).layers == 4
    # What has ended, or is on its way, makes a stream wait for an event, or for nothing.
    other = driver.stream()  # a fifth one: those before have passed their gates
    job.wait_stream(other, gate=True)
    driver("cuStreamSynchronize", other)
    # All layers at once; stores too.
    for turn in range(20):
        job = world.transfer.load(blocks, blocks + 64)
        job.wait_stream(seen[0].stream, gate=True)
        seen[0].look()
        store = world.transfer.store(blocks, blocks)
        store.wait_layer(3, seen[1].stream, gate=True)
        driver("cuStreamSynchronize", seen[1].stream)
        assert (world.rows(blocks) == blocks[:, np.newaxis] + 64).all()
        assert (seen[0].image() == blocks[:, np.newaxis] + 64).all()
        store.wait(10)
    world.transfer.close()
    """
    check_gates(code, policy)


def test_a_gate_of_a_job_behind_another() -> None:
    """Which has not begun, and whose blocks it overwrites: the stream finds the last values."""
    code = """
    world, gate = numbered(), _core.GpuTimer(0)
    seen, blocks = Seen(world), np.arange(64)
    gate.shut()
    first = world.transfer.load(blocks, blocks, after=gate.stream)
    second = world.transfer.load(blocks, blocks + 64, by_layer=2)
    second.wait_stream(seen.stream, gate=True)
    seen.look()
    # What comes after that stream is behind both, and holds up neither.
    third = world.transfer.store(blocks, blocks, after=seen.stream, priority=9)
    assert world.transfer.load([], []).wait(10).blocks == 0
    time.sleep(0.02)
    assert seen.stands() and not (first.done() or second.done() or third.done())
    gate.open()
    assert (seen.image() == blocks[:, np.newaxis] + 64).all()
    assert (first.wait(10).blocks, second.wait(10).blocks, third.wait(10).blocks) == (64, 64, 64)
    assert (world.rows(blocks) == blocks[:, np.newaxis] + 64).all()
    world.transfer.close()
    """
    check_gates(code)


@pytest.mark.parametrize("how", ["job.cancel()", "close(cancel=True)", "del world.transfer, job"])
def test_gates_of_jobs_that_are_given_up_open(how: str) -> None:
    code = """
    world, gate = numbered(), _core.GpuTimer(0)
    seen, close = Seen(world), world.transfer.close
    gate.shut()
    job = world.transfer.load([1, 2], [0, 1], after=gate.stream, by_layer=True)
    job.wait_layer(2, seen.stream, gate=True)
    seen.look()
    time.sleep(0.02)
    assert seen.stands()
    dropped = "del" in sys.argv[1]
    if dropped:  # what it frees waits for the whole GPU
        threading.Timer(0.2, gate.open).start()
        del close
    exec(sys.argv[1])
    assert (seen.image() == world.image).all() or dropped
    if not dropped:
        assert job.wait(10).cancelled and job.wait().layers == 0
        code, told = code_of(lambda: job.wait_layer(2, seen.stream, gate=True))
        assert code == "cancelled", told
    gate.open()
    """
    check_gates(code, how)


@pytest.mark.parametrize("fault", ["cuMemcpy2DAsync:1:999", "cuStreamBatchMemOp:2:999"])
def test_gates_of_a_job_that_fails_open_and_its_wait_says_so(fault: str) -> None:
    """A copy that the driver refuses, or the write behind it that opens the gate."""
    code = """
    world, gate = numbered(plain_from=NEVER), _core.GpuTimer(0)
    seen = Seen(world)
    release = driver.memory()
    driver("cuStreamWaitValue32", seen.stream, release, 1, 0)  # it comes to its gate late
    blocked = driver.stream()
    event = driver.event(2)
    driver("cuEventRecord", event, seen.stream)
    driver("cuStreamWaitEvent", blocked, event, 0)
    job = world.transfer.load([1, 2], [0, 1], after=blocked)
    job.wait_stream(seen.stream, gate=True)
    seen.look()
    assert seen.stands()
    driver("cuStreamWriteValue32", driver.stream(), release, 1, 0)
    seen.image()
    code, told = code_of(lambda: job.wait(10))
    assert (code, "CUDA_ERROR_UNKNOWN" in told) == ("driver", True), told
    job = world.transfer.load([1, 2], [0, 1], by_layer=True)
    job.wait_stream(seen.stream, gate=True)
    seen.look()
    assert (seen.image()[:, [1, 2]] == [[[0], [1]]]).all() and job.wait(10).blocks == 2
    world.transfer.close()
    """
    check_gates(code, OFFCORE_FAKE_CUDA_FAIL=fault)


def test_gates_that_are_refused() -> None:
    code = """
    world, gate = numbered(), _core.GpuTimer(0)
    gate.shut()
    job = world.transfer.load([1], [1], after=gate.stream, by_layer=True)
    for call, code, says in (
        (lambda: job.wait_layer(0, gate=True), "invalid", "gate needs stream="),
        (lambda: job.wait_layer(4, driver.stream(), gate=True), "invalid", "no layer 4"),
    ):
        assert code_of(call)[0] == code and says in code_of(call)[1], code_of(call)
    if os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8":
        code, told = code_of(lambda: job.wait_layer(0, driver.stream(), gate=True))
        assert code == "unsupported" and "set CUDA_DEVICE_MAX_CONNECTIONS=32" in told, told
    else:
        streams = [driver.stream() for _ in range(5)]
        for stream in streams[:4] + streams[:4]:
            job.wait_layer(1, stream, gate=True)
        code, told = code_of(lambda: job.wait_layer(2, streams[4], gate=True))
        assert code == "unsupported" and "1 more would be past 4" in told, told
        graphs = []
        with driver.capture(streams[4], graphs):
            code, told = code_of(lambda: job.wait_layer(0, streams[4], gate=True))
            assert (code, "a graph cannot wait" in told) == ("unsupported", True), told
            driver("cuMemsetD8Async", world.at, 1, 16, streams[4])
    gate.open()
    assert job.wait(10).layers == 4
    if os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32":
        for stream in streams:
            driver("cuStreamSynchronize", stream)
        job = world.transfer.load([1], [1])
        job.wait_stream(streams[4], gate=True)  # there is room again
        job.wait(10)
    layout = kv.Layout(Gpu(world.at, world.shape), block_axis=1, layer_axis=0)
    with kv.BlockTransfer(layout, world.pool, hold=True) as transfer:
        job = transfer.load([2], [2])
        code, told = code_of(lambda: job.wait_stream(driver.stream(), gate=True))
        assert code == "invalid" and "cannot be combined with hold" in told, told
    cache = np.zeros((8, 64), np.uint8)
    with kv.HostPool(64, 4, backend="host") as pool, kv.BlockTransfer(cache, pool) as transfer:
        job = transfer.load([0], pool.allocate(1, timeout=5))
        code, told = code_of(lambda: job.wait_stream(1, gate=True))
        assert code == "unsupported" and "no streams that can wait" in told, told
    """
    check_gates(code)
    check_gates(code, CUDA_DEVICE_MAX_CONNECTIONS="8")


def test_gates_are_used_again_by_any_number_of_jobs() -> None:
    """More of them than words, in streams that come to their waits early or late, beside copies of
    the other direction and jobs that are cancelled; each finds what its jobs have brought."""
    code = """
    world = numbered(ahead_bytes=5 * 4096)
    seen, random = [Seen(world) for _ in range(3)], np.random.default_rng(7)
    expected = world.image.copy()
    for turn in range(300):
        jobs = []
        for one in range(3):
            blocks = random.permutation(20)[:6] + one * 20
            slots = random.integers(0, 128, 6)
            job = world.transfer.load(blocks, slots, by_layer=int(random.integers(0, 4)))
            for layer in random.permutation(4)[: random.integers(1, 5)]:
                job.wait_layer(int(layer), seen[one].stream, gate=True)
            job.wait_stream(seen[one].stream, gate=True)
            cancelled = turn % 7 == one
            if cancelled:
                world.transfer.load([62, 63], [0, 1], after=seen[one].stream).cancel()
            expected[:, blocks] = slots[np.newaxis, :, np.newaxis]
            seen[one].look(blocks=range(20 * one, 20 * one + 20))
            jobs.append((job, blocks, slots))
        for one, (job, blocks, slots) in enumerate(jobs):
            got = seen[one].image()[:, blocks]
            assert (got == slots[np.newaxis, :, np.newaxis]).all(), (turn, one)
    # A load may have brought some blocks before it was cancelled.
    assert (world.read() == expected)[:, :62].all()
    before = live()["streams"]
    world.transfer.close()
    del job, jobs
    world.transfer = None
    import gc
    gc.collect()
    assert live()["streams"] < before
    world.pool.close()
    """
    check_gates(code)
