"""Blocks that SMs pack for the link: which jobs, in which order, and what may go wrong. On the
stand-in driver, a process for each test."""

import pytest
from test_cuda import run
from test_kv_cuda import WORLD

APART = """
import gc, random
class Apart:
    '''A tensor a layer with K and V apart, each an allocation of its own.'''
    def __init__(self, layers=8, blocks=64, page=4096, **options):
        self.blocks, self.page, self.layers = blocks, page, layers
        bytes_ = 2 * blocks * page
        self.at = [driver.get(ctypes.c_uint64, "cuMemAlloc", bytes_ + k) for k in range(layers)]
        self.layout = kv.Layout([Gpu(at, (2, blocks, page)) for at in self.at], block_axis=1)
        self.pool = kv.HostPool(self.layout.block_bytes, 2 * blocks, backend="cuda",
                                chunk_bytes=24 * self.layout.block_bytes)
        self.slots = self.pool.allocate(2 * blocks, timeout=20)
        self.options = options
        self.transfer = kv.BlockTransfer(self.layout, self.pool, verify=True, **options)
        self.fill(1)

    def fill(self, seed):
        shape = (self.layers, 2, self.blocks, self.page)
        self.image = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        for at, layer in zip(self.at, self.image):
            driver.put(at, layer.tobytes())

    def read(self, layers=None):  # the first ones, while jobs write the others
        held = [driver.read(at, 2 * self.blocks * self.page) for at in self.at[:layers]]
        return np.frombuffer(b"".join(held), np.uint8).reshape(self.image[:layers].shape)

    def rows(self, slots):
        return np.stack([self.pool.row(slot) for slot in slots])

    def wanted(self, blocks):
        return self.image[:, :, blocks].transpose(2, 0, 1, 3).reshape(len(blocks), -1)

def some(count, seed=0, of=64):
    return np.random.default_rng(seed).permutation(of)[:count]
"""


def check_on_gpu(code: str, *args: str, **env: str) -> None:
    assert run(code, *args, prelude=WORLD + APART, **env) == ""


def test_which_jobs_are_packed() -> None:
    code = """
    world = Apart()
    start = world.transfer.store
    found = start(some(40), some(40, 1)).wait(20)
    assert (found.path, found.sms, found.commands < 100, found.sm_ms > 0) == (
        "packed", 4, True, True), found
    assert found.calls["packs"] > 1 and (world.rows(some(40, 1)) == world.wanted(some(40))).all()
    assert start(some(40), some(40, 1), by_layer=True).wait(20).path == "packed"
    # Few commands have come before a kernel has begun.
    one = start([5], [5], by_layer=2).wait(20)
    assert (one.path, one.sms, one.sm_ms) == ("plain", 0, 0), one
    # Large rows are not packed but by one who asks.
    whole = kv.Layout(Gpu(driver.memory(16 << 20), (64, 4, 64 << 10)), layer_axis=1)
    for layout, options, path in (
        (world.layout, {"pack_sms": 1}, "packed"),
        (world.layout, {"pack_sms": 0}, "plain"),
        (world.layout, {"policy": "zero_sm"}, "plain"),
        (world.layout, {"pack_bytes": 4 * world.layout.block_bytes - 1}, "plain"),
        (world.layout, {"plain_from": 1}, "plain"),
        (world.layout, {"kernel": True}, "kernel"),
        (whole, {}, "plain"),
        (whole, {"policy": "pack"}, "packed"),
    ):
        pool = kv.HostPool(layout.block_bytes, 64, backend="cuda")
        slots = pool.allocate(64, timeout=20)
        with kv.BlockTransfer(layout, pool, **options) as transfer:
            found = transfer.store(some(64), slots).wait(20)
            assert found.path == path, (options, found)
            assert found.sms == (options.get("pack_sms", 4) if path == "packed" else 0)
            if layout is world.layout:
                held = np.stack([pool.row(slot) for slot in slots])
                assert (held == world.wanted(some(64))).all()
    world.transfer.close()
    """
    check_on_gpu(code)


@pytest.mark.parametrize("sms", ["1", "4"])
def test_order_of_packed_jobs(sms: str) -> None:
    """Jobs that meet, urgent ones, ones that stop, and streams that wait for a layer."""
    code = """
    world = Apart(policy="pack", pack_sms=int(sys.argv[1]), pack_bytes=1 << 20)
    rng, rows = random.Random(7), None
    rows = {slot: world.pool.row(slot).tobytes() for slot in range(64)}
    image = world.image.copy()
    for turn in range(6):
        jobs = []
        for _ in range(12):
            count, load = rng.randrange(1, 64), rng.random() < 0.5
            blocks, slots = (rng.sample(range(64), count) for _ in range(2))
            call = world.transfer.load if load else world.transfer.store
            jobs.append(call(blocks, slots, priority=count % 3, by_layer=rng.choice((0, 1, 3))))
            for block, slot in zip(blocks, slots):
                if load:
                    held = np.frombuffer(rows[slot], np.uint8).reshape(world.layers, 2, -1)
                    image[:, :, block] = held
                else:
                    rows[slot] = image[:, :, block].tobytes()
        for job in jobs:
            job.wait(20)
        assert (world.read() == image).all()
        assert all(world.pool.row(slot).tobytes() == rows[slot] for slot in range(64))
    world.fill(3)
    gate = _core.GpuTimer(0)
    gate.shut()
    late = world.transfer.store(some(60), some(60, 4), after=gate.stream)
    assert world.transfer.store([1, 2], [64, 65]).wait(20).path == "packed"
    late.cancel()
    assert late.wait(20).blocks == 0
    gate.open()
    world.image[:, :, some(60, 5)] = 0
    job = world.transfer.load(some(60, 5), some(60, 6), by_layer=True)
    stream = driver.stream()
    for layer in range(world.layers):
        job.wait_layer(layer, stream)
        driver("cuStreamSynchronize", stream)
        held = world.read(layer + 1)[layer][:, some(60, 5)].transpose(1, 0, 2).reshape(60, -1)
        row = world.rows(some(60, 6)).reshape(60, world.layers, -1)[:, layer]
        assert (held == row).all(), layer
    job.wait(20)
    world.transfer.close()
    """
    check_on_gpu(code, sms)


@pytest.mark.parametrize(("policy", "path"), [("pack", "packed"), ("zero_sm", "plain")])
def test_groups_are_copied_apart(policy: str, path: str) -> None:
    """Pages of several sizes, all layers at once and some at a time."""
    code = """
    policy, path = sys.argv[1:]
    worlds = [Apart(layers=3), Apart(layers=5, page=1536), Apart(layers=2, blocks=48, page=513)]
    with kv.BlockTransfer([w.layout for w in worlds], [w.pool for w in worlds], policy=policy,
                          verify=True) as transfer:
        for turn, by_layer in enumerate((False, True, 2)):
            jobs = []
            for group, world in enumerate(worlds):
                named, slots = some(40, turn, world.blocks), some(40, 9)
                job = transfer.store(named, slots, group=group, by_layer=by_layer)
                jobs.append((world, named, group, job))
            for world, named, group, job in jobs:
                assert job.wait(20).path == path
                assert (world.rows(slots) == world.wanted(named)).all()
                others = some(40, 6, world.blocks)
                world.image[:, :, others] = world.image[:, :, named].copy()
                transfer.load(others, slots, group=group, by_layer=by_layer).wait(20)
                assert (world.read() == world.image).all()
    """
    check_on_gpu(code, policy, path)


def test_a_packed_job_is_few_parts() -> None:
    """To submit one takes as long as to copy a MiB; its rows are one call. A load's parts get
    smaller towards its end, where nothing is copied while the last one is unpacked."""
    code = """
    world = Apart(layers=28, blocks=64, page=8192, policy="pack", linger=60.0)
    slots = some(64, 1, 127)
    for start, parts in ((world.transfer.store, 7), (world.transfer.load, 10)):
        world.transfer.store([5], [127]).wait(20)  # the thread is awake
        found = start(some(64), slots).wait(20)
        assert found.calls["packs"] in (parts, parts + 1), found  # the caller's, if it was not
        assert found.calls["batches"] + found.calls["plain"] == found.calls["packs"], found
        assert found.commands == 64 + found.calls["packs"], found
        assert (world.rows(slots) == world.wanted(some(64))).all()
    assert (world.read() == world.image).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_the_caller_begins_with_few_blocks() -> None:
    """With 64 of 200, however small, while the thread wakes: unless it woke in time."""
    code = """
    world = Apart(layers=2, blocks=200, page=64, policy="pack", linger=0.0)
    blocks, slots, packs = some(200, of=200), some(200, 1, 400), []
    while 2 not in packs and len(packs) < 100:
        time.sleep(0.05)
        packs.append(world.transfer.store(blocks, slots).wait(20).calls["packs"])
    assert 2 in packs, packs
    assert (world.rows(slots) == world.wanted(blocks)).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_pages_apart_go_by_calls_of_256() -> None:
    """As whoever lists them by hand would hand them over, whatever blocks they are of; and a run of
    blocks is not listed, but a strided copy a page."""
    code = """
    world = Apart(layers=7, blocks=64, policy="zero_sm", linger=60.0)
    for count, calls_ in ((40, 3), (16, 1), (1, 1)):
        world.transfer.store([5], [5]).wait(20)  # the thread is awake
        found = world.transfer.store(some(count), some(count, 1)).wait(20)
        assert found.calls["batched"] == found.commands == found.pages == 14 * count, found
        assert found.calls["batches"] == calls_ and found.calls["plain"] == 0, found
    mixed = np.concatenate([np.arange(30, 50), some(20, 2, 30)])
    rows = np.concatenate([np.arange(72, 92), some(20, 3)])  # a run in one chunk
    found = world.transfer.store(mixed, rows).wait(20)
    assert (found.path, found.calls["strided"], found.calls["batched"]) == ("mixed", 14, 280), found
    assert (world.rows(rows) == world.wanted(mixed)).all()
    world.image[:, :, mixed[::-1]] = world.image[:, :, mixed].copy()
    world.transfer.load(mixed[::-1].copy(), rows).wait(20)
    assert (world.read() == world.image).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_what_cannot_be_packed() -> None:
    code = """
    world = Apart()
    def opened(**options):
        return code_of(lambda: kv.BlockTransfer(world.layout, world.pool, **options))
    told = "unknown policy 'fast': known are auto, zero_sm, pack"
    assert opened(policy="fast") == ("invalid", told)
    for options in ({"kernel": True}, {"plain_from": 1}):
        assert opened(policy="pack", **options)[0] == "invalid"
    code, told = opened(policy="pack", pack_bytes=1 << 10)
    assert code == "invalid" and "pack_bytes of 262144 or more, not 1024" in told, told
    assert opened(policy="pack", pack_sms=0)[0] == "unsupported"
    cache = np.zeros((2, 8, 64), np.uint8)
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 8, backend="host")
    code, told = code_of(lambda: kv.BlockTransfer(layout, pool, policy="pack"))
    assert code == "unsupported" and "nothing packs here" in told, told
    kv.BlockTransfer(layout, pool).close()
    world.transfer.close()
    """
    check_on_gpu(code)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("entry", ["cuLaunchKernel", "cuMemcpyBatchAsync"])
def test_a_refused_call_fails_its_packed_job_alone(store: bool, entry: str) -> None:
    """Nobody gets its slots before what was enqueued has ended; later jobs are packed again."""
    code = """
    world = Apart(policy="pack", linger=60.0)
    start = world.transfer.store if sys.argv[1] == "True" else world.transfer.load
    failed = code_of(lambda: start(some(64), some(64, 1)).wait(20))
    assert failed[0] in ("driver", "memory"), failed
    world.image[:] = world.read()
    for turn in range(2):
        assert world.transfer.store(some(64, turn), some(64, 2)).wait(20).path == "packed"
        assert (world.rows(some(64, 2)) == world.wanted(some(64, turn))).all()
    world.transfer.close()
    """
    before = "world = Apart(policy='pack')\nprint(calls(sys.argv[1]))\nworld.transfer.close()"
    made = int(run(before, entry, prelude=WORLD + APART))
    check_on_gpu(code, str(store), OFFCORE_FAKE_CUDA_FAIL=f"{entry}:{made + 2}:2")


def test_packing_leaves_nothing() -> None:
    """Staging and tables go with their transfer, whether its jobs have ended or not."""
    code = """
    world = Apart(policy="pack")
    world.transfer.close()
    kept = []
    for turn in range(4):
        transfer = kv.BlockTransfer(world.layout, world.pool, policy="pack")
        job = transfer.store(some(64), some(64, 1))
        transfer.close(cancel=turn % 2 == 1)
        del transfer, job
        gc.collect()
        kept.append(live())
    assert kept[1:] == kept[:-1], kept
    """
    check_on_gpu(code)
