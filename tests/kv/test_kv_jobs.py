"""Jobs: their order, their ends, what they refuse and what they keep. On the host backend, whose
threads are slow enough to be met on the way."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_kv_pool import check_refused

import offcore
from offcore import kv

LAYERS, BLOCKS, PAGE = 4, 64, 4096
ROOT = str(Path(str(offcore.__file__)).parents[1])


class World:
    """A cache with layers outermost, and a pool of two rows for each block, all allocated."""

    def __init__(self, blocks: int = BLOCKS, page: int = PAGE, **options: Any) -> None:
        self.cache = np.random.default_rng(3).integers(0, 256, (LAYERS, blocks, page), np.uint8)
        layout = kv.Layout(self.cache, block_axis=1, layer_axis=0)
        self.pool = kv.HostPool(
            layout.block_bytes, 2 * blocks, backend="host", chunk_bytes=8 * layout.block_bytes
        )
        self.slots = self.pool.allocate(2 * blocks, timeout=20)
        self.transfer = kv.BlockTransfer(layout, self.pool, **options)

    def block(self, block: int) -> bytes:
        return self.cache[:, block].tobytes()

    def row(self, slot: int) -> bytes:
        return self.pool.row(slot).tobytes()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.transfer.close(cancel=True)


def slow() -> World:
    """Nearly every block is a part of its own, so that a large job takes long."""
    return World(blocks=2000, ahead_bytes=1)


def test_a_result_tells_what_ran(world: World) -> None:
    result = world.transfer.store(np.arange(0, 20, 2), world.slots[:10]).wait()
    facts = result.as_dict()
    assert facts["backend"] == "host"
    assert (facts["direction"], facts["asked"], facts["blocks"]) == ("store", 10, 10)
    assert (facts["pages"], facts["bytes"]) == (10 * LAYERS, 10 * LAYERS * PAGE)
    assert facts["path"] in ("strided", "mixed", "plain")
    assert facts["commands"] < facts["pages"]
    assert min(facts["submit_us"], facts["queued_us"], facts["copy_us"], facts["gbps"]) > 0
    assert not facts["cancelled"]
    assert "path=" in repr(result)
    plain = kv.BlockTransfer(world.transfer.layouts[0], world.pool, plain_from=(None, 1))
    stored = plain.store([5, 9, 2], world.slots[:3]).wait()
    assert (stored.path, stored.commands) == ("plain", 3 * LAYERS)
    loaded = plain.load([5, 9, 2], world.slots[:3]).wait()
    assert (loaded.path, loaded.commands) == ("strided", 3)
    empty = plain.load([], [], by_layer=True)
    empty.wait_layer(LAYERS - 1)
    assert (empty.wait().path, empty.wait().layers) == ("none", LAYERS)


def test_what_a_call_refuses(world: World) -> None:
    load, store, slots = world.transfer.load, world.transfer.store, world.slots
    check_refused(lambda: load([1, 2], slots[:1]), "invalid", "2 blocks and 1 slots")
    check_refused(lambda: load([BLOCKS], slots[:1]), "invalid", f"block {BLOCKS} is not one")
    check_refused(lambda: load([-1], slots[:1]), "invalid", "block -1")
    check_refused(lambda: load([1], [999]), "invalid", "slot 999 is not one")
    check_refused(lambda: load([1, 2, 1], slots[:3]), "invalid", "block 1 is listed twice")
    check_refused(lambda: store([1, 2], [0, 0]), "invalid", "slot 0 is listed twice")
    for start in (store, load):  # what was refused is not held against others
        assert start([1, 2], slots[:2]).wait().blocks == 2
    check_refused(lambda: load([1.5], slots[:1]), "invalid", "whole numbers")
    check_refused(lambda: load([1], slots[:1], group=1), "invalid", "no group 1 of 1")
    check_refused(lambda: load([1], slots[:1], after=4711), "unsupported", "no streams")
    for name, value in [
        ("priority", 1 << 31),
        ("priority", "high"),
        ("by_layer", -1),
        ("group", -1),
    ]:
        options = {name: value}
        check_refused(lambda o=options: load([1], slots[:1], **o), "invalid", name)
    for name in ("ahead_bytes", "ahead_commands", "plain_from"):
        options = {name: -1}
        check_refused(
            lambda o=options: kv.BlockTransfer(world.transfer.layouts[0], world.pool, **o),
            "invalid",
            name,
        )
    job = load([1], slots[:1])
    check_refused(lambda: job.wait_layer(-1), "invalid", "layer is -1")
    check_refused(lambda: job.wait_layer(LAYERS), "invalid", f"there is no layer {LAYERS}")
    check_refused(lambda: job.wait_stream(4711), "unsupported", "no streams")
    job.wait()
    world.pool.free(slots[:1])
    check_refused(lambda: load([1], slots[:1]), "invalid", "slot 0 is not allocated")
    # One source for several destinations is none of these.
    assert load([1, 2], [3, 3]).wait().blocks == 2
    assert store([1, 1], [3, 4]).wait().blocks == 2
    assert world.row(3) == world.row(4) == world.block(1)


def test_what_does_not_fit_together(world: World) -> None:
    layout = world.transfer.layouts[0]
    small = kv.HostPool(64, 4, backend="host")
    check_refused(lambda: kv.BlockTransfer(layout, small), "invalid", "one of the host pool 64")
    check_refused(lambda: kv.BlockTransfer([layout], [world.pool] * 2), "invalid", "1 caches and 2")
    simulated = kv.HostPool(layout.block_bytes, 4, backend="sim")
    pools = [world.pool, simulated]
    check_refused(lambda: kv.BlockTransfer([layout] * 2, pools), "invalid", "the same backend")
    check_refused(lambda: kv.BlockTransfer(layout, world.pool, device=0), "invalid", "backend cuda")
    half = kv.Layout(world.cache[:, : BLOCKS // 2], block_axis=1, layer_axis=0)
    both = [world.pool, world.pool]
    check_refused(lambda: kv.BlockTransfer([layout, half], both), "invalid", "share memory")


def test_both_directions_at_once(world: World) -> None:
    """Many jobs that do not meet: none may disturb another."""
    before = world.cache.copy()
    half = BLOCKS // 2
    for slot in range(BLOCKS):
        world.pool.row(slot)[:] = slot
    jobs = []
    for block in range(half):
        jobs.append(world.transfer.load([block], [block]))
        jobs.append(world.transfer.store([half + block], [BLOCKS + block], by_layer=block % 3))
    assert [job.wait().blocks for job in jobs] == [1] * len(jobs)
    for block in range(half):
        assert (world.cache[:, block] == block).all()
        assert world.row(BLOCKS + block) == before[:, half + block].tobytes()


def test_jobs_that_meet_keep_the_order_of_their_calls(world: World) -> None:
    """A chain over blocks and slots, both directions and any priority in turn."""
    value = world.block(0)
    jobs = []
    for turn in range(BLOCKS - 1):  # block k -> slot k -> block k + 1 -> ...
        jobs.append(world.transfer.store([turn], [turn], priority=turn))
        jobs.append(world.transfer.load([turn + 1], [turn], priority=-turn, by_layer=turn % 2))
    jobs[-1].wait()
    assert world.block(BLOCKS - 1) == world.row(BLOCKS - 2) == value
    # A row that is read is not written before, nor one that is written read.
    world.pool.row(0)[:], world.pool.row(1)[:] = 1, 2
    for _ in range(20):
        jobs += [world.transfer.load([5], [0]), world.transfer.store([5], [2])]
        jobs += [world.transfer.load([5], [1], priority=9), world.transfer.store([5], [3])]
        jobs += [world.transfer.load([6], [3], priority=7), world.transfer.store([6], [0])]
    for job in jobs:
        job.wait()
    assert set(world.row(2)) == {2}, "it was stored from block 5 after slot 0 had become 2"
    assert set(world.row(3)) == set(world.row(0)) == {2}


def test_a_higher_priority_overtakes_what_is_not_enqueued() -> None:
    world = slow()
    every = np.arange(1, 1900)
    large = world.transfer.load(every, world.slots[every])
    urgent = world.transfer.load([0], world.slots[:1], priority=1)
    urgent.wait()
    assert not large.done()
    # What an urgent job has to wait for is as urgent.
    needed = world.transfer.store([1950], [2001], priority=-5)
    other = world.transfer.store(every + 50, world.slots[2002 : 2002 + len(every)])
    dependent = world.transfer.load([1990], [2001], priority=3)
    dependent.wait()
    assert needed.done()
    assert not (large.done() and other.done())
    world.transfer.close(cancel=True)


def test_a_cancelled_job_tells_what_was_copied() -> None:
    world = slow()
    for slot in world.slots[:2000]:
        world.pool.row(slot)[:] = slot % 251
    before = world.cache.copy()
    blocks = np.random.default_rng(1).permutation(2000)
    job = world.transfer.load(blocks, world.slots[:2000])
    job.cancel()
    result = job.wait()
    assert result.cancelled
    assert result.asked == 2000
    count = result.blocks
    assert count < 2000
    assert result.bytes == count * LAYERS * PAGE
    for slot, block in enumerate(blocks):
        wanted = slot % 251 if slot < count else before[:, block]
        assert (world.cache[:, block] == wanted).all(), (slot, count)
    # By layer no block is whole, but some layers may be.
    job = world.transfer.load(blocks, world.slots[:2000], by_layer=True)
    job.wait_layer(0)
    job.cancel()
    result = job.wait()
    if result.cancelled:
        assert result.blocks < 2000
        assert 1 <= result.layers <= LAYERS
    assert all((world.cache[0, b] == slot % 251).all() for slot, b in enumerate(blocks))
    job.cancel()  # once more, too late
    if result.layers < LAYERS:
        check_refused(lambda: job.wait_layer(LAYERS - 1), "cancelled", f"layer {LAYERS - 1}")
    world.transfer.close()


def test_layers_arrive_one_after_the_other() -> None:
    world = slow()
    for slot in world.slots[:2000]:
        world.pool.row(slot)[:] = slot % 251
    job = world.transfer.load(np.arange(2000), world.slots[:2000], by_layer=True)
    wanted = (np.arange(2000) % 251).astype(np.uint8)[:, np.newaxis]
    for layer in range(LAYERS):
        job.wait_layer(layer)
        assert (world.cache[layer] == wanted).all()
    assert job.wait().layers == LAYERS
    world.transfer.close()


def test_every_wait_has_a_timeout() -> None:
    world = slow()
    job = world.transfer.load(np.arange(2000), world.slots[:2000])
    check_refused(lambda: job.wait(0), "timeout", "a load of 2000 blocks did not end within")
    check_refused(lambda: job.wait_layer(0, timeout=0), "timeout", "0 of 1 groups")
    check_refused(lambda: world.transfer.close(timeout=0), "timeout", "1 jobs")
    check_refused(lambda: world.transfer.load([1], [1]), "cancelled", "closed")
    check_refused(lambda: world.pool.close(timeout=0), "timeout", "2000 rows")
    assert job.wait().blocks == 2000
    world.transfer.close()
    world.transfer.close()
    world.pool.close()


def test_slots_freed_under_a_job_are_free_when_it_has_ended() -> None:
    world = slow()
    job = world.transfer.load(np.arange(2000), world.slots[:2000])
    world.pool.free(world.slots[:2000])
    assert world.pool.free_blocks + world.pool.leaving_blocks == 2000
    if not job.done():
        check_refused(
            lambda: world.pool.free(world.slots[1999:2000]), "invalid", "not allocated any more"
        )
        check_refused(lambda: world.transfer.store([0], [1999]), "invalid", "slot 1999")
        check_refused(lambda: world.pool.row(1999), "invalid", "slot 1999")
        check_refused(
            lambda: world.pool.allocate(2000, timeout=0),
            "memory",
            "are free once their jobs have ended",
        )
    assert world.pool.allocate(2000, timeout=20).tolist() == list(range(2000))
    assert job.wait().blocks == 2000
    world.transfer.close()


def test_a_job_outlives_its_tensors_pool_and_transfer() -> None:
    world = slow()
    for slot in world.slots[:2000]:
        world.pool.row(slot)[:] = slot % 251
    job = world.transfer.load(np.arange(2000), world.slots[:2000])
    cache = world.cache
    del world
    gc.collect()
    assert job.wait().blocks == 2000
    assert (cache == (np.arange(2000) % 251)[:, np.newaxis]).all()
    del job, cache
    gc.collect()


def test_dropping_everything_ends_it() -> None:
    world = slow()
    cache = world.cache
    world.transfer.load(np.arange(2000), world.slots[:2000])
    del world
    gc.collect()
    cache[:] = 0
    assert not cache.any(), "nothing writes any more"


def test_threads_share_a_transfer() -> None:
    world = World(blocks=64, ahead_bytes=1)
    before = world.cache.copy()
    wrong: list[str] = []

    def work(number: int) -> None:
        blocks = np.arange(16) + 16 * number
        slots = world.slots[32 * number : 32 * number + 16]
        rng = np.random.default_rng(number)
        for turn in range(30):
            order = rng.permutation(16)
            store = world.transfer.store(blocks[order], slots, by_layer=turn % 3)
            load = world.transfer.load(blocks, slots[np.argsort(order)], priority=turn % 2)
            if turn % 5 == 4:
                store.cancel()
            if turn % 4 == 3:
                store.wait(20)
            load.wait(20)
            if (world.cache[:, blocks] != before[:, blocks]).any() and turn % 5 != 4:
                wrong.append(f"{number}, turn {turn}")
            world.cache[:, blocks] = before[:, blocks]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert wrong == []
    world.transfer.close()


def test_callers_meet_a_thread_that_goes_to_sleep() -> None:
    """It spins for 0.2 or 2 ms after a job: callers come just before and just after that."""
    for _ in range(4):
        world = World(blocks=64)
        wanted = world.cache.copy()

        def work(number: int, world: World = world, wanted: Any = wanted) -> None:
            rng = np.random.default_rng(number)
            blocks = np.arange(16) + 16 * number
            slots = world.slots[32 * number : 32 * number + 16]
            for _ in range(12):
                time.sleep(rng.choice([0.0002, 0.002, 0.003]) * 2 * rng.random())
                shuffled = rng.permutation(blocks)
                world.transfer.store(blocks, slots)
                world.transfer.load(shuffled, slots)
                wanted[:, shuffled] = wanted[:, blocks].copy()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        world.transfer.close()
        assert (world.cache == wanted).all()


def test_groups_have_blocks_of_their_own() -> None:
    wide = np.random.default_rng(0).integers(0, 256, (2, 10, 64), np.uint8)
    narrow = np.random.default_rng(1).integers(0, 256, (3, 20, 16), np.uint8)
    layouts = [kv.Layout(array, block_axis=1, layer_axis=0) for array in (wide, narrow)]
    pools = [kv.HostPool(layout.block_bytes, 8, backend="host") for layout in layouts]
    for pool in pools:
        pool.allocate(8, timeout=10)
    with kv.BlockTransfer(layouts, pools) as transfer:
        jobs = [
            transfer.store([9, 1], [0, 1]),
            transfer.store([19, 3, 5], [0, 1, 2], group=1),
        ]
        assert [job.wait().bytes for job in jobs] == [2 * 128, 3 * 48]
        check_refused(lambda: transfer.store([10], [0]), "invalid", "block 10")
    assert pools[0].row(0).tobytes() == wide[:, 9].tobytes()
    assert pools[1].row(2).tobytes() == narrow[:, 5].tobytes()


def test_groups_that_share_memory_keep_the_order() -> None:
    """As where layers of several kinds take turns with one tensor: block numbers are shared."""
    memory = np.zeros((2, 10, 64), np.uint8)
    layouts = [kv.Layout([memory[k] for k in order]) for order in ((0, 1), (1, 0))]
    pool = kv.HostPool(128, 4, backend="host")
    pool.allocate(4, timeout=10)
    for slot in range(4):
        pool.row(slot)[:] = slot + 1
    with kv.BlockTransfer(layouts, [pool, pool], ahead_bytes=1) as transfer:
        for _ in range(30):
            first = transfer.load([3], [0])
            store = transfer.store([3], [2], group=1)
            last = transfer.load([3], [1], priority=5)
            for job in (first, store, last):
                job.wait()
            assert (pool.row(2) == 1).all()
            assert (memory[:, 3] == 2).all()


def in_a_process(code: str, **env: str) -> str:
    done = subprocess.run(
        (sys.executable, "-c", PRELUDE + code),
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": ROOT} | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


PRELUDE = """
import os, sys
import numpy as np
from offcore import Error, kv
cache = np.ones((4, 2000, 4096), np.uint8)
layout = kv.Layout(cache, block_axis=1, layer_axis=0)
pool = kv.HostPool(layout.block_bytes, 2000, backend="host", chunk_bytes=1 << 20)
slots = pool.allocate(2000, timeout=30)
transfer = kv.BlockTransfer(layout, pool, ahead_bytes=1)
job = transfer.load(np.arange(2000), slots)
"""


@pytest.mark.parametrize("how", ["pass", "sys.exit(0)", "pool.grow(1 << 18)"])
def test_a_process_ends_with_jobs_under_way(how: str) -> None:
    assert in_a_process(how) == ""


def test_a_child_is_told_that_nothing_survives_a_fork() -> None:
    code = """
child = os.fork()
if child == 0:
    for call in (lambda: transfer.load([0], slots[:1]), lambda: pool.allocate(1)):
        try:
            call()
        except Error as error:
            print(error.code, error)
    transfer.close()
    pool.close()
    del transfer, pool, job
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert job.wait(30).blocks == 2000
"""
    told = in_a_process(code)
    assert told.count("invalid") == 2
    assert told.count("does not survive a fork") == 2
