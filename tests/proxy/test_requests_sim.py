"""Requests of simulated GPU threads: order, bytes, faults as on host, and times that follow from a
machine's file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import machines
from offcore.tools.driven import rows, simulated

NONE, TIMEOUT, FULL, INVALID, STOPPED, PEER = 0, 1, 2, 3, 4, 5
ENGINES = ("auto", "stores", "device")
MACHINE = "h200-4"
SEND, RECEIVE = 0, 1


@pytest.fixture
def comm() -> Iterator[Any]:
    with offcore.Communicator(backend="sim", machine=MACHINE, ranks=2) as made:
        yield made


@pytest.fixture
def pair(comm: Any) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    windows = [comm.empty(1 << 16) for _ in range(2)]
    with comm.requests(windows, chunk=256, slots=128, limit=5.0) as requests:
        yield requests, windows, [requests.host_port(rank) for rank in range(2)]


def faults_of(requests: Any, *calls: Any) -> list[Any]:
    """What one thread's calls come to, each behind the one before; of pushes their faults."""
    found = []

    def thread() -> Iterator[Any]:
        for call in calls:
            reply = yield call
            found.append(getattr(reply, "fault", reply))

    requests.run(thread())
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [0, 7])
def test_none_lost_or_doubled_over_many_laps(engine: str, seed: int) -> None:
    """Every rank to every other, many warps, a ring that wraps and is full most of the time; every
    byte, every signal, and the same again by the same seed."""
    ranks, warps, rounds, lanes, chunk = 3, 5, 12, 16, 64
    times = []
    for _ in range(2):
        with offcore.Communicator(backend="sim", machine=MACHINE, ranks=ranks, seed=seed) as comm:
            send, receive = (comm.empty(ranks * warps * lanes * rounds * chunk) for _ in range(2))
            for rank in range(ranks):
                send[rank][:] = np.random.default_rng(rank).integers(0, 256, len(send[0]), "uint8")
            with comm.requests([send, receive], chunk=chunk, slots=128, engine=engine) as requests:

                def place(source: int, warp: int, turn: int, lane: int) -> int:
                    return ((source * warps + warp) * rounds + turn) * lanes + lane

                def warp(rank: int, number: int, requests: Any = requests) -> Iterator[Any]:
                    port = requests.host_port(rank)
                    for turn in range(rounds):
                        for peer in range(ranks):
                            if peer == rank:
                                continue
                            tickets = yield [
                                port.put_signal(
                                    peer, RECEIVE, SEND, place(rank, number, turn, lane), 1
                                )
                                for lane in range(lanes)
                            ]
                            assert [one.fault for one in tickets] == [NONE] * lanes

                def reader(rank: int, requests: Any = requests) -> Iterator[Any]:
                    port = requests.host_port(rank)
                    for peer in range(ranks):
                        if peer != rank:
                            assert (yield port.wait(peer, RECEIVE, warps * rounds * lanes)) == NONE
                            assert port.received(peer, RECEIVE) == warps * rounds * lanes

                threads = [warp(rank, n) for rank in range(ranks) for n in range(warps)]
                times.append(requests.run(*threads, *map(reader, range(ranks))))
                requests.check()
                for rank in range(ranks):
                    stats = requests.stats(rank)
                    sent = warps * rounds * lanes * (ranks - 1)
                    assert stats.requests == stats.signals == sent
                    assert stats.nbytes == sent * chunk
                    assert stats.copies <= sent
            part = warps * rounds * lanes * chunk
            for rank in range(ranks):
                for peer in range(ranks):
                    there = receive[rank][peer * part : (peer + 1) * part]
                    here = send[peer][peer * part : (peer + 1) * part]
                    np.testing.assert_array_equal(there, here if peer != rank else 0 * here)
    assert times[0] == times[1] > 0


def test_a_ticket_of_other_ranks_is_refused(comm: Any) -> None:
    """As on host."""
    with offcore.Communicator(backend="host", ranks=3) as larger:
        with larger.requests([larger.window(64)]) as requests:
            ticket = requests.host_port(0).signal(2, 0)
        assert ticket.fault == NONE
    with comm.requests([comm.empty(64)]) as requests:
        port, told = requests.host_port(0), []

        def thread() -> Iterator[Any]:
            told.append((yield port.wait_sent(ticket)))

        requests.run(thread())
        assert told == [INVALID]
        assert not port.test(ticket)


@pytest.mark.parametrize("engine", [*ENGINES, "armed"])
def test_a_signal_comes_behind_the_data_before_it(comm: Any, engine: str) -> None:
    """Who waits reads what was sent; who does not, only half of it."""
    windows = [comm.empty(4 << 20) for _ in range(2)]
    plan = [[offcore.Put(1 - rank, RECEIVE, SEND, 0, 256)] for rank in range(2)]
    named = {"schedule": plan} if engine == "armed" else {"engine": engine}
    windows[SEND][0][:] = 9
    seen = {}
    with comm.requests(windows, chunk=1 << 14, **named) as requests:

        def sender() -> Iterator[Any]:
            ticket = yield requests.host_port(0).put_signal(1, RECEIVE, SEND, 0, 256)
            assert not requests.host_port(0).test(ticket)
            assert (yield requests.host_port(0).wait_sent(ticket)) == NONE
            assert requests.host_port(0).test(ticket)

        def reader() -> Iterator[Any]:
            port = requests.host_port(1)
            while windows[RECEIVE][1][0] == 0:
                yield port.work(10)
            seen["early"] = windows[RECEIVE][1].copy()
            assert (yield port.wait(0, RECEIVE, 1)) == NONE
            seen["late"] = windows[RECEIVE][1].copy()

        requests.run(sender(), reader())
        requests.check()
    assert not (seen["early"] == 9).all()
    assert (seen["late"] == 9).all()


def test_any_bytes_and_whole_chunks(pair: Any) -> None:
    requests, (send, receive), (port, other) = pair
    rng = np.random.default_rng(1)
    send[0][:] = rng.integers(0, 256, len(send[0]), "uint8")
    wanted = np.zeros_like(receive[1])

    def thread() -> Iterator[Any]:
        for turn in range(200):
            if turn % 2:
                chunk, count = (int(one) for one in (rng.integers(0, 200), rng.integers(1, 50)))
                dst = src = chunk * 256
                nbytes = count * 256
                call = port.put(1, 1, 0, chunk, count)
            else:
                dst, src, nbytes = (int(one) for one in rng.integers(0, 1 << 15, 3))
                call = port.put_bytes(1, 1, dst, 0, src, nbytes, signalled=True)
            wanted[dst : dst + nbytes] = send[0][src : src + nbytes]
            ticket = yield call
            assert (yield port.wait_sent(ticket)) == NONE
        assert (yield port.flush(1)) == NONE

    requests.run(thread())
    assert other.received(0, 1) == 100
    np.testing.assert_array_equal(receive[1], wanted)
    with pytest.raises(offcore.Error, match="536866816 at most"):
        port.put_bytes(1, 1, 0, 0, 0, 1 << 30)


def test_neighbours_become_one_copy(pair: Any) -> None:
    requests, (send, receive), (port, _) = pair
    send[0][:] = 7

    def warp() -> Iterator[Any]:
        for chunk in range(0, 256, 32):
            yield [port.put(1, 1, 0, chunk + lane, 1) for lane in range(32)]
        assert (yield port.flush(1)) == NONE

    requests.run(warp())
    assert (receive[1] == 7).all()
    stats = requests.stats(0)
    assert (stats.requests, stats.nbytes) == (257, 1 << 16)
    assert stats.copies <= 8


@pytest.mark.parametrize(
    "calls",
    [
        lambda port: [port.put(2, 0, 0, 0, 1)],
        lambda port: [port.put(0, 0, 0, 0, 1)],
        lambda port: [port.signal(1, 2)],
        lambda port: [port.put(1, 0, 0, 1 << 21, 1)],
        lambda port: [port.put_bytes(1, 0, 0, 0, 1 << 38, 1)],
        lambda port: [port.wait(2, 0, 1)],
        lambda port: [port.wait(1, 2, 1)],
        lambda port: [port.flush(0)],
        lambda port: [port.wait(1, 0, 1, limit_s=0.001), port.signal(1, 2)],
    ],
)
def test_a_bad_number_is_refused_as_on_host(pair: Any, calls: Any) -> None:
    requests, _, (port, other) = pair
    assert faults_of(requests, *calls(port))[-1] == INVALID
    assert faults_of(requests, other.wait(0, 0, 1)) == [INVALID]
    with pytest.raises(offcore.Error, match="a kernel named") as told:
        requests.check()
    assert told.value.code == "invalid"


def test_a_range_that_is_not_registered(pair: Any) -> None:
    requests, _, (port, other) = pair
    call = port.put_bytes(1, 0, (1 << 16) - 10, 1, 0, 11, signalled=True)
    assert faults_of(requests, call, port.wait(1, 0, 1)) == [NONE, INVALID]
    assert faults_of(requests, other.wait(0, 0, 1)) == [INVALID]
    for told in (requests.check, requests.drain):
        with pytest.raises(offcore.Error, match=r"from 0\+11 of buffer 1"):
            told()


def test_a_wait_has_a_limit_in_virtual_time(comm: Any, pair: Any) -> None:
    """It passes at once, is reported once, and the engine goes on."""
    requests, _, (port, other) = pair
    before = comm.now_ns
    assert faults_of(requests, port.wait(1, 0, 1, limit_s=100.0)) == [TIMEOUT]
    assert comm.now_ns - before == 100e9
    with pytest.raises(offcore.Error, match="waited longer than its limit") as told:
        requests.check()
    assert told.value.code == "timeout"
    requests.check()
    assert faults_of(requests, port.signal(1, 1)) == [NONE]
    assert faults_of(requests, other.wait(0, 1, 1)) == [NONE]
    assert comm.now_ns - before < 101e9, "a limit that is not reached takes no time"


def test_stop_and_what_comes_after(pair: Any) -> None:
    requests, (send, receive), (port, other) = pair
    send[0][:] = 3
    pushes = [port.put_signal(1, 1, 0, chunk, 1) for chunk in range(256)]
    assert set(faults_of(requests, *pushes)) == {NONE}
    requests.stop()
    assert (receive[1] == 3).all()
    waits = other.wait(0, 1, 256), other.wait(0, 0, 1)
    assert faults_of(requests, *waits) == [NONE, STOPPED]
    assert faults_of(requests, port.put(1, 1, 0, 0, 1), port.flush(1)) == [STOPPED, STOPPED]
    with pytest.raises(offcore.Error, match="was stopped"):
        requests.check()


def test_a_dead_communicator(comm: Any, pair: Any) -> None:
    requests, _, (port, _) = pair
    comm.abort()
    assert faults_of(requests, port.wait(1, 0, 1)) == [PEER]
    with pytest.raises(offcore.Error, match="died or aborted") as told:
        requests.check()
    assert told.value.code == "peer"


def test_a_schedule(comm: Any) -> None:
    """Puts in its order, again and again; another one is refused."""
    windows = [comm.empty(4096) for _ in range(2)]
    plan = [[offcore.Put(1, 1, 0, 0, 4), offcore.Put(1, 0, signal=True)], []]
    with comm.requests(windows, chunk=256, schedule=plan) as requests:
        port, other = (requests.host_port(rank) for rank in range(2))
        windows[0][0][:] = 5
        turn = port.put_signal(1, 1, 0, 0, 4), port.signal(1, 0)
        assert faults_of(requests, *turn * 100, port.flush(1)) == [NONE] * 201
        assert (other.received(0, 0), other.received(0, 1)) == (100, 100)
        assert (windows[1][1] == np.repeat([5, 0], [1024, 3072])).all()
        assert requests.stats(0) == (200, 200, 100, 200, 100 * 1024)
        assert faults_of(requests, port.signal(1, 0)) == [INVALID]
    with pytest.raises(offcore.Error, match="has no schedule"):
        comm.requests(windows, schedule=plan, engine="device")
    with (
        offcore.Communicator(backend="sim", machine="h200-8", ranks=6) as six,
        pytest.raises(offcore.Error, match="4 are the most") as refused,
    ):
        six.requests([six.window(64)], schedule=[[]] * 6)
    assert refused.value.code == "unsupported"


def test_what_is_refused(comm: Any) -> None:
    window = comm.empty(4096)

    def refusal(run: Any) -> tuple[str, str]:
        with pytest.raises(offcore.Error) as refused:
            run()
        return refused.value.code, str(refused.value)

    assert refusal(lambda: comm.requests([]))[0] == "invalid"
    assert refusal(lambda: comm.requests([window], slots=100))[0] == "invalid"
    assert "auto, stores or device" in refusal(lambda: comm.requests([window], engine="dma"))[1]
    counts = [np.zeros(2, "int64") for _ in range(2)]
    exchange = refusal(
        lambda: comm.all_to_all_v(window, comm.empty(4096), counts, counts_on_device=True)
    )
    assert exchange[0] == "unsupported"
    with comm.requests([window]) as requests:
        assert refusal(lambda: requests.port(0))[0] == "unsupported"
        port = requests.host_port(0)
        assert refusal(lambda: requests.run([1]))[0] == "invalid"
        mixed = [port.work(1), port.signal(1, 0)]
        for bad in (iter([3]), iter([[]]), iter([mixed]), iter([[port.signal(1, 0)] * 33])):

            def thread(bad: Any = bad) -> Iterator[Any]:
                yield next(bad)

            with comm.requests([window]) as other:
                assert refusal(lambda: other.run(thread()))[0] == "invalid"
                assert "thread failed" in refusal(other.check)[1]
    with offcore.Communicator(backend="host", ranks=2) as here:
        assert refusal(lambda: here.requests([here.empty(64)], engine="device"))[0] == "unsupported"
        with here.requests([here.empty(64)]) as requests:
            assert refusal(lambda: requests.run())[0] == "unsupported"
    with offcore.Communicator(backend="sim", machine="host-2") as there:
        assert "no section `requests`" in refusal(lambda: there.requests([there.empty(64)]))[1]
    fault = {"rank": 0, "kind": "dead_rank", "ns": 5}
    with offcore.Communicator(backend="sim", machine=MACHINE, ranks=2, faults=[fault]) as planted:
        assert refusal(lambda: planted.requests([planted.empty(64)]))[0] == "unsupported"


def test_what_a_thread_raises(pair: Any) -> None:
    requests, _, (port, other) = pair

    def thread() -> Iterator[Any]:
        yield port.signal(1, 0)
        raise KeyError("mine")

    def waiting() -> Iterator[Any]:
        yield other.wait(0, 1, 1)

    with pytest.raises(KeyError, match="mine"):
        requests.run(waiting(), thread())
    with pytest.raises(offcore.Error, match="thread failed"):
        requests.check()


def test_threads_work_meanwhile(comm: Any, pair: Any) -> None:
    """Time passes for each thread on its own; the communicator's clock has it behind the run."""
    requests, _, (port, other) = pair
    told = []

    def worker(at: Any, ns: float) -> Iterator[Any]:
        for _ in range(3):
            told.append((yield at.work(ns)))

    before = comm.now_ns
    assert requests.run(worker(port, 1000), worker(other, 700)) == 3000
    assert sorted(told) == [700, 1000, 1400, 2000, 2100, 3000]
    assert comm.now_ns - before == 3000


# The costs of a file, as sums: what the events have to come to when nothing is in the way.


def one_way_us(machine: Any, engine: str, nbytes: int) -> float:
    cost, of = machine.cost, machine.requests
    begin = {
        "proxy": of.reach_ns + of.take_ns + cost.control_ns + cost.doorbell_ns + cost.wake_ns,
        "armed": cost.poll_ns - cost.fetch_ns,
        "stores": of.reach_ns + of.take_ns,
        "device": 1.5 * of.device_trip_ns,
    }[engine]
    engines = cost.fetch_ns + cost.setup_ns + nbytes / machine.links.engine_gbps + cost.sync_ns
    rest = {
        "stores": nbytes / of.store_gbps + of.reach_ns,
        "device": nbytes / of.device_gbps + of.device_trip_ns / 2,
    }.get(engine, engines)
    return (of.push_ns + begin + rest + of.see_ns) / 1e3


@pytest.mark.parametrize("name", ["h200-2", "h100-8", "mi300x-8", "v100-8", "nvidia-4"])
@pytest.mark.parametrize("engine", simulated.ENGINES)
def test_one_way_is_the_sum_of_its_steps(name: str, engine: str) -> None:
    on = simulated.Simulated(name, rounds=3, phantom=True)
    for nbytes in rows.SIZES:
        found = on.one_way_us(engine, nbytes, 4096)
        assert found == pytest.approx(one_way_us(on.machine, engine, nbytes), rel=1e-3)


@pytest.mark.parametrize("name", ["h200-2", "v100-8"])
def test_throughput_of_many_messages(name: str) -> None:
    """An external engine hides its trips as far as it has requests under way; a call of copies is
    bound by the host, by its copies' starts or by the wire."""
    on = simulated.Simulated(name, phantom=True)
    of, cost, gbps = on.machine.requests, on.machine.cost, on.machine.links.engine_gbps
    for nbytes in rows.MESSAGES:
        alone = of.device_trip_ns + nbytes / of.device_gbps
        piped = min(of.device_gbps, of.device_overlap * nbytes / alone)
        pushed = 32 * nbytes / of.push_ns if of.push_ns else piped
        found = on.message_gbps("device", nbytes, 2, 4096)
        assert found == pytest.approx(min(piped, pushed), rel=0.03)
        starts = of.overlap * nbytes / (cost.setup_ns + nbytes / gbps)
        calls = cost.control_ns + cost.doorbell_ns + 127 * on.machine.batches.copy_ns
        host = nbytes / (calls / 128 + of.take_ns)
        bound = min(starts, host, gbps)
        assert 0.85 * bound < on.message_gbps("proxy", nbytes, 2, 4096) < 1.01 * bound


def test_ranks_share_links() -> None:
    """Three ranks that send to one have a third of its port each."""
    with offcore.Communicator(backend="sim", machine="h200-4", phantom=True) as comm:
        window = comm.window(64 << 20)
        with comm.requests([window], chunk=4096) as requests:

            def sender(rank: int) -> Iterator[Any]:
                port = requests.host_port(rank)
                ticket = yield port.put(0, 0, 0, 0, 16384)
                yield port.wait_sent(ticket)

            alone = requests.run(sender(1))
            together = requests.run(*map(sender, (1, 2, 3)))
    wire = (64 << 20) / 390
    assert together - alone == pytest.approx(2 * wire, rel=0.01)


# Beside what was measured on 2 x H200: rows that no cost was fitted to, within this much.
RECORDED = Path(__file__).parents[2] / "benchmarks/results/gpu-driven-h200-2.txt"
PREDICTED = {
    ("ping-pong", "proxy"): 0.07,
    ("ping-pong", "armed co"): 0.16,
    ("ping-pong", "events"): 0.15,
    ("throughput", "contiguous"): 0.16,
    ("throughput", "memcpy loop"): 0.14,
}


@pytest.mark.parametrize(("what", "engine"), PREDICTED)
def test_beside_two_h200(what: str, engine: str) -> None:
    on = simulated.Simulated("h200-2", rounds=3, phantom=True)
    lines = [line.split() for line in RECORDED.read_text("utf-8").splitlines()]
    head = [what, *engine.split()]
    found = [one for one in lines if one[: len(head)] == head]
    assert len(found) == (3 if what == "ping-pong" else 7)
    for line in found:
        nbytes, measured = int(line[len(head)]), float(line[len(head) + 1])
        if engine == "events":
            value = simulated.events_us(on.machine, nbytes)
        elif engine == "memcpy loop":
            value = simulated.loop_gbps(on.machine, nbytes)
        elif what == "throughput":
            value = on.message_gbps("proxy", nbytes, 1, min(4096, (512 << 20) // nbytes))
        else:
            value = on.one_way_us(engine.split()[0], nbytes, 4096)
        assert value == pytest.approx(measured, rel=PREDICTED[what, engine]), line


def test_recorded_ways_are_still_what_is_simulated() -> None:
    """benchmarks/README.md says how gpu-driven-sim.txt is written anew."""
    text = RECORDED.with_name("gpu-driven-sim.txt").read_text("utf-8")
    parts = re.split(r"^(\S+), simulated$", text, flags=re.M)[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        on = simulated.Simulated(name, rounds=5, phantom=True)
        lines = re.findall(r"^ping-pong +(\S+) +(\d+) +(\S+) us", part, re.M)
        assert len(lines) == 15
        for engine, nbytes, us in lines:
            if engine == "events":
                found = simulated.events_us(on.machine, int(nbytes))
            else:
                found = on.one_way_us(engine, int(nbytes), 4096)
            assert f"{found:.2f}" == us, (name, engine, nbytes)


def test_a_machine_file_without_the_section(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "machines"
    given = json.loads((folder / "h200-2.json").read_text("utf-8"))
    del given["requests"]
    given["sources"] = {k: v for k, v in given["sources"].items() if k[:9] != "requests."}
    path = tmp_path / "h200-2.json"
    path.write_text(json.dumps(given), "utf-8")
    assert machines.load(path).requests.push_ns < 0
    with (
        offcore.Communicator(backend="sim", machine=str(path)) as comm,
        pytest.raises(offcore.Error, match="no section `requests`") as refused,
    ):
        comm.requests([comm.window(64)])
    assert refused.value.code == "unsupported"
