"""Requests of kernels on the stand-in driver, whose GPU threads are threads: every byte checked."""

import textwrap
from pathlib import Path

import pytest
from test_capture import PATHS
from test_cuda import run

BEGIN = f"""
sys.path[:0] = {PATHS!r}
from request_threads import *
from offcore import _core
NONE, TIMEOUT, FULL, INVALID, STOPPED, PEER, BROKEN = range(7)
"""


def check_alone(*texts: str, **env: str) -> None:
    assert run(BEGIN + "".join(textwrap.dedent(text) for text in texts), **env) == ""


def test_every_rank_to_every_other() -> None:
    """Nothing is allocated, destroyed or put in a caller's stream while requests are answered."""
    check_alone("""
    ranks, producers, chunk = 3, 2, 1024
    comm = opened(ranks)
    windows = [comm.window(ranks * producers * chunk) for _ in range(2)]
    requests = comm.requests(windows, chunk=chunk, slots=128)
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


@pytest.mark.not_tsan("a lane's clock is looked at while copies move it")
def test_a_soak() -> None:
    """`offcore gpu bench --only soak`, smaller, and with threads as GPU threads, which push and
    watch; then one byte that is wrong."""
    check_alone("""
    from types import SimpleNamespace
    sys.modules["cupy"] = SimpleNamespace()
    from offcore.tools.driven import gpu, soak
    shape = gpu.SOAK = soak.Shape(lanes=4, each=16 * 32, buffers=2, slots=1024)
    gpu.SOAK_BLOCK = gpu.WATCH_BLOCK = 2
    gpu.timed = lambda bench, call: call() or 2.0
    made, rows, asked = [], [], []
    class Comm:
        def __init__(self):
            self.comm, self.windows = opened(2), []
        def window(self, nbytes):
            self.windows.append(self.comm.window(nbytes))
            return self.windows[-1]
        def requests(self, *args, **options):
            made.append(self.comm.requests(*args, **options))
            return made[-1]
    def launch(rank, name, args, grid, block):
        asked.append((rank, name, grid * block, *map(int, args[1:5])))
        assert int(args[0]) == made[-1].port(rank)
        if name != "soak":
            return
        ports = [gpu_port(made[-1], rank) for rank in range(2)]
        clocks = seen(bench.comm.windows[-2].address(1), shape.clock_bytes)
        assert _core.trial_soak(*ports, 4, *map(int, args[2:5]), clocks) == 0
    bench = SimpleNamespace(comm=Comm(), launch=launch, failures=[], address=lambda *_: 0)
    bench.end, bench.add = lambda what: None, lambda *row: rows.append(row)
    gpu.soak(bench)
    assert bench.failures == [], bench.failures
    assert asked == [(1, "soak_watch", 4, 0, 512, 2, 1024), (0, "soak", 4, 1, 512, 2, 1024)]
    count = 4 * 32 * 17
    assert rows[0] == ("soak", "4 lanes", 64, count / 1e6, "M requests, all right")
    assert rows[1][3] == count / 2000 and rows[2][0] == "soak copies"
    bench.end = lambda what: bench.comm.windows[-4].write(np.full(1, 77, np.uint8), 640, rank=1)
    del bench.comm.windows[:]
    gpu.soak(bench)
    assert bench.failures == ["soak: buffer 0: 1 wrong slots, the first is 10"], bench.failures
    """)


def test_neighbours_go_as_one_copy_and_others_as_a_batch() -> None:
    check_alone("""
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
    check_alone(
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
    check_alone(
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
        code_of(requests.stop)
        del requests  # its thread ends before the process
        os._exit(0)
        """,
        OFFCORE_FAKE_CUDA_FAIL="copy:60:700",
    )


def test_ranks_on_one_gpu_are_refused() -> None:
    check_alone("""
    comm = opened(2, device=[0, 0])
    code, text = code_of(lambda: comm.requests([comm.window(4096)]))
    assert code == "unsupported" and "one GPU" in text, (code, text)
    """)


ARMED = """
ranks, chunk, rounds = 3, 512, 150
comm = opened(ranks, signals=os.environ.get("SIGNALS", "fenced"))
windows = [comm.window(ranks * chunk) for _ in range(2)]
Put = offcore.Put
peers = [[peer for peer in range(ranks) if peer != rank] for rank in range(ranks)]
plan = [[one for peer in peers[rank] for one in (Put(peer, 1, 0, rank, 1, signal=False),
        Put(peer, 1))] for rank in range(ranks)]
"""


@pytest.mark.parametrize("signals", ["fenced", "copy_order"])
def test_armed_requests_start_without_the_host(signals: str) -> None:
    """More rounds than are parked at once; what is parked at the end changes nothing."""
    check_alone(
        ARMED,
        """
    requests = comm.requests(windows, schedule=plan, chunk=chunk, limit=20.0)
    ports = [gpu_port(requests, rank) for rank in range(ranks)]
    got = np.empty(chunk, np.uint8)
    for turn in range(1, rounds + 1):
        for rank, port in enumerate(ports):
            windows[0].write(np.full(chunk, (turn + rank) % 251, np.uint8), rank * chunk, rank=rank)
            for peer in peers[rank]:
                assert port.put(peer, 1, 0, rank, 1).fault == NONE
                ticket = port.signal(peer, 1)
                assert ticket.fault == NONE and ticket.position == 2 * turn
        for rank, port in enumerate(ports):
            for peer in peers[rank]:
                wake(requests, peer, rank)
                assert port.wait(peer, 1, turn) == NONE
                windows[1].read(got, peer * chunk, rank)  # what others send may be under way
                assert (got == (turn + peer) % 251).all(), (turn, rank, peer, got)
                assert port.flush(peer) == NONE
    requests.drain()
    requests.check()
    stats = requests.stats(0)
    assert stats.requests == 4 * rounds and stats.signals == 2 * rounds, stats
    assert stats.nbytes == 2 * rounds * chunk, stats
    before = [look(windows[1], rank).copy() for rank in range(ranks)]
    windows[0].write(np.full(chunk, 255, np.uint8), 0, rank=0)
    requests.stop()
    assert requests.stats(0) == stats
    requests.drain()
    assert ports[1].wait(0, 1, rounds + 1) == STOPPED
    for rank in range(ranks):
        assert (look(windows[1], rank) == before[rank]).all()
        assert ports[rank].received((rank + 1) % ranks, 1) == rounds
    del requests
    again = comm.requests(windows, schedule=plan, chunk=chunk)  # its streams are free again
    port = gpu_port(again, 0)
    again.stop()
    assert port.put(1, 1, 0, 0, 1).fault == STOPPED
    assert port.flush(1) == STOPPED
    """,
        CUDA_DEVICE_MAX_CONNECTIONS="32",
        SIGNALS=signals,
    )


def test_a_schedules_signals_by_default(tmp_path: Path) -> None:
    """Copied in copy order only where the stress has passed, else written behind the data."""
    check_alone(
        """
    from offcore.comm import signal_forms
    facts = _core.cuda_facts()
    passed = signal_forms.Verdict(
        signal_forms.driver_name(facts), facts["gpus"][0]["name"], "copy_order", True, "", 2000, 0,
        1, True, 2, "2026-11-27")
    for form, copies in (("fenced", 1), ("copy_order", 2)):
        comm = opened(2)
        windows = [comm.window(4096) for _ in range(2)]
        plan = [[offcore.Put(1 - rank, 1, 0, 0, 1)] for rank in range(2)]
        with comm.requests(windows, schedule=plan, chunk=4096, limit=20.0) as requests:
            port, other = gpu_port(requests, 0), gpu_port(requests, 1)
            before = done("plain")[0]
            assert port.put_signal(1, 1, 0, 0, 1).fault == NONE
            wake(requests, 0, 1)
            assert other.wait(0, 1, 1) == NONE
            assert port.flush(1) == NONE
            assert done("plain")[0] - before == copies, form
        comm.close()
        signal_forms.remember([passed])
    """,
        OFFCORE_CACHE=str(tmp_path),
    )


def test_what_the_schedule_does_not_have() -> None:
    check_alone(
        ARMED,
        """
    bad = [[Put(1, 1, 0, 0, 1)], [Put(1, 1, 0, 0, 1)], []]
    code, text = code_of(lambda: comm.requests(windows, schedule=bad, chunk=chunk))
    assert code == "invalid" and "rank 1 sends chunks 0+1" in text, (code, text)
    code, text = code_of(lambda: comm.requests(windows, schedule=plan[:2], chunk=chunk))
    assert code == "invalid" and "2 lists of requests for 3 ranks" in text, (code, text)
    requests = comm.requests(windows, schedule=plan, chunk=chunk)
    port, other = gpu_port(requests, 0), gpu_port(requests, 1)
    assert port.put_bytes(1, 1, 0, 0, 0, 5).fault == INVALID
    assert other.wait(0, 1, 1) == INVALID
    assert code_of(requests.check)[0] == "invalid"
    assert code_of(requests.drain)[0] == "invalid"
    requests.stop()
    requests = comm.requests(windows, schedule=plan, chunk=chunk)
    assert gpu_port(requests, 0).signal(1, 1).fault == INVALID  # a put comes first
    assert code_of(requests.check)[0] == "invalid"
    """,
        CUDA_DEVICE_MAX_CONNECTIONS="32",
    )


COUNTED = """
ranks, row, rows = 3, 256, 64
comm = opened(ranks)
out, inp, words = comm.window(rows * row), comm.window(rows * row), comm.window(4096)
class Array:
    def __init__(self, address, count):
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i8", "data": (address, False), "version": 2}
counts = [Array(words.address(rank), ranks) for rank in range(ranks)]
received = [Array(words.address(rank) + 512, ranks) for rank in range(ranks)]
"""


def test_an_all_to_all_whose_counts_lie_on_the_gpus() -> None:
    """In the caller's stream order; nothing is allocated once the buffers are known."""
    check_alone(
        COUNTED,
        """
    rng = np.random.default_rng(3)
    for turn in range(12):
        matrix = rng.integers(0, rows // ranks, (ranks, ranks))
        data = rng.integers(0, 256, (ranks, rows * row), "uint8")
        for rank in range(ranks):
            words.write(matrix[rank].astype(np.int64) * row, 0, rank=rank)
            inp.write(data[rank], rank=rank)
            out.write(np.zeros(rows * row, np.uint8), rank=rank)
        before = live()
        handle = comm.all_to_all_v(out, inp, counts, counts_on_device=True, received=received)
        handle.wait(20.0)
        if turn > 0:
            assert live() == before
        for rank in range(ranks):
            parts = [data[q][matrix[q][:rank].sum() * row:][:matrix[q][rank] * row]
                     for q in range(ranks)]
            wanted = np.concatenate(parts)
            got = look(out, rank)
            assert (got[:len(wanted)] == wanted).all() and not got[len(wanted):].any(), (turn, rank)
            told = look(words, rank)[512:512 + 8 * ranks].view(np.int64)
            assert (told == matrix[:, rank] * row).all()
    words.write(np.full(ranks, rows * row, np.int64), 0, rank=1)
    code, text = code_of(comm.all_to_all_v(out, inp, counts, counts_on_device=True).wait)
    assert code == "invalid" and "nothing was sent" in text, (code, text)
    host = [np.zeros(ranks, np.int64) for _ in range(ranks)]
    code, text = code_of(lambda: comm.all_to_all_v(out, inp, host, counts_on_device=True))
    assert code == "invalid" and "host memory" in text, (code, text)
    comm.close()
    """,
    )


STREAMS = """
from cuda_driver import Driver
driver, streams = Driver(os.environ["OFFCORE_LIBCUDA"]), []
for rank in range(ranks):
    driver.start(rank)
    streams.append(driver.stream())
    words.write(np.full(ranks, row, np.int64), 0, rank=rank)
    inp.write(np.full(rows * row, rank + 1, np.uint8), rank=rank)
comm._streams = lambda: streams
driver.start(0)
"""


def test_an_all_to_all_with_counts_is_in_no_graph() -> None:
    """Its number would be captured with it; the refusal takes no number."""
    check_alone(
        COUNTED,
        STREAMS,
        """
    graph = []
    with driver.capture(streams[0], graph):
        code, text = code_of(lambda: comm.all_to_all_v(out, inp, counts, counts_on_device=True))
    assert code == "unsupported" and "outside of the capture" in text, (code, text)
    for _ in range(2):
        comm.all_to_all_v(out, inp, counts, counts_on_device=True).wait(20.0)
    for rank in range(ranks):
        assert (look(out, rank)[:ranks * row].reshape(ranks, row).T == [1, 2, 3]).all()
    comm.close()
    """,
    )


def test_a_close_waits_for_an_all_to_all_with_counts() -> None:
    """Whose kernels use what the communicator maps; one has not even begun."""
    check_alone(
        COUNTED,
        STREAMS,
        """
    comm.all_to_all_v(out, inp, counts, counts_on_device=True).wait(20.0)
    gate = comm.host_array(1, "uint32")
    word = gate.ctypes.data
    driver("cuStreamWaitValue32", streams[0], word, 1, 0)
    comm.all_to_all_v(out, inp, counts, counts_on_device=True)  # nobody keeps its handle
    opening = threading.Timer(0.2, ctypes.c_uint32.from_address(word).__init__, [1])
    start = time.monotonic()
    opening.start()
    comm.close()
    took = time.monotonic() - start
    assert 0.2 <= took < 10, took
    driver("cuStreamSynchronize", streams[0])
    """,
    )
