"""What else a process does while a kernel waits for its request, on the stand-in driver: each of
these has hung other libraries. A stream that waits for a word plays the kernel."""

import textwrap

import pytest
from test_capture import PATHS
from test_cuda import run, start

from stores import free_store

BEGIN = f"""
sys.path[:0] = {PATHS!r}
from request_threads import *
from cuda_driver import NOT_READY, Driver
NONE, TIMEOUT, FULL, INVALID, STOPPED, PEER, BROKEN = range(7)
driver = Driver(os.environ["OFFCORE_LIBCUDA"])
ranks, chunk = 2, 512
comm = opened(ranks, device=[0, 1])
driver.start(0)
windows = [comm.window(1 << 16) for _ in range(2)]
words = comm.host_array(64, "uint32")
word = words.ctypes.data
plan = [[offcore.Put(1 - rank, 1, 0, rank, 1)] for rank in range(ranks)]

def requests(armed, **options):
    schedule = plan if armed else ()
    return comm.requests(windows, schedule=schedule, chunk=chunk, **{{"limit": 20.0, **options}})

class Kernel:
    '''Ends when it is told to, or the test does.'''
    def __init__(self, blocking=False):
        words[0] = 0
        self.stream = driver.stream(non_blocking=not blocking)
        driver("cuStreamWaitValue32", self.stream, word, 1, 0)
    def running(self):
        return driver.code("cuStreamQuery", self.stream) == NOT_READY
    def end(self):
        words[0] = 1
        driver("cuStreamSynchronize", self.stream)

def exchanged(made, turns=3):
    '''The kernel's puts, to and fro, while it waits.'''
    ports = [gpu_port(made, rank) for rank in range(ranks)]
    first = ports[1].received(0, 1)
    for turn in range(first + 1, first + turns + 1):
        for rank, port in enumerate(ports):
            assert port.put_signal(1 - rank, 1, 0, rank, 1).fault == NONE
            if made.armed:
                wake(made, rank, 1 - rank)
        for rank, port in enumerate(ports):
            assert port.wait(1 - rank, 1, turn) == NONE
    made.check()
"""


def check_alone(text: str, *, armed: bool, **env: str) -> None:
    with_engine = f"""
    made = requests({armed})
    made.armed = {armed}
    """
    assert run(BEGIN + textwrap.dedent(with_engine) + textwrap.dedent(text), **env) == ""


both = pytest.mark.parametrize("armed", [False, True], ids=["proxy", "armed"])


@both
def test_launches_and_copies_behind_the_kernel(armed: bool) -> None:
    """In its stream, on the legacy default stream, and until a queue is full, whose caller hangs
    until the kernel ends. Nothing is loaded, allocated or destroyed meanwhile."""
    check_alone(
        """
    kernel = Kernel(blocking=True)
    memory = driver.get(ctypes.c_uint64, "cuMemAlloc", 4096)
    asked = [calls(name) for name in "cuModuleLoadData cuMemCreate cuMemHostRegister".split()]
    before = live()
    driver("cuMemsetD8Async", memory, 1, 4096, kernel.stream)   # a launch behind it
    exchanged(made)
    driver("cuMemsetD8Async", memory, 2, 4096, 0)               # the legacy default stream
    exchanged(made)
    def fill():
        driver("cuCtxSetCurrent", driver.get(ctypes.c_uint64, "cuDevicePrimaryCtxRetain", 0))
        for _ in range(400):
            driver("cuMemsetD8Async", memory, 3, 4096, kernel.stream)
    full = threading.Thread(target=fill)
    full.start()
    full.join(0.05)
    assert full.is_alive()
    exchanged(made, 100)
    assert kernel.running() and full.is_alive()
    assert live() == before
    assert [calls(name) for name in
            "cuModuleLoadData cuMemCreate cuMemHostRegister".split()] == asked
    for _ in range(40):  # in flight when it is stopped
        assert gpu_port(made, 0).put_signal(1, 1, 0, 0, 1).fault == NONE
    if made.armed:
        wake(made, 0, 1)
    made.stop()
    assert gpu_port(made, 1).received(0, 1) == 146
    kernel.end()
    full.join()
    """,
        armed=armed,
        OFFCORE_FAKE_CUDA_QUEUE_DEPTH="360",
    )


@both
def test_abort_while_kernels_wait(armed: bool) -> None:
    """With requests in flight: both sides are told, the streams drain, the communicator closes."""
    check_alone(
        """
    ports = [gpu_port(made, rank) for rank in range(ranks)]
    told = [None, None]
    def wait(rank):
        told[rank] = ports[rank].wait(1 - rank, 1, 1 << 40)
    waiting = [threading.Thread(target=wait, args=(rank,)) for rank in range(ranks)]
    for thread in waiting:
        thread.start()
    for _ in range(40):
        ports[0].put_signal(1, 1, 0, 0, 1)
    if made.armed:
        wake(made, 0, 1)
    comm.abort()
    for thread in waiting:
        thread.join(10)
    assert told == [PEER, PEER], told
    until = time.monotonic() + 5
    while (fault := ports[0].put_signal(1, 1, 0, 0, 1).fault) == NONE:  # until the GPU knows
        assert time.monotonic() < until, "still open"
    assert fault == PEER, fault
    assert code_of(made.check)[0] == "peer"
    assert code_of(made.drain)[0] == "peer"
    made.stop()
    del made
    comm.close()
    """,
        armed=armed,
    )


@both
def test_the_process_ends_while_kernels_wait(armed: bool) -> None:
    """Nothing was stopped or closed: requests are in flight, the kernel's stream is not done."""
    check_alone(
        """
    kernel = Kernel()
    port = gpu_port(made, 0)
    for _ in range(40):
        port.put_signal(1, 1, 0, 0, 1)
    if made.armed:
        wake(made, 0, 1)
    """,
        armed=armed,
    )


@both
def test_a_peer_is_killed_while_kernels_wait(armed: bool) -> None:
    """Of two processes, which have exchanged chunks: the other one's kernel is told, the rank
    hears why, and closes."""
    code = """
    sys.path[:0] = eval(sys.argv[1])
    from request_threads import *
    rank, armed = int(sys.argv[2]), sys.argv[4] == "True"
    comm = offcore.Communicator(
        backend="cuda", store=sys.argv[3], rank=rank, world_size=2, device=rank)
    windows = [comm.window(1 << 12) for _ in range(2)]
    plan = [[offcore.Put(1 - own, 1, 0, own, 1)] for own in range(2)]
    made = comm.requests(windows, schedule=plan if armed else (), chunk=512, limit=30.0)
    port = gpu_port(made, rank)
    for turn in range(1, 4):
        assert port.put_signal(1 - rank, 1, 0, rank, 1).fault == 0
        if armed:
            wake(made, rank, 1 - rank)
        assert port.wait(1 - rank, 1, turn, 30.0) == 0, turn
    print("ready", flush=True)
    fault = port.wait(1 - rank, 1, 4, 30.0)
    print(fault, code_of(made.check)[0], code_of(made.drain)[0], flush=True)
    made.stop()
    comm.close()
    """
    store = free_store()
    group = [start(code, repr(PATHS), str(rank), store, str(armed)) for rank in range(2)]
    told = [rank.stdout.readline() for rank in group if rank.stdout is not None]
    assert told == ["ready\n"] * 2, [rank.communicate()[0] for rank in group]
    group[1].kill()
    assert group[0].communicate(timeout=60)[0] == "5 peer peer\n"
    assert group[0].returncode == 0
    group[1].communicate()


def test_few_channels_are_refused() -> None:
    """By a word before anything can hang: the driver may put a launch that waits for the kernel
    and the copy that the kernel waits for into one channel."""
    text = """
    code, text = code_of(lambda: requests(False))
    assert code == "unsupported" and "CUDA_DEVICE_MAX_CONNECTIONS=32" in text, (code, text)
    comm.all_gather(comm.window(2048)).wait()
    """
    assert run(BEGIN + textwrap.dedent(text), CUDA_DEVICE_MAX_CONNECTIONS="8") == ""
