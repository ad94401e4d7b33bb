"""Capture and graphs: what is captured, what is refused, what a replay repeats."""

import ctypes
import threading
from ctypes import byref, c_int, c_uint64

import cuda_driver as cu
import pytest
from cuda_case import isolated, run_case
from cuda_driver import MIB, WAIT, WRITE, Driver, mem_op
from test_fake_cuda import PATTERN, pinned_words, settle

UNSUPPORTED, INVALIDATED = 900, 901


def status(d: Driver, stream: int) -> int:
    """Not capturing, capturing, or in a capture that is spoilt."""
    value = c_int(-1)
    d("cuStreamIsCapturing", stream, byref(value))
    return value.value


def end(d: Driver, stream: int) -> int:
    """The result of ending a capture."""
    return d.code("cuStreamEndCapture", stream, byref(c_uint64()))


@isolated()
def test_a_replay_repeats_copies_and_baked_in_values(d: Driver) -> None:
    d.start()
    s, stream, graph = 2 * MIB, d.stream(), []
    a, b, go = d.memory(s), d.memory(s), d.memory(s)
    with d.capture(stream, graph):
        assert d.mem_ops(stream, mem_op(WAIT, go, 1, cu.EQ), mem_op(WRITE, go, 0)) == 0
        assert d.copy_2d(stream, b, 4096, a, 1000, 1000, 3) == 0
        d("cuStreamWriteValue32", stream, go + 64, 7, 0)
    assert status(d, stream) == 0
    assert d.read(b, 64) == bytes(64)  # captured, not done
    host = d.stream()
    for turn in range(3):
        data = bytes([turn + 1]) * 3000
        d.put(a, data)
        d("cuStreamWriteValue32", stream, go + 64, 0, 0)
        d("cuGraphLaunch", graph[0], stream)
        assert settle(d, stream, 0.03) == cu.NOT_READY
        d("cuStreamWriteValue32", host, go, 1, 0)
        assert settle(d, stream) == 0
        assert (d.word(go), d.word(go + 64)) == (0, 7)
        assert d.read(b + 8192, 1000) == data[:1000]
    d("cuGraphExecDestroy", graph[0])


@isolated()
def test_branches_of_a_graph_run_at_once(d: Driver) -> None:
    d.start()
    first, second, graph = d.stream(), d.stream(), []
    forked, joined, flags = d.event(), d.event(), d.memory()
    with d.capture(first, graph):
        d("cuEventRecord", forked, first)
        d("cuStreamWaitEvent", second, forked, 0)
        assert status(d, second) == 1
        # Each branch waits for the other.
        assert d.mem_ops(first, mem_op(WRITE, flags, 1), mem_op(WAIT, flags + 64, 1)) == 0
        assert d.mem_ops(second, mem_op(WAIT, flags, 1), mem_op(WRITE, flags + 64, 1)) == 0
        d("cuEventRecord", joined, second)
        d("cuStreamWaitEvent", first, joined, 0)
        d("cuStreamWriteValue32", first, flags + 128, 1, 0)
    d("cuGraphLaunch", graph[0], first)
    assert settle(d, first) == 0
    assert d.word(flags + 128) == 1


@isolated()
def test_a_batch_copy_is_refused_and_the_capture_goes_on(d: Driver) -> None:
    d.start()
    stream, memory = d.stream(), d.memory()
    d("cuStreamBeginCapture", stream, 1)
    assert d.batch(stream, [(memory, memory + 4096, 64)]) == UNSUPPORTED
    assert status(d, stream) == 1
    d("cuStreamWriteValue32", stream, memory, 1, 0)
    assert end(d, stream) == 0


@isolated()
def test_what_looks_at_a_captured_stream_spoils_the_capture(d: Driver) -> None:
    d.start()
    stream, memory, buffer = d.stream(), d.memory(), ctypes.create_string_buffer(8)
    for call in (("cuStreamSynchronize", stream), ("cuStreamQuery", stream),
                 ("cuMemcpyDtoH", buffer, memory, 8)):  # fmt: skip
        d("cuStreamBeginCapture", stream, 1)
        assert d.code(*call) == UNSUPPORTED, call
        assert status(d, stream) == 2
        assert d.code("cuStreamWriteValue32", stream, memory, 1, 0) == INVALIDATED
        assert end(d, stream) == INVALIDATED
        assert status(d, stream) == 0
    assert settle(d, stream) == 0


@isolated()
def test_what_a_capture_may_not_depend_on(d: Driver) -> None:
    d.start()
    words, address = pinned_words(d)
    stream, other, memory = d.stream(), d.stream(), d.memory()
    inside, outside = d.event(), d.event()
    d("cuStreamWaitValue32", other, address, 1, 0)
    d("cuEventRecord", outside, other)
    d("cuStreamBeginCapture", stream, 1)
    assert d.code("cuStreamWaitEvent", stream, outside, 0) == 905
    assert end(d, stream) == INVALIDATED
    words[0] = 1
    assert settle(d, other) == 0
    d("cuStreamBeginCapture", stream, 1)
    d("cuStreamWriteValue32", stream, memory, 1, 0)
    d("cuEventRecord", inside, stream)
    assert d.code("cuEventQuery", inside) == 907
    d("cuStreamWaitEvent", other, inside, 0)
    d("cuStreamWriteValue32", other, memory, 1, 0)
    assert d.code("cuStreamEndCapture", other, byref(c_uint64())) == 903
    assert end(d, stream) == 904  # the other stream's work never came back
    assert status(d, other) == 0
    assert d.code("cuStreamBeginCapture", 0, 1) == UNSUPPORTED


def exchange(d: Driver, mode: int) -> int:
    """The thread's capture mode before this one."""
    value = c_int(mode)
    d("cuThreadExchangeStreamCaptureMode", byref(value))
    return value.value


@isolated()
def test_captures_have_numbers(d: Driver) -> None:
    d.start()
    stream, other, event, seen = d.stream(), d.stream(), d.event(2), set()
    for _ in range(3):
        d("cuStreamBeginCapture", stream, 1)
        d("cuEventRecord", event, stream)
        d("cuStreamWaitEvent", other, event, 0)
        numbers = set()
        for captured in (stream, other):
            state, number = c_int(), c_uint64()
            d("cuStreamGetCaptureInfo", captured, byref(state), byref(number), 0, 0, 0, 0)
            assert state.value == 1
            numbers.add(number.value)
        seen |= numbers
        assert len(numbers) == 1
        d("cuEventRecord", event, other)
        d("cuStreamWaitEvent", stream, event, 0)
        assert end(d, stream) == 0
        assert status(d, other) == 0
    assert len(seen - {0}) == 3


@isolated()
def test_a_relaxed_thread_may_do_what_a_capture_forbids(d: Driver) -> None:
    d.start()
    stream, other, event = d.stream(), d.stream(), d.event(2)
    d("cuEventRecord", event, other)
    assert settle(d, other) == 0
    assert exchange(d, 2) == 0
    d("cuStreamBeginCapture", stream, 0)
    d("cuEventQuery", event)
    memory = d.memory()
    d("cuStreamWriteValue32", other, memory, 3, 0)
    assert settle(d, other) == 0
    assert status(d, stream) == 1
    assert exchange(d, 0) == 2
    assert d.code("cuEventQuery", event) == UNSUPPORTED
    assert status(d, stream) == 2
    assert end(d, stream) == INVALIDATED
    for mode in (3, -1):
        assert d.code("cuThreadExchangeStreamCaptureMode", byref(c_int(mode))) == cu.INVALID_VALUE


@isolated(only_fake=True)
def test_whose_calls_a_capture_forbids(d: Driver) -> None:
    """The capture's mode says whether it minds other threads, theirs whether they mind it."""
    d.start()
    event, idle, allowed = d.event(2), d.stream(), {}
    d("cuEventRecord", event, idle)
    assert settle(d, idle) == 0
    context = d.get(c_uint64, "cuCtxGetCurrent")

    def call(mode: int, key: tuple[int, int, bool]) -> None:
        before = exchange(d, mode)
        d("cuCtxSetCurrent", context)
        allowed[key] = d.code("cuEventQuery", event) == 0
        exchange(d, before)

    for capture_mode in (0, 1, 2):
        for thread_mode in (0, 1, 2):
            for ours in (True, False):
                stream = d.stream()
                d("cuStreamBeginCapture", stream, capture_mode)

                key = (capture_mode, thread_mode, ours)
                if ours:
                    call(thread_mode, key)
                else:
                    thread = threading.Thread(target=call, args=(thread_mode, key))
                    thread.start()
                    thread.join()
                assert (end(d, stream) == 0) == allowed[key]
    for (capture_mode, thread_mode, ours), may in allowed.items():
        minds = capture_mode != 2 if ours else (capture_mode, thread_mode) == (0, 0)
        assert may == (thread_mode == 2 or not minds), (capture_mode, thread_mode, ours)


@isolated(only_fake=True)
def test_what_a_capture_makes_unsafe(d: Driver) -> None:
    d.start()
    memory, spare = d.reserve(2 * MIB), d.create(2 * MIB)
    refused = {
        "cuMemAddressReserve": lambda: d.reserve(2 * MIB),
        "cuMemCreate": lambda: d.create(2 * MIB),
        "cuMemMap": lambda: d("cuMemMap", memory, 2 * MIB, 0, spare, 0),
        "cuMemRelease": lambda: d("cuMemRelease", spare),
        "cuStreamCreateWithPriority": d.stream,
        "cuStreamDestroy": lambda: d("cuStreamDestroy", idle),
        "cuStreamQuery": lambda: d("cuStreamQuery", idle),
        "cuStreamSynchronize": lambda: d("cuStreamSynchronize", idle),
    }
    stream, idle = d.stream(), d.stream()
    for name, call in refused.items():
        d("cuStreamBeginCapture", stream, 0)
        with pytest.raises(cu.DriverError, match=f"{name}: {UNSUPPORTED}$"):
            call()
        assert end(d, stream) == INVALIDATED, name


@isolated(only_fake=True)
def test_a_replay_on_unmapped_memory_is_an_illegal_address(d: Driver) -> None:
    d.start()
    s, stream, graph = 2 * MIB, d.stream(), []
    a, b = d.memory(s), d.memory(s)
    d.put(a, PATTERN)
    with d.capture(stream, graph):
        d("cuMemcpyAsync", b, a, 64, stream)
    d("cuMemUnmap", b, s)
    d("cuGraphLaunch", graph[0], stream)
    assert settle(d, stream) == cu.ILLEGAL_ADDRESS


class Kept:
    """A user object of the graph that a stream is being captured into."""

    def __init__(self, d: Driver, stream: int) -> None:
        assert status(d, stream) == 1
        self.gone = threading.Event()
        self.codes: list[int] = []

        def destroy(_: int) -> None:
            if d.path != "libcuda.so.1":  # what no driver allows here
                self.codes.append(d.code("cuStreamIsCapturing", stream, byref(c_int())))
            self.gone.set()

        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy)
        handle, state, graph = c_uint64(), c_int(), c_uint64()
        self.object = d.get(c_uint64, "cuUserObjectCreate", 0, self.callback, 1, 1)
        d("cuStreamGetCaptureInfo", stream, byref(state), byref(handle), byref(graph), 0, 0, 0)
        self.graph = graph.value
        d("cuGraphRetainUserObject", self.graph, self.object, 1, 0)
        assert not self.gone.wait(0.01)
        d("cuUserObjectRelease", self.object, 1)


@isolated()
def test_a_user_object_lives_as_long_as_its_graph_can_run(d: Driver) -> None:
    """The graph and every instance hold it, and so does a launch whose instance is destroyed."""
    d.start()
    stream, other, words, graph = d.stream(), d.stream(), d.memory(), c_uint64()
    d("cuStreamBeginCapture", stream, 1)
    kept = Kept(d, stream)
    assert d.mem_ops(stream, mem_op(WAIT, words, 1, cu.EQ), mem_op(WRITE, words + 64, 9)) == 0
    d("cuStreamEndCapture", stream, byref(graph))
    assert graph.value == kept.graph
    first, second = (d.get(c_uint64, "cuGraphInstantiateWithFlags", graph.value, 0) for _ in "12")
    d("cuGraphDestroy", graph.value)
    d("cuGraphLaunch", second, stream)
    d("cuGraphExecDestroy", first)
    d("cuGraphExecDestroy", second)
    assert not kept.gone.wait(0.1)
    d("cuStreamWriteValue32", other, words, 1, 0)
    assert settle(d, stream) == 0
    assert kept.gone.wait(10)
    assert d.word(words + 64) == 9
    assert set(kept.codes) <= {800}


@isolated()
def test_a_spoilt_capture_lets_go_of_its_user_objects(d: Driver) -> None:
    d.start()
    stream = d.stream()
    d("cuStreamBeginCapture", stream, 1)
    kept = Kept(d, stream)
    assert d.code("cuStreamSynchronize", stream) == UNSUPPORTED
    assert end(d, stream) == INVALIDATED
    assert kept.gone.wait(10)


@isolated(only_fake=True)
def test_references_that_nobody_has(d: Driver) -> None:
    d.start()
    gone = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gone.set())
    created = c_uint64()
    for count, flags in ((0, 1), (1, 0), (1, 2)):
        code = d.code("cuUserObjectCreate", byref(created), 0, callback, count, flags)
        assert code == cu.INVALID_VALUE
    kept = d.get(c_uint64, "cuUserObjectCreate", 0, callback, 2, 1)
    assert d.code("cuUserObjectRelease", kept, 3) == cu.INVALID_VALUE
    assert d.code("cuGraphRetainUserObject", 0, kept, 1, 0) == cu.INVALID_VALUE
    d("cuUserObjectRelease", kept, 2)
    assert gone.wait(10)
    assert d.code("cuUserObjectRelease", kept, 1) == cu.INVALID_VALUE


if __name__ == "__main__":
    run_case(globals())
