"""Default streams, lanes across streams, and GPUs that fail: on the stand-in driver."""

from textwrap import dedent

import pytest
from test_cuda import finish, run, start
from test_streamed_views import STREAMED

from stores import free_store

SPENT = """
REACHING = ("cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpyBatchAsync", "cuStreamBatchMemOp",
            "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery", "cuStreamQuery")

def spent(call):
    # How often each was called, from the call to the end of its wait.
    call().wait()
    before = {name: calls(name) for name in REACHING}
    handle = call()
    time.sleep(0.3)  # it ends meanwhile
    handle.wait()
    return {name: calls(name) - n for name, n in before.items() if calls(name) > n}
"""


@pytest.mark.parametrize("stream", ["own", "made", "default"])
def test_a_process_a_rank_calls_the_driver_seldom(stream: str) -> None:
    """And in the default stream, where torch's users are, not more often than elsewhere."""
    code = """
    store, rank, stream = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    comm = Streamed(backend="cuda", store=store, rank=rank, world_size=2, timeout=10)
    comm.given = {"own": (), "made": streams(2)[rank:][:1], "default": (1,)}[stream]
    out = comm.window(2000)
    call = lambda protocol: lambda: comm.all_gather(out, variant="pcpy", protocol=protocol)
    found = spent(call("promise"))
    ends = {"cuEventRecord": 1, "cuEventQuery": 1}
    assert found == {"cuMemcpyAsync": 1, "cuStreamBatchMemOp": 1} | ends, found
    found = spent(call("barrier"))
    assert found == {"cuMemcpyAsync": 2, "cuStreamBatchMemOp": 2} | ends, found
    comm.close()
    """
    store = free_store()
    group = [start(STREAMED + SPENT + dedent(code), store, str(rank), stream) for rank in (0, 1)]
    assert finish(group, {0: 0, 1: 0})


@pytest.mark.parametrize("variant", ["pcpy", "fan", "prelaunch_fan"])
def test_the_default_stream(variant: str) -> None:
    """What comes before an operation in it, and behind it, is in order: with own slices, which
    another stream has to copy, and without."""
    code = """
    variant = sys.argv[1]
    comm = Streamed(backend="cuda", ranks=2, timeout=10)
    comm.given = [1, 1]
    contexts = []
    for device in range(2):
        contexts.append(ctypes.c_void_p())
        assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(contexts[-1]), device) == 0

    def copied(rank, dst, src, nbytes):
        assert lib.cuCtxPushCurrent_v2(contexts[rank]) == 0
        assert lib.cuMemcpyAsync(ctypes.c_uint64(dst), ctypes.c_uint64(src), nbytes, None) == 0

    def place(array):
        return array.__array_interface__["data"][0]

    out, own = comm.window(2000), comm.window(1000)
    word = comm.host_array(1, "uint32")
    inputs = [comm.host_array((2, 1000)) for _ in range(12)]
    seen = [comm.host_array((2, 2000)) for _ in range(12)]
    for turn in range(12):
        for rank in range(2):
            inputs[turn][rank] = sent(turn, rank)
            assert lib.cuCtxPushCurrent_v2(contexts[rank]) == 0
            hold(None, word, turn)  # neither may run before the other rank's memory is filled
            into = own.address(rank) if turn % 2 else out.address(rank) + rank * 1000
            copied(rank, into, place(inputs[turn][rank]), 1000)
        comm.all_gather(out, *[own][: turn % 2], variant=variant)
        for rank in range(2):
            copied(rank, place(seen[turn][rank]), out.address(rank), 2000)
        put_word(word, turn)
    comm.all_gather(out, variant=variant).wait()
    for turn in range(12):
        for rank in range(2):
            assert np.array_equal(seen[turn][rank], gathered(turn, 2)), (turn, rank)
    comm.close()
    """
    assert run(STREAMED + dedent(code), variant) == ""


def test_a_lane_is_in_order_across_streams() -> None:
    """The second call's stream is free, and its result is not there before the first one's."""
    code = """
    comm = Streamed(backend="cuda", ranks=2, timeout=10)
    sets = [streams(2), streams(2), [1, 1], ()]
    first, second = comm.window(2000), comm.window(2000)
    word = comm.host_array(1, "uint32")
    for turn in range(1, 20):
        held, free = sets[turn % 2], sets[turn % 4]
        for rank in range(2):
            first.write(sent(turn, rank), rank * 1000, rank)
            second.write(sent(-turn % 99, rank), rank * 1000, rank)
            hold(held[rank], word, turn)
        comm.given = held
        one = comm.all_gather(first)
        comm.given = free if free != held else ()
        two = comm.all_gather(second)
        time.sleep(0.01)
        assert not one.done() and not two.done()
        assert np.array_equal(look(second, 1)[1000:], sent(-turn % 99, 1))
        assert not np.array_equal(look(second, 1), gathered(-turn % 99, 2))
        put_word(word, turn)
        two.wait()
        assert one.done()
        for rank in range(2):
            assert np.array_equal(look(first, rank), gathered(turn, 2))
            assert np.array_equal(look(second, rank), gathered(-turn % 99, 2))
    comm.close()
    """
    assert run(STREAMED + dedent(code)) == ""


@pytest.mark.parametrize("look", ["wait", "done"])
def test_a_gpu_that_fails_is_told(look: str) -> None:
    """It writes no end: whoever waits or asks is told all the same, and soon."""
    code = """
    comm = opened(2, timeout=30)
    out = comm.window(2000)

    def ended():
        handle = comm.all_gather(out)
        if sys.argv[1] == "wait":
            handle.wait()
        while not handle.done():
            time.sleep(0.001)

    codes = []
    began = time.monotonic()
    while time.monotonic() - began < 10 and not any(codes):
        codes.append(code_of(ended)[0])
    assert codes[-1] == "driver" and len(codes) > 5, codes
    os._exit(0)  # memory of a failed GPU is not given back
    """
    assert run(code, look, OFFCORE_FAKE_CUDA_FAIL="copy:40:700") == ""


def test_all_lanes_at_once() -> None:
    code = """
    comm = opened(2)
    out = comm.window(64 * 64)
    handles = [comm.all_gather(out.region(64 * lane, 64), lane=lane) for lane in range(64)]
    for handle in reversed(handles):
        assert handle.wait().protocol in ("barrier", "eager")  # by the table
    comm.close()
    """
    assert run(code) == ""


def test_memory_as_a_tensor_tells_its_gpu() -> None:
    """What torch reads of a capsule, and that both who takes the tensor and who drops the capsule
    let go of the memory."""
    code = """
    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2),
                    ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                    ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                    ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
                    ("context", ctypes.c_void_p),
                    ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]

    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = ctypes.py_object, ctypes.c_char_p
    python.PyCapsule_SetName.argtypes = ctypes.py_object, ctypes.c_char_p
    comm = opened(3)
    before = live()["allocations"]
    window = comm.window(6000)
    address = window.address(2)
    capsule = window._core.dlpack(2, 96, (3, 5, 7), 2, 32)
    for refused in ((0, 0, (2000, 4), 2, 32), (3, 0, (1,), 1, 8), (0, 5999, (2,), 1, 8),
                    (0, 0, (-1,), 1, 8), (0, 0, (1 << 62, 1 << 62), 1, 8)):
        assert code_of(lambda: window._core.dlpack(*refused))[0] == "invalid", refused
    del window
    pointer = python.PyCapsule_GetPointer(capsule, b"dltensor")
    tensor = Tensor.from_address(pointer)
    assert tensor.data + tensor.byte_offset == address + 96
    assert (list(tensor.device), tensor.ndim, tensor.strides) == ([2, 2], 3, None)
    assert (tensor.code, tensor.bits, tensor.lanes) == (2, 32, 1)
    assert tensor.shape[:3] == [3, 5, 7]
    assert live()["allocations"] > before
    if sys.argv[1] == "taken":
        assert python.PyCapsule_SetName(capsule, b"used_dltensor") == 0
        del capsule
        assert live()["allocations"] > before
        tensor.deleter(pointer)
    else:
        del capsule
    assert live()["allocations"] == before
    """
    for fate in ("taken", "dropped"):
        assert run(code, fate) == "", fate
