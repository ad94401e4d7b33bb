"""Caches with a tensor a layer at equal steps: the pool for them, and VMM memory that is mapped
once more. Every byte is checked. On the stand-in driver, a process for each test."""

from pathlib import Path

import pytest
from test_cuda import run
from test_kv_cuda import WORLD

TESTS = str(Path(__file__).parents[1])

CACHE = f"""
sys.path.append({TESTS + "/comm"!r})
MIB = 1 << 20

def reserved(nbytes, head=0, sizes=()):  # VMM memory from `head` on, in allocations of so many MiB
    sizes = sizes or ((head + nbytes - 1) // (2 * MIB) * 2 + 2,)
    start = at = driver.reserve(sum(sizes) * MIB)
    for size in sizes:
        handle = driver.create(size * MIB)
        driver("cuMemMap", at, size * MIB, 0, handle, 0)
        driver("cuMemRelease", handle)
        at += size * MIB
    assert driver.set_access(start, at - start, [0]) == 0
    return start + head

class Cache:  # K and V apart, a tensor a layer: (2, blocks, page)
    def __init__(self, places, blocks=32, page=8192, **options):
        self.places, self.blocks, self.page = places, blocks, page
        caches = [Gpu(at, (2, blocks, page)) for at in places]
        layout = kv.Layout(caches, block_axis=1)
        self.pool = kv.HostPool(layout.block_bytes, blocks, backend="cuda")
        self.slots = self.pool.allocate(blocks, timeout=20)
        options = {{"policy": "zero_sm", "plain_from": NEVER, "verify": True, **options}}
        self.transfer = kv.BlockTransfer(layout, self.pool, **options)
        self.image = np.random.default_rng(5).integers(
            0, 256, (len(places), 2, blocks, page), np.uint8)
        for at, layer in zip(places, self.image):
            driver.put(at, layer.tobytes())

    def check(self, path="strided", copies=None, **options):  # some blocks stored, and loaded
        rng = np.random.default_rng(6)
        named, others = np.split(rng.permutation(self.blocks)[: self.blocks // 2 * 2], 2)
        stored = self.transfer.store(named, self.slots[: len(named)], **options).wait(20)
        rows = np.stack([self.pool.row(slot) for slot in self.slots[: len(named)]])
        assert (rows.reshape(len(named), -1) == self.image[:, :, named]
                .transpose(2, 0, 1, 3).reshape(len(named), -1)).all()
        loaded = self.transfer.load(others, self.slots[: len(named)], **options).wait(20)
        self.image[:, :, others] = self.image[:, :, named]
        for at, layer in zip(self.places, self.image):
            assert driver.read(at, layer.size) == layer.tobytes()
        for result in (stored, loaded):
            assert path in ("", result.path), result
            if copies:
                assert result.commands == copies * len(named), result
"""


def check_on_gpu(code: str, *args: str, **env: str) -> None:
    assert run(code, *args, prelude=WORLD + CACHE, **env) == ""


def test_a_pool_gives_memory_at_equal_steps() -> None:
    code = """
    from test_pool import door_functions
    door = _core.open_cache_pool(0, 0)
    take, give = door_functions(door)
    size = 2 * 32 * 64 * 1024 - 4096  # 4 MiB with the rest of a granule
    places = [take(size, 0, None) for _ in range(6)]
    assert {b - a for a, b in zip(places, places[1:])} == {4 * MIB}
    assert _core.pool_taken_bytes(door) == 24 * MIB
    assert take(size, 1, None) is None  # another GPU's
    assert take(1 << 50, 0, None) is None
    cache = Cache(places)
    assert not cache.transfer.adopted  # nothing would be better
    cache.check(copies=2)  # K's pages, and V's
    cache.check(by_layer=3)
    cache.transfer.close()
    # What came back is free once the GPU is through, and the first free place is taken next.
    give(places[2], size, 0, None)
    assert take(size, 0, None) == places[2] and driver.read(places[2], 16) is not None
    give(places[2], size, 0, None)
    give(places[3], size, 0, None)
    assert take(8 * MIB, 0, None) == places[2]
    def leaves(end_use):
        held, end = _core.pool_taken_bytes(door), time.monotonic() + 20
        end_use()
        while _core.pool_taken_bytes(door) == held and time.monotonic() < end:
            time.sleep(0.001)
        return held - _core.pool_taken_bytes(door)
    gate = _core.GpuTimer(0)
    gate.shut()
    before = calls("cuMemUnmap")
    give(places[0], size, 0, None)  # waits a moment, and keeps it then
    assert calls("cuMemUnmap") == before
    assert take(size, 0, None) not in places
    assert leaves(gate.open) == 4 * MIB
    assert take(size, 0, None) == places[0]
    assert calls("cuMemUnmap") == before + 1
    # A stream that is gone is not named to the driver, which might crash.
    gone = driver.stream()
    driver("cuStreamDestroy", gone)
    give(places[0], size, 0, gone)
    assert calls("cuMemUnmap") == before + 2
    # While something is captured the driver does not tell: the part goes later.
    capturing = driver.stream()
    driver("cuStreamBeginCapture", capturing, 0)
    give(places[1], size, 0, None)
    assert calls("cuMemUnmap") == before + 2
    graph = ctypes.byref(ctypes.c_uint64())
    assert leaves(lambda: driver.code("cuStreamEndCapture", capturing, graph)) == 4 * MIB
    assert calls("cuMemUnmap") == before + 3
    assert take(size, 0, None) == places[0]
    _core.close_pool(door)
    assert take(size, 0, None) is None

    # A pool whose last part a stream still uses stays until that is through.
    door = _core.open_cache_pool(0, 0)
    take, give = door_functions(door)
    part = take(size, 0, None)
    gate.shut()
    _core.close_pool(door)
    give(part, size, 0, None)
    assert _core.pool_taken_bytes(door) == 4 * MIB
    assert leaves(gate.open) == 4 * MIB
    kept = live()["reservations"]
    assert _core.open_cache_pool(0, 64 * MIB) == door
    assert live()["reservations"] == kept
    """
    check_on_gpu(code)


def test_a_pool_of_a_driver_that_marks_no_context() -> None:
    """Before CUDA 12.5: what comes back waits for the GPU."""
    code = """
    from test_pool import door_functions
    door = _core.open_cache_pool(0, 0)
    take, give = door_functions(door)
    part = take(2 * MIB, 0, None)
    gate = _core.GpuTimer(0)
    gate.shut()
    threading.Timer(0.1, gate.open).start()
    give(part, 2 * MIB, 0, None)
    assert _core.pool_taken_bytes(door) == 0
    assert take(2 * MIB, 0, None) == part
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_LACKS="cuCtxRecordEvent")


def test_torch_is_given_a_pool() -> None:
    """By the library's path and the names of two functions; what it gets closes the pool."""
    code = """
    import gc, types, weakref
    from test_pool import door_functions
    class Allocator:
        def __init__(self, *names):
            self.names = names
        def allocator(self):
            return self
    class MemPool:
        def __init__(self, allocator):
            self.given = allocator
    torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
    cuda.memory = types.SimpleNamespace(CUDAPluggableAllocator=Allocator)
    cuda.MemPool, cuda.current_device, torch.cuda = MemPool, lambda: 0, cuda
    sys.modules |= {"torch": torch, "torch.cuda": cuda}
    pool = kv.cache_pool(nbytes=8 * MIB)
    allocator = weakref.ref(pool.given)  # tensors, which outlive the pool, go by its address
    assert pool.given.names == (_core.__file__, "offcore_pool_take_0", "offcore_pool_give_0")
    take, give = door_functions(0)
    place = take(MIB, 0, None)
    assert place and take(8 * MIB, 0, None) is None
    del pool
    gc.collect()
    assert take(MIB, 0, None) is None  # closed
    assert allocator() is not None
    give(place, MIB, 0, None)
    pool = kv.cache_pool(0)
    assert pool.given is allocator()
    del pool
    gc.collect()
    del cuda.MemPool
    try:
        kv.cache_pool(0)
    except AttributeError:
        assert _core.open_cache_pool(0, 0) == 0  # the failed one is closed, too
    else:
        raise AssertionError("there was no MemPool")
    """
    check_on_gpu(code)


@pytest.mark.parametrize(
    "fault", ["cuMemCreate:2", "cuMemMap:2", "cuMemSetAccess:2", "cuMemAddressReserve:1"]
)
def test_a_pool_whose_memory_is_refused(fault: str) -> None:
    code = """
    from test_pool import door_functions
    if "Reserve" in sys.argv[1]:
        assert code_of(lambda: _core.open_cache_pool(0, 0))[0] in ("driver", "memory")
    door = _core.open_cache_pool(0, 64 * MIB)
    take, give = door_functions(door)
    places = [take(2 * MIB, 0, None) for _ in range(3)]
    wanted = [False] * 3 if "Reserve" in sys.argv[1] else [False, True, False]
    assert [place is None for place in places] == wanted, places
    given = [place for place in places if place]
    assert all(b - a == 2 * MIB for a, b in zip(given, given[1:]))
    for place in given:
        give(place, 2 * MIB, 0, None)
    assert _core.pool_taken_bytes(door) == 0
    assert code_of(lambda: _core.open_cache_pool(9, 0))[0] == "invalid"
    """
    check_on_gpu(code, fault, OFFCORE_FAKE_CUDA_FAIL=fault)


@pytest.mark.parametrize(
    "form",
    ["an allocation each", "from within", "several allocations", "further apart than a pitch"],
)
def test_vmm_memory_is_mapped_once_more(form: str) -> None:
    code = """
    form, page = sys.argv[1], 8192
    blocks = 200 if form == "several allocations" else 32
    size = 2 * blocks * page
    options = {"from within": {"head": 4096}, "several allocations": {"sizes": (2, 2)}}
    if form == "further apart than a pitch":
        options[form] = {"sizes": (2,) + (1022,) * 3}
    def places():
        for layer in range(5):
            reserved(2 * MIB * (layer + 1) ** 2)  # so that no two are as far apart
            yield reserved(size, **options.get(form, {}))
    cache = Cache(list(places()), blocks, page)
    assert cache.transfer.adopted
    cache.check(copies=2)
    cache.check(by_layer=2)
    rng = np.random.default_rng(8)
    for _ in range(20):  # and beside each other
        named = rng.permutation(blocks)[:8]
        jobs = [cache.transfer.store(named[:4], cache.slots[:4], priority=int(rng.integers(3))),
                cache.transfer.load(named[4:], cache.slots[:4], priority=int(rng.integers(3)))]
        for job in jobs:
            job.wait(20)
        cache.image[:, :, named[4:]] = cache.image[:, :, named[:4]]
    cache.check(copies=2)
    """
    check_on_gpu(code, form)


def test_memory_that_is_not_mapped_once_more() -> None:
    code = """
    size = 2 * 32 * 8192
    plain = [driver.get(ctypes.c_uint64, "cuMemAlloc", size + k) for k in range(4)]
    skewed = [reserved(size, head=4096 * k) for k in (1, 3, 4, 8)]
    apart = [reserved(size * (1 + k)) for k in range(4)]
    for places, options in ((plain, {}), (skewed, {}), (apart, {"adopt": False})):
        cache = Cache(places, **options)
        assert not cache.transfer.adopted
        cache.check(path="")
    """
    check_on_gpu(code)


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_maps_nothing_once_more(call: str) -> None:
    code = """
    places = [reserved(MIB * (1 + 2 * k)) for k in range(4)]
    Cache(places, adopt=False)
    print(calls(sys.argv[1]))
    """
    count = run(code, call, prelude=WORLD + CACHE).strip()
    code = """
    places = [reserved(MIB * (1 + 2 * k)) for k in range(4)]
    cache = Cache(places)
    assert not cache.transfer.adopted
    cache.check(path="")
    """
    check_on_gpu(code, OFFCORE_FAKE_CUDA_FAIL=f"{call}:{int(count) + 1}")


def test_memory_that_its_owner_replaces() -> None:
    """As an engine does that sleeps: the same addresses, other memory behind them."""
    code = """
    places = [reserved(MIB * (1 + 2 * k)) for k in range(4)]
    cache = Cache(places)
    cache.check()
    driver("cuMemUnmap", places[2], 6 * MIB)
    handle = driver.create(6 * MIB)
    driver("cuMemMap", places[2], 6 * MIB, 0, handle, 0)
    driver.set_access(places[2], 6 * MIB, [0])
    for call in (cache.transfer.store, cache.transfer.load):
        code, told = code_of(lambda: call([1], cache.slots[:1]))
        assert (code, "make another" in told) == ("invalid", True), told
    cache.transfer.close()
    cache = Cache(places)
    assert cache.transfer.adopted
    cache.check()
    """
    check_on_gpu(code)


def test_both_engines_and_packing_of_adopted_memory() -> None:
    code = """
    places = [reserved(MIB * (1 + 2 * k)) for k in range(10)]
    for policy, path in (("zero_sm", "crossed"), ("pack", "packed")):
        cache = Cache(places, policy=policy, plain_from=None)
        assert cache.transfer.adopted
        cache.check(path=path)
        cache.transfer.close()
    """
    check_on_gpu(code)
