"""Host pools: what is given out, what comes back, and what is refused."""

import gc
import mmap
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_caches import Places

import offcore
from offcore import _core, kv


def check_refused(call: Callable[[], object], code: str, *says: str) -> None:
    with pytest.raises(offcore.Error) as raised:
        call()
    assert raised.value.code == code
    for part in says:
        assert part in str(raised.value)


def opened(
    blocks: int, chunk: int = 4, block_bytes: int = 64, backend: str = "host"
) -> kv.HostPool:
    pool = kv.HostPool(block_bytes, blocks, backend=backend, chunk_bytes=chunk * block_bytes)
    pool.wait_ready(10)
    return pool


def test_rows_are_memory_of_their_own(places: Places) -> None:
    with places.pool(100, 10, chunk_bytes=350) as pool:
        slots = pool.allocate(10, timeout=10)
        assert slots.dtype == np.int64
        assert slots.tolist() == list(range(10))
        for slot in slots:
            row = pool.row(slot)
            assert row.shape == (100,)
            assert not row.any()
            row[:] = slot + 1
        assert all((pool.row(slot) == slot + 1).all() for slot in slots)
        kept = pool.row(3)
        pool.free(slots)
        assert pool.free_blocks == 10
    assert (kept == 4).all(), "the memory lives as long as a view of it"
    check_refused(lambda: pool.allocate(1), "cancelled", "closed")
    pool.close()


def test_a_fresh_pool_is_waited_for() -> None:
    with kv.HostPool(1 << 20, 64, backend="host", chunk_bytes=1 << 20) as pool:
        assert pool.allocate(64).tolist() == list(range(64))
        threading.Timer(0.2, lambda: pool.free([5])).start()
        assert pool.allocate(1).tolist() == [5], "rows that others free are waited for too"
        pool.timeout = 0.1
        check_refused(lambda: pool.allocate(1), "memory", "0 of 64 are free")


def test_a_large_pool_may_take_long_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as rows become ready, nobody who has named no time gives up."""
    with opened(4) as pool:
        ready = iter((0, 1, 1, 2, 2, 3, 3, 3))
        monkeypatch.setattr(kv.HostPool, "progress", property(lambda _: (next(ready), 4)))
        pool.timeout = 0.0
        slots = pool.allocate(4)
        for seconds in (0.0, None):
            check_refused(lambda s=seconds: pool.allocate(1, timeout=s), "memory", "0 of 4")
        assert list(ready) == [], "three times rows had come, the fourth none"
        pool.free(slots)


def test_the_smallest_run_that_fits_is_taken() -> None:
    pool = opened(20, chunk=20)
    slots = pool.allocate(20)
    pool.free(slots[1:3])
    pool.free(slots[5:10])
    pool.free(slots[12:15])
    assert pool.allocate(3).tolist() == [12, 13, 14]
    assert pool.allocate(2).tolist() == [1, 2]
    assert pool.allocate(2).tolist() == [5, 6]
    pool.free([0, 1])
    assert pool.allocate(5).tolist() == [0, 1, 7, 8, 9], "the largest run first, sorted"
    assert pool.free_blocks == 0
    assert pool.allocate(0).tolist() == []


def test_runs_do_not_leave_a_chunk() -> None:
    pool = opened(12, chunk=4)
    slots = pool.allocate(12)
    pool.free([2, 3, 4, 5, 6])
    assert pool.allocate(3).tolist() == [4, 5, 6], "2 to 6 are in two chunks"
    pool.free(slots[8:])
    assert pool.allocate(6).tolist() == [2, 3, 8, 9, 10, 11]


def test_what_is_not_allocated_is_refused() -> None:
    pool = opened(8)
    slots = pool.allocate(4)
    check_refused(lambda: pool.free([8]), "invalid", "slot 8 is not one of the host pool's 8")
    check_refused(lambda: pool.free([-1]), "invalid", "slot -1")
    check_refused(lambda: pool.free([5]), "invalid", "slot 5 is not allocated")
    check_refused(lambda: pool.free([0, 1, 0]), "invalid", "slot 0 is listed twice")
    check_refused(lambda: pool.free([0.5]), "invalid", "whole numbers")
    check_refused(lambda: pool.free(np.zeros((2, 2), np.int64)), "invalid", "2 dimensions")
    check_refused(lambda: pool.row(7), "invalid", "not allocated")
    assert pool.free_blocks == 4, "a refused call frees nothing"
    pool.free(slots[:2])
    check_refused(lambda: pool.free(slots), "invalid", "slot 0 is not allocated")
    pool.free(slots[2:])
    assert pool.free_blocks == 8
    for wrong in (-1, 1 << 63, "many"):
        check_refused(lambda wrong=wrong: pool.allocate(wrong), "invalid", "count")
    check_refused(lambda: kv.HostPool(0, 4, backend="host"), "invalid", "0 bytes")
    check_refused(lambda: kv.HostPool(64, 4, backend="host", device=0), "unsupported", "device")
    check_refused(lambda: kv.HostPool(64, 4, backend="none"), "invalid", "unknown backend")


def test_exhaustion_tells_the_numbers() -> None:
    pool = opened(10, block_bytes=128)
    pool.allocate(7)
    check_refused(
        lambda: pool.allocate(4, timeout=0), "memory", "4 rows of 128 bytes", "3 of 10 are free"
    )
    check_refused(lambda: pool.allocate(11, timeout=60), "memory", "cannot allocate 11 rows")
    assert pool.free_blocks == 3


def test_an_allocation_waits_for_what_others_free() -> None:
    pool = opened(4)
    slots = pool.allocate(4)
    later = threading.Timer(0.1, lambda: pool.free(slots[1:3]))
    later.start()
    assert pool.allocate(2, timeout=20).tolist() == [1, 2]
    later.join()
    began = time.monotonic()
    check_refused(lambda: pool.allocate(1, timeout=0.1), "memory", "0 of 4 are free")
    assert time.monotonic() - began >= 0.1


def test_a_pool_grows_and_shrinks_by_chunks(places: Places) -> None:
    with places.pool(64, 6, chunk_bytes=4 * 64) as pool:
        pool.wait_ready(10)
        first = pool.allocate(6)
        pool.row(5)[:] = 5
        pool.grow(7)
        pool.wait_ready(10)
        assert pool.progress == (13, 13)
        assert pool.blocks == 13
        second = pool.allocate(7)
        assert second.tolist() == list(range(6, 13))
        for slot in second:
            pool.row(slot)[:] = slot
        assert (pool.row(5) == 5).all()
        assert pool.shrink() == 13, "everything is in use"
        pool.free(second[1:])  # 10 to 12 are the last chunk; 6 is still taken
        assert pool.shrink(11) == 13, "less would be left than wanted"
        assert pool.shrink() == 10
        assert pool.blocks == 10
        pool.free(first)
        pool.free(second[:1])
        assert pool.shrink(5) == 6
        assert pool.shrink() == 0
        check_refused(lambda: pool.allocate(1), "memory", "0 of 0")
        pool.grow(3)
        assert pool.allocate(3, timeout=10).tolist() == [0, 1, 2]


def test_a_shrunk_row_lives_as_long_as_its_view() -> None:
    pool = opened(4, chunk=4)
    slots = pool.allocate(4)
    row = pool.row(2)
    row[:] = 7
    pool.free(slots)
    assert pool.shrink() == 0
    assert (row == 7).all()


def test_rows_become_usable_chunk_by_chunk() -> None:
    pool = kv.HostPool(1 << 20, 64, backend="host", chunk_bytes=1 << 20)
    slots = pool.allocate(1, timeout=20)
    ready, total = pool.progress
    assert 1 <= ready <= total == 64
    assert slots.tolist() == [0]
    rest = pool.allocate(63, timeout=20)
    assert rest.tolist() == list(range(1, 64))
    pool.wait_ready(0)
    pool.close()


def test_close_waits_for_no_registration_of_a_large_pool() -> None:
    _, available = _core.host_memory()
    blocks, options = available // 4 >> 20, {"backend": "host", "chunk_bytes": 1 << 20}
    pool = kv.HostPool(1 << 20, blocks, **options)
    check_refused(lambda: pool.wait_ready(0), "timeout", f"of {blocks} rows")
    pool.close()
    ended = threading.Thread(target=lambda: kv.HostPool(1 << 20, blocks, **options))
    ended.start()  # dropped at once
    ended.join(20)
    assert not ended.is_alive()


def test_a_pool_that_memory_cannot_hold_is_refused_at_once() -> None:
    total, _ = _core.host_memory()
    blocks = (total >> 20) + 1
    with pytest.raises(offcore.Error) as raised:
        kv.HostPool(1 << 20, blocks, backend="host")
    assert raised.value.code == "memory"
    assert f"{blocks} more rows of {1 << 20} bytes" in str(raised.value)
    assert f"of the {total} bytes that this process may use" in str(raised.value)
    with opened(4) as pool:
        check_refused(lambda: pool.grow(1 << 31), "memory", f"{1 << 31} more rows", f"{total}")
        assert pool.progress == (4, 4)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1 << 30)), max_size=30), st.integers(1, 9)
)
def test_any_order_of_calls(calls: list[tuple[int, int]], chunk: int) -> None:
    pool = opened(24, chunk=chunk)
    free = set(range(24))
    held: list[np.ndarray] = []
    for count, pick in calls:
        if pick % 3 == 0 and held:
            slots = held.pop(pick % len(held))
            pool.free(random.Random(pick).sample(slots.tolist(), len(slots)))
            free |= set(slots.tolist())
            continue
        if count > len(free):
            check_refused(
                lambda count=count: pool.allocate(count, timeout=0),
                "memory",
                f"{len(free)} of 24",
            )
            continue
        slots = pool.allocate(count)
        assert sorted(set(slots.tolist())) == slots.tolist()
        assert set(slots.tolist()) <= free
        longest = longest_run(free, chunk)
        if count <= longest:
            assert count == 0 or slots[-1] - slots[0] == count - 1, "one run would have held them"
        free -= set(slots.tolist())
        held.append(slots)
    assert pool.free_blocks == len(free)
    pool.close()


def longest_run(slots: set[int], chunk: int) -> int:
    best = run = 0
    for slot in range(24):
        run = 0 if slot not in slots else 1 if slot % chunk == 0 else run + 1
        best = max(best, run)
    return best


def test_many_threads_share_a_pool() -> None:
    pool = opened(64, chunk=8)
    owner = np.full(64, -1)
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(150):
            slots = pool.allocate(rng.randint(1, 12), timeout=20)
            if (owner[slots] != -1).any():
                wrong.append(f"{slots} are taken")
            owner[slots] = number
            for slot in slots:
                pool.row(slot)[:8] = number
            if any((pool.row(slot)[:8] != number).any() for slot in slots):
                wrong.append(f"{slots} were written")
            owner[slots] = -1
            pool.free(slots)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert pool.free_blocks == 64


def test_a_dropped_pool_is_gone() -> None:
    pool = opened(4)
    row = pool.row(pool.allocate(1)[0])
    del pool
    gc.collect()
    row[:] = 1
    assert row.sum() == 64


def within(seconds: float, work: Callable[[], object], times: int = 1) -> bool:
    """Whether so many threads that do it at once end in time."""
    threads = [threading.Thread(target=work, daemon=True) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return not any(thread.is_alive() for thread in threads)


def test_rows_come_back_while_the_thread_begins() -> None:
    """The thread that registers may find nothing to do, and the next one begin at once."""

    def work() -> None:
        for _ in range(20):
            pool = kv.HostPool(4096, 4, backend="host")
            pool.shrink(0)
            pool.grow(4)
            assert pool.allocate(4, timeout=10).tolist() == [0, 1, 2, 3]
            pool.close()

    assert within(30, work)


def test_several_close_a_pool_at_once() -> None:
    for _ in range(20):
        pool = kv.HostPool(64, 1000, backend="host", chunk_bytes=64)
        assert within(30, pool.close, times=4)
        check_refused(lambda pool=pool: pool.allocate(1), "cancelled", "closed")


@pytest.mark.parametrize("start", [0, 100])
def test_rows_of_memory_that_others_have_allocated(places: Places, start: int) -> None:
    """At a stride, whether it begins with a page or not; what lies between is never touched."""
    region = mmap.mmap(-1, 1 << 20)
    whole = np.frombuffer(region, np.uint8)
    whole[:] = 7
    memory = whole[start : start + 39 * 1000 + 600]
    with places.pool(600, 40, memory=memory, row_stride=1000, chunk_bytes=9000) as pool:
        slots = pool.allocate(40, timeout=20)
        assert slots.tolist() == list(range(40)), "the owner's own numbers"
        for slot in slots:
            pool.row(slot)[:] = slot + 100
        check_refused(lambda: pool.grow(1), "invalid", "has 40 rows of 600 bytes, not 41")
    rows = np.full((40, 1000), 7, np.uint8)
    rows[:, :600] = np.arange(100, 140)[:, None]
    assert (memory == rows.reshape(-1)[: memory.size]).all()
    assert (whole[:start] == 7).all()
    assert (whole[start + memory.size :] == 7).all()
    for options, says in (
        ({"memory": memory, "row_stride": 599}, "cannot lie 599 bytes apart"),
        ({"memory": memory[::2]}, "memory is not contiguous"),
        ({"memory": bytes(4000)}, "memory is read-only"),
        ({"row_stride": 1000}, "row_stride needs memory="),
    ):
        check_refused(lambda o=options: places.pool(600, 2, **o), "invalid", says)


def test_rows_of_several_pieces_of_memory(places: Places) -> None:
    """Each at a stride of its own, in the order of the list. Random jobs leave every byte of the
    cache, the rows and what lies between them as plain copies would."""
    rng = np.random.default_rng(5)
    cache = places.tensor(0, (3, 40, 200))
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    kept = [np.frombuffer(mmap.mmap(-1, 64 << 10), np.uint8) for _ in range(3)]
    # Rows of the second lie at the end of its page; those of the third between each other.
    parts: list[Any] = [(kept[0][:9000], 1000), kept[1][4096 - 600 :][:3600]]
    parts += [(kept[2], 8192)]
    steps = [(kept[0], 0, 1000, 9), (kept[1], 3496, 600, 6), (kept[2], 0, 8192, 8)]
    wanted = [part.copy() for part in kept]

    def row(images: list[np.ndarray], slot: int) -> np.ndarray:
        for (_, at, step, count), image in zip(steps, images, strict=True):
            if slot < count:
                return image[at + slot * step :][:600]
            slot -= count
        raise AssertionError

    with places.pool(600, 20, memory=parts, chunk_bytes=9000) as pool:
        pool.grow(3)
        check_refused(lambda: pool.grow(1), "invalid", "has 23 rows of 600 bytes, not 24")
        slots = pool.allocate(23, timeout=20)
        assert slots.tolist() == list(range(23))
        for slot in slots:
            pool.row(slot)[:] = row(wanted, slot)[:] = rng.integers(0, 256, 600, np.uint8)
        image = rng.integers(0, 256, 1 << 18, np.uint8)
        places.write(image)
        blocks_of = image[: 3 * 40 * 200].reshape(3, 40, 200)
        with kv.BlockTransfer(layout, pool) as transfer:
            for _ in range(60):
                count = int(rng.integers(1, 23))
                start = int(rng.integers(0, 24 - count))
                run = rng.random() < 0.5
                named = np.arange(start, start + count) if run else rng.permutation(23)[:count]
                blocks = rng.permutation(40)[:count] if rng.random() < 0.5 else named + 10
                if rng.random() < 0.5:
                    transfer.load(blocks, named, by_layer=int(rng.integers(0, 3))).wait(10)
                    for block, slot in zip(blocks, named, strict=True):
                        blocks_of[:, block] = row(wanted, slot).reshape(3, 200)
                else:
                    transfer.store(blocks, named).wait(10)
                    for block, slot in zip(blocks, named, strict=True):
                        row(wanted, slot)[:] = blocks_of[:, block].reshape(-1)
        assert (places.read() == image).all()
        assert all((part == other).all() for part, other in zip(kept, wanted, strict=True))
    if places.backend != "cuda":  # whose pages are registered once
        both = [(kept[2], 8192), (kept[2][4096:], 8192)]
        with places.pool(600, 16, memory=both) as pool:
            for slot in pool.allocate(16, timeout=20):
                pool.row(slot)[:] = slot
        assert kept[2].reshape(8, 2, 4096)[:, :, 0].T.ravel().tolist() == list(range(16))
    for memory, says in (
        ([kept[0][:600], kept[1][:599]], "599 bytes, fewer than a row of 600"),
        ([(kept[0], 599)], "cannot lie 599 bytes apart"),
        ([kept[0], kept[1][::2]], "memory[1] is not contiguous"),
        ([kept[0][:6000], kept[0][5999:]], "two parts of the memory overlap"),
        ([(kept[0], 8192), (kept[0][599:], 8192)], "two parts of the memory overlap"),
        ([], "the memory has 0 rows"),
    ):
        check_refused(lambda m=memory: places.pool(600, 2, memory=m), "invalid", says)
