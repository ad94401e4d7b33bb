"""What a libcuda does, stated as tests: memory, copies, words, events."""

import ctypes
import itertools
import mmap
import threading
import time
from ctypes import byref, c_uint64
from typing import Any

import cuda_driver as cu
from cuda_case import isolated, run_case
from cuda_driver import MIB, WAIT, WRITE, Driver, mem_op

PATTERN = bytes(range(251)) * 40


def settle(d: Driver, stream: int, limit_s: float = 20) -> int:
    """The stream's state once it is through; NOT_READY where it does not get there."""
    end = time.monotonic() + limit_s
    while (code := d.code("cuStreamQuery", stream)) == cu.NOT_READY and time.monotonic() < end:
        time.sleep(0.0002)
    return code


def pinned_words(d: Driver, bytes_: int = 4096) -> tuple[Any, int]:
    """Registered host memory as 32-bit words, and its address."""
    words = (ctypes.c_uint32 * (bytes_ // 4)).from_buffer(mmap.mmap(-1, bytes_))
    address = ctypes.addressof(words)
    d("cuMemHostRegister", address, bytes_, 0)
    assert d.get(c_uint64, "cuMemHostGetDevicePointer", address, 0) == address
    return words, address


@isolated()
def test_calls_need_initialisation_and_a_context(d: Driver) -> None:
    assert d.code("cuDeviceGetCount", byref(c_uint64())) == cu.NOT_INITIALIZED
    d("cuInit", 0)
    assert d.code("cuStreamCreateWithPriority", byref(c_uint64()), 1, 0) == cu.INVALID_CONTEXT
    assert d.code("cuMemGetInfo", byref(c_uint64()), byref(c_uint64())) == cu.INVALID_CONTEXT
    assert d.code("cuCtxPopCurrent", byref(c_uint64())) == cu.INVALID_CONTEXT
    assert d.code("cuDevicePrimaryCtxRelease", 0) == cu.INVALID_CONTEXT
    assert d.code("cuDeviceGet", byref(c_uint64()), 1000) == cu.INVALID_DEVICE
    d.start()
    stream = d.stream()
    assert d.code("cuStreamSynchronize", stream) == 0


@isolated()
def test_symbols_are_found_by_name_and_version(d: Driver) -> None:
    assert d.look_up("cuMemcpyBatchAsync", 12070)[1:] == (2, None)  # known, but not yet then
    assert d.look_up("cuNoSuchThing")[1:] == (1, None)
    assert d.look_up("cuMemcpy2DAsync_v2")[2] is None  # by base names only
    old, new = (d.look_up("cuMemcpyBatchAsync", v)[2] for v in (12080, 13000))
    assert old is not None
    assert new not in (None, old)
    assert d.look_up("cuStreamGetCtx", 9020)[2] != d.look_up("cuStreamGetCtx", 12050)[2]


@isolated()
def test_virtual_memory_is_strict(d: Driver) -> None:
    d.start()
    s = 2 * MIB
    handle, room = d.create(2 * s), d.reserve(4 * s)
    assert d.code("cuMemMap", room, s, s, handle, 0) == cu.INVALID_VALUE  # an offset
    assert d.code("cuMemMap", room + 4096, s, 0, handle, 0) == cu.INVALID_VALUE
    d("cuMemMap", room, s, 0, handle, 0)
    assert d.code("cuMemMap", room, s, 0, handle, 0) != 0
    assert d.set_access(room, 2 * s, [0]) == cu.INVALID_VALUE  # half of it is not mapped
    d("cuMemMap", room + s, s, 0, handle, 0)
    assert d.set_access(room, 2 * s, [0]) == 0
    assert d.code("cuMemUnmap", room, s // 2) == cu.INVALID_VALUE
    assert d.code("cuMemUnmap", room, 3 * s) == cu.INVALID_VALUE
    assert d.code("cuMemAddressFree", room, 4 * s) != 0  # still mapped
    d("cuMemRelease", handle)
    d.put(room, PATTERN)  # the mappings keep the memory
    assert d.read(room + s, len(PATTERN)) == PATTERN  # and are aliases of it
    d("cuMemUnmap", room, 2 * s)
    d("cuMemAddressFree", room, 4 * s)
    assert d.code("cuMemCreate", byref(c_uint64()), 4096, byref(cu.Prop(1, 1, 1, 0)), 0) != 0
    private = d.create(s, handle_types=0)
    assert d.code("cuMemExportToShareableHandle", byref(c_uint64()), private, 1, 0) != 0


@isolated()
def test_one_strided_copy_reaches_every_mapping(d: Driver) -> None:
    d.start()
    s, stream = 2 * MIB, d.stream()
    window = d.map([d.create(s) for _ in range(4)], s)
    source = d.create(s)
    alias = d.map([source] * 3, s)
    d.put(alias + 512, PATTERN)
    assert d.copy_2d(stream, window + s, s, alias + 512, s, len(PATTERN), 3) == 0
    assert d.copy_2d(stream, window + 65536, s, alias + 512, 2000, 2000, 4) == 0  # chunks
    assert settle(d, stream) == 0
    for rank in range(1, 4):
        assert d.read(window + rank * s, len(PATTERN)) == PATTERN
    for rank in range(4):
        chunk = PATTERN[rank * 2000 : (rank + 1) * 2000]
        assert d.read(window + rank * s + 65536, 2000) == chunk


@isolated()
def test_rows_are_not_written_into_several_allocations(d: Driver) -> None:
    d.start()
    found = sorted(d.get(c_uint64, "cuMemAlloc", 4 * MIB) for _ in range(8))
    step, a = min((b - a, a) for a, b in itertools.pairwise(found))
    inside, stream = d.memory(4 * MIB), d.stream()
    d.put(a + step, PATTERN)
    start, size = (d.get(c_uint64, "cuPointerGetAttribute", k, a + step + 9) for k in (11, 12))
    assert (start, size) == (a + step, 4 * MIB)
    assert d.copy_2d(stream, a, step, inside, 4096, 512, 2) == cu.INVALID_VALUE
    assert d.copy_2d(stream, inside, 4096, a, step, 512, 2) == 0  # they are read
    assert d.copy_2d(stream, a, MIB, a + step, 512, 512, 4) == 0  # one allocation's rows
    one = cu.Copy2D(width=100, height=1)  # from a base in another allocation
    one.src.type = one.dst.type = cu.UNIFIED
    one.src.device, one.src.pitch = inside + 4096, 512
    one.dst.device, one.dst.pitch, one.dst.y = a, step, 1
    assert settle(d, stream) == 0
    assert d.code("cuMemcpy2DAsync", byref(one), stream) == 0
    assert settle(d, stream) == 0
    assert d.read(inside + 4096, 512) == PATTERN[:512]
    assert d.read(a + 3 * MIB, 512) == PATTERN[1536:2048]
    assert d.read(a + step, 100) == PATTERN[:100]
    for start in found:
        d("cuMemFree", start)
    assert d.code("cuMemFree", inside) != 0


@isolated()
def test_pitches(d: Driver) -> None:
    d.start()
    a, b, stream = d.memory(), d.memory(), d.stream()
    d.put(a, PATTERN)
    assert d.copy_2d(stream, b, 8, a, 64, 9, 2) == cu.INVALID_VALUE
    assert d.copy_2d(stream, b, 64, a, 8, 9, 2) == cu.INVALID_VALUE
    assert d.copy_2d(stream, b, 1 << 31, a, 64, 9, 1) == cu.INVALID_VALUE
    assert d.copy_2d(stream, b, (1 << 31) - 1, a, 64, 9, 1) == 0
    assert d.copy_2d(stream, b, 64, a, 0, 9, 2) == 0  # dense, and no broadcast
    assert settle(d, stream) == 0
    assert (d.read(b, 9), d.read(b + 64, 9)) == (PATTERN[:9], PATTERN[9:18])


@isolated()
def test_copies_in_three_dimensions(d: Driver) -> None:
    d.start()
    a, b, stream = d.memory(), d.memory(), d.stream()
    d.put(a, PATTERN)
    copy = cu.Copy3D(width=10, height=3, depth=2)
    copy.src.type = copy.dst.type = cu.UNIFIED
    copy.src.device, copy.src.pitch, copy.src.height = a, 20, 5
    copy.dst.device, copy.dst.pitch, copy.dst.height = b, 32, 4
    copy.src.x, copy.src.y = 4, 1
    assert d.code("cuMemcpy3DAsync", byref(copy), stream) == 0
    assert settle(d, stream) == 0
    for z in range(2):
        for y in range(3):
            start = z * 100 + (y + 1) * 20 + 4
            assert d.read(b + z * 128 + y * 32, 10) == PATTERN[start : start + 10]


@isolated()
def test_batches(d: Driver) -> None:
    d.start()
    a, b, stream = d.memory(), d.memory(), d.stream()
    d.put(a, PATTERN)
    assert d.batch(0, [(b, a, 8)]) == cu.INVALID_VALUE  # the default stream
    assert d.batch(1, [(b, a, 8)]) == cu.INVALID_VALUE
    assert d.batch(stream, [(b, a, 8)], order=0) == cu.INVALID_VALUE
    copies = [(b + 100 * i, a + 50 * i, 50) for i in range(100)]
    assert d.batch(stream, copies) == 0
    assert settle(d, stream) == 0
    for i in range(100):
        assert d.read(b + 100 * i, 50) == PATTERN[50 * i : 50 * i + 50]


@isolated()
def test_waits_compare_cyclically_and_streams_wait_for_the_host(d: Driver) -> None:
    d.start()
    words, address = pinned_words(d)
    stream, out = d.stream(), d.memory()
    script = [  # condition, awaited, a word that does not do, one that does
        (cu.GEQ, 5, 4, 6),
        (cu.GEQ, 2, 0xFFFFFFF0, 2),  # 0xFFFFFFF0 lies 18 behind
        (cu.GEQ, 0xFFFFFFF0, 0xFFFFFFEF, 3),
        (cu.EQ, 7, 8, 7),
        (cu.AND, 4, 3, 12),
    ]
    for step, (condition, awaited, before, after) in enumerate(script):
        words[0] = before
        d("cuStreamWaitValue32", stream, address, awaited, condition)
        d("cuStreamWriteValue32", stream, out, step + 1, 0)
        assert settle(d, stream, 0.03) == cu.NOT_READY
        words[0] = after
        assert settle(d, stream) == 0
        assert d.word(out) == step + 1


@isolated()
def test_words_must_be_reachable_and_aligned(d: Driver) -> None:
    d.start()
    stream, memory, reserved = d.stream(), d.memory(), d.reserve(2 * MIB)
    for name in ("cuStreamWaitValue32", "cuStreamWriteValue32"):
        assert d.code(name, stream, memory + 2, 0, 0) == cu.INVALID_VALUE
        assert d.code(name, stream, reserved, 0, 0) == cu.INVALID_VALUE
        assert d.code(name, stream, memory, 0, 8) == cu.INVALID_VALUE
    assert d.code("cuStreamWriteValue32", stream, memory, 0, 1) in (1, 801)  # without barrier
    assert d.mem_ops(stream, *[mem_op(WRITE, memory, 1)] * 255) == 0
    assert d.mem_ops(stream, *[mem_op(WRITE, memory, 1)] * 256) == cu.INVALID_VALUE
    assert settle(d, stream) == 0


@isolated()
def test_streams_are_concurrent_and_in_order(d: Driver) -> None:
    d.start()
    flags, data = d.memory(), d.memory()
    streams = [d.stream() for _ in range(24)]
    for round_ in range(1, 6):  # a ring of streams, each waiting for the one before
        for i, stream in enumerate(streams):
            ops = [mem_op(WAIT, flags + 64 * i, round_)] if i else []
            assert d.mem_ops(stream, *ops, mem_op(WRITE, data + 4 * i, round_)) == 0
            assert d.mem_ops(stream, mem_op(WRITE, flags + 64 * (i + 1), round_)) == 0
        for stream in streams:
            assert settle(d, stream) == 0
        expected = b"".join(round_.to_bytes(4, "little") for _ in streams)
        assert d.read(data, 4 * len(streams)) == expected


@isolated()
def test_data_is_there_when_its_flag_is(d: Driver) -> None:
    d.start()
    s, rounds = 2 * MIB, 60
    a, b, flag = d.memory(s), d.memory(s), d.memory()
    out = d.memory(s)
    sender, receiver = d.stream(), d.stream()
    for i in range(1, rounds):
        d("cuMemsetD8Async", a, i, 100_000, sender)
        assert d.copy_2d(sender, b, 50_000, a, 50_000, 50_000, 2) == 0
        d("cuStreamWriteValue32", sender, flag, i, 0)
        d("cuStreamWaitValue32", receiver, flag, i, 0)
        d("cuMemcpyAsync", out, b, 100_000, receiver)
        d("cuStreamWriteValue32", receiver, flag + 64, i, 0)
        d("cuStreamWaitValue32", sender, flag + 64, i, 0)
        if i % 10 == 0:
            assert settle(d, receiver) == 0
            assert d.read(out, 100_000) == bytes([i]) * 100_000
    assert settle(d, sender) == 0


@isolated()
def test_events(d: Driver) -> None:
    d.start()
    words, address = pinned_words(d)
    stream, other, flag = d.stream(), d.stream(), d.memory()
    start, end, untimed = d.event(), d.event(), d.event(2)
    ms = ctypes.c_float()
    assert d.code("cuEventQuery", start) == 0  # stands for no work yet
    assert d.code("cuEventElapsedTime", byref(ms), start, end) == cu.INVALID_HANDLE
    d("cuEventRecord", start, stream)
    d("cuStreamWaitValue32", stream, address, 1, 0)
    for event in (end, untimed):
        d("cuEventRecord", event, stream)
    d("cuStreamWaitEvent", other, end, 0)
    d("cuStreamWriteValue32", other, flag, 9, 0)
    assert d.code("cuEventQuery", end) == cu.NOT_READY
    assert d.code("cuEventElapsedTime", byref(ms), start, end) == cu.NOT_READY
    assert settle(d, other, 0.05) == cu.NOT_READY
    words[0] = 1
    d("cuEventSynchronize", end)
    assert settle(d, other) == 0
    assert d.word(flag) == 9
    d("cuEventElapsedTime", byref(ms), start, end)
    assert 40 < ms.value < 30_000
    assert d.code("cuEventElapsedTime", byref(ms), start, untimed) == cu.INVALID_HANDLE


@isolated()
def test_the_default_stream_waits_for_blocking_streams_only(d: Driver) -> None:
    d.start()
    words, address = pinned_words(d)
    memory, blocking, free = d.memory(), d.stream(non_blocking=False), d.stream()
    d("cuStreamWaitValue32", free, address, 2, 0)
    assert d.read(memory, 4) == bytes(4)  # although the non-blocking stream hangs
    d("cuStreamWaitValue32", blocking, address, 1, 0)
    d("cuStreamWriteValue32", blocking, memory, 5, 0)
    d("cuMemsetD32Async", memory + 64, 3, 1, 0)
    assert settle(d, 0, 0.05) == cu.NOT_READY
    words[0] = 1
    assert d.read(memory, 4) == (5).to_bytes(4, "little")
    assert settle(d, free, 0.02) == cu.NOT_READY
    words[0] = 2
    assert settle(d, free) == 0


@isolated()
def test_each_thread_has_a_default_stream_of_its_own(d: Driver) -> None:
    d.start()
    memory, (words, address) = d.memory(), pinned_words(d)
    d("cuStreamWaitValue32", cu.OF_THREAD, address, 1, 0)
    assert settle(d, cu.OF_THREAD, 0.05) == cu.NOT_READY
    told: list[int] = []

    def other() -> None:
        d.start()
        told.append(settle(d, cu.OF_THREAD))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert told == [0]
    d("cuMemsetD32Async", memory, 3, 1, 0)
    assert settle(d, 0, 0.05) == cu.NOT_READY  # the common one waits for those of all threads
    words[0] = 1
    assert settle(d, 0) == 0
    assert d.code("cuStreamDestroy", cu.OF_THREAD) == cu.INVALID_HANDLE


@isolated()
def test_registered_memory(d: Driver) -> None:
    d.start()
    words, address = pinned_words(d)
    assert d.code("cuMemHostRegister", address, 4096, 0) == 712
    assert d.code("cuMemHostUnregister", address + 64) != 0
    assert d.code("cuMemHostGetDevicePointer", byref(c_uint64()), 1 << 40, 0) == cu.INVALID_VALUE
    device, stream = d.memory(), d.stream()
    kind = ctypes.c_int()
    for pointer, expected in ((address, cu.HOST), (device, cu.DEVICE)):
        d("cuPointerGetAttribute", byref(kind), 2, pointer)
        assert kind.value == expected
    assert d.code("cuPointerGetAttribute", byref(kind), 2, d.reserve(2 * MIB)) != 0
    words[0], words[1] = 0x1234, 0x5678
    d("cuMemcpyAsync", device, address, 8, stream)
    d("cuMemcpyAsync", address + 8, device, 8, stream)
    assert settle(d, stream) == 0
    assert list(words[2:4]) == [0x1234, 0x5678]
    d("cuMemHostUnregister", address)
    assert d.code("cuMemHostUnregister", address) == 713


@isolated()
def test_a_wild_strided_copy_fails_the_context_for_good(d: Driver) -> None:
    d.start()
    s = 2 * MIB
    a, stream, other = d.memory(s), d.stream(), d.stream()
    room = d.reserve(4 * s)
    d("cuMemMap", room, s, 0, d.create(s), 0)
    assert d.set_access(room, s, [0]) == 0
    assert d.copy_2d(stream, room, s, a, 64, 64, 3) == 0  # rows 1 and 2 are mapped nowhere
    assert settle(d, stream) == cu.ILLEGAL_ADDRESS
    assert d.code("cuMemsetD8Async", a, 0, 8, other) == cu.ILLEGAL_ADDRESS
    assert d.code("cuMemcpyDtoH", ctypes.create_string_buffer(8), a, 8) == cu.ILLEGAL_ADDRESS


if __name__ == "__main__":
    run_case(globals())
