"""Requests of running kernels, on backend host: its threads push as a GPU's do."""

import ctypes
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import _core
from offcore.tools.driven import soak
from stores import free_store

NONE, TIMEOUT, FULL, INVALID, STOPPED, PEER = 0, 1, 2, 3, 4, 5
RANK = Path(__file__).with_name("request_rank.py")


@pytest.mark.parametrize(
    ("producers", "slots", "lanes"), [(1, 16, 1), (7, 16, 1), (4, 1024, 1), (6, 16, 3), (12, 16, 4)]
)
def test_racing_producers(producers: int, slots: int, lanes: int) -> None:
    """None lost, doubled, reordered or torn, over many laps; also where lanes push as one."""
    wrong, _ = _core.trial_ring(producers, 20_000 if lanes == 1 else 3_000, slots, lanes)
    assert wrong == 0


@pytest.mark.parametrize("seed", range(4))
def test_simulated_gpu_threads(seed: int) -> None:
    """Words that arrive late and out of order, in virtual time; a seed repeats its run."""
    told = _core.simulate_ring(5, 60, 128, seed)
    wrong, time_ns, _, waits = told
    assert wrong == 0
    assert 0 < time_ns < 50_000_000
    assert waits > 0
    assert _core.simulate_ring(5, 60, 128, seed) == told
    assert _core.simulate_ring(5, 60, 128, seed + 100) != told


def test_ten_million_requests(request: pytest.FixtureRequest) -> None:
    sanitized = request.config.getoption("--sanitized")
    wrong, time_ns = _core.trial_ring(8, 200_000 if sanitized else 10_000_000, 4096)
    assert wrong == 0
    assert time_ns > 0


SOAK = soak.Shape(lanes=6, each=16 * 64, buffers=3, slots=2048)


def soaked(shape: soak.Shape, watched: bool) -> Any:
    """Runs one on host: what soak.wrong asks for."""
    sizes = [shape.nbytes] * (1 + shape.buffers) + [shape.clock_bytes, len(shape.table())]
    with offcore.Communicator(backend="host", ranks=2) as comm:
        send, *received, table = (comm.empty(size) for size in sizes)
        send[0][:] = np.random.default_rng(5).integers(0, 256, shape.nbytes, "uint8")
        table[0][:] = shape.table()
        with comm.requests([send, *received, table], chunk=soak.SLOT, limit=30.0) as requests:
            ports = [requests.host_port(rank) for rank in range(2)]
            given = shape.lanes, shape.each, shape.buffers, shape.slots
            clocks = received[-1][1].ctypes.data if watched else 0
            assert _core.trial_soak(*ports, *given, clocks) == 0
            requests.drain()
            requests.check()
            return send[0].copy(), [one[1].copy() for one in received], requests.stats(0)


def test_a_soak(request: pytest.FixtureRequest) -> None:
    """Requests of both kinds by many lanes; a word that is wrong anywhere is told."""
    source, got, stats = soaked(SOAK, not request.config.getoption("--sanitized"))
    assert soak.wrong(SOAK, source, got.__getitem__, stats) == []
    assert stats.requests == 6 * 64 * 17
    got[1][soak.SLOT * 77 + 3] ^= 1
    got[3][soak.CLOCK] ^= 1
    told = soak.wrong(SOAK, source, got.__getitem__, stats._replace(requests=1, nbytes=2))
    assert told == [
        "requests: 1 of 6528",
        f"nbytes: 2 of {stats.nbytes}",
        "buffer 1: 1 wrong slots, the first is 77",
        "1 clocks do not show the last number",
    ]


def test_what_a_soak_draws() -> None:
    """Both kinds, all sizes and many places, in parts as at once."""
    whole, size, shift, src = SOAK.drawn(0, 6144)
    assert 0.45 < whole.mean() < 0.55
    assert set(size.tolist()) == set(range(1, soak.SLOT + 1))
    assert (shift + size).max() == soak.SLOT
    assert shift.min() == 0
    assert (src + size).max() <= SOAK.nbytes
    parts = [SOAK.drawn(at, 1024) for at in range(0, 6144, 1024)]
    for number, all_of in enumerate((whole, size, shift, src)):
        assert (np.concatenate([part[number] for part in parts]) == all_of).all()


def test_an_engine_spins_between_requests() -> None:
    """Until `spin` is over since the last one; asleep it would take the next one late."""

    def sleeps(thread: str) -> int:
        status = Path(f"/proc/self/task/{thread}/status").read_text("ascii")
        return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])

    with offcore.Communicator(backend="host", ranks=2) as comm:
        buffers = [comm.empty(64) for _ in range(2)]
        before = set(os.listdir("/proc/self/task"))
        with comm.requests(buffers, spin=0.4) as requests:
            engines = set(os.listdir("/proc/self/task")) - before
            assert len(engines) == 2
            ports = [requests.host_port(rank) for rank in range(2)]

            def work(turns: int) -> int:
                for _ in range(turns):
                    for rank, port in enumerate(ports):
                        assert port.wait_sent(port.signal(1 - rank, 0)) == NONE
                    time.sleep(0.02)
                return max(map(sleeps, engines))

            first = work(25)  # longer than it spins without any
            assert work(25) - first < 50
            end = time.monotonic() + 20  # a machine may stand still for a second
            while max(map(sleeps, engines)) - first <= 200:
                assert time.monotonic() < end
                time.sleep(0.1)


@pytest.mark.parametrize(("ranks", "producers", "chunk"), [(2, 3, 16), (4, 2, 4096)])
def test_every_rank_to_every_other(ranks: int, producers: int, chunk: int) -> None:
    with offcore.Communicator(backend="host", ranks=ranks) as comm:
        send, receive = (comm.empty(ranks * producers * chunk) for _ in range(2))
        with comm.requests([send, receive], chunk=chunk, slots=128) as requests:
            ports = [requests.host_port(rank) for rank in range(ranks)]
            places = [[array.ctypes.data for array in side] for side in (send, receive)]
            assert _core.trial_exchange(ports, *places, producers, 40, chunk) == 0
            requests.drain()
            requests.check()
            for rank in range(ranks):
                stats = requests.stats(rank)
                assert stats.requests == stats.signals == 40 * producers * (ranks - 1)
                assert stats.nbytes == stats.requests * chunk
                assert stats.copies <= stats.requests
                assert stats.batches <= stats.requests


@pytest.fixture
def pair() -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Two ranks here: requests between them, their windows and their ports."""
    with offcore.Communicator(backend="host", ranks=2) as comm:
        windows = [comm.empty(1 << 16) for _ in range(2)]
        with comm.requests(windows, chunk=256, slots=128, limit=5.0) as requests:
            yield requests, windows, [requests.host_port(rank) for rank in range(2)]


def test_any_bytes_and_whole_chunks(pair: Any) -> None:
    requests, (send, receive), (port, other) = pair
    rng = np.random.default_rng(1)
    send[0][:] = rng.integers(0, 256, len(send[0]), "uint8")
    wanted = np.zeros_like(receive[1])
    for turn in range(200):
        if turn % 2:
            chunk, count = rng.integers(0, 200), rng.integers(1, 50)
            dst = src = int(chunk) * 256
            nbytes = int(count) * 256
            ticket = port.put(1, 1, 0, int(chunk), int(count))
        else:
            dst, src = (int(one) for one in rng.integers(0, 1 << 15, 2))
            nbytes = int(rng.integers(0, 1 << 15))
            ticket = port.put_bytes(1, 1, dst, 0, src, nbytes, signalled=True)
        wanted[dst : dst + nbytes] = send[0][src : src + nbytes]
        assert port.wait_sent(ticket) == NONE  # puts that overlap have no order among each other
        assert port.test(ticket)
    assert other.wait(0, 1, 100) == NONE
    assert other.received(0, 1) == 100
    np.testing.assert_array_equal(receive[1], wanted)
    assert requests.stats(0).signals == 100


def test_neighbours_become_one_copy(pair: Any) -> None:
    """What continues another request is merged with it when the engine finds both."""
    requests, (send, receive), (port, _) = pair
    send[0][:] = 7
    for _ in range(50):
        for chunk in range(256):
            port.put(1, 1, 0, chunk, 1)
    assert port.flush(1) == NONE
    assert (receive[1] == 7).all()
    stats = requests.stats(0)
    assert stats.requests == 50 * 256 + 1
    assert stats.copies < stats.requests


def test_limits_at_registration() -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        window = comm.window(1 << 20)
        small = window.region(0, 4096)

        def refusal(*args: Any, **named: Any) -> str:
            with pytest.raises(offcore.Error) as refused:
                comm.requests(*args, **named)
            assert refused.value.code == "invalid"
            return str(refused.value)

        assert "1 to 64" in refusal([])
        assert "1 to 64" in refusal([small] * 65)
        assert "power of two" in refusal([small], chunk=48)
        assert "power of two" in refusal([small], slots=100)
        assert "whole chunks" in refusal([small, window.region(0, 100)])
        assert "lies in no window" in refusal([[np.zeros(16, "uint8") for _ in range(2)]])
        assert "2 ranks" in refusal([np.zeros(16, "uint8")])
        with comm.requests([small] * 64) as requests:
            assert requests.host_port(0).put(1, 63, 63, 0, 256).fault == NONE
            with pytest.raises(offcore.Error, match="not local"):
                requests.port(2)


def test_chunks_grow_with_buffers() -> None:
    """Past 2^21 chunks of the least size a chunk is larger; of a chosen size it is an error."""
    with offcore.Communicator(backend="host", ranks=2) as comm:
        window = comm.window(1 << 26)
        with comm.requests([window]) as requests:
            port = requests.host_port(0)
            assert port.put_signal(1, 0, 0, (1 << 20) - 1, 1).fault == NONE
            assert requests.host_port(1).wait(0, 0, 1) == NONE
            assert requests.stats(0).nbytes == 64
        with pytest.raises(offcore.Error, match="choose larger chunks"):
            comm.requests([window], chunk=16)


def test_a_range_that_is_not_registered(pair: Any) -> None:
    """The engine ends; this rank and its peer are told, and nothing hangs."""
    requests, _, (port, other) = pair
    assert port.put_bytes(1, 0, (1 << 16) - 10, 1, 0, 11, signalled=True).fault == NONE
    assert other.wait(0, 0, 1) == INVALID
    assert port.wait(1, 0, 1) == INVALID
    with pytest.raises(offcore.Error, match=r"from 0\+11 of buffer 1") as told:
        requests.check()
    assert told.value.code == "invalid"
    with pytest.raises(offcore.Error, match="buffer 1"):
        requests.drain()


@pytest.mark.parametrize(
    "call",
    [
        lambda port: port.put(2, 0, 0, 0, 1),
        lambda port: port.put(0, 0, 0, 0, 1),
        lambda port: port.signal(1, 2),
        lambda port: port.put(1, 0, 0, 1 << 21, 1),
        lambda port: port.put_bytes(1, 0, 0, 0, 1 << 38, 1),
        lambda port: port.put_bytes(1, 0, 1, 0, 0, 1 << 38),
        lambda port: (port.wait(1, 0, 1, limit_s=0.001), port.signal(1, 2))[1],
    ],
)
def test_a_bad_number_is_refused_by_its_producer(pair: Any, call: Any) -> None:
    requests, _, (port, other) = pair
    assert call(port).fault == INVALID
    assert other.wait(0, 0, 1) == INVALID
    with pytest.raises(offcore.Error, match="a kernel named") as told:
        requests.check()
    assert told.value.code == "invalid"


def test_a_ticket_of_other_ranks_is_refused(pair: Any) -> None:
    """Its peer's word would lie behind this port's."""
    _, _, (port, other) = pair
    with offcore.Communicator(backend="host", ranks=3) as comm:
        with comm.requests([comm.window(64)]) as requests:
            ticket = requests.host_port(0).signal(2, 0)
        assert ticket.fault == NONE
    assert not port.test(ticket)
    assert port.wait_sent(ticket) == INVALID
    assert other.wait(0, 0, 1) == INVALID


def test_armed_words_of_a_port(pair: Any) -> None:
    """By hand, as host threads have no armed engine: one that has closed but not said why yet, and
    a rank that is no peer."""
    requests, _, _ = pair
    start, schedule = (ctypes.c_uint64 * 64)(), (ctypes.c_uint64 * 1)()
    fields = bytearray(requests.proxies[0].port)
    struct.pack_into("<2Q", fields, 72, ctypes.addressof(start), ctypes.addressof(schedule))
    struct.pack_into("<64I", fields, 368, *([1] * 64))  # periods
    port = _core.host_port(bytes(fields))
    start[1] = 1 << 62
    assert port.put(1, 0, 0, 0, 1).fault == STOPPED
    assert port.flush(0, 0.1) == INVALID


def test_a_wait_has_a_limit(pair: Any) -> None:
    """It is reported once, and the engine goes on."""
    requests, _, (port, other) = pair
    began = time.monotonic()
    assert port.wait(1, 0, 1, limit_s=0.05) == TIMEOUT
    assert time.monotonic() - began < 2
    with pytest.raises(offcore.Error, match="longer than its limit") as told:
        requests.check()
    assert told.value.code == "timeout"
    requests.check()
    port.signal(1, 1)
    assert other.wait(0, 1, 1) == NONE


def test_stop_answers_what_was_pushed_and_wakes(pair: Any) -> None:
    requests, (send, receive), (port, other) = pair
    send[0][:] = 3
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.wait, 0, 0, 1000, 20.0)
        for chunk in range(256):
            port.put_signal(1, 1, 0, chunk, 1)
        requests.stop()
        assert waiting.result(10) == STOPPED
    assert (receive[1] == 3).all()
    assert other.wait(0, 1, 256) == NONE  # what has come counts, also after the end
    assert port.put(1, 1, 0, 0, 1).fault == STOPPED
    with pytest.raises(offcore.Error, match="was stopped"):
        requests.check()
    requests.stop()


def test_a_ring_that_stays_full() -> None:
    """A producer that reserved a place and died blocks the ring: pushes end by their limit, the
    engine tells both sides and ends."""
    with offcore.Communicator(backend="host", ranks=2) as comm:
        window = comm.window(4096)
        with comm.requests([window], slots=128, limit=0.2) as requests:
            port, other = requests.host_port(0), requests.host_port(1)
            fields = requests.proxies[0].port
            tail = struct.unpack_from("<2Q", fields)[1]
            ctypes.c_uint64.from_address(tail).value += 1
            faults = [port.put(1, 0, 0, 0, 1).fault for _ in range(128)]
            assert faults == [NONE] * 127 + [FULL]
            assert other.wait(0, 0, 1, limit_s=5.0) == FULL
            with pytest.raises(offcore.Error, match="no room in the ring") as told:
                requests.check()
            assert told.value.code == "timeout"


def start(rank: int, store: str, what: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(RANK.parents[1]), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(RANK), str(rank), store, what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_drains_at_once(pair: Any) -> None:
    requests, _, (port, _) = pair
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            port.put_signal(1, 1, 0, 0, 1)
            list(pool.map(lambda _: requests.drain(5.0), range(4)))
    assert requests.stats(0).signals == 50


def test_ranks_of_other_processes() -> None:
    store = free_store()
    group = [start(rank, store, "exchange") for rank in range(3)]
    assert [rank.communicate(timeout=60)[0] for rank in group] == ["right\n"] * 3


def test_a_peer_is_killed() -> None:
    store = free_store()
    group = [start(rank, store, "wait") for rank in range(2)]
    assert group[1].stdout is not None
    assert group[1].stdout.readline() == "ready\n"
    group[1].send_signal(signal.SIGKILL)
    assert group[0].communicate(timeout=60)[0] == f"ready\n{PEER} peer\n"
    group[1].communicate()


def test_ranks_that_register_otherwise() -> None:
    store = free_store()
    group = [start(rank, store, "otherwise") for rank in range(2)]
    for rank in group:
        out = rank.communicate(timeout=60)[0]
        assert out.startswith("mismatch requests: rank")
        assert "chunks of 64 bytes" in out
