"""The emulated engine: what it does to memory, in which order, and what stops it."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offcore
from offcore import _core
from offcore.tools.sdma.text import ADD64
from oracles import Bytes, noise

BASE = 0x7000_0000_0000
SIZE = 1 << 16


class Lab:
    """Memory of SIZE bytes at BASE, and engines on rings of their own."""

    def __init__(self, engines: int = 1, ring_bytes: int = 4096, seed: int = 0) -> None:
        self.bytes = noise(SIZE, seed, 77)
        self.memory = _core.SdmaMemory()
        self.memory.add(BASE, self.bytes)
        self.rings = [_core.SdmaRing(ring_bytes) for _ in range(engines)]
        self.engines = [
            _core.SdmaEngine(ring, self.memory, seed=seed and seed + i, now_ns=123_456_789)
            for i, ring in enumerate(self.rings)
        ]

    def run(self, encoder: _core.SdmaEncoder) -> str:
        self.rings[0].submit(encoder.dwords)
        return str(self.engines[0].run())

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.engines[0].counts)

    def word(self, at: int) -> int:
        return int(self.bytes[at : at + 4].view(np.uint32)[0])

    def word64(self, at: int) -> int:
        return int(self.bytes[at : at + 8].view(np.uint64)[0])


def apply(expected: Bytes, kind: str, fields: dict[str, int]) -> None:
    """What a packet does, written with slices."""
    n = fields["bytes"]
    dst, src = fields["dst"] - BASE, fields["src"] - BASE
    one, other = expected[dst : dst + n].copy(), expected[src : src + n].copy()
    expected[dst : dst + n] = other
    if kind == "swap":
        expected[src : src + n] = one
    if kind == "broadcast":
        second = fields["dst2"] - BASE
        expected[second : second + n] = other


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 2, 63, 64, 4097, 9000])
def test_copies(seed: int, nbytes: int) -> None:
    lab = Lab(seed=seed)
    encoder = _core.SdmaEncoder()
    encoder.copy(BASE + 10_001, BASE + 3, nbytes)
    encoder.broadcast([BASE + 20_033, BASE + 30_017], BASE + 3, nbytes)
    encoder.swap(BASE + 40_000, BASE + 50_048, nbytes)
    expected = lab.bytes.copy()
    for kind, fields, _ in _core.sdma_unpack(encoder.dwords):
        apply(expected, kind, fields)
    assert lab.run(encoder) == "idle"
    assert np.array_equal(lab.bytes, expected)
    assert lab.counts["moves"] == 3
    assert lab.counts["bytes"] == 5 * nbytes


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("at", "nbytes", "rows", "dst_step", "src_step"),
    [(0, 16, 9, 64, 128), (3, 5, 7, 16, 12), (2, 6, 100, 8, 16), (0, 4, 1000, 4, 4)],
)
def test_rectangles_move_rows(
    seed: int, at: int, nbytes: int, rows: int, dst_step: int, src_step: int
) -> None:
    lab = Lab(seed=seed)
    encoder = _core.SdmaEncoder()
    encoder.strided(BASE + 30_000 + at, BASE + at, nbytes, rows, dst_step, src_step)
    expected = lab.bytes.copy()
    for row in range(rows):
        to, what = 30_000 + at + row * dst_step, at + row * src_step
        expected[to : to + nbytes] = lab.bytes[what : what + nbytes]
    assert lab.run(encoder) == "idle"
    assert np.array_equal(lab.bytes, expected)
    assert [kind for kind, _, _ in _core.sdma_unpack(encoder.dwords)] == ["rect"]


def test_slices_and_offsets() -> None:
    """A window of 2 rows and 3 slices, with offsets in every direction, of 4-byte elements."""
    lab = Lab()
    fields = {
        **{"element": 2, "width": 3, "height": 2, "depth": 3},
        **{"src": BASE, "src_x": 1, "src_y": 2, "src_z": 1, "src_pitch": 8, "src_slice": 64},
        **{"dst": BASE + 8192, "dst_x": 2, "dst_y": 1, "dst_z": 2},
        **{"dst_pitch": 16, "dst_slice": 256},
    }
    cells = lab.bytes.view(np.uint32)
    expected = cells.copy()
    for z in range(3):
        for y in range(2):
            for x in range(3):
                to = 2048 + (2 + x) + (1 + y) * 16 + (2 + z) * 256
                expected[to] = cells[(1 + x) + (2 + y) * 8 + (1 + z) * 64]
    lab.rings[0].submit(_core.sdma_pack("rect", fields))
    assert lab.engines[0].run() == "idle"
    assert np.array_equal(cells, expected)


def test_words_time_and_interrupts() -> None:
    lab = Lab()
    lab.bytes[64:72].view(np.uint64)[0] = (1 << 64) - 2
    encoder = _core.SdmaEncoder()
    encoder.fence(BASE + 4, 0xDEADBEEF)
    encoder.add("atomic", {**ADD64, "dst": BASE + 64, "value": 5})
    encoder.timestamp(BASE + 96)
    encoder.add("trap", {"value": 7})
    dwords = [
        *encoder.dwords,
        *_core.sdma_pack("fill", {"dst": BASE + 128, "value": 0xABCD, "bytes": 12}),
    ]
    lab.rings[0].submit(dwords)
    assert lab.engines[0].run() == "idle"
    assert lab.word(4) == 0xDEADBEEF
    assert lab.word64(64) == 3
    assert lab.word64(96) == 12_345_678  # 100 MHz
    assert [lab.word(at) for at in (128, 132, 136)] == [0xABCD] * 3
    assert lab.counts | {"packets": 5, "fences": 1, "atomics": 1, "traps": 1} == lab.counts


@pytest.mark.parametrize(
    ("func", "word", "passes"),
    [
        (0, 0, True),
        (1, 4, True), (1, 5, False),
        (2, 5, True), (2, 6, False),
        (3, 5, True), (3, 6, False),
        (4, 6, True), (4, 5, False),
        (5, 5, True), (5, 0xFFFFFFFF, True), (5, 4, False),  # unsigned: no cycle
        (6, 6, True), (6, 5, False),
    ],
)  # fmt: skip
def test_polls_compare(func: int, word: int, passes: bool) -> None:
    lab = Lab()
    lab.bytes[0:4].view(np.uint32)[0] = word
    poll = {"func": func, "memory": 1, "dst": BASE, "value": 5, "mask": 0xFFFFFFFF, "retry": 0xFFF}
    lab.rings[0].submit(_core.sdma_pack("poll", poll))
    assert lab.engines[0].run() == ("idle" if passes else "parked")


def test_a_poll_parks_until_its_word_comes_and_looks_at_masked_bits() -> None:
    lab = Lab()
    lab.bytes[:8] = 0
    poll = {"func": 3, "memory": 1, "dst": BASE, "value": 0x30, "mask": 0xF0, "retry": 0xFFF}
    lab.rings[0].submit(_core.sdma_pack("poll", poll))
    encoder = _core.SdmaEncoder()
    encoder.fence(BASE + 4, 1)
    assert lab.run(encoder) == "parked"
    assert lab.engines[0].run() == "parked"
    assert lab.rings[0].rptr == 0
    lab.bytes[0] = 0x3F
    assert lab.engines[0].run() == "idle"
    assert lab.word(4) == 1
    assert lab.counts["parks"] >= 2


def test_what_is_in_flight_lands_while_a_poll_waits() -> None:
    lab = Lab(seed=9)
    lab.bytes[:4] = 0
    encoder = _core.SdmaEncoder()
    encoder.copy(BASE + 2048, BASE + 1024, 512)
    encoder.poll(BASE, 1)
    assert lab.run(encoder) == "parked"
    assert np.array_equal(lab.bytes[2048:2560], lab.bytes[1024:1536])


def chain(ordered: bool) -> _core.SdmaEncoder:
    """A to B, and B to C: right only if the second waits for the first."""
    encoder = _core.SdmaEncoder()
    encoder.copy(BASE + 4096, BASE, 256)
    if ordered:
        encoder.fence(BASE + 32768, 1)
    encoder.copy(BASE + 8192, BASE + 4096, 256)
    return encoder


def test_a_missing_fence_is_caught() -> None:
    """With the fence every order gives the same; without it some of them do not."""
    right = {True: 0, False: 0}
    for ordered in right:
        for seed in range(1, 41):
            lab = Lab(seed=seed)
            before = lab.bytes[:256].copy()
            assert lab.run(chain(ordered)) == "idle"
            right[ordered] += np.array_equal(lab.bytes[8192:8448], before)
    assert right[True] == 40
    assert 0 < right[False] < 40


def test_copies_overtake_each_other_up_to_a_fence() -> None:
    overtaken = []
    for seed in (0, 1, 2):
        lab = Lab(seed=seed)
        encoder = _core.SdmaEncoder()
        for i in range(16):
            encoder.copy(BASE + 32768 + 64 * i, BASE + 64 * i, 64)
        lab.run(encoder)
        assert np.array_equal(lab.bytes[32768 : 32768 + 1024], lab.bytes[:1024])
        overtaken.append(lab.counts["overtaken"])
    assert overtaken[0] == 0
    assert min(overtaken[1:]) > 0


MEMORY = f"at {BASE + SIZE - 1:#x} are not in the engine's memory"
POLL = {"func": 5, "memory": 1, "dst": BASE, "value": 1, "mask": 1, "retry": 0xFFF}
RECT = {"src": BASE, "dst": BASE + 4096, "src_pitch": 8, "dst_pitch": 8, "element": 2}
RECT |= {"src_slice": 1, "dst_slice": 1, "width": 1, "height": 2, "depth": 1}
FORBIDDEN = [
    ("copy", {"dst": BASE, "src": BASE + SIZE - 1, "bytes": 2}, f"COPY_LINEAR: 2 bytes {MEMORY}"),
    ("copy", {"dst": BASE - 1, "src": BASE, "bytes": 1}, "are not in the engine's memory"),
    ("copy", {"dst": BASE, "src": BASE, "bytes": 1 << 30}, "are not in the engine's memory"),
    ("copy", {"dst": (1 << 64) - 1, "src": BASE, "bytes": 64}, "are not in the engine's memory"),
    ("broadcast", {"dst": BASE, "dst2": BASE + 48, "src": BASE, "bytes": 4}, "agree modulo 32"),
    ("swap", {"dst": BASE + 32, "src": BASE + 64, "bytes": 4}, "is not a multiple of 64"),
    ("swap", {"dst": BASE, "src": BASE + 72, "bytes": 4}, "is not a multiple of 64"),
    ("fence", {"dst": BASE + 2, "value": 1}, "is not a multiple of 4"),
    ("timestamp", {"dst": BASE + 16}, "is not a multiple of 32"),
    ("atomic", {"dst": BASE + 4, "operation": 47, "value": 1}, "is not a multiple of 8"),
    ("atomic", {"dst": BASE, "operation": 15, "value": 1}, "operation 15 is not emulated"),
    ("poll", POLL | {"dst": BASE + 1}, "is not a multiple of 4"),
    ("poll", POLL | {"memory": 0}, "registers are not emulated"),
    ("poll", POLL | {"retry": 100}, "only polls that wait for ever"),
    ("poll", POLL | {"func": 7}, "function 7"),
    ("fill", {"dst": BASE, "value": 1, "bytes": 6}, "not whole dwords"),
    ("rect", RECT | {"element": 5}, "at most 16 bytes"),
    ("rect", RECT | {"width": 9}, "longer than its pitch"),
    ("rect", RECT | {"src": BASE + 2}, "whole dwords"),
    ("rect", RECT | {"element": 0, "dst_pitch": 9}, "whole dwords"),
    ("rect", RECT | {"height": 1 << 14}, "are not in the engine's memory"),
]


@pytest.mark.parametrize(("kind", "fields", "told"), FORBIDDEN)
def test_what_stops_an_engine(kind: str, fields: dict[str, int], told: str) -> None:
    """It names the dword, nothing has moved, and it stays stopped."""
    lab = Lab()
    before = lab.bytes.copy()
    lab.rings[0].submit([0, 0, *_core.sdma_pack(kind, fields)])
    for _ in range(2):
        assert lab.engines[0].run() == "faulted"
        assert lab.engines[0].fault.startswith("dword 2 (byte 8): ")
        assert told in lab.engines[0].fault
    assert np.array_equal(lab.bytes, before)


@pytest.mark.parametrize(
    ("dwords", "doorbell", "told"),
    [
        ([0xFF], 4, "operation 255"),
        ([1, 0, 0], 12, "has 7 dwords, and 3 are left"),
        ([0], 6, "the doorbell is 6 bytes ahead"),
        ([0], 4096, "the doorbell is 4096 bytes ahead, and the ring has 256"),
        ([0] * 62 + [5, 0], 256, "across the ring's end"),
    ],
)
def test_rings_that_stop_an_engine(dwords: list[int], doorbell: int, told: str) -> None:
    lab = Lab(ring_bytes=256)
    lab.rings[0].poke(dwords, doorbell)
    assert lab.engines[0].run() == "faulted"
    assert told in lab.engines[0].fault


ALLOWED = [
    ("copy", {"dst": BASE, "src": BASE + 4096, "bytes": 100}),
    ("broadcast", {"dst": BASE, "dst2": BASE + 2048, "src": BASE + 4096, "bytes": 100}),
    ("swap", {"dst": BASE, "src": BASE + 4096, "bytes": 100}),
    ("rect", RECT),
    ("fill", {"dst": BASE, "value": 1, "bytes": 64}),
    ("fence", {"dst": BASE, "value": 1}),
    ("atomic", {"dst": BASE, "operation": 47, "value": 1}),
    ("timestamp", {"dst": BASE}),
    ("trap", {"value": 1}),
    ("poll", POLL),
]


def fuzzed(rng: random.Random) -> list[int]:
    """Noise, or packets, many with a field or some bits of them changed."""
    if rng.random() < 0.2:
        return [rng.getrandbits(32) for _ in range(rng.randint(1, 24))]
    dwords: list[int] = []
    for _ in range(rng.randint(1, 4)):
        kind, fields, *_ = rng.choice([*ALLOWED, *ALLOWED, *ALLOWED, *FORBIDDEN])
        fields = {
            name: value if rng.random() < 0.9 else rng.choice([0, 1, 4, 64, BASE, BASE + 4096])
            for name, value in fields.items()
        }
        try:
            dwords += _core.sdma_pack(kind, fields)
        except offcore.Error:
            dwords.append(rng.getrandbits(32))
    for _ in range(rng.choice([0, 0, 0, 0, 1, 3])):
        dwords[rng.randrange(len(dwords))] ^= 1 << rng.randrange(32)
    return dwords


def assert_fuzzed_dwords_are_survived(cases: int, seed: int) -> None:
    rng = random.Random(seed)
    ends = {"idle": 0, "parked": 0, "faulted": 0}
    guard = noise(SIZE * 2, seed)
    arena = guard.copy()
    for case in range(cases):
        memory = _core.SdmaMemory()
        memory.add(BASE, arena[SIZE // 2 : SIZE // 2 + 8192])
        ring = _core.SdmaRing(256)
        engine = _core.SdmaEngine(ring, memory, seed=case, now_ns=0)
        dwords = fuzzed(rng)
        ring.poke(dwords, 4 * min(len(dwords), 64) if rng.random() < 0.95 else rng.getrandbits(64))
        ends[engine.run()] += 1
        assert (engine.state == "faulted") == engine.fault.startswith("dword ")
        decoded, told = [], ""
        try:
            decoded = _core.sdma_unpack(dwords)
        except offcore.Error as failure:
            told = str(failure) or "nothing"
        assert not told or "dword " in told
        assert len(decoded) <= len(dwords)
    assert np.array_equal(arena[: SIZE // 2], guard[: SIZE // 2])
    assert np.array_equal(arena[SIZE // 2 + 8192 :], guard[SIZE // 2 + 8192 :])
    assert min(ends.values()) > cases // 100, ends


def test_fuzzed_dwords_crash_nothing() -> None:
    assert_fuzzed_dwords_are_survived(10_000, 1)


@pytest.mark.long
def test_many_fuzzed_dwords_crash_nothing() -> None:
    assert_fuzzed_dwords_are_survived(100_000, random.randrange(1 << 30))


@given(st.integers(1, 1 << 30), st.integers(1, 4), st.sampled_from([256, 512, 1024]))
def test_random_work_on_several_engines(seed: int, engines: int, ring_bytes: int) -> None:
    """Stages of copies that do not touch each other, on engines that wait for each other's words:
    whatever order they run in, every byte is what it has to be. Rings are smaller than the work."""
    rng = random.Random(seed)
    lab = Lab(engines, ring_bytes, seed)
    words, data = 0, 4096  # the first bytes are flags: one word for each engine
    lab.bytes[words : words + 64 * engines] = 0
    expected = lab.bytes.copy()
    queues: list[list[int]] = [[] for _ in range(engines)]
    for stage in range(1, rng.randint(3, 8)):
        encoders = [_core.SdmaEncoder() for _ in range(engines)]
        places = list(range(data, SIZE - 256, 256))
        rng.shuffle(places)
        for _ in range(rng.randint(1, 40)):
            encoder = rng.choice(encoders)
            nbytes = rng.randint(1, 256)
            one, two, three = (BASE + places.pop() for _ in range(3))
            kind = rng.choice(["copy", "broadcast", "swap"])
            fields = {"dst": one, "dst2": three, "src": two, "bytes": nbytes}
            if kind == "copy":
                encoder.copy(one, two, nbytes)
            elif kind == "swap":
                encoder.swap(one, two, nbytes)
            else:
                encoder.broadcast([one, three], two, nbytes)
            apply(expected, kind, fields)
        for mine, encoder in enumerate(encoders):
            encoder.fence(BASE + words + 64 * mine, stage)
            for other in range(engines):
                encoder.poll(BASE + words + 64 * other, stage)
            queues[mine] += encoder.dwords
            expected[words + 64 * mine] = stage
    work(lab, queues, rng)
    assert np.array_equal(lab.bytes, expected)
    assert sum(engine.counts["moves"] for engine in lab.engines) > 0
    assert all(engine.fault == "" for engine in lab.engines)


def work(lab: Lab, queues: list[list[int]], rng: random.Random) -> None:
    """Feeds rings as they have room and lets random engines go on for a few packets."""
    for _ in range(1_000_000):
        mine = rng.randrange(len(queues))
        if left := queues[mine]:
            part = lab.rings[mine].part_of(left)
            if lab.rings[mine].try_submit(left[:part]):
                queues[mine] = left[part:]
        lab.engines[mine].run(rng.randint(1, 9))
        if not any(queues) and all(engine.run() == "idle" for engine in lab.engines):
            return
    raise AssertionError([engine.fault or engine.state for engine in lab.engines])


def test_memory_ranges() -> None:
    memory = _core.SdmaMemory()
    memory.add(4096, np.zeros(4096, np.uint8))
    memory.add(8192, np.zeros(10, np.uint8))
    memory.add(4095, np.zeros(1, np.uint8))
    for address, nbytes in [(4095, 1), (4000, 200), (8191, 1), (0, 1 << 16), (8201, 1), (100, 0)]:
        with pytest.raises(offcore.Error, match=r"overlap|are not a valid range"):
            memory.add(address, np.zeros(nbytes, np.uint8))
