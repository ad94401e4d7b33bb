"""batch_copy on every backend: random entries against slices of bytes."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import Target

import offcore
from oracles import Bytes, noise

ROOM = 8192
KINDS = ("h2d", "d2h", "d2d", "h2h")


class Memory:
    """Memory of GPUs and of the host, which the test reads and writes by copies."""

    def __init__(self, target: Target, gpus: int = 1) -> None:
        self.target = target
        self.comm = target.communicator(gpus)
        self.window = self.comm.window(ROOM)
        self.host = self.comm.host_array(ROOM)
        self.gpus = gpus

    def close(self) -> None:
        self.comm.close()

    def address(self, home: int) -> int:
        return self.host.ctypes.data if home < 0 else self.window.address(home)

    def fill(self, *seed: int) -> dict[int, Bytes]:
        contents = {home: noise(ROOM, *seed, home + 1) for home in range(-1, self.gpus)}
        self.host[:] = contents[-1]
        for rank in range(self.gpus):
            self.window.write(contents[rank], rank=rank)
        return {home: data.copy() for home, data in contents.items()}

    def look(self) -> dict[int, Bytes]:
        contents = {-1: self.host.copy()}
        for rank in range(self.gpus):
            contents[rank] = np.empty(ROOM, np.uint8)
            self.window.read(contents[rank], rank=rank)
        return contents

    def copy(self, entries: list[Any], **options: Any) -> offcore.BatchHandle:
        columns = [
            [self.address(home) + at for (home, at), _, _ in entries],
            [self.address(home) + at for _, (home, at), _ in entries],
            [nbytes for *_, nbytes in entries],
        ]
        where = {"backend": self.target.backend, "timeout": 20.0}
        if self.target.backend != "cuda":
            where["machine"] = self.target.name(1)
        with self.target.driver():
            return offcore.batch_copy(*columns, **{**where, **options})


@pytest.fixture(scope="module")
def memory(target: Target) -> Any:
    if not target.batches:
        pytest.skip(f"batches have no backend {target.backend}")
    memory = Memory(target)
    yield memory
    memory.close()


def random_entries(rng: random.Random, homes: tuple[int, int], count: int) -> list[Any]:
    """Entries that are not in each other's way; many continue an earlier one, or its steps."""
    entries: list[Any] = []
    taken: dict[int, list[tuple[int, int, bool]]] = {homes[0]: [], homes[1]: []}

    def clear(home: int, begin: int, end: int, writes: bool) -> bool:
        return not any(b < end and begin < e and (w or writes) for b, e, w in taken[home])

    for _ in range(count):
        nbytes = rng.choice([0, 1, 7, 64, 64, 64, 300])
        dst, src = rng.randrange(ROOM), rng.randrange(ROOM)
        if entries and rng.random() < 0.8:
            (_, dst), (_, src), nbytes = entries[-1]
            steps = rng.choice([(nbytes, nbytes), (2 * nbytes, nbytes), (100, 300)])
            dst, src = dst + steps[0], src + steps[1]
        if max(dst, src) + nbytes > ROOM:
            continue
        if nbytes and not (
            clear(homes[0], dst, dst + nbytes, True) and clear(homes[1], src, src + nbytes, False)
        ):
            continue
        if homes[0] == homes[1] and max(dst, src) < min(dst, src) + nbytes:
            continue
        if nbytes:
            taken[homes[0]].append((dst, dst + nbytes, True))
            taken[homes[1]].append((src, src + nbytes, False))
        entries.append(((homes[0], dst), (homes[1], src), nbytes))
    rng.shuffle(entries)
    return entries


def expected(before: dict[int, Bytes], entries: list[Any], swaps: bool = False) -> dict[int, Bytes]:
    after = {home: data.copy() for home, data in before.items()}
    for (dst_home, dst), (src_home, src), nbytes in entries:
        after[dst_home][dst : dst + nbytes] = before[src_home][src : src + nbytes]
        if swaps:
            after[src_home][src : src + nbytes] = before[dst_home][dst : dst + nbytes]
    return after


def assert_same(found: dict[int, Bytes], wanted: dict[int, Bytes]) -> None:
    for home, data in wanted.items():
        assert np.array_equal(found[home], data), home


POLICIES = (
    {},
    {"merge": False, "fold": False},
    {"fold_rows_min": 2},
    {"sub_batch": 1},
    {"engines": 2},
    {"b2b_bytes_max": 0, "timed": False},
    {"own_copy": "sm"},
)


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS), st.integers(0, 1 << 30), st.integers(0, 60), st.sampled_from(POLICIES)
)
def test_random_entries(memory: Memory, kind: str, seed: int, count: int, policy: dict) -> None:
    if kind == "h2h" and memory.target.backend == "cuda":
        kind = "d2d"
    homes = (0 if kind[2] == "d" else -1, 0 if kind[0] == "d" else -1)
    rng = random.Random(seed)
    entries = random_entries(rng, homes, count)
    before = memory.fill(seed, count)
    if policy.get("own_copy") and memory.target.backend != "cuda":
        policy = {}
    given_policy = offcore.BatchPolicy(**policy)
    result = memory.copy(entries, kind=kind, policy=given_policy).wait()
    assert_same(memory.look(), expected(before, entries))
    filled = [entry for entry in entries if entry[2]]
    assert (result.entries, result.entries - result.empty) == (len(entries), len(filled))
    assert result.bytes == sum(nbytes for *_, nbytes in entries)
    assert result.commands <= len(filled)
    assert (result.path == "none") == (not filled)
    assert result.backend == memory.target.backend


@pytest.mark.parametrize("kind", ["h2d", "d2d"])
def test_swaps_where_asked_for(memory: Memory, kind: str) -> None:
    source = -1 if kind == "h2d" else 0
    entries = [((0, 512 * i), (source, 4096 + 512 * i + 64), 192) for i in range(6)]
    before = memory.fill(3)
    policy = offcore.BatchPolicy(swap=True)
    result = memory.copy(entries, kind=kind, policy=policy).wait()
    assert_same(memory.look(), expected(before, entries, swaps=True))
    assert result.swaps == 6
    some = offcore.BatchPolicy(swap=(1, 4))
    before = memory.fill(4)
    result = memory.copy(entries, kind=kind, policy=some).wait()
    wanted = expected(before, [entries[1], entries[4]], swaps=True)
    others = [entry for i, entry in enumerate(entries) if i not in (1, 4)]
    wanted_others = expected(before, others)
    for (home, at), _, nbytes in others:
        wanted[home][at : at + nbytes] = wanted_others[home][at : at + nbytes]
    assert_same(memory.look(), wanted)
    assert result.swaps == 2


def test_thousands_of_entries(memory: Memory) -> None:
    rng = random.Random(5)
    places = rng.sample(range(ROOM), ROOM)
    entries = [((0, dst), (-1, src), 1) for dst, src in zip(places, range(ROOM), strict=True)]
    before = memory.fill(6)
    result = memory.copy(entries[:6000], kind="h2d").wait()
    assert_same(memory.look(), expected(before, entries[:6000]))
    assert result.entries == 6000
    assert result.plan_us > 0
    assert result.submit_us > 0


def test_nothing_to_copy(memory: Memory) -> None:
    before = memory.fill(7)
    for entries in ([], [((0, 5), (-1, 9), 0)]):
        handle = memory.copy(entries, kind="h2d")
        result = handle.wait()
        assert handle.done()
        assert (result.entries, result.commands, result.path) == (len(entries), 0, "none")
    assert_same(memory.look(), before)


def test_the_copies_time(memory: Memory) -> None:
    entries = [((0, 0), (-1, 0), 4096)]
    result = memory.copy(entries, kind="h2d").wait()
    assert result.copy_us is not None
    assert 0 < result.copy_us <= result.time_us
    untimed = memory.copy(entries, kind="h2d", policy=offcore.BatchPolicy(timed=False)).wait()
    assert (untimed.copy_us is None) == (memory.target.backend != "sim")
    assert untimed.as_dict()["bytes"] == 4096


def test_entries_of_another_kind(memory: Memory) -> None:
    if memory.target.backend != "cuda":
        pytest.skip("arrays in host memory are of any kind")
    entries = [((0, 0), (-1, 0), 8), ((-1, 50), (0, 50), 8)]
    with pytest.raises(offcore.Error, match="entry 1 is d2h, not h2d") as refused:
        memory.copy(entries, kind="h2d")
    assert refused.value.code == "invalid"
