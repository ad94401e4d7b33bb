"""What batch_copy takes, what it refuses, and what its results tell."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import BatchPolicy, batch_copy, batch_program
from oracles import Bytes, noise


def parts(array: Bytes, starts: list[int], nbytes: int) -> list[Bytes]:
    return [array[start : start + nbytes] for start in starts]


def test_arrays_in_host_memory_by_software_engines() -> None:
    src, dst = noise(1000, 1), np.zeros(1000, np.uint8)
    result = batch_copy(parts(dst, [500, 0, 90], 50), parts(src, [3, 600, 400], 50)).wait()
    wanted = np.zeros(1000, np.uint8)
    wanted[500:550], wanted[0:50], wanted[90:140] = src[3:53], src[600:650], src[400:450]
    assert np.array_equal(dst, wanted)
    assert (result.backend, result.machine, result.path) == ("host", "host-1", "engines")
    assert (result.own_copy, result.calls["plain"]) == ("none", 0)
    assert str(result).startswith("BatchResult(backend='host'")


@pytest.mark.parametrize("form", ["list", "array", "mixed"])
def test_addresses(form: str) -> None:
    src, dst = noise(300, 2), np.zeros(300, np.uint8)
    dsts = [dst.ctypes.data + at for at in (0, 100, 200)]
    srcs = [src.ctypes.data + at for at in (200, 0, 100)]
    given: tuple[Any, Any, Any] = dsts, srcs, [100, 50, 0]
    if form == "array":
        given = np.array(dsts), np.array(srcs, np.uint64), np.array([100, 50, 0])
    if form == "mixed":
        given = dsts, parts(src, [200, 0, 100], 100), (100, 50, 0)
    result = batch_copy(*given, backend="host").wait()
    wanted = np.zeros(300, np.uint8)
    wanted[:100], wanted[100:150] = src[200:300], src[0:50]
    assert np.array_equal(dst, wanted)
    assert (result.entries, result.empty, result.bytes) == (3, 1, 150)


def test_other_kinds_of_arrays() -> None:
    src, dst = np.arange(6, dtype=np.float32), bytearray(24)
    batch_copy([dst], [src]).wait()
    assert np.array_equal(np.frombuffer(dst, np.float32), src)
    batch_copy([memoryview(dst)[:8]], [b"12345678"]).wait()
    assert bytes(dst[:8]) == b"12345678"


@pytest.mark.needs("torch")
def test_torch_tensors() -> None:
    import torch

    src = torch.arange(100, dtype=torch.bfloat16).reshape(10, 10)
    dst = torch.zeros_like(src)
    batch_copy([dst[9 - row] for row in range(10)], [src[row] for row in range(10)]).wait()
    assert torch.equal(dst, src.flip(0))
    addresses = torch.tensor([dst[row].data_ptr() for row in range(10)])
    sources = torch.tensor([src[row].data_ptr() for row in range(10)])
    batch_copy(addresses, sources, torch.full((10,), 20), backend="host").wait()
    assert torch.equal(dst, src)
    with pytest.raises(offcore.Error, match="entry 0: its source is not contiguous"):
        batch_copy([dst], [src.t()])


def test_places_stand_for_memory_of_a_simulated_machine() -> None:
    """No bytes, and gigabytes of them."""
    dsts = [(0, i << 21) for i in range(1024)]
    srcs = [("host", i << 22) for i in range(1024)]
    result = batch_copy(dsts, srcs, [1 << 20] * 1024).wait()
    assert (result.backend, result.machine, result.ranks) == ("sim", "mi300x-8", 1)
    assert result.bytes == 1 << 30
    link_us = (1 << 30) / 64e3
    assert link_us < result.time_us < 1.2 * link_us


def scatter(count: int, nbytes: int) -> tuple[list[Any], list[Any], list[int]]:
    rng = np.random.default_rng(0)
    slots = rng.permutation(4 * count)[:count], rng.permutation(4 * count)[:count]
    dsts, srcs = ([int(slot) * 2 * nbytes for slot in side] for side in slots)
    return [(0, at) for at in dsts], [("host", at) for at in srcs], [nbytes] * count


def test_back_to_back_beats_fan_out_for_small_batches_and_loses_for_large() -> None:
    """DMA-Latte, section 6: the fan-out is the runtime's to choose."""

    def time_us(count: int, nbytes: int, **policy: Any) -> float:
        return batch_copy(*scatter(count, nbytes), policy=BatchPolicy(**policy)).wait().time_us

    assert time_us(4, 512, engines=1) < time_us(4, 512, engines=2)
    assert time_us(256, 1 << 18, engines=1) > time_us(256, 1 << 18, engines=2)
    one = batch_copy(*scatter(256, 1 << 14)).wait()
    several = batch_copy(*scatter(256, 1 << 15)).wait()
    assert [(r.variant, r.engines, r.syncs) for r in (one, several)] == [
        ("b2b", 1, 1),
        ("pcpy", 2, 2),
    ]
    phases = one.phases
    parts_us = [phases.control_us, phases.schedule_us, phases.copy_us, phases.sync_us]
    assert sum(parts_us) == pytest.approx(one.time_us, abs=0.01)
    assert all(part > 0 for part in parts_us)


def test_overlapped_copies_beat_copies_one_by_one() -> None:
    """Section 4.4: fenced, as a loop of single copies is, each one waits for the last."""
    entries = scatter(256, 8192)
    one_by_one = batch_copy(*entries, policy=BatchPolicy(sub_batch=1)).wait()
    assert batch_copy(*entries).wait().copy_us < one_by_one.copy_us / 2


def test_a_broadcast_is_inferred_where_the_machine_has_one() -> None:
    srcs = [(0, 0)] * 4
    dsts = [(rank, 4096) for rank in (1, 2, 3, 4)]
    result = batch_copy(dsts, srcs, [1 << 12] * 4).wait()
    assert (result.ranks, result.bcst, result.commands) == (5, 4, 2)
    forced = batch_copy(dsts, srcs, [1 << 12] * 4, policy=BatchPolicy(bcst=False)).wait()
    assert (forced.bcst, forced.commands) == (0, 4)
    assert result.time_us < forced.time_us


def test_the_program_can_be_seen() -> None:
    entries = scatter(3, 64)
    program = batch_program(*entries, machine="h200-2")
    offcore.verify(program)
    assert str(program).startswith("program batch machine=h200-2 ranks=1 variant=b2b")
    assert program.counts().copies == 3
    handle = batch_copy(*entries, machine="h200-2")
    assert str(handle.program) == str(program)


def test_threads() -> None:
    wrong = []

    def work(index: int) -> None:
        for turn in range(20):
            src, dst = noise(4096, index, turn), np.zeros(4096, np.uint8)
            starts = list(range(0, 4096, 64))
            handles = [
                batch_copy(parts(dst, starts[k::2], 64), parts(src, starts[k::2], 64))
                for k in range(2)
            ]
            for handle in handles:
                handle.wait(timeout=20)
            if not np.array_equal(src, dst):
                wrong.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


A = np.zeros(64, np.uint8)
B = np.zeros(64, np.uint8)
FROZEN = np.zeros(64, np.uint8)
FROZEN.flags.writeable = False
ON_GPU = SimpleNamespace(
    is_conj=lambda: False,
    is_neg=lambda: False,
    data_ptr=lambda: 4096,
    is_cuda=True,
    is_cpu=False,
    get_device=lambda: 0,
    is_contiguous=lambda: True,
    nbytes=64,
    itemsize=1,
    dtype="uint8",
)

REFUSALS: list[tuple[tuple[Any, ...], dict[str, Any], str, str]] = [
    (([A], []), {}, "invalid", "1 destinations, but 0 sources"),
    (([A], [B[:8]]), {}, "invalid", "entry 0: its destination has 64 bytes, its source 8"),
    (([A, A[:8]], [B, B[::8]]), {}, "invalid", "entry 1: its source is not contiguous"),
    (([FROZEN], [A]), {}, "invalid", "entry 0: its destination is read-only"),
    (([A[:8]], [FROZEN[:8]]), {"policy": BatchPolicy(swap=True)}, "invalid", "its source is read-"),
    (([A], [B], [65]), {}, "invalid", "entry 0: its destination has 64 bytes, fewer than its size"),
    (([A], [B], [-1]), {}, "invalid", "entry 0: its size is -1"),
    (([A], [B], [1, 2]), {}, "invalid", "1 entries, but 2 sizes"),
    (([A], [B], ["x"]), {}, "invalid", "sizes must be whole numbers"),
    (([4096], [8192]), {}, "invalid", "addresses and places need sizes"),
    (([-1], [8192], [8]), {}, "invalid", "destinations: an address is not a 64-bit integer"),
    (([0], [8192], [8]), {"backend": "host"}, "invalid", "entry 0: its destination is null"),
    ((A, B), {}, "invalid", "pass a list of arrays, or addresses and sizes"),
    (("ab", "cd"), {}, "invalid", "pass a list of arrays, not a str"),
    (([None], [A]), {}, "invalid", "entry 0: its destination is a NoneType"),
    (([A[:32], A[31:60]], [B[:32], B[:29]]), {}, "invalid", "entries 0 and 1: the destination"),
    (([A[:32], B[8:16]], [B[:32], A[40:48]]), {}, "invalid", "the source of entry 0 and the dest"),
    (([A[:32]], [A[16:48]]), {}, "invalid", "entry 0: its destination and its source overlap by"),
    (([A], [B]), {"kind": "up"}, "invalid", "unknown kind 'up'"),
    (([A], [B]), {"backend": "cloud"}, "invalid", "batches have no backend 'cloud'"),
    (([A], [B]), {"policy": BatchPolicy(swap=(3,))}, "invalid", "no entry 3 to swap"),
    (([A], [B]), {"policy": BatchPolicy(engines=9)}, "invalid", "engines is 9; host-1 has only 2"),
    (
        ([A], [B]),
        {"policy": BatchPolicy(sub_batch=-2)},
        "invalid",
        "holds an invalid number or choice",
    ),
    (([ON_GPU], [A]), {"backend": "host"}, "invalid", "host cannot reach the memory of GPUs"),
    (([(0, 0)], [A], [8]), {}, "invalid", "must both have memory, or neither"),
    (([(0, -1)], [(0, 8)], [8]), {}, "invalid", "entry 0: its destination is not a place"),
    (([(9, 0)], [(0, 0)], [8]), {}, "invalid", "mi300x-8 has 1 to 8 ranks, not 10"),
    (([(0, 0)], [(0, 8)], [8]), {"backend": "host"}, "invalid", "need backend sim, not host"),
]


@pytest.mark.parametrize(("given", "options", "code", "text"), REFUSALS, ids=lambda v: str(v)[:30])
def test_refusals(given: tuple, options: dict, code: str, text: str) -> None:
    before = A.copy()
    with pytest.raises(offcore.Error) as refused:
        batch_copy(*given, **options)
    assert text in str(refused.value)
    assert refused.value.code == code
    assert np.array_equal(A, before)
    with pytest.raises(offcore.Error, match=r".") as again:
        batch_program(*given, **options)
    assert again.value.code == code


def test_the_environment_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFCORE_BACKEND", "sim")
    src, dst = noise(64, 1), np.zeros(64, np.uint8)
    assert batch_copy([dst], [src]).wait().backend == "sim"
    assert np.array_equal(src, dst)
