"""Loops on the host: graphs, dependencies, counters, ends and aborts, beside plain references; and
the generated kernel, as host code and as nvcc compiles it."""

import shutil
import subprocess
import time
import types

import generated
import loop_graphs
import numpy as np
import pytest

import offcore
from offcore import loop
from offcore.comm.requests import Requests
from offcore.device.cuda import nvrtc
from offcore.loop import gpu, plan, source
from offcore.loop.host import HostExecutor

RNG = np.random.default_rng(3)


def refused(code, call):
    with pytest.raises(offcore.Error) as told:
        call()
    assert told.value.code == code, told.value
    return str(told.value)


@pytest.fixture
def comm():
    with offcore.Communicator(backend="host", ranks=2, timeout=20) as made:
        yield made


@pytest.mark.parametrize(("count", "blocks"), [(512, 1), (512, 3), (65536, 4)])
def test_all_reduce(comm, count, blocks):
    made = loop_graphs.all_reduce(count)
    windows = [comm.window(count * 4) for _ in range(2)]
    data = [RNG.integers(0, 1 << 32, count, "uint32") for _ in range(2)]
    with loop.Loop(comm, made, buffers=windows, blocks=blocks) as looped:
        for rank in range(2):
            looped.write(made[rank].buffers["data"][:], data[rank], rank)
        looped.run(3)
        looped.run(4)
        want = loop_graphs.all_reduce_expected(data, 7)
        for rank in range(2):
            assert (looped.read(made[rank].buffers["data"][:], rank) == want[rank]).all()
            assert looped.times(rank).shape == (7, 1)
            assert (np.diff(looped.times(rank)[:, 0]) > 0).all()
        looped.start()
        time.sleep(0.05)
        ended = looped.stop()
        assert ended >= 7
        want = loop_graphs.all_reduce_expected(data, ended)
        for rank in range(2):
            assert (looped.read(made[rank].buffers["data"][:], rank) == want[rank]).all()


def test_mlp(comm):
    rows, width, hidden, iterations = 70, 64, 96, 5
    made = loop_graphs.mlp(rows, width, hidden)
    windows = [comm.window(rows * width * 4) for _ in range(3)]
    x = RNG.integers(0, 2, rows * width).astype(np.float32)
    weights = [
        [RNG.integers(-1, 2, n * hidden).astype(np.float32) for n in (width, width)]
        for _ in range(2)
    ]
    with loop.Loop(comm, made, buffers=windows) as looped:
        for rank in range(2):
            for name, one in (("x", x), ("w1", weights[rank][0]), ("w2", weights[rank][1])):
                looped.write(made[rank].buffers[name][:], one, rank)
        looped.run(iterations)
        want = loop_graphs.mlp_expected(x, weights, rows, width, hidden, iterations)
        for rank in range(2):
            assert (looped.read(made[rank].buffers["x"][:], rank) == want).all()


def test_one_rank_without_requests():
    with offcore.Communicator(backend="host", ranks=1) as comm:
        graph = loop.Graph(0, 1)
        a, b = graph.buffer("a", 40000, "int32"), graph.buffer("b", 10000, "int32")
        graph.reduce(b, a)
        graph.stamp()
        graph.map(loop.ADD, a.buffer[:10000], a.buffer[:10000], b)
        graph.copy(a.buffer[10000:20000], b)
        data = RNG.integers(-100, 100, 40000).astype(np.int32)
        with loop.Loop(comm, [graph]) as looped:
            looped.write(a, data)
            looped.run(6)
            for _ in range(6):
                total = data.reshape(4, -1).sum(0, dtype=np.int32)
                data[:10000] += total
                data[10000:20000] = total
            assert (looped.read(a) == data).all()
            times = looped.times()
            assert times.shape == (6, 2)
            assert (np.diff(times.ravel()) > 0).all()
            assert "needs backend cuda" in refused(
                "unsupported", lambda: looped.run(1, launched=True)
            )
            looped.run(1)  # that was refused, and nothing runs


def test_only_a_loop_without_an_end_is_stopped():
    """One that has ended would count an iteration that it has not made."""
    graph = loop.Graph(0, 1)
    a = graph.buffer("a", 8)
    one = graph.buffer("one", 8)
    graph.map(loop.ADD, a, a, one)
    with (
        offcore.Communicator(backend="host", ranks=1) as comm,
        loop.Loop(comm, [graph], blocks=1) as looped,
    ):
        looped.write(one, np.ones(8))
        refused("invalid", looped.stop)
        looped.run(3)
        assert looped.begun() == 3
        refused("invalid", looped.stop)
        looped.start(50_000)
        refused("invalid", looped.stop)
        looped.wait()
        looped.start()
        deadline = time.monotonic() + 20
        while looped.begun() < 50_103:  # it runs, and counts
            assert time.monotonic() < deadline
        ended = looped.stop()
        assert ended >= 50_103
        refused("invalid", looped.stop)
        looped.run(2)
        assert (looped.read(a) == ended + 2).all()


@pytest.mark.needs("c++")
def test_times_are_of_the_last_iterations(tmp_path):
    """The look that finds the end takes no iteration's place."""
    graph = loop.Graph(0, 1)
    graph.stamp()
    planned = loop.Plan(graph, 1)
    one = generated.Generated(planned, generated.compiled(planned, tmp_path, "c++"), {}, 0)
    one.start(5000)
    assert one.join() == 0
    times = one.kept[4].reshape(4096, 2)
    last = times[np.arange(5000 - 4096, 5000) % 4096].ravel()
    assert (np.diff(last.astype(np.int64)) >= 0).all()


@pytest.mark.needs("c++")
@pytest.mark.parametrize("blocks", [1, 2])
def test_an_abort_ends_a_loop_that_never_waits(tmp_path, blocks):
    """One with an end: at its begin block 0 tells the others how far they may go."""
    graph = loop.Graph(0, 1)
    a = graph.buffer("a", 8192)
    graph.map(loop.ADD, a, a, a)
    memory = {"a": np.zeros(8192, np.float32)}
    planned = loop.Plan(graph, blocks)
    library = generated.compiled(planned, tmp_path, "c++")
    one = generated.Generated(planned, library, memory, 0)
    one.start(2_000_000)  # many seconds
    time.sleep(0.05)
    one.shared.abort = 1
    assert one.join() & 255 == 15


def test_launches_end_when_all_is_sent():
    """As a loop's block 0 does: what was sent may be written again."""
    launched = []

    class Driver:
        def fill(self, at, nbytes):
            pass

        def launch(self, function, grid, threads, args, cooperative):
            launched.append((args[1].kind, args[1].a))

    one = gpu.GpuExecutor.__new__(gpu.GpuExecutor)
    one.plan, one.driver = loop.Plan(loop_graphs.all_reduce(512)[0], 2), Driver()
    one._args, one._shared, one._fault, one._step, one.base = gpu.Args(), gpu.Shared(), 0, None, 0
    one.start(2, launched=True)
    puts = [n for n, made in enumerate(one.plan.graph.operators) if made.kind == "put"]
    assert launched[-len(puts) :] == [(plan.SENT, put) for put in puts]


def test_a_peer_that_does_not_send(comm):
    """The wait ends by its limit, by an abort, or by the engine's end; the loop is dead then."""
    for how, code in (("limit", "timeout"), ("abort", "cancelled")):
        graph = [loop.Graph(rank, 2) for rank in range(2)]
        for one in graph:
            one.barrier()
        windows = [comm.window(4096)]
        limit = 0.2 if how == "limit" else 20.0
        looped = loop.Loop(comm, graph, buffers=windows, limit=limit)
        looped._executors[1].start = lambda *_: None
        looped.start(5)
        if how == "abort":
            time.sleep(0.05)
            assert refused("timeout", lambda looped=looped: looped.wait(0.01))
            looped.abort()
        text = refused(code, looped.wait)
        assert "rank 0" in text
        assert "block" in text
        refused("invalid", lambda looped=looped: looped.start(1))
        looped.close()


def test_requests_open_last_and_stop_first(comm, monkeypatch):
    """So that nothing parked in streams holds up code that is loaded or memory that is freed."""
    order = []

    def noted(owner, name):
        plain = getattr(owner, name)

        def call(*args, **kwargs):
            order.append(f"{owner.__name__}.{name}")
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (HostExecutor, "__init__"),
        (HostExecutor, "close"),
        (Requests, "__init__"),
        (Requests, "stop"),
    ):
        noted(owner, name)
    made = loop_graphs.all_reduce(512)
    with loop.Loop(comm, made, buffers=[comm.window(2048) for _ in range(2)]) as looped:
        looped.run(1)
    made, stopped = order.index("Requests.__init__"), order.index("Requests.stop")
    assert order[:made] == ["HostExecutor.__init__"] * 2
    assert order[stopped + 1 :] == ["HostExecutor.close"] * 2


def test_what_is_refused(comm):
    graph = loop.Graph(0, 2)
    a = graph.buffer("a", 64)
    b = graph.buffer("b", 64, number=0)
    refused("unsupported", lambda: graph.buffer("h", 8, "float16"))
    refused("invalid", lambda: graph.buffer("a", 8))
    refused("invalid", lambda: graph.map(loop.ADD, a, a.buffer[:32], a))
    refused("invalid", lambda: graph.map(loop.COPY, a.buffer[:32], a.buffer[1:33]))
    refused("invalid", lambda: graph.map(loop.ADD, a, *[a] * 9))
    refused("invalid", lambda: graph.buffer("before", 64, number=0, offset=-256))
    refused("invalid", lambda: graph.put(1, b, a))
    refused("invalid", lambda: graph.put(0, b, b))
    refused("invalid", lambda: graph.gemm(a, b, b, 8, 8, 7))
    graph.put(1, b, b)
    other = loop.Graph(1, 2)
    text = refused("invalid", lambda: loop.Loop(comm, [graph, other]))
    assert "rank 0's puts to rank 1 are not its waits" in text
    other.buffer("b", 64, number=0)
    other.wait(0, other.buffers["b"][:])
    text = refused("invalid", lambda: loop.Loop(comm, [graph, other]))
    assert "no window 0" in text
    windows = [comm.window(256)]
    text = refused("invalid", lambda: loop.Loop(comm, [graph, other], buffers=windows, engine="x"))
    assert "proxy and armed" in text


def test_a_schedule_is_the_graphs_puts():
    made = loop_graphs.all_reduce(512)
    assert loop.schedule_of(made) == [
        [offcore.Put(1, 1, 0, 4, 4), offcore.Put(1, 0, 0, 0, 4)],
        [offcore.Put(0, 1, 0, 0, 4), offcore.Put(0, 0, 0, 4, 4)],
    ]


def test_instructions():
    """No wait that program order or an earlier wait implies."""
    lists = loop.Plan(loop_graphs.all_reduce(512)[0], 2).blocks
    kinds = [one.kind for one in lists[0]]
    assert kinds.count(plan.RUN) == 3
    assert kinds.count(plan.ARRIVED) == 3
    assert plan.AWAIT not in kinds
    assert lists[1] == []


@pytest.mark.needs("c++")
def test_the_generated_kernel_as_host_code(comm, tmp_path):
    rows, width, hidden, iterations = 70, 64, 96, 5
    made = loop_graphs.mlp(rows, width, hidden)
    sides = [comm.empty(rows * width, "float32") for _ in range(3)]
    x = RNG.integers(0, 2, rows * width).astype(np.float32)
    weights = [
        [RNG.integers(-1, 2, n * hidden).astype(np.float32) for n in (width, width)]
        for _ in range(2)
    ]
    with comm.requests(sides, chunk=256) as requests:
        kernels = []
        for rank, graph in enumerate(made):
            folder = tmp_path / str(rank)
            folder.mkdir()
            planned = loop.Plan(graph, 3)
            library = generated.compiled(planned, folder, "c++")
            memory = {"h": np.zeros(rows * hidden, np.float32)}
            memory |= dict(zip(("w1", "w2"), weights[rank], strict=True))
            memory |= {
                name: side[rank] for name, side in zip(("x", "got", "y"), sides, strict=True)
            }
            memory["x"][:] = x
            port = requests.port(rank)
            kernels.append(generated.Generated(planned, library, memory, port))
        for turn in (2, 3):
            for one in kernels:
                one.start(turn)
            assert [one.join() for one in kernels] == [0, 0]
        want = loop_graphs.mlp_expected(x, weights, rows, width, hidden, iterations)
        for one in kernels:
            assert (one.memory["x"] == want).all()
        for one in kernels:  # without an end, until both are told
            one.start()
        time.sleep(0.02)
        begun = []
        for one in kernels:
            one.shared.stop = 1
            begun.append(one.shared.begun)
        for one in kernels:
            one.shared.end = max(begun) + 1
        assert [one.join() for one in kernels] == [0, 0]
        want = loop_graphs.mlp_expected(x, weights, rows, width, hidden, max(begun))
        for one in kernels:
            assert (one.memory["x"] == want).all()
            one.args.base = max(begun)
        kernels[0].start(1)  # alone: it waits for the other's put
        kernels[0].shared.abort = 1
        assert kernels[0].join() & 255 == 15


@pytest.mark.needs("c++")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_relu_is_that_of_torch(tmp_path, dtype):
    """On the host and in the kernel: NaN stays NaN, and -0 becomes 0."""
    values = [-2, 3, 0, 7] if dtype == "int32" else [np.nan, -0.0, -np.inf, np.inf, -1.5, 2.5]
    given = np.array(values, dtype)
    want = np.array([one if one > 0 or one != one else 0 for one in values], dtype)
    graph = loop.Graph(0, 1)
    inp, out = graph.buffer("inp", len(values), dtype), graph.buffer("out", len(values), dtype)
    graph.map(loop.RELU, out, inp)
    memory = {"inp": given, "out": np.ones_like(given)}
    planned = loop.Plan(graph, 1)
    library = generated.compiled(planned, tmp_path, "c++")
    kernel = generated.Generated(planned, library, memory, 0)
    kernel.start(1)
    assert kernel.join() == 0
    assert memory["out"].tobytes() == want.tobytes()
    with (
        offcore.Communicator(backend="host", ranks=1) as comm,
        loop.Loop(comm, [graph], blocks=1) as looped,
    ):
        looped.write(inp, given)
        looped.run(1)
        assert looped.read(out).tobytes() == want.tobytes()


def test_stop_is_told_before_the_host_looks(monkeypatch):
    """In any other order an iteration could begin that neither side knows of."""
    told = []

    class Shared:
        begun = property(lambda self: told.append("begun") or 7)

        def __setattr__(self, name, value):
            told.append((name, value))

    executor = object.__new__(gpu.GpuExecutor)
    executor._shared = Shared()
    monkeypatch.setattr(gpu._core, "fence", lambda: told.append("fence"))
    assert executor.ask_to_stop() == 7
    assert told == [("stop", 1), "fence", "begun"]


def test_iterations_of_a_number_count_on_a_gpu():
    """Whose kernel counts only those of a loop without an end."""
    executor = object.__new__(gpu.GpuExecutor)
    executor.driver = types.SimpleNamespace(idle=lambda: True)
    executor._shared, executor._args = gpu.Shared(begun=3), gpu.Args(base=3, end=8)
    executor.base, executor._free = 3, False
    assert executor.begun == 3
    assert executor.ended()
    assert executor.begun == 8
    executor._shared.begun = 9  # of the next one
    assert executor.begun == 9


def test_nvcc_compiles_the_text(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    file = tmp_path / "loop.cu"
    file.write_text(source.text_of(loop.Plan(loop_graphs.mlp(70, 64, 96)[0], 8)), "utf-8")
    command = [nvcc, "-std=c++17", "-arch=sm_90", "-ptx", "-o", str(tmp_path / "loop.ptx")]
    command += [f"-I{one}" for one in source.include_paths()]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ".entry offcore_loop" in (tmp_path / "loop.ptx").read_text("utf-8")


def test_nvrtc_of_a_package(monkeypatch, tmp_path):
    """It asks for its builtins by name alone, so they are loaded before it."""
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"):
        (tmp_path / name).touch()
    loaded = []
    monkeypatch.setattr(nvrtc, "_candidates", lambda: [str(tmp_path / "libnvrtc.so.13")])
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", loaded.append)
    nvrtc.library.cache_clear()
    nvrtc.library()
    nvrtc.library.cache_clear()
    names = ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13")
    assert loaded == [str(tmp_path / name) for name in names]


def test_without_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["libnone.so"])
    nvrtc.library.cache_clear()
    assert "nvidia-cuda-nvrtc" in refused("unsupported", nvrtc.library)
    nvrtc.library.cache_clear()
