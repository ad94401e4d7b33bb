"""Rings: offsets, room, the ring's end, and producers that race."""

import threading

import numpy as np
import pytest

import offcore
from offcore import _core
from offcore.tools.sdma.text import ADD64, POLL


def fences(*values: int, address: int = 64) -> list[int]:
    encoder = _core.SdmaEncoder()
    for value in values:
        encoder.fence(address, value)
    return encoder.dwords


def ring_with_engine(nbytes: int, **options: int) -> tuple[_core.SdmaRing, _core.SdmaEngine]:
    memory = _core.SdmaMemory()
    memory.add(0, np.zeros(4096, np.uint8))
    ring = _core.SdmaRing(nbytes, options.pop("offset", 0))
    return ring, _core.SdmaEngine(ring, memory, **options)


def test_offsets_grow_and_the_end_is_padded() -> None:
    """Byte offsets; packets of 7 dwords leave 4 of 256 bytes at the ring's end."""
    ring, engine = ring_with_engine(256)
    encoder = _core.SdmaEncoder()
    encoder.copy(0, 1024, 64)
    for number in range(1, 30):
        before = ring.wptr
        assert ring.try_submit(encoder.dwords)
        pad = 4 if before % 256 == 252 else 0
        assert ring.wptr == ring.doorbell == before + pad + 28
        assert engine.run() == "idle"
        assert ring.rptr == ring.wptr
        assert engine.counts["moves"] == number
    assert engine.counts["laps"] == ring.wptr // 256
    assert engine.counts["laps"] > 2
    assert engine.counts["packets"] == 29 + engine.counts["laps"]  # a nop each


@pytest.mark.parametrize("offset", [0, 4, 252, (1 << 40) + 128, (1 << 63) + 8])
def test_room(offset: int) -> None:
    """A ring is full one dword before it would look empty."""
    ring, engine = ring_with_engine(256, offset=offset)
    assert ring.free_bytes == 252
    taken = 0
    while ring.try_submit(fences(1)):
        taken += 1
    assert taken == 15
    assert ring.wptr - ring.rptr < 256
    engine.run(2)  # one may be the nop at the end
    assert ring.free_bytes >= 16
    assert engine.run() == "idle"
    assert engine.counts["fences"] == taken
    assert ring.rptr == ring.wptr == ring.doorbell


def test_a_full_ring_times_out_and_says_how_far_it_came() -> None:
    ring, engine = ring_with_engine(256)
    with pytest.raises(offcore.Error, match=r"48 of 80 dwords are submitted") as refused:
        ring.submit(fences(*range(20)), timeout_s=0.05)
    assert refused.value.code == "timeout"
    assert engine.run() == "idle"
    assert engine.counts["fences"] == 12


@pytest.mark.parametrize("dwords", [[0xFF], [5, 0, 0], [*fences(1), 1]])
def test_no_packets(dwords: list[int]) -> None:
    ring, _ = ring_with_engine(256)
    with pytest.raises(offcore.Error, match="no whole packet") as refused:
        ring.submit(dwords)
    assert refused.value.code == "invalid"


@pytest.mark.parametrize("nbytes", [0, 128, 260, 300, 1000])
def test_sizes_that_no_ring_has(nbytes: int) -> None:
    with pytest.raises(offcore.Error, match="power of two") as refused:
        _core.SdmaRing(nbytes)
    assert refused.value.code == "invalid"


def test_a_packet_larger_than_the_ring() -> None:
    ring, _ = ring_with_engine(256)
    with pytest.raises(offcore.Error, match="too large"):
        ring.submit([40 << 16] + [0] * 40)
    assert ring.wptr == 0


def test_producers_race() -> None:
    """Each producer adds to one word and stores its rising number into another: nothing is lost,
    nothing overtakes within a producer, and no packet is torn."""
    producers, rounds = 6, 400
    cells = np.zeros(4096, np.uint8)
    words = cells.view(np.uint64)
    memory = _core.SdmaMemory()
    memory.add(0, cells)
    ring = _core.SdmaRing(1024)
    engine = _core.SdmaEngine(ring, memory, seed=5)
    failures: list[BaseException] = []

    def produce(mine: int) -> None:
        try:
            for number in range(1, rounds + 1):
                encoder = _core.SdmaEncoder()
                before = {"memory": 1, "dst": 256 + 64 * mine, "value": number - 1}
                encoder.add("poll", {**POLL, **before, "func": 3})  # 3: equal
                encoder.add("atomic", {**ADD64, "dst": 0, "value": 1})
                encoder.fence(256 + 64 * mine, number)
                ring.submit(encoder.dwords, timeout_s=30.0)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=produce, args=(mine,)) for mine in range(producers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or ring.rptr != ring.doorbell:
        # A poll that does not pass at once would mean that something overtook something.
        assert engine.run() == "idle", engine.fault
    for thread in threads:
        thread.join()
    assert failures == []
    assert words[0] == producers * rounds
    assert [words[32 + 8 * mine] for mine in range(producers)] == [rounds] * producers
    assert engine.counts["laps"] > 10
