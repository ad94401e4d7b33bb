"""Blocks that share rows of the pool, piece by piece: which copies that takes, which jobs meet, and
what is refused. Random jobs of such layouts are in test_kv_layouts.py."""

import numpy as np
import pytest
from kv_caches import place
from test_cuda import run
from test_kv_cuda import WORLD
from test_kv_pool import check_refused

from offcore import kv
from offcore.kv.pool import RowsByAddress

SHARED, LAYERS, BLOCKS, PAGE = 4, 3, 24, 64


def outermost(seed: int = 1, page: int = PAGE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, page), np.uint8)


def layout_of(cache: np.ndarray, row_blocks: int = SHARED) -> kv.Layout:
    return kv.Layout(cache, block_axis=1, layer_axis=0, row_blocks=row_blocks)


def pool_of(layout: kv.Layout, rows: int = 6) -> kv.HostPool:
    pool = kv.HostPool(layout.row_bytes, rows, backend="host")
    pool.allocate(rows, timeout=20)
    return pool


def test_how_blocks_lie_in_a_row() -> None:
    cache = outermost()
    layout = layout_of(cache)
    assert (layout.row_blocks, layout.row_bytes) == (SHARED, SHARED * layout.block_bytes)
    assert layout.copies() == [(LAYERS, PAGE)]
    deep = np.zeros((BLOCKS, LAYERS, PAGE), np.uint8)
    assert kv.Layout(deep, layer_axis=1).copies() == [(1, LAYERS * PAGE)]
    assert kv.Layout(deep, layer_axis=1, row_blocks=2).copies() == [(LAYERS, PAGE)]
    pool = pool_of(layout)
    with kv.BlockTransfer(layout, pool, verify=True) as transfer:
        transfer.store([5, 3, 20], [4, 6, 7]).wait(20)
        row = pool.row(1).reshape(LAYERS, SHARED, PAGE)
        assert (row[:, [0, 2, 3]] == cache[:, [5, 3, 20]]).all()
        transfer.load([0, 1, 2], [7, 7, 4]).wait(20)
        assert (cache[:, [0, 1, 2]] == row[:, [3, 3, 0]]).all()


def test_adjacent_blocks_in_adjacent_places_are_one_copy() -> None:
    cache = outermost()
    layout = layout_of(cache)
    pool = pool_of(layout)
    with kv.BlockTransfer(layout, pool, verify=True) as transfer:
        for count, blocks, slots, commands in (
            (1, 4, 0, 1),
            (2, 4, 2, 1),
            (4, 9, 8, 1),  # a whole row
            (4, 9, 10, 2),  # two halves
            (24, 0, 0, 6),
        ):
            named = np.arange(blocks, blocks + count), np.arange(slots, slots + count)
            found = transfer.store(*named).wait(20)
            assert (found.commands, found.path) == (commands, "strided"), (found, count)
            for block, slot in zip(*named, strict=True):
                assert (place(pool, layout, slot) == cache[:, block]).all()
    with kv.BlockTransfer(layout, pool, plain_from=1, verify=True) as transfer:
        found = transfer.load(np.arange(9, 13), np.arange(8, 12)).wait(20)
        assert (found.commands, found.path) == (LAYERS, "plain")


def test_jobs_that_name_other_places_of_a_row_do_not_meet() -> None:
    """And those that name the same one keep their order."""
    cache = outermost()
    layout = layout_of(cache)
    pool = pool_of(layout)
    with kv.BlockTransfer(layout, pool, ahead_bytes=1) as transfer:
        for turn in range(40):
            cache[:] = outermost(turn)
            before = cache.copy()
            order = np.random.default_rng(turn).permutation(BLOCKS)
            jobs = [transfer.store([block], [slot]) for slot, block in enumerate(order)]
            jobs.append(transfer.load(order[::-1].copy(), np.arange(BLOCKS), priority=5))
            jobs += [transfer.store([block], [slot]) for slot, block in enumerate(order[:8])]
            assert all(job.wait(20).blocks in (1, BLOCKS) for job in jobs)
            assert (cache[:, order[::-1]] == before[:, order]).all()
            for slot, block in enumerate(order):
                held = cache if slot < 8 else before
                assert (place(pool, layout, slot) == held[:, block]).all(), slot


def test_rows_stay_taken_while_a_job_uses_a_place() -> None:
    layout = layout_of(outermost())
    pool = pool_of(layout)
    with kv.BlockTransfer(layout, pool, ahead_bytes=1) as transfer:
        jobs = [transfer.store(np.arange(BLOCKS), np.arange(BLOCKS)) for _ in range(50)]
        pool.free([0, 5])
        refused = [[3], [20], [8, 21]]
        for slots in refused:
            check_refused(lambda s=slots: transfer.load(range(len(s)), s), "invalid", "not alloc")
        for job in jobs:
            job.wait(20)
        assert (pool.free_blocks, pool.leaving_blocks) == (2, 0)


def test_what_is_refused() -> None:
    cache = outermost()
    layout = layout_of(cache)
    pool = pool_of(layout)
    for wrong, told in ((0, "row_blocks is 0"), (1 << 17, "1..65536"), (-1, "row_blocks is -1")):
        check_refused(lambda w=wrong: layout_of(cache, w), "invalid", told)
    sizes = [(np.zeros((8, 64), np.uint8), np.zeros((8, 32), np.uint8))]
    told = "pages of 64 and of 32 bytes cannot share rows"
    check_refused(lambda: kv.Layout(sizes, row_blocks=2), "invalid", told)
    told = f"4 blocks of the cache have {layout.row_bytes} bytes, a row of the host pool 192"
    small = kv.HostPool(layout.block_bytes, 6, backend="host")
    check_refused(lambda: kv.BlockTransfer(layout, small), "invalid", told)
    check_refused(lambda: kv.BlockTransfer(layout, pool, links=[1]), "unsupported", "row_blocks")
    pairs = kv.Layout(outermost(page=PAGE * LAYERS), block_axis=1, layer_axis=0)
    other = kv.Layout(np.zeros((BLOCKS, 2 * PAGE * LAYERS), np.uint8), row_blocks=2)
    assert pairs.row_bytes != other.row_bytes == layout.row_bytes
    groups = [layout, other]
    told = "row_blocks 2 and 4, pages of 384 and 64 bytes"
    check_refused(lambda: kv.BlockTransfer(groups, [pool, pool]), "invalid", told)
    with kv.BlockTransfer(layout, pool) as transfer:
        for slots, told in (
            ([-1], "slot -1 is not one of the host pool's 24"),
            ([24], "slot 24 is not one of the host pool's 24"),
            ([1, 1], "slot 1 is listed twice"),
        ):
            blocks = range(len(slots))
            check_refused(lambda b=blocks, s=slots: transfer.store(b, s), "invalid", told)
        assert transfer.store([0, 1], [1, 2]).wait(20).blocks == 2


def test_rows_by_address() -> None:
    """At any byte, and what their slots may not be."""
    cache = outermost()
    layout = layout_of(cache)
    memory = np.zeros(1 << 12, np.uint8)
    for first, step in ((0, 0), (int(memory.ctypes.data) + 5, 100), (7, 1 << 20)):
        memory[:] = 0
        pool = RowsByAddress(layout.row_bytes, "host", first, step)
        at = [int(memory.ctypes.data) + place for place in (3, 3000, 1009)]
        slots = np.ravel([[address * SHARED + place for place in range(SHARED)] for address in at])
        with kv.BlockTransfer(layout, pool, verify=True) as transfer:
            blocks = np.random.default_rng(step).permutation(BLOCKS)[: len(slots)]
            transfer.store(blocks, slots).wait(20)
            shape = (LAYERS, SHARED, PAGE)
            for row, (place, named) in enumerate(
                zip((3, 3000, 1009), blocks.reshape(3, -1), strict=True)
            ):
                held = memory[place : place + layout.row_bytes].reshape(shape)
                assert (held == cache[:, named]).all(), row
            assert (memory != 0).sum() <= 3 * layout.row_bytes
            for wrong, told in (
                ([slots[1], slots[1]], "listed twice"),
                ([slots[1], slots[1] + 2, slots[1] + 2], "listed twice"),
                ([slots[0], slots[0] + SHARED * (layout.row_bytes - 1)], "two rows of 768 bytes"),
                ([-1], "is not in a row of memory"),
                ([SHARED - 1], "is not in a row of memory"),
            ):
                call = lambda s=wrong: transfer.store(range(len(s)), s)  # noqa: E731
                check_refused(call, "invalid", told)
            loaded = transfer.load(blocks[[1, 0]], slots[[0, 0]]).wait(20)
            assert loaded.blocks == 2
            assert (cache[:, blocks[1]] == cache[:, blocks[0]]).all()
            cache[:] = outermost()


CHUNKS = """
SHARED, LAYERS, BLOCKS, PAGE = 16, 5, 96, 4096
class Chunks:
    '''A tensor a layer, each an allocation of its own, or layers outermost.'''
    def __init__(self, apart, rows=12, **options):
        size = BLOCKS * PAGE
        if apart:
            self.at = [driver.get(ctypes.c_uint64, "cuMemAlloc", size) for _ in range(LAYERS)]
        else:
            self.at = driver.memory(4 << 20) + size * np.arange(LAYERS, dtype=np.uint64)
        self.layout = kv.Layout([Gpu(int(at), (BLOCKS, PAGE)) for at in self.at],
                                row_blocks=SHARED)
        self.pool = kv.HostPool(self.layout.row_bytes, rows, backend="cuda")
        self.pool.allocate(rows, timeout=20)
        self.slots = rows * SHARED
        self.transfer = kv.BlockTransfer(self.layout, self.pool, verify=True, **options)
        self.image = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, PAGE), np.uint8)
        for at, layer in zip(self.at, self.image):
            driver.put(int(at), layer.tobytes())
        self.rows = np.random.default_rng(2).integers(
            0, 256, (rows, LAYERS, SHARED, PAGE), np.uint8)
        for slot, row in enumerate(self.rows):
            self.pool.row(slot)[:] = row.ravel()

    def read(self, layers=None):  # the first ones, while jobs write the others
        held = [driver.read(int(at), BLOCKS * PAGE) for at in self.at[:layers]]
        return np.frombuffer(b"".join(held), np.uint8).reshape(self.image[:layers].shape)

    def keep(self, load, blocks, slots):
        for block, slot in zip(blocks, slots):
            row = self.rows[slot // SHARED][:, slot % SHARED]
            if load:
                self.image[:, block] = row
            else:
                row[:] = self.image[:, block]

    def check(self):
        assert (self.read() == self.image).all()
        for slot, row in enumerate(self.rows):
            assert (self.pool.row(slot) == row.ravel()).all(), slot

    def run(self, load, blocks, slots, **options):
        call = self.transfer.load if load else self.transfer.store
        found = call(blocks, slots, **options).wait(20)
        self.keep(load, blocks, slots)
        self.check()
        return found

def chunks(rng, count, skip=0):
    '''Slots of whole rows, any, the first one from `skip` on; and so many blocks, in any order.'''
    rows = rng.permutation(12)[: -(-(skip + count) // SHARED)]
    slots = (rows[:, np.newaxis] * SHARED + np.arange(SHARED)).ravel()[skip:][:count]
    return rng.permutation(BLOCKS)[:count], slots
"""


def check_on_gpu(code: str, *args: str) -> None:
    assert run(code, *args, prelude=WORLD + CHUNKS) == ""


@pytest.mark.parametrize("policy", ["auto", "zero_sm", "pack"])
@pytest.mark.parametrize("apart", ["apart", ""])
def test_random_jobs_under_way_together(apart: str, policy: str) -> None:
    """Chunks, parts of them and slots in any order; large and small bounds."""
    code = """
    rng = np.random.default_rng(3)
    least = 4 * LAYERS * PAGE
    for turn, (ahead, pack) in enumerate(((32 << 20, 32 << 20), (1, least), (1 << 18, 5 * least))):
        world = Chunks(sys.argv[1] != "", policy=sys.argv[2], ahead_bytes=ahead, pack_bytes=pack)
        for _ in range(3):
            jobs = []
            for number in range(10):
                load, count = rng.random() < 0.5, int(rng.integers(1, 80))
                blocks, slots = chunks(rng, count, int(rng.integers(16)))
                if number % 3 == 0:
                    slots = rng.permutation(world.slots)[:count]
                call = world.transfer.load if load else world.transfer.store
                jobs.append(call(blocks, slots, priority=count % 3, by_layer=number % 4))
                world.keep(load, blocks, slots)
            for job in jobs:
                job.wait(20)
            world.check()
        world.transfer.close()
    """
    check_on_gpu(code, apart, policy)


def test_copies_between_the_stage_and_chunks() -> None:
    """A plain one for whole chunks, one for those that follow each other, and a strided one for a
    part of a chunk."""
    code = """
    def links(found):  # the calls that cross the link
        calls = found.calls
        return calls["batched"] + calls["plain"], calls["strided"], calls["packs"]

    world = Chunks(True, policy="pack", linger=60.0)
    rng = np.random.default_rng(5)
    world.run(False, [0], [0])  # the thread is awake
    for count, skip, plain, strided in ((16, 0, 1, 0), (15, 0, 0, 1), (10, 3, 0, 1), (16, 3, 0, 2)):
        for load in (False, True):
            blocks, slots = chunks(rng, count, skip)
            found = world.run(load, blocks, slots, by_layer=5)
            assert links(found) == (plain, strided, 1), (count, skip, found)
    following = world.run(False, rng.permutation(BLOCKS)[:64], np.arange(32, 96))
    packs = following.calls["packs"]
    assert links(following)[1] <= packs and links(following)[0] <= packs, following
    # In parts of fewer blocks than a chunk has.
    small = Chunks(True, policy="pack", pack_bytes=4 * 5 * LAYERS * PAGE, linger=60.0)
    blocks, slots = chunks(rng, 32)
    found = small.run(False, blocks, slots)
    assert links(found)[0] == 0 and links(found)[1] >= 7, found
    by_layer = small.run(True, blocks, slots, by_layer=True)  # whole rows of one page
    assert by_layer.calls["strided"] == 0, by_layer
    world.transfer.close()
    small.transfer.close()
    """
    check_on_gpu(code)


def test_both_engines_copy_blocks_that_share_rows() -> None:
    code = """
    LAYERS = 9
    world = Chunks(False, policy="zero_sm")
    rng, paths = np.random.default_rng(6), set()
    for turn in range(6):
        blocks, slots = chunks(rng, 60, turn)
        paths.add(world.run(turn % 2 == 1, blocks, slots).path)
    assert paths == {"crossed"}, paths
    world.transfer.close()
    """
    check_on_gpu(code)


def test_layers_come_in_turn() -> None:
    code = """
    for policy in ("pack", "zero_sm"):
        world = Chunks(True, policy=policy, ahead_bytes=1 << 16)
        blocks, slots = chunks(np.random.default_rng(7), 70, 5)
        job = world.transfer.load(blocks, slots, by_layer=2)
        world.keep(True, blocks, slots)
        stream = driver.stream()
        for layer in range(LAYERS):
            job.wait_layer(layer, stream)
            driver("cuStreamSynchronize", stream)
            assert (world.read(layer + 1)[layer] == world.image[layer]).all()
        job.wait(20)
        job = world.transfer.store(*chunks(np.random.default_rng(8), 60))
        job.cancel()
        found = job.wait(20)
        assert found.bytes == found.blocks * world.layout.block_bytes
        world.transfer.close()
    """
    check_on_gpu(code)
