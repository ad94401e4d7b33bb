"""Small pages by both engines of a link: every byte, who copies, and where one engine copies alone.
On the stand-in driver, a process for each test."""

import pytest
from test_cuda import run
from test_kv_cuda import WORLD

CROSSED = """
STRAIGHT = ("strided", "mixed")

class Small(World):
    def __init__(self, layers=8, blocks=128, page=4096, **options):
        super().__init__(layers=layers, blocks=blocks, page=page, **options)

    def check(self, named, slots, paths=("crossed",), **options):  # a store, and a load
        result = self.transfer.store(named, slots, **options).wait(20)
        assert (self.rows(slots) == self.wanted(named)).all()
        others = np.setdiff1d(np.arange(self.shape[1]), named)[: len(named)]
        loaded = self.transfer.load(others, slots[: len(others)], **options).wait(20)
        self.image[:, others] = self.image[:, named[: len(others)]]
        assert (self.read() == self.image).all()
        assert result.bytes == len(named) * self.wanted([0]).shape[1], result.bytes
        for done in (result, loaded):
            assert done.path in paths or done.blocks < 2, (done, paths)
        return result

def some(count, seed=0, of=128):
    return np.random.default_rng(seed).permutation(of)[:count]
"""


def check_on_gpu(code: str, *args: str, **env: str) -> None:
    assert run(code, *args, prelude=WORLD + CROSSED, **env) == ""


@pytest.mark.parametrize("ahead", [1, 1 << 16, 32 << 20])
def test_random_stores_and_loads_beside_them(ahead: int) -> None:
    code = """
    world = Small(ahead_bytes=int(sys.argv[1]))
    rng = np.random.default_rng(0)
    paths = []
    for turn in range(15):
        world.fill(turn)
        blocks, slots = rng.permutation(128), rng.permutation(256)
        if turn % 5 == 4:  # in short runs
            blocks = rng.permutation(32)[:, np.newaxis] * 4 + np.arange(4)
            slots = rng.permutation(64)[:, np.newaxis] * 4 + np.arange(4)
            blocks, slots = blocks.ravel(), slots.ravel()
        cut = int(rng.integers(1, 128))
        jobs = [world.transfer.store(blocks[:cut], slots[:cut], priority=int(rng.integers(3)))]
        if turn % 3:
            for slot in slots[128:]:
                world.pool.row(slot)[:] = rng.integers(0, 256, 8 * 4096, np.uint8)
            jobs.append(world.transfer.load(blocks[cut:], slots[128 : 256 - cut]))
        results = [job.wait(20) for job in jobs]
        assert (world.rows(slots[:cut]) == world.wanted(blocks[:cut])).all()
        if turn % 3:
            rows = world.rows(slots[128 : 256 - cut]).reshape(128 - cut, 8, 4096)
            world.image[:, blocks[cut:]] = rows.swapaxes(0, 1)
        assert (world.read() == world.image).all()
        paths += [result.path for result in results]
    assert paths.count("crossed") >= 5, paths
    assert done("same_device") == [0] and done("crossed") > [0]
    world.transfer.close()
    """
    check_on_gpu(code, str(ahead))


@pytest.mark.parametrize("halves", [False, True])
def test_caches_of_other_shapes(halves: bool) -> None:
    code = """
    blocks, page, layers = 96, 2048, 9
    whole = driver.memory(20 << 20)
    if sys.argv[1] == "True":  # K and V apart: two copies a block
        tensors = [Gpu(whole + i * 2 * blocks * page, (2, blocks, page)) for i in range(layers)]
        layout, order = kv.Layout(tensors, block_axis=1), (2, 0, 1, 3)
        shape = (layers, 2, blocks, page)
    else:  # a tensor a layer, and gaps between blocks
        tensors = [Gpu(whole + i * blocks * 2 * page, (blocks, page), (2 * page, 1))
                   for i in range(layers)]
        layout, order = kv.Layout(tensors), (1, 0, 2, 3)
        shape = (layers, blocks, 2, page)
    image = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    driver.put(whole, image.tobytes())
    pool = kv.HostPool(layout.block_bytes, blocks, backend="cuda", chunk_bytes=9 << 20)
    slots = pool.allocate(blocks, timeout=20)[some(blocks, 1, blocks)]
    with kv.BlockTransfer(layout, pool, verify=True, policy="zero_sm") as transfer:
        named = some(blocks, 2, blocks)
        result = transfer.store(named, slots).wait(20)
        wanted = image.transpose(order)[named]
        if sys.argv[1] != "True":
            wanted = wanted[:, :, 0]
        rows = np.stack([pool.row(slot) for slot in slots])
        assert (rows == wanted.reshape(blocks, -1)).all()
        loaded = transfer.load(named[::-1], slots).wait(20)  # each gets another one's bytes
        again = transfer.store(named[::-1], slots[::-1]).wait(20)
    rows = np.stack([pool.row(slot) for slot in slots[::-1]])
    assert (rows == wanted.reshape(blocks, -1)).all()
    gaps = driver.read(whole, image.size)
    if sys.argv[1] != "True":
        found = np.frombuffer(gaps, np.uint8).reshape(shape)
        assert (found[:, :, 1] == image[:, :, 1]).all(), "between the blocks"
    assert {run.path for run in (result, loaded, again)} == {"crossed"}
    assert done("same_device") == [0]
    """
    check_on_gpu(code, str(halves))


def test_where_one_engine_copies() -> None:
    code = """
    world = Small()
    slots = some(64, 7, 256)
    result = world.check(some(64), slots)
    assert result.links == {0: 64 * 8 * 4096} and 0 < result.calls["crossed"] < 64
    world.check(some(1), slots[:1], STRAIGHT)  # no part behind the first
    layout = kv.Layout(Gpu(world.at, world.shape), block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 64, backend="cuda")
    with kv.BlockTransfer(layout, pool, verify=True, policy="zero_sm") as transfer:
        run = transfer.store(np.arange(64), pool.allocate(64, timeout=20)).wait(20)
        assert (run.path, run.commands) == ("strided", 8)  # one a layer
    world.check(some(64), slots, ("plain",), by_layer=True)
    world.transfer.close()
    for options in ({"crossing_bytes": 0}, {"plain_from": (None, 1 << 40)}, {"layers": 4},
                    {"page": 512 << 10, "blocks": 16}, {"crossing_bytes": (8 << 20) - 1}):
        world = Small(**options)
        half = world.shape[1] // 2
        paths = ("plain",) if "page" in options else STRAIGHT  # large pages are as fast alone
        world.check(some(half, 0, 2 * half), np.arange(half), paths)
        world.transfer.close()
    world = Small(crossing_bytes=8 << 20)
    world.check(some(64), slots)
    world.transfer.close()
    # Layers so far apart that telling of such copies would take longer than one engine's copies,
    # unless more memory is taken for that.
    step = 32 << 20
    far = Gpu(driver.memory(8 * step), (8, 64, 1024), (step, 1024, 1))
    layout = kv.Layout(far, block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 64, backend="cuda")
    slots = pool.allocate(64, timeout=20)[some(64, 8, 64)]
    for room, paths in ((8 << 20, STRAIGHT), (64 << 20, ("crossed",))):
        with kv.BlockTransfer(
            layout, pool, verify=True, policy="zero_sm", crossing_bytes=room) as transfer:
            assert transfer.store(some(64, 9, 64), slots).wait(20).path in paths
    assert done("same_device") == [0]
    """
    check_on_gpu(code)


def test_what_is_not_under_way_keeps_no_engine() -> None:
    code = """
    world, gate = Small(), _core.GpuTimer(0)
    blocks = some(128)
    gate.shut()
    job = world.transfer.load(blocks[:8], np.arange(8), after=gate.stream)
    stored = world.transfer.store(blocks[8:72], np.arange(128, 192)).wait(20)
    assert (world.rows(np.arange(128, 192)) == world.wanted(blocks[8:72])).all()
    assert stored.path == "crossed" and not job.done()
    gate.open()
    assert job.wait(10).blocks == 8
    world.transfer.close()
    """
    check_on_gpu(code)


def test_groups_are_judged_apart() -> None:
    """One whose layers are too far apart for what its blocks take keeps no other from crossing."""
    code = """
    near = Small()
    far = Gpu(driver.memory(8 * (32 << 20)), (8, 64, 1024), (32 << 20, 1024, 1))
    layouts = [kv.Layout(far, block_axis=1, layer_axis=0),
               kv.Layout(Gpu(near.at, near.shape), block_axis=1, layer_axis=0)]
    pools = [kv.HostPool(layouts[0].block_bytes, 64, backend="cuda"), near.pool]
    slots = pools[0].allocate(64, timeout=20)[some(64, 8, 64)]
    for room, both in ((8 << 20, False), (64 << 20, True)):
        with kv.BlockTransfer(
            layouts, pools, verify=True, policy="zero_sm", crossing_bytes=room) as transfer:
            apart = transfer.store(some(64, 9, 64), slots).wait(20)
            assert (apart.path == "crossed") == both, apart
            result = transfer.store(some(128), np.arange(128), group=1).wait(20)
            assert result.path == "crossed", result
            assert (near.rows(range(128)) == near.wanted(some(128))).all()
    """
    check_on_gpu(code)


@pytest.mark.parametrize("hint", [0, 0x7E << 40])
@pytest.mark.parametrize("step", [(1 << 30) + 12288, (2 << 30) + (1 << 20)])
def test_layers_far_apart(step: int, hint: int) -> None:
    """Copies of two dimensions, and of three where a pitch has no room for the step; of caches that
    lie above what copies are addressed from, or below."""
    code = """
    step, hint, MIB, page = int(sys.argv[1]), int(sys.argv[2]), 1 << 20, 32 << 10
    at = driver.reserve((7 * step + 8 * MIB) >> 21 << 21, hint)
    image = np.random.default_rng(2).integers(0, 256, (8, 64, page), np.uint8)
    for k in range(8):
        place = at + (k * step >> 21 << 21)  # whole granules; a layer may begin inside one
        driver("cuMemMap", place, 6 * MIB, 0, driver.create(6 * MIB), 0)
        driver.set_access(place, 6 * MIB, [0])
        driver.put(at + k * step, image[k].tobytes())
    layout = kv.Layout(Gpu(at, (8, 64, page), (step, page, 1)), block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 64, backend="cuda")
    slots, named = pool.allocate(64, timeout=20)[some(64, 8, 64)], some(64, 9, 64)
    entry = "cuMemcpy3DAsync" if step >= 1 << 31 else "cuMemcpy2DAsync"
    with kv.BlockTransfer(layout, pool, verify=True, policy="zero_sm") as transfer:
        before = calls(entry)
        stored = transfer.store(named, slots).wait(20)
        assert calls(entry) - before == stored.calls["strided"] > 0
        rows = np.stack([pool.row(slot) for slot in slots])
        assert (rows == image[:, named].swapaxes(0, 1).reshape(64, -1)).all()
        loaded = transfer.load(named[::-1], slots).wait(20)
    image[:, named[::-1]] = image[:, named]
    found = [driver.read(at + k * step, 64 * page) for k in range(8)]
    assert b"".join(found) == image.tobytes()
    assert {run.path for run in (stored, loaded)} == {"crossed"}
    assert stored.calls["crossed"] < 64
    """
    check_on_gpu(code, str(step), str(hint), OFFCORE_FAKE_CUDA_MEMORY="64G")


def test_runs_behind_blocks_that_are_apart() -> None:
    """A run that is longer than the layers are takes fewer copies, and does not cross."""
    code = """
    world = Small(blocks=256)
    world.transfer.close()
    layout = kv.Layout(Gpu(world.at, world.shape), block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 256, backend="cuda")  # of one chunk
    pool.allocate(256, timeout=20)
    named = np.concatenate([some(40, 3, 64), np.arange(100, 200), some(40, 4, 50) + 200])
    slots = np.concatenate([some(40, 5, 64), np.arange(100, 200), some(40, 6, 50) + 200])
    with kv.BlockTransfer(layout, pool, verify=True, policy="zero_sm") as transfer:
        for turn in range(4):
            world.fill(turn)
            stored = transfer.store(named, slots).wait(20)
            rows = np.stack([pool.row(slot) for slot in slots])
            assert (rows == world.wanted(named)).all()
            for slot in slots:
                pool.row(slot)[:] = (slot + turn) % 256
            loaded = transfer.load(named, slots).wait(20)
            world.image[:, named] = ((slots + turn) % 256)[:, np.newaxis]
            assert (world.read() == world.image).all()
            for done in (stored, loaded):
                assert done.path == "crossed" and done.calls["crossed"] <= 80, done
    """
    check_on_gpu(code)


def test_large_rows() -> None:
    code = """
    world = Small(layers=33, blocks=8, page=256 << 10)
    world.check(np.array([5, 1, 6, 2]), np.array([9, 3, 12, 0]))
    world.transfer.close()
    """
    check_on_gpu(code)


@pytest.mark.parametrize("commands", [1, 4])
def test_few_commands_ahead(commands: int) -> None:
    code = """
    world = Small(ahead_commands=int(sys.argv[1]))
    world.check(some(64), some(64, 7, 256))
    world.transfer.close()
    """
    check_on_gpu(code, str(commands))


def test_cancelled_and_overtaken() -> None:
    code = """
    world = Small(blocks=512, page=1024, ahead_bytes=1 << 16)
    every = some(512, 5, 512)
    cut = overtaken = 0
    for turn in range(8):
        for slot in range(512):
            world.pool.row(slot)[:] = 0
        job = world.transfer.store(every, np.arange(512))
        urgent = world.transfer.store(every[:16], 512 + np.arange(16), priority=1)
        assert urgent.wait(20).blocks == 16
        overtaken += not job.done()
        time.sleep(0.001 * turn)
        job.cancel()
        result = job.wait(20)
        cut += result.cancelled and result.path == "crossed"
        done = result.blocks
        rows = world.rows(range(512))
        assert (rows[:done] == world.wanted(every[:done])).all()
        assert not rows[done:].any()
        assert result.cancelled == (done < 512)
    assert cut > 0, "no cancellation came amid what crosses"
    assert overtaken > 0
    world.transfer.close()
    """
    check_on_gpu(code)


def test_jobs_that_meet_keep_their_order() -> None:
    code = """
    world = Small()
    blocks, slots = some(128), np.arange(128)
    for turn in range(6):
        world.fill(turn)
        first = world.transfer.store(blocks, slots)
        twice = world.transfer.store(blocks[::-1], 128 + slots)  # the slots of the last one
        again = world.transfer.load(blocks[::-1], slots)  # each block gets another one's bytes
        last = world.transfer.store(blocks, 128 + slots)
        for job in (last, again, twice, first):
            job.wait(20)
        was = world.wanted(blocks)
        assert (world.rows(slots) == was).all()
        assert (world.rows(128 + slots) == was[::-1]).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_what_meets_in_one_direction_keeps_its_order() -> None:
    """Two engines have no order."""
    code = """
    world = Small()
    for turn in range(10):
        named = [some(100, 10 * turn + k) for k in range(4)]
        jobs = [world.transfer.store(blocks, np.arange(100)) for blocks in named]
        assert [job.wait(20).path for job in jobs] == ["crossed"] * 4
        assert (world.rows(range(100)) == world.wanted(named[-1])).all()
        for k in range(4):
            for slot in range(50):
                world.pool.row(50 * k + slot)[:] = 50 * k + slot
        jobs = [world.transfer.load(some(50, turn), 50 * k + np.arange(50)) for k in range(4)]
        assert [job.wait(20).path for job in jobs] == ["crossed"] * 4
        world.image[:, some(50, turn)] = 150 + np.arange(50)[:, np.newaxis]
        assert (world.read() == world.image).all()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_groups_with_rows_of_their_own() -> None:
    code = """
    worlds = [Small(blocks=256, page=1024), Small(page=16384), Small(layers=4)]
    layouts = [kv.Layout(Gpu(w.at, w.shape), block_axis=1, layer_axis=0) for w in worlds]
    with kv.BlockTransfer(
        layouts, [w.pool for w in worlds], verify=True, policy="zero_sm") as transfer:
        for turn in range(4):
            named = some(256, turn, 256), some(128, turn), some(128, turn + 9)
            for group, blocks in enumerate(named):
                slots = np.arange(len(blocks))
                result = transfer.store(blocks, slots, group=group).wait(20)
                assert (result.path == "crossed") == (group < 2), (group, result)
                rows = worlds[group].rows(slots)
                assert (rows == worlds[group].wanted(blocks)).all()
                loaded = transfer.load(blocks[::-1], slots, group=group).wait(20)
                assert (loaded.path == "crossed") == (group < 2), (group, loaded)
                worlds[group].image[:, blocks[::-1]] = worlds[group].image[:, blocks]
                assert (worlds[group].read() == worlds[group].image).all()
    assert done("same_device") == [0]
    """
    check_on_gpu(code)


def test_a_stream_waits_for_all_of_it() -> None:
    code = """
    world, gate, reader = Small(), _core.GpuTimer(0), _core.GpuTimer(0)
    slots = np.arange(128)
    for turn in range(5):
        world.fill(turn)
        gate.shut()
        job = world.transfer.store(some(128, turn), slots, after=gate.stream)
        threading.Timer(0.02, gate.open).start()
        job.wait_stream(reader.stream, 10)
        assert passed(reader)
        assert (world.rows(slots) == world.wanted(some(128, turn))).all(), turn
        assert job.wait(10).path == "crossed"
        # A load: what looks at it behind wait_stream sees all, of both engines.
        for slot in slots:
            world.pool.row(slot)[:] = 100 + turn
        job = world.transfer.load(some(128, turn), slots)
        job.wait_stream(reader.stream, 10)
        assert passed(reader)
        assert (world.read() == 100 + turn).all(), turn
        assert job.wait(10).path == "crossed"
    world.transfer.close()
    """
    check_on_gpu(code)


def test_no_sm_is_needed() -> None:
    code = """
    blocks = _core.Occupation([0], 20.0)
    began = time.monotonic()
    world = Small()  # with its trial
    world.check(some(100), np.arange(100))
    assert time.monotonic() - began < 4, "something waited for an SM"
    assert blocks.holds and not blocks.control_ran
    blocks.release()
    world.transfer.close()
    """
    check_on_gpu(code)


def test_nothing_is_left() -> None:
    code = """
    before, at = None, driver.memory(4 << 20)
    for turn in range(3):
        world = Small(at=at)
        world.check(some(64), np.arange(64))
        world.transfer.close()
        world.pool.free(world.slots)
        world.pool.close()
        del world
        now = [live()[kind] for kind in ("allocations", "mappings", "reservations")]
        assert before in (None, now), (before, now)
        before = now
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_MEMORY="64G")


def test_the_thread_looks_out_as_long_as_it_is_told() -> None:
    code = """
    def states():  # of the other threads
        others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
        return {open(f"/proc/self/task/{one}/stat").read().rsplit(")")[1][1] for one in others}

    def looks_out(linger):
        world = World(linger=linger)
        world.transfer.store([1], [0]).wait(10)
        time.sleep(0.1)
        found = [states() for _ in range(20)]
        began = time.monotonic()
        world.transfer.close()
        assert time.monotonic() - began < 2, "it spins for an end too"
        return sum("R" in state for state in found)

    assert looks_out(5.0) == 20
    assert looks_out(0.0) == 0
    for wrong in (-1.0, float("nan"), 61.0):
        assert code_of(lambda: World(linger=wrong))[0] == "invalid"
    """
    check_on_gpu(code)
