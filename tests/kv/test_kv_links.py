"""Loads and stores over several links to the host: every byte, which links carried what, and what
happens when one of them fails."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda import run
from test_kv_cuda import WORLD, check_on_gpu
from test_kv_pool import check_refused

from offcore import kv
from offcore.tools.kv.case import LAYOUTS, Case
from offcore.tools.kv.models import Geometry
from offcore.tools.kv.peers import Transfers


@settings(max_examples=25, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 5),
    page=st.sampled_from((64, 512, 1000, 4096)),
    blocks=st.integers(1, 60),
    requests=st.integers(1, 3),
    rows=st.integers(1, 9),
    ahead=st.sampled_from((1, 1 << 14, 32 << 20)),
    links=st.sampled_from(((1,), (1, 2), (4, 2, 7))),
)
def test_every_byte_arrives(layout, layers, page, blocks, requests, rows, ahead, links) -> None:
    geometry = Geometry("random", layers, page)
    case = Case("host", geometry, layout, blocks, requests=requests, both=True)
    lent = 4 * rows * geometry.block_bytes
    ways = Transfers(case, 10.0, links=links, link_bytes=lent, ahead_bytes=ahead, verify=True)
    for turn in range(2):
        case.refresh(turn)
        before = case.rows()
        ways.enqueue("load", 0)
        ways.enqueue("store", 0)
        jobs = [job.wait(10.0) for job in ways._jobs]
        assert case.wrong("both", before) == 0
        for result in jobs:
            assert result.links.keys() == {0, *links}
            assert sum(result.links.values()) == result.bytes
        wanted = 2 * requests * blocks * geometry.block_bytes
        assert sum(result.bytes for result in jobs) == wanted
        ways.settle()
    ways.close()
    case.close()


GPUS = """
class Lent(World):
    def __init__(self, links, **options):
        at = driver.get(ctypes.c_uint64, "cuMemAlloc", 3 * 256 * 8192)  # what peers may reach
        super().__init__(layers=3, blocks=256, page=8192, links=links, link_bytes=1 << 20,
                         ahead_bytes=1 << 16, at=at, **options)
"""


def check_on_gpus(code: str, said: str = "", **env: str) -> None:
    assert run(code, prelude=WORLD + GPUS, **env) == said


def test_neighbours_carry_a_share() -> None:
    code = """
    world = Lent("all")
    assert world.transfer.links == [1, 2, 3]
    world.transfer.close()
    world = Lent([3, 1])
    rng = np.random.default_rng(0)
    carried = {0: 0, 3: 0, 1: 0}
    for turn in range(40):
        blocks, slots = rng.permutation(256), rng.permutation(512)[:256]
        result = world.transfer.store(blocks, slots).wait(20)
        assert list(result.links) == [0, 3, 1]
        carried = {link: carried[link] + nbytes for link, nbytes in result.links.items()}
        assert sum(result.links.values()) == result.bytes == 256 * 3 * 8192
        assert (world.rows(slots) == world.wanted(blocks)).all()
        world.fill(turn + 10)
        others = rng.permutation(256)
        store = world.transfer.store(others[128:], 512 - 1 - slots[:128], priority=1)
        load = world.transfer.load(others[:128], slots[:128])
        assert load.wait(20).blocks == store.wait(20).blocks == 128
        world.image[:, others[:128]] = world.rows(slots[:128]).reshape(128, 3, 8192).swapaxes(0, 1)
        assert (world.read() == world.image).all()
        if turn >= 3 and min(carried.values()) > 0:  # slow links have less, and rarely nothing
            break
    else:
        raise AssertionError(carried)
    # Jobs by layer go over the own link.
    by_layer = world.transfer.load(np.arange(256), np.arange(256), by_layer=True).wait(20)
    assert by_layer.links == {0: by_layer.bytes, 3: 0, 1: 0}
    world.transfer.close()
    """
    check_on_gpus(code)


def test_a_stream_waits_for_all_links() -> None:
    code = """
    world, gate, reader = Lent([1, 2]), _core.GpuTimer(0), _core.GpuTimer(0)
    slots = np.arange(256)
    for turn in range(5):
        for slot in slots:
            world.pool.row(slot)[:] = (slot + turn) % 251
        gate.shut()
        job = world.transfer.load(slots, slots, after=gate.stream)
        threading.Timer(0.02, gate.open).start()
        job.wait_stream(reader.stream, 10)
        assert passed(reader)
        assert (world.read() == (slots + turn)[:, np.newaxis] % 251).all(), turn
        assert job.wait(10).blocks == 256
    world.transfer.close()
    """
    check_on_gpus(code)


def test_jobs_that_meet_keep_their_order_over_several_links() -> None:
    code = """
    world = Lent([1, 2])
    every, slots = np.arange(256), np.arange(256)
    for turn in range(6):
        for slot in slots:
            world.pool.row(slot)[:] = turn + 1
            world.pool.row(slot + 256)[:] = turn + 101
        jobs = [world.transfer.load(every, slots), world.transfer.store(every, slots + 256),
                world.transfer.load(every[::-1].copy(), slots + 256, priority=turn % 3),
                world.transfer.store(every, slots, priority=2)]
        for job in jobs:
            job.wait(20)
        assert (world.read() == turn + 1).all()
        assert (world.rows(range(512)) == turn + 1).all()
    world.transfer.close()
    """
    check_on_gpus(code)


def test_no_neighbour_is_touched_without_leave() -> None:
    code = """
    contexts = lambda: lib.fakecuda_live(b"contexts")
    world = World(layers=3, blocks=256, page=8192)
    result = world.transfer.load(np.arange(256), np.arange(256)).wait()
    assert result.links == {0: result.bytes}
    assert contexts() == 1
    world.transfer.close()
    lent = Lent([2])
    assert contexts() == 2
    """
    check_on_gpus(code)


def test_a_link_that_fails_fails_its_jobs_and_is_left_out() -> None:
    """A neighbour's context is broken by a stray copy; the own GPU goes on."""
    code = """
    world = Lent([1, 2])
    every, slots = np.arange(256), np.arange(256)
    assert world.transfer.store(every, slots).wait(20).blocks == 256
    driver.start(1)
    stream = driver.stream()
    driver.code("cuMemcpyAsync", driver.memory(), world.at, 64, stream)  # GPU 0 alone reaches it
    while driver.code("cuStreamQuery", stream) in (0, 600):
        pass
    driver.start(0)
    for turn in range(40):  # until one goes over that link
        code, told = code_of(lambda: world.transfer.load(every, slots).wait(20))
        if code:
            break
    assert code == "driver", (code, told)
    for slot in slots:
        world.pool.row(slot)[:] = slot % 251
    for turn in range(3):
        result = world.transfer.load(every, slots).wait(20)
        assert result.links[1] == 0, result
        assert (world.read() == slots[:, np.newaxis] % 251).all()
        driver.put(world.at, bytes(world.image.size))
    # What the failed job had named is free again.
    world.pool.free(slots)
    assert world.pool.leaving_blocks == 0
    world.transfer.close(timeout=20)
    print("ended")
    """
    check_on_gpus(code, "ended\n")


@pytest.mark.parametrize("call", [2, 5, 9])
def test_a_call_that_is_refused_on_a_link(call: int) -> None:
    """By whichever GPU it was: its job fails, what else of it was enqueued has ended, and later
    jobs are right."""
    code = """
    world = Lent([1, 2], plain_from=NEVER)
    every, slots = np.arange(256), np.arange(256)
    codes = [code_of(lambda: world.transfer.load(every, slots).wait(20))[0] for _ in range(2)]
    assert codes.count("driver") == 1, codes
    for slot in slots:
        world.pool.row(slot)[:] = slot % 251
    result = world.transfer.load(every, slots).wait(20)
    assert sum(result.links.values()) == result.bytes
    assert (world.read() == slots[:, np.newaxis] % 251).all()
    world.pool.free(slots)
    assert world.pool.leaving_blocks == 0
    world.transfer.close(timeout=20)
    """
    check_on_gpus(code, OFFCORE_FAKE_CUDA_FAIL=f"cuMemcpy2DAsync:{call}:999")


def test_a_cancelled_job_over_several_links_tells_what_was_copied() -> None:
    cache = np.random.default_rng(3).integers(0, 256, (4, 2000, 4096), np.uint8)
    before = cache.copy()
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 2000, backend="host")
    slots = pool.allocate(2000, timeout=20)
    for slot in slots:
        pool.row(slot)[:] = slot % 251
    options = {"links": [1, 2], "link_bytes": 16 * layout.block_bytes, "ahead_bytes": 1}
    with kv.BlockTransfer(layout, pool, **options) as transfer:
        blocks = np.random.default_rng(1).permutation(2000)
        job = transfer.load(blocks, slots)
        job.cancel()
        result = job.wait(20)
        assert result.cancelled
        assert result.blocks < 2000
        assert result.bytes == result.blocks * layout.block_bytes == sum(result.links.values())
        for slot, block in enumerate(blocks):
            wanted = slot % 251 if slot < result.blocks else before[:, block]
            assert (cache[:, block] == wanted).all(), (slot, result.blocks)


def test_what_links_are_refused() -> None:
    layout = kv.Layout(np.zeros((8, 2, 64), np.uint8))
    sim, host = (kv.HostPool(128, 4, backend=name) for name in ("sim", "host"))

    def opened(pool: kv.HostPool, **options: object) -> None:
        kv.BlockTransfer(layout, pool, **options)

    check_refused(lambda: opened(sim, links=[1]), "unsupported", "one link")
    check_refused(lambda: opened(host, links="all"), "invalid", "needs explicit links")
    check_refused(lambda: opened(host, links="some"), "invalid", "pass 'all'")
    check_refused(lambda: opened(host, links=[1, 1]), "invalid", "each once")
    check_refused(lambda: opened(host, links=[-1]), "invalid", "links is -1")
    check_refused(lambda: opened(host, links=[1], link_bytes=511), "invalid", "at least 512 bytes")
    opened(host, links=[1], link_bytes=512)
    code = """
    for links, code, words in (
        ([8], "unsupported", "4 are visible"), ([0], "invalid", "name other GPUs"),
        ([], "unsupported", "besides this one")):
        told = code_of(lambda: World(links=links))
        assert told[0] == code and words in told[1], told
    """
    check_on_gpu(code)
    unreached = """
    told = code_of(lambda: World(links=[2]))  # its cache is mapped for GPU 0 only
    assert told[0] == "unsupported" and "GPU 2 does not reach the cache" in told[1], told
    """
    check_on_gpu(unreached)
    alone = """
    told = code_of(lambda: World(links="all"))
    assert told[0] == "unsupported" and "1 are visible" in told[1], told
    """
    check_on_gpu(alone, OFFCORE_FAKE_CUDA_DEVICES="1")
