"""Requests of simulated GPU threads, on backend sim: a machine's costs, no clock.

ping-pong   One way: half of a round trip, when nothing else is under way. `proxy`, `armed`,
            `stores` (a CPU copies), `device` (an external engine); `events`: two events and two
            waits of streams for them a way, and a copy. All bytes compared.
push        What a push costs its thread; to the host and back; requests a second of many threads,
            until all have ended, and copies that they became.
throughput  Messages of one warp, all bytes compared: side by side (merged by the engine) or apart,
            by the proxy; `device`: apart, by an external engine; `memcpy loop`: one copy after the
            other.

`events`, `memcpy loop` and `to and fro` are sums of the machine's costs; all else is simulated. A
seed draws the order of pushes of the same moment.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

import offcore
from offcore import machines
from offcore.tools.driven.rows import KIB, MESSAGES, MIB, SIZES, Rows

BUFFER = 16 * MIB
COUNT_MAX = 4096  # messages of a size
MOVED = 512 * MIB  # in them
PUSHERS = ((1, 1), (1, 32), (64, 1), (64, 32), (128, 32))
PUSHED = 1 << 15
LANES = 32
ENGINES = ("proxy", "armed", "stores", "device")
SEND, RECEIVE = 0, 1
Thread = Generator[Any, Any, None]  # of a simulated GPU


def copy_us(machine: Any, nbytes: int) -> float:
    """Of a copy that the host submits: until its last byte is there."""
    cost = machine.cost
    before = cost.control_ns + cost.doorbell_ns + cost.wake_ns + cost.fetch_ns + cost.setup_ns
    return float(before + nbytes / machine.links.engine_gbps) / 1e3


def events_us(machine: Any, nbytes: int) -> float:
    """One way by the host: a copy between two events, each of which another stream waits for."""
    return 2 * float(machine.requests.event_ns) / 1e3 + copy_us(machine, nbytes)


def loop_gbps(machine: Any, nbytes: int) -> float:
    """Of copies of one stream, one after the other."""
    return nbytes / float(machine.cost.setup_ns + nbytes / machine.links.engine_gbps)


class Simulated:
    """Two ranks of a machine. phantom: buffers without bytes."""

    def __init__(self, machine: str, rounds: int = 1, phantom: bool = False) -> None:
        self.rounds = rounds
        self.machine = machines.load(machine)
        self.comm = offcore.Communicator(
            backend="sim", machine=machine, ranks=2, phantom=phantom, seed=1
        )
        made: Any = self.comm.window if phantom else self.comm.empty
        self.buffer = 4 * BUFFER if phantom else BUFFER
        self.send, self.receive = made(self.buffer), made(self.buffer)

    def requests(self, chunk: int, engine: str, chunks: int = 1) -> offcore.Requests:
        plan: Any = ()
        if engine == "armed":
            plan = [[offcore.Put(1 - rank, RECEIVE, SEND, 0, chunks)] for rank in range(2)]
        name = engine if engine in ("stores", "device") else "auto"
        return self.comm.requests(
            [self.send, self.receive], schedule=plan, chunk=chunk, engine=name, limit=100.0
        )

    def one_way_us(self, engine: str, nbytes: int, chunk: int) -> float:
        """Half of a round trip, on the average."""
        chunks = nbytes // chunk
        with self.requests(chunk, engine, chunks) as requests:

            def side(rank: int) -> Thread:
                port, peer = requests.host_port(rank), 1 - rank
                for k in range(1, self.rounds + 1):
                    if rank == 1:
                        yield port.wait(peer, RECEIVE, k)
                    yield port.put_signal(peer, RECEIVE, SEND, 0, chunks)
                    if rank == 0:
                        yield port.wait(peer, RECEIVE, k)

            took_ns = requests.run(side(0), side(1))
            requests.check()
        return took_ns / self.rounds / 2e3

    def message_gbps(self, engine: str, nbytes: int, apart: int, count: int) -> float:
        """Messages of one warp, from the first push until the last one has left."""
        with self.requests(KIB, engine) as requests:
            port = requests.host_port(0)
            stride, chunks = nbytes * apart // KIB, nbytes // KIB
            places = self.buffer // KIB // stride

            def warp() -> Thread:
                tickets: list[Any] = []
                for first in range(0, count, LANES):
                    lanes = range(first, min(first + LANES, count))
                    tickets = yield [
                        port.put(1, RECEIVE, SEND, m % places * stride, chunks) for m in lanes
                    ]
                yield port.wait_sent(tickets[-1])

            took_ns = requests.run(warp())
            requests.check()
        return count * nbytes / took_ns


class Bench(Rows):
    """A section's rows, of one machine."""

    def __init__(self, machine: str, rounds: int, file: Path) -> None:
        super().__init__(file)
        self.on = Simulated(machine, rounds)

    def looked_at(self, what: str, rank: int, wanted: Any) -> None:
        if not np.array_equal(self.on.receive[rank][: len(wanted)], wanted):
            self.failures.append(f"{what}: wrong bytes")


def ping_pongs(bench: Bench) -> None:
    on = bench.on
    for nbytes in SIZES:
        for engine in ENGINES:
            for rank in range(2):
                on.receive[rank][:] = 0
                on.send[rank][:nbytes] = nbytes // KIB % 251 + rank + 1
            us = on.one_way_us(engine, nbytes, 4 * KIB)
            bench.add("ping-pong", engine, nbytes, us, "us one way")
            for rank in range(2):
                what = f"ping-pong of {nbytes} by {engine}"
                bench.looked_at(what, rank, on.send[1 - rank][:nbytes])
        bench.add("ping-pong", "events", nbytes, events_us(on.machine, nbytes), "us one way")


def pushes(bench: Bench) -> None:
    with bench.on.requests(64, "proxy") as requests:
        port = requests.host_port(0)
        times: list[int] = []

        def pusher() -> Thread:
            times.append((yield port.work(0)))
            yield port.put(1, RECEIVE, SEND, 0, 0)
            times.append((yield port.work(0)))

        requests.run(pusher())
        cost = bench.on.machine.requests
        pushed_us = (times[1] - times[0]) / 1e3
        bench.add("push", "one thread", 8, pushed_us, "us")
        echo_us = pushed_us + (2 * cost.reach_ns + cost.take_ns) / 1e3
        bench.add("push", "to and fro", 8, echo_us, "us")
        for blocks, threads in PUSHERS:
            push_rate(bench, requests, blocks, threads)


def push_rate(bench: Bench, requests: Any, blocks: int, threads: int) -> None:
    """Every block's warps push on their own."""
    port, warps = requests.host_port(0), blocks * max(1, threads // LANES)
    lanes = min(threads, LANES)
    each = max(1, PUSHED // (warps * lanes))
    count, chunks = each * warps * lanes, BUFFER // 64

    def warp(number: int) -> Thread:
        tickets: list[Any] = []
        for k in range(each):
            first = (k * warps + number) * lanes
            tickets = yield [
                port.put(1, RECEIVE, SEND, (first + lane) % chunks, 1) for lane in range(lanes)
            ]
        yield port.wait_sent(tickets[-1])

    before = requests.stats(0)
    took_ns = requests.run(*(warp(number) for number in range(warps)))
    requests.check()
    stats = requests.stats(0)
    if stats.requests - before.requests != count:
        bench.failures.append(f"{count} pushed, {stats.requests - before.requests} came")
    name, copies = f"{blocks} x {threads}", (stats.copies - before.copies) / count
    bench.add("push rate", name, 1 << 16, count / took_ns * 1e3, "M requests/s")
    bench.add("push copies", name, 1 << 16, copies, "copies a request")


def throughput(bench: Bench) -> None:
    on = bench.on
    on.send[0][:] = np.random.default_rng(1).integers(0, 256, BUFFER, "uint8")
    for nbytes in MESSAGES:
        count = min(COUNT_MAX, MOVED // nbytes)
        forms = (("contiguous", "proxy", 1), ("apart", "proxy", 2), ("device", "device", 2))
        for name, engine, apart in forms:
            on.receive[1][:] = 0
            rate = on.message_gbps(engine, nbytes, apart, count)
            bench.add("throughput", name, nbytes, rate, "GB/s")
            wanted = np.zeros_like(on.send[0]).reshape(-1, nbytes * apart)
            wanted[:count, :nbytes] = on.send[0].reshape(-1, nbytes * apart)[:count, :nbytes]
            bench.looked_at(f"{name} messages of {nbytes}", 1, wanted.reshape(-1))
        bench.add("throughput", "memcpy loop", nbytes, loop_gbps(on.machine, nbytes), "GB/s")


SECTIONS = {"ping-pong": ping_pongs, "push": pushes, "throughput": throughput}


def measure(section: str, machine: str, rounds: int, file: Path) -> list[str]:
    """What was wrong."""
    bench = Bench(machine, rounds, file)
    with bench.on.comm:
        SECTIONS[section](bench)
    return bench.failures
