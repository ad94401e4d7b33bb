"""The machine that the stand-in plays: several devices and processes, faults, adverse timing."""

import ctypes
import os
import re
import subprocess
import threading
import time
from ctypes import byref, c_int, c_size_t, c_uint64
from pathlib import Path

import cuda_driver as cu
from cuda_case import isolated, run_case, start_peer
from cuda_driver import MIB, WRITE, Driver, mem_op
from cuda_library import fake_cuda_library
from test_fake_cuda import PATTERN, pinned_words, settle


def live(d: Driver, what: str) -> int:
    function = d.library.fakecuda_live
    function.restype = c_uint64
    return function(what.encode())


def done(d: Driver, what: str) -> int:
    function = d.library.fakecuda_done
    function.restype = c_uint64
    return function(what.encode())


def calls(d: Driver, name: str) -> int:
    function = d.library.fakecuda_calls
    function.restype = c_uint64
    return function(name.encode())


def attribute(d: Driver, number: int, device: int = 0) -> int:
    value = c_int(-1)
    d("cuDeviceGetAttribute", byref(value), number, device)
    return value.value


def test_only_the_driver_and_the_fakes_own_names_are_exported() -> None:
    library = fake_cuda_library()
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r" [A-Z] (\S+)", table)
    assert "cuMemcpyBatchAsync_v2" in names
    assert [name for name in names if not re.match(r"(cu[A-Z]|fakecuda_)", name)] == []


@isolated(DEVICES=8)
def test_eight_devices_in_a_ring(d: Driver) -> None:
    s, ranks, rounds = 2 * MIB, range(8), 5
    d("cuInit", 0)
    contexts = [d.get(c_uint64, "cuDevicePrimaryCtxRetain", r) for r in ranks]
    d("cuCtxSetCurrent", contexts[0])
    handles = [d.create(s, r) for r in ranks]
    window = d.map(handles * 2, s, ranks)
    streams = []
    for r in ranks:
        d("cuCtxSetCurrent", contexts[r])
        streams.append(d.stream())
        d.put(window + r * s, bytes([r + 1]) * 4096)
    for round_ in range(1, rounds + 1):
        for r, stream in enumerate(streams):
            d("cuCtxSetCurrent", contexts[r])
            own = window + r * s
            peers, flags = own + s + (1 + r) * 8192, own + s + MIB + 64 * r
            # The own chunk to every peer, then the round's number to every peer.
            for peer in range(7):
                d("cuMemcpyAsync", peers + peer * s, own, 4096, stream)
            ops = [mem_op(WRITE, flags + peer * s, round_) for peer in range(7)]
            ops += [mem_op(cu.WAIT, own + MIB + 64 * q, round_) for q in ranks if q != r]
            assert d.mem_ops(stream, *ops) == 0
    for r, stream in enumerate(streams):
        d("cuCtxSetCurrent", contexts[r])
        assert settle(d, stream) == 0
        for q in ranks:
            if q != r:
                assert d.read(window + r * s + (1 + q) * 8192, 4096) == bytes([q + 1]) * 4096
    assert done(d, "writes") == 8 * 7 * rounds
    assert calls(d, "cuStreamBatchMemOp") == 8 * rounds


def echo_flags(d: Driver, fd: str, rounds: str) -> None:
    """The peer of the next test: answers each flag with the data that came with it."""
    d.start(1)
    s, stream = 2 * MIB, d.stream()
    handle = c_uint64()
    d("cuMemImportFromShareableHandle", byref(handle), int(fd), 1)
    os.close(int(fd))
    shared = d.map([handle.value], s, [1])
    for i in range(1, int(rounds) + 1):
        d("cuStreamWaitValue32", stream, shared, i, 0)
        d("cuMemcpyAsync", shared + 65536, shared + 4096, 10_000, stream)
        d("cuStreamWriteValue32", stream, shared + 64, i, 0)
    assert settle(d, stream) == 0


@isolated(DEVICES=2)
def test_memory_and_flags_between_processes(d: Driver) -> None:
    d.start(0)
    s, stream, rounds = 2 * MIB, d.stream(), 50
    handle, source, fd = d.create(s, 0), d.memory(s), c_int()
    d("cuMemExportToShareableHandle", byref(fd), handle, 1, 0)
    shared = d.map([handle], s, [0])
    peer = start_peer(d, __file__, "echo_flags", fd.value, rounds, fds=[fd.value])
    os.close(fd.value)
    for i in range(1, rounds + 1):
        d.put(source, bytes([i]) * 10_000)
        d("cuMemcpyAsync", shared + 4096, source, 10_000, stream)
        d("cuStreamWriteValue32", stream, shared, i, 0)
        d("cuStreamWaitValue32", stream, shared + 64, i, 0)
        assert settle(d, stream) == 0
        assert d.read(shared + 65536, 10_000) == bytes([i]) * 10_000
    assert peer.wait(20) == 0


def die_waiting(d: Driver) -> None:
    """A process that ends while one of its streams hangs in a wait."""
    d.start()
    d("cuStreamWaitValue32", d.stream(), d.memory(), 1, 0)
    print("waiting", flush=True)
    time.sleep(60)


@isolated()
def test_a_waiting_process_can_end_or_be_killed(d: Driver) -> None:
    peer = start_peer(d, __file__, "die_waiting")
    assert peer.stdout is not None
    assert peer.stdout.readline() == "waiting\n"
    peer.kill()
    assert peer.wait(10) == -9
    d.start()
    d("cuStreamWaitValue32", d.stream(), d.memory(), 1, 0)  # and this one ends by itself
    assert live(d, "streams") == 1


@isolated()
def test_a_forked_child_has_no_driver(d: Driver) -> None:
    d.start()
    child = os.fork()
    if child == 0:
        os._exit(d.code("cuInit", 0) * 10 + d.code("cuMemRelease", 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 33
    assert d.code("cuInit", 0) == 0


@isolated(DEVICES=3, NO_PEER="0-2")
def test_devices_without_peer_access(d: Driver) -> None:
    d.start()
    can = {
        (a, b): d.get(c_int, "cuDeviceCanAccessPeer", a, b)
        for a, b in ((0, 1), (1, 2), (0, 2), (2, 0), (1, 1))
    }
    assert can == {(0, 1): 1, (1, 2): 1, (0, 2): 0, (2, 0): 0, (1, 1): 0}
    room = d.reserve(2 * MIB)
    d("cuMemMap", room, 2 * MIB, 0, d.create(2 * MIB, 2), 0)
    assert d.set_access(room, 2 * MIB, [0]) == 217
    assert d.set_access(room, 2 * MIB, [1, 2]) == 0


@isolated(DEVICES=2)
def test_engines_need_access_of_their_own(d: Driver) -> None:
    d.start(0)
    stream, own, foreign = d.stream(), d.memory(devices=(0,)), d.memory(devices=(1,))
    assert d.code("cuStreamWriteValue32", stream, foreign, 1, 0) == cu.INVALID_VALUE
    d("cuMemcpyAsync", foreign, own, 64, stream)
    assert settle(d, stream) == cu.ILLEGAL_ADDRESS


@isolated(DRIVER=12020)
def test_an_old_driver(d: Driver) -> None:
    d.version = 12020
    d("cuInit", 0)
    assert d.get(c_int, "cuDriverGetVersion") == 12020
    result, _, address = d.look_up("cuMemcpyAsync", 13000)  # more than this driver knows of
    assert (result, address) == (cu.INVALID_VALUE, None)
    assert d.look_up("cuMemcpyBatchAsync", 12020)[1:] == (1, None)
    assert d.look_up("cuMemcpyAsync", 12020)[0] == 0


@isolated(MIG=1)
def test_an_instance_of_a_partitioned_gpu(d: Driver) -> None:
    d.start()
    assert d.get(c_int, "cuDeviceGetCount") == 1
    name = ctypes.create_string_buffer(64)
    d("cuDeviceGetName", name, 64, 0)
    assert b"MIG" in name.value
    assert attribute(d, 40) == 1  # one engine


@isolated(DEVICES=4)
def test_visible_devices(d: Driver) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,0,9,1"  # read up to the first that is not there
    d("cuInit", 0)
    assert d.get(c_int, "cuDeviceGetCount") == 2
    uuid = ctypes.create_string_buffer(16)
    d("cuDeviceGetUuid", uuid, 0)
    assert uuid.value.endswith(b"002")
    assert (attribute(d, 33, 0), attribute(d, 33, 1)) == (0x12, 0x10)  # their places on the bus


@isolated(DEVICES=0)
def test_no_device(d: Driver) -> None:
    assert d.code("cuInit", 0) == cu.NO_DEVICE
    assert d.get(c_int, "cuDriverGetVersion") == 13000


@isolated(MEMORY="64M")
def test_memory_runs_out_and_comes_back(d: Driver) -> None:
    d.start()
    free, total = c_size_t(), c_size_t()
    handles = [d.create(16 * MIB) for _ in range(4)]
    d("cuMemGetInfo", byref(free), byref(total))
    assert (free.value, total.value) == (0, 64 * MIB)
    assert d.code("cuMemCreate", byref(c_uint64()), 2 * MIB, byref(cu.Prop(1, 1, 1, 0)), 0) == 2
    kept = d.map(handles[:1], 16 * MIB)
    for handle in handles:
        d("cuMemRelease", handle)
    d("cuMemGetInfo", byref(free), byref(total))
    assert free.value == 48 * MIB  # one is still mapped
    d("cuMemUnmap", kept, 16 * MIB)
    assert live(d, "allocations") == 0


@isolated(FAIL="cuMemCreate:2,cuStreamQuery:1:999,copy:2:214")
def test_planted_faults(d: Driver) -> None:
    d.start()
    a, b, stream = d.memory(), 0, d.stream()
    prop = cu.Prop(1, 1, 1, 0)
    assert d.code("cuMemCreate", byref(c_uint64()), 2 * MIB, byref(prop), 0) == cu.OUT_OF_MEMORY
    b = d.memory()
    assert d.code("cuStreamQuery", stream) == 999
    d("cuMemcpyAsync", b, a, 8, stream)
    assert settle(d, stream) == 0
    d("cuMemcpyAsync", b, a, 8, stream)
    assert settle(d, stream) == 214


@isolated(SEED=3)
def test_what_is_not_ordered_comes_out_of_order(d: Driver) -> None:
    d.start()
    s = 2 * MIB
    a, b, flag, out = d.memory(s), d.memory(s), d.memory(s), d.memory(s)
    data, hasty, reader = d.stream(), d.stream(), d.stream()
    d.put(a, b"\1" * 8192)
    early = 0
    for i in range(1, 201):
        d("cuMemsetD8Async", b, 0, 8192, data)
        assert settle(d, data) == 0
        assert d.copy_2d(data, b, 4096, a, 4096, 4096, 2) == 0
        d("cuStreamWriteValue32", hasty, flag, i, 0)  # does not wait for the data
        d("cuStreamWaitValue32", reader, flag, i, 0)
        d("cuMemcpyAsync", out, b, 8192, reader)
        assert settle(d, reader) == 0
        assert settle(d, data) == 0
        early += d.read(out, 8192) != b"\1" * 8192
    assert early > 2


@isolated(SEED=1)
def test_copies_of_a_batch_overtake_one_another(d: Driver) -> None:
    d.start()
    a, stream = d.memory(), d.stream()
    swapped = 0
    for _ in range(60):
        d.put(a, b"first" + b"next." + bytes(10))
        assert d.batch(stream, [(a + 10, a, 5), (a + 15, a + 10, 5)]) == 0  # a chain: an error
        assert settle(d, stream) == 0
        swapped += d.read(a + 15, 5) != b"first"
    assert 10 < swapped < 50


@isolated(QUEUE_DEPTH=4)
def test_a_full_stream_holds_its_caller(d: Driver) -> None:
    d.start()
    words, address = pinned_words(d)
    stream, memory = d.stream(), d.memory()
    enqueued: list[int] = []

    def enqueue() -> None:
        d("cuCtxSetCurrent", context)
        for i in range(20):
            d("cuMemsetD8Async", memory, 1, 8, stream)
            enqueued.append(i)

    context = d.get(c_uint64, "cuCtxGetCurrent")
    d("cuStreamWaitValue32", stream, address, 1, 0)
    caller = threading.Thread(target=enqueue)
    caller.start()
    caller.join(0.3)
    assert caller.is_alive()
    assert len(enqueued) <= 3
    words[0] = 1
    caller.join(20)
    assert len(enqueued) == 20
    assert settle(d, stream) == 0


@isolated()
def test_nothing_is_left_behind(d: Driver) -> None:
    d.start()
    s, graph = 2 * MIB, []
    _, address = pinned_words(d)
    handle = d.create(s)
    memory, stream, event = d.map([handle], s), d.stream(), d.event()
    with d.capture(stream, graph):
        d("cuMemcpyAsync", memory, address, 64, stream)
    d("cuGraphLaunch", graph[0], stream)
    d("cuEventRecord", event, stream)
    assert settle(d, stream) == 0
    kinds = ("allocations", "mappings", "reservations", "registrations", "streams", "events",
             "graphs", "contexts")  # fmt: skip
    assert [live(d, kind) for kind in kinds] == [1] * 8
    d("cuGraphExecDestroy", graph[0])
    d("cuEventDestroy", event)
    d("cuStreamDestroy", stream)
    assert d.code("cuStreamQuery", stream) == cu.INVALID_HANDLE
    assert d.code("cuStreamDestroy", stream) == cu.INVALID_HANDLE
    d("cuMemUnmap", memory, s)
    d("cuMemAddressFree", memory, s)
    d("cuMemRelease", handle)
    assert d.code("cuMemRelease", handle) == cu.INVALID_VALUE
    d("cuMemHostUnregister", address)
    d("cuDevicePrimaryCtxRelease", 0)
    assert [live(d, kind) for kind in kinds] == [0] * 8
    assert d.code("cuStreamCreateWithPriority", byref(c_uint64()), 1, 0) == 709


@isolated()
def test_the_cpu_cannot_touch_device_memory(d: Driver) -> None:
    d.start()
    memory = d.memory()
    d.put(memory, PATTERN)
    assert d.library.fakecuda_store32(c_uint64(memory), 77) == 0  # as a kernel would
    assert d.word(memory) == 77
    regions = Path("/proc/self/maps").read_text().splitlines()
    inside = [line for line in regions if int(line.split("-")[0], 16) <= memory <
              int(line.split("-")[1].split()[0], 16)]  # fmt: skip
    assert [line.split()[1] for line in inside] == ["---p"]


if __name__ == "__main__":
    run_case(globals())
