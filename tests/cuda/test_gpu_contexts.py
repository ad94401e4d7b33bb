"""One context a GPU: whatever a process opens there shares it, and the last one lets it go."""

from test_cuda import run

RETAINED = """
import gc
from offcore import _core, kv

def retained():
    gc.collect()
    return calls("cuDevicePrimaryCtxRetain") - calls("cuDevicePrimaryCtxRelease")

def all_gather(comm):
    inp, out = comm.window(64), comm.window(128)
    for rank in range(2):
        inp.write(np.full(64, rank + 1, np.uint8), rank=rank)
    comm.all_gather(out, inp).wait()
    for rank in range(2):
        assert (look(out, rank) == np.repeat([1, 2], 64)).all()
"""


def test_all_that_a_process_opens_shares_a_context_a_gpu() -> None:
    code = """
    comms = [opened() for _ in range(3)]
    pool = kv.HostPool(4096, 4, backend="cuda", device=1)
    timer = _core.GpuTimer(0)
    assert retained() == 2
    for comm in comms:
        all_gather(comm)
    assert retained() == 2
    comms.pop().close()
    del comm
    all_gather(comms[0])  # goes on where another one has gone
    while comms:
        comms.pop().close()
    assert retained() == 2  # the timer and the pool are still there
    del timer
    assert retained() == 1
    pool.close()
    del pool
    assert retained() == 0
    assert set(live().values()) == {0}
    comm = opened()  # and they can be made again
    all_gather(comm)
    assert retained() == 2
    """
    assert run(code, prelude=RETAINED) == ""


def test_threads_open_and_close_beside_each_other() -> None:
    code = """
    import concurrent.futures

    def work():
        for _ in range(4):
            comm = opened()
            all_gather(comm)
            comm.close()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work) for _ in range(6)]:
            done.result(60)
    del done
    assert retained() == 0
    assert set(live().values()) == {0}
    """
    assert run(code, prelude=RETAINED) == ""


def test_a_child_lets_nothing_of_its_parents_go() -> None:
    code = """
    comm, timer = opened(), _core.GpuTimer(0)
    all_gather(comm)
    child = os.fork()
    if child == 0:
        assert code_of(lambda: comm.window(64))[0] == "invalid"
        assert code_of(opened)[0] == "invalid"  # a child cannot use its parent's driver
        del comm, timer
        gc.collect()
        assert retained() == 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    all_gather(comm)
    assert retained() == 2
    """
    assert run(code, prelude=RETAINED) == ""


def test_calls_ask_for_no_capture_mode_to_enqueue() -> None:
    code = """
    comm = opened()
    inp, out = comm.window(64), comm.window(128)
    comm.all_gather(out, inp).wait()

    def exchanged(count):
        before = calls("cuThreadExchangeStreamCaptureMode")
        handles = [comm.all_gather(out, inp) for _ in range(count)]
        told = calls("cuThreadExchangeStreamCaptureMode") - before
        for handle in handles:
            handle.wait()
        return told

    exchanged(16)  # which makes events
    told = exchanged(16)
    assert told <= 2 * 16, told  # to look at what has ended, now and then
    stream, context, graph = (ctypes.c_void_p() for _ in range(3))
    assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert lib.cuCtxSetCurrent(context) == 0
    assert lib.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    assert lib.cuStreamBeginCapture_v2(stream, 0) == 0  # global: it forbids to all threads
    for _ in range(3):
        exchanged(6)
        inp.write(np.ones(64, np.uint8), rank=0)
    assert lib.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0  # and was not spoilt
    """
    assert run(code) == ""
