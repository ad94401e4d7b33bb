"""Requests of kernels on the stand-in driver, whose GPU threads are threads: every byte checked."""

import textwrap

from test_capture import PATHS
from test_cuda import run

BEGIN = f"""
sys.path[:0] = {PATHS!r}
from request_threads import *
from offcore import _core
NONE, TIMEOUT, FULL, INVALID, STOPPED, PEER, BROKEN = range(7)
"""


def alone(text: str, *args: str, **env: str) -> str:
    return run(BEGIN + textwrap.dedent(text), *args, **env)


def test_every_rank_to_every_other() -> None:
    """Nothing is allocated, destroyed or put in a caller's stream while requests are answered."""
    alone("""
    ranks, producers, chunk = 3, 2, 1024
    comm = opened(ranks)
    windows = [comm.window(ranks * producers * chunk) for _ in range(2)]
    requests = comm.requests(windows, chunk=chunk, slots=16)
    ports = [gpu_port(requests, rank) for rank in range(ranks)]
    places = [[seen(w.address(rank), w.nbytes) for rank in range(ranks)] for w in windows]
    before = live()
    named = "cuMemCreate cuMemHostRegister cuEventCreate cuEventRecord cuStreamSynchronize"
    asked = [calls(name) for name in named.split()]
    assert _core.trial_exchange(ports, *places, producers, 30, chunk) == 0
    assert live() == before
    assert [calls(name) for name in named.split()] == asked
    requests.drain()
    requests.check()
    stats = requests.stats(0)
    assert stats.requests == stats.signals == 30 * producers * (ranks - 1)
    assert done("same_device") == [0]
    requests.stop()
    assert ports[0].wait(1, 0, 1000) == STOPPED
    """)


def test_neighbours_go_as_one_copy_and_others_as_a_batch() -> None:
    alone("""
    comm = opened(2)
    window = comm.window(1 << 20)
    window.write(np.arange(1 << 20, dtype=np.uint32).astype(np.uint8), rank=0)
    target = comm.window(1 << 20)
    requests = comm.requests([window, target], chunk=256)
    port, other = gpu_port(requests, 0), gpu_port(requests, 1)
    for turn in range(4):
        for chunk in range(0, 4096, 2 if turn % 2 else 1):
            assert port.put(1, 1, 0, chunk, 1).fault == NONE
    assert port.signal(1, 1).fault == NONE
    assert other.wait(0, 1, 1, 20.0) == NONE
    assert (look(target, 1) == look(window, 0)).all()
    requests.drain()
    stats = requests.stats(0)
    assert stats.copies < stats.requests, stats
    assert calls("cuMemcpyBatchAsync") > 0
    assert stats.batches < stats.requests / 2, stats
    """)


def test_a_driver_without_batches() -> None:
    alone(
        """
        comm = opened(2)
        windows = [comm.window(1 << 16) for _ in range(2)]
        windows[0].write(np.full(1 << 16, 9, np.uint8), rank=0)
        with comm.requests(windows, chunk=256) as requests:
            port = gpu_port(requests, 0)
            for chunk in range(0, 256, 2):
                port.put(1, 1, 0, chunk, 1)
            assert port.flush(1, 20.0) == NONE
        got = look(windows[1], 1).reshape(-1, 256)
        assert (got[::2] == 9).all() and (got[1::2] == 0).all()
        """,
        OFFCORE_FAKE_CUDA_LACKS="cuMemcpyBatchAsync",
    )


def test_a_copy_that_fails() -> None:
    """The GPU is gone: its own threads look at host memory, the caller is told."""
    alone(
        """
        comm = opened(2)
        windows = [comm.window(1 << 16) for _ in range(2)]
        requests = comm.requests(windows, chunk=256, limit=20.0)
        port = gpu_port(requests, 0)
        for _ in range(200):
            port.wait_sent(port.put_signal(1, 1, 0, 0, 1))
        assert port.wait(1, 0, 1) == BROKEN
        code, text = code_of(requests.check)
        assert code == "driver", (code, text)
        os._exit(0)
        """,
        OFFCORE_FAKE_CUDA_FAIL="copy:60:700",
    )


def test_ranks_on_one_gpu_are_refused() -> None:
    alone("""
    comm = opened(2, device=[0, 0])
    code, text = code_of(lambda: comm.requests([comm.window(4096)]))
    assert code == "unsupported" and "one GPU" in text, (code, text)
    """)
