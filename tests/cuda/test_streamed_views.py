"""Views in the order of streams, which is what makes them usable without a wait."""

from textwrap import dedent

import pytest
from test_cuda import finish, run, start

from stores import free_store

STREAMED = """
class Streamed(offcore.Communicator):
    given = ()
    def _streams(self):
        return list(self.given)

lib.cuStreamWaitValue32_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32,
                                       ctypes.c_uint)
lib.cuMemcpyDtoHAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t,
                                     ctypes.c_void_p)

def streams(ranks):
    made = []
    for device in range(ranks):
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert lib.cuCtxPushCurrent_v2(context) == 0
        assert lib.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        made.append(stream.value)
    return made

def hold(stream, word, value):
    address = word.__array_interface__["data"][0]
    assert lib.cuStreamWaitValue32_v2(stream, address, value, 0) == 0

def addressed(view, rank):
    window, offset = view._pending.view
    return window.address(rank) + offset

def sent(turn, rank, nbytes=1000):
    return np.random.default_rng((turn, rank)).integers(0, 256, nbytes, np.uint8)

def gathered(turn, ranks):
    return np.concatenate([sent(turn, rank) for rank in range(ranks)])
"""


OVERRUN = pytest.param(3, False, marks=pytest.mark.not_tsan("the reader is overrun on purpose"))


@pytest.mark.parametrize(("further", "intact"), [(0, True), (2, True), OVERRUN])
@pytest.mark.parametrize("variant", ["fan", "pcpy"])
def test_a_late_reader_in_the_stream(variant: str, further: int, intact: bool) -> None:
    """Rank 1's stream is held up before it copies its view out; rank 0 goes as far as it can."""
    code = """
    variant, further, intact = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
    comm = Streamed(backend="cuda", ranks=2, timeout=10)
    comm.given = streams(2)
    word, copied = comm.host_array(1, "uint32"), comm.host_array(2000)
    inputs = [[comm.host_array(1000) for _ in range(2)] for _ in range(9)]
    for turn in range(9):
        for rank in range(2):
            inputs[turn][rank][:] = sent(turn, rank)
    views = [comm.all_gather_view(inputs[turn], variant=variant) for turn in range(1 + further)]
    hold(comm.given[1], word, 1)
    assert lib.cuMemcpyDtoHAsync_v2(copied.__array_interface__["data"][0],
                                    addressed(views[0], 1), 2000, comm.given[1]) == 0
    views += [comm.all_gather_view(inputs[turn], variant=variant) for turn in range(1 + further, 9)]
    time.sleep(0.2)
    assert not views[-1].done() and not copied.any()
    put_word(word, 1)
    views[-1].wait()
    assert np.array_equal(copied, gathered(0, 2)) == intact
    for rank in range(2):
        last = np.empty(2000, np.uint8)
        views[-1].read(last, rank=rank)
        assert np.array_equal(last, gathered(8, 2))
    comm.close()
    """
    assert run(STREAMED + dedent(code), variant, str(further), str(intact)) == ""


def test_a_ring_that_grows_keeps_what_streams_may_read() -> None:
    """The old slots stay mapped until a stream that may still read them has come past the third
    call; and no longer."""
    code = """
    comm = Streamed(backend="cuda", ranks=2, timeout=10)
    comm.given = streams(2)
    word, copied = comm.host_array(1, "uint32"), comm.host_array(2000)
    small, large = ([comm.host_array(n) for _ in range(2)] for n in (1000, 3 << 20))
    for rank in range(2):
        small[rank][:] = sent(0, rank)
    view = comm.all_gather_view(small)
    hold(comm.given[1], word, 1)
    assert lib.cuMemcpyDtoHAsync_v2(copied.__array_interface__["data"][0],
                                    addressed(view, 1), 2000, comm.given[1]) == 0
    before = live()["allocations"]
    del view  # only the ring holds the slots now
    handles = [comm.all_gather_view(large) for _ in range(3)]
    # A new ring of two parts beside the old one.
    assert live()["allocations"] == before + 2, (before, live())
    put_word(word, 1)
    handles[-1].wait()
    assert np.array_equal(copied, gathered(0, 2))
    assert live()["allocations"] == before, (before, live())
    comm.close()
    """
    assert run(STREAMED + dedent(code)) == ""


@pytest.mark.parametrize("call", ["all_gather", "all_gather_view"])
def test_operands_outlive_their_owners(call: str) -> None:
    """What a caller drops while its stream has yet to get there is kept, with the handle or without
    it, until the operation has ended."""
    code = """
    import gc
    call = sys.argv[1]
    comm = Streamed(backend="cuda", ranks=2, timeout=10)
    comm.given = streams(2)
    word, out = comm.host_array(1, "uint32"), comm.host_array(2000)
    before = live()["registrations"]
    hold(comm.given[0], word, 1)
    inp = [comm.host_array(1000) for _ in range(2)]
    for rank in range(2):
        inp[rank][:] = sent(7, rank)
    alive = [weakref.ref(array) for array in inp]
    window = comm.window(2000)
    handle = getattr(comm, call)(*[window][: call == "all_gather"], inp)
    del handle, inp
    gc.collect()
    assert all(array() is not None for array in alive)
    assert live()["registrations"] == before + 2, (before, live())
    time.sleep(0.1)
    put_word(word, 1)
    for _ in range(2):  # who waits for a later operation lets go of those before it
        comm.all_gather_view([out[:10], out[10:20]]).wait()
    if call == "all_gather":
        assert np.array_equal(look(window, 1), gathered(7, 2))
    assert not any(array() is not None for array in alive), alive
    assert live()["registrations"] == before, (before, live())
    comm.close()
    """
    assert run(STREAMED + dedent(code), call) == ""


def test_processes() -> None:
    """A process a rank, one of them slow: views are right when they are read late."""
    code = """
    store, rank = sys.argv[1], int(sys.argv[2])
    comm = offcore.Communicator(backend="cuda", store=store, rank=rank, world_size=3, timeout=20)
    inp = comm.host_array(1000)
    views = []
    for turn in range(40):
        inp[:] = sent(turn, rank)
        views.append(comm.all_gather_view(inp))
        views[-1].wait()
        if turn // 8 % 3 == rank:
            time.sleep(0.01)
        if turn >= 2:
            got = np.empty(3000, np.uint8)
            views[turn - 2].read(got)
            assert np.array_equal(got, gathered(turn - 2, 3)), turn
    comm.barrier()
    comm.close()
    """
    store = free_store()
    group = [start(STREAMED + dedent(code), store, str(rank)) for rank in range(3)]
    assert finish(group, {0: 0, 1: 0, 2: 0})
