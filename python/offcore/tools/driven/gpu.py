"""Copies that running kernels ask for, between two GPUs of this process. Needs cupy.

ping-pong   One way: half of a round trip, by the GPU's clock, median. `proxy`: requests; `armed`:
            by a schedule, with signals that are written or, `armed co`, copied in copy order.
            Then rounds in which a block fills and checks every byte.
put cost    What a put of it takes the kernel's thread, at the GPU's peak clock, median.
held        The same ping-pong while blocks hold every SM but one of both GPUs (held.py).
push        What a push costs its thread; until the engine has taken it, seen from the GPU; requests
            a second from many blocks, until all have ended (`bytes`: slots of the ring), and copies
            that they became.
soak        11 million requests of up to 64 bytes by 8,192 lanes, each with a place of its own: none
            lost, doubled or torn (soak.py). Requests a second.
throughput  Messages in flight, all bytes compared: side by side (merged by the engine) or apart;
            beside a loop of cuMemcpyAsync of the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy  # type: ignore[import-not-found]
import numpy as np

import offcore
from offcore import _core
from offcore.tools.driven import soak as soaks
from offcore.tools.driven.held import Holders
from offcore.tools.driven.rows import KIB, LIMIT_S, MESSAGES, MIB, SIZES, Rows

KERNELS = (
    "ping",
    "ping_checked",
    "push_cost",
    "push_many",
    "messages",
    "soak",
    "soak_watch",
    "stamp_time",
    "hold",
    "hold_sms",
    "roam",
    "chase",
    "tell_host",
    "read_l2",
    "multiply",
)
BUFFER = 64 * MIB
PUSHERS = ((1, 1), (1, 32), (64, 1), (64, 32), (128, 32), (128, 128), (128, 512))
RANKS = (0, 1)
SOAK = soaks.Shape(lanes=128 * 64, each=1280, buffers=10, slots=1 << 20)
SOAK_BLOCK, WATCH_BLOCK = 64, 1024


class Bench(Rows):
    """Two ranks, their kernels and streams."""

    def __init__(self, rounds: int, file: Path, signals: str = "fenced") -> None:
        super().__init__(file)
        self.rounds = rounds
        self.comm = offcore.Communicator(backend="cuda", ranks=2, timeout=20, signals=signals)
        self.windows = [self.comm.window(BUFFER) for _ in range(2)]
        self.kernels: list[dict[str, Any]] = []
        self.streams: list[Any] = []
        self.results: list[dict[str, Any]] = []
        folder = Path(__file__).parent
        source = (folder / "kernels.cu").read_text("utf-8")
        options = ("-std=c++17", f"-I{offcore.device.include_path()}", f"-I{folder}")
        for rank in RANKS:
            with cupy.cuda.Device(rank):
                module = cupy.RawModule(code=source, options=options)
                self.kernels.append({name: module.get_function(name) for name in KERNELS})
                for kernel in self.kernels[rank].values():
                    assert kernel.max_threads_per_block > 0  # loads it: nothing may spin then
                self.streams.append(cupy.cuda.Stream(non_blocking=True))
                names = {"times": 4096, "more": 4096, "wrong": 1, "fault": 1, "flags": 16}
                self.results.append({name: cupy.zeros(n, "uint64") for name, n in names.items()})
                cupy.cuda.Device(rank).synchronize()

    def launch(self, rank: int, name: str, args: tuple[Any, ...], **shape: Any) -> None:
        with cupy.cuda.Device(rank), self.streams[rank]:
            grid, block = shape.get("grid", 1), shape.get("block", 1)
            self.kernels[rank][name]((grid,), (block,), args)

    def address(self, rank: int, name: str) -> np.uint64:
        where: np.uint64 = np.uint64(self.results[rank][name].data.ptr)
        return where

    def end(self, what: str) -> None:
        """Waits for both GPUs' kernels, and looks at what they reported."""
        for rank in RANKS:
            with cupy.cuda.Device(rank), self.streams[rank] as stream:  # never the legacy stream
                stream.synchronize()
                fault = int(self.results[rank]["fault"].get()[0])
                wrong = int(self.results[rank]["wrong"].get()[0])
                if fault or wrong:
                    self.results[rank]["fault"].fill(0)
                    self.results[rank]["wrong"].fill(0)
                stream.synchronize()
            if fault or wrong:
                self.failures.append(f"{what}: rank {rank}: fault {fault}, {wrong} wrong words")

    def median(self, name: str, count: int, first: int = 0) -> float:
        with cupy.cuda.Device(0), self.streams[0]:
            return float(statistics.median(self.results[0][name].get()[first:count].tolist()))

    def both(
        self,
        requests: offcore.Requests,
        name: str,
        args: Callable[[int], tuple[Any, ...]],
        **shape: Any,
    ) -> None:
        for rank in RANKS[::-1]:
            port = np.uint64(requests.port(rank))
            self.launch(rank, name, (port, np.uint32(1 - rank), *args(rank)), **shape)


def ping_pong(bench: Bench, requests: offcore.Requests, chunks: int, base: int) -> float:
    """Microseconds one way."""
    rounds = bench.rounds
    bench.both(
        requests,
        "ping",
        lambda rank: (
            np.uint64(chunks),
            np.uint64(base),
            np.uint32(rounds),
            np.uint32(rank == 0),
            bench.address(rank, "times"),
            bench.address(rank, "more"),
            bench.address(rank, "fault"),
        ),
    )
    bench.end("ping-pong")
    return bench.median("times", rounds) / 2e3


def checked(bench: Bench, requests: offcore.Requests, nbytes: int, chunks: int, base: int) -> None:
    send, receive = bench.windows
    bench.both(
        requests,
        "ping_checked",
        lambda rank: (
            np.uint64(send.address(rank)),
            np.uint64(receive.address(rank)),
            np.uint32(nbytes // 4),
            np.uint64(chunks),
            np.uint64(base),
            np.uint32(bench.rounds),
            np.uint32(rank == 0),
            bench.address(rank, "wrong"),
            bench.address(rank, "fault"),
        ),
        block=1024,
    )
    bench.end(f"checked ping-pong of {nbytes}")


def ping_pongs(bench: Bench, engine: str) -> None:
    with cupy.cuda.Device(0):
        clock_khz = cupy.cuda.Device(0).attributes["ClockRate"]
    for nbytes in SIZES:
        chunk = 4 * KIB
        chunks = nbytes // chunk
        puts = [[offcore.Put(1 - rank, 1, 0, 0, chunks)] for rank in RANKS]
        plan = () if engine == "proxy" else puts
        with bench.comm.requests(
            bench.windows, schedule=plan, chunk=chunk, limit=LIMIT_S, spin=5.0
        ) as requests:
            ping_pong(bench, requests, chunks, 0)
            us = ping_pong(bench, requests, chunks, bench.rounds)
            bench.add("ping-pong", engine, nbytes, us, "us one way")
            cost = bench.median("more", bench.rounds) / clock_khz * 1e3
            bench.add("put cost", engine, nbytes, cost, "us at the peak clock")
            checked(bench, requests, nbytes, chunks, 2 * bench.rounds)
            if nbytes == SIZES[0]:
                held(bench, requests, engine, nbytes, chunks)
            requests.check()


def held(bench: Bench, requests: offcore.Requests, engine: str, nbytes: int, chunks: int) -> None:
    """The same while blocks hold all SMs but one. A row only if they held them until it ended."""
    holders = [Holders(cupy, rank, bench.kernels[rank]) for rank in RANKS]
    wrong = [one.start() for one in holders]
    us = ping_pong(bench, requests, chunks, 3 * bench.rounds)
    for one, faults in zip(holders, wrong, strict=True):
        faults += one.end()
        bench.failures += [f"held, {engine}: rank {one.gpu}: {fault}" for fault in faults]
    if not any(wrong):
        bench.add("held", engine, nbytes, us, "us one way")


def timed(bench: Bench, call: Callable[[], None]) -> float:
    """Milliseconds of what `call` enqueues in rank 0's stream."""
    with cupy.cuda.Device(0):
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(bench.streams[0])
        call()
        last.record(bench.streams[0])
        last.synchronize()
        return float(cupy.cuda.get_elapsed_time(first, last))


def pushes(bench: Bench) -> None:
    push_costs(bench)
    for slots, pushers in ((1 << 16, PUSHERS), (1 << 12, PUSHERS[-3:])):
        push_rates(bench, slots, pushers)


def push_costs(bench: Bench) -> None:
    with bench.comm.requests(bench.windows, chunk=64, limit=LIMIT_S, spin=5.0) as requests:
        port, peer = np.uint64(requests.port(0)), np.uint32(1)
        fault = bench.address(0, "fault")
        with cupy.cuda.Device(0):
            clock_khz = cupy.cuda.Device(0).attributes["ClockRate"]
        for _ in range(2):
            cost_args = (
                port,
                peer,
                np.uint32(1000),
                bench.address(0, "times"),
                bench.address(0, "more"),
                fault,
            )
            bench.launch(0, "push_cost", cost_args)
            bench.end("push cost")
        cost, taken = (bench.median(name, 1000) for name in ("times", "more"))
        bench.add("push", "one thread", 8, cost / clock_khz * 1e3, "us at the peak clock")
        bench.add("push", "to and fro", 8, taken / 1e3, "us")
        requests.check()


def push_rates(bench: Bench, slots: int, pushers: tuple[tuple[int, int], ...]) -> None:
    with bench.comm.requests(
        bench.windows, chunk=64, limit=LIMIT_S, spin=5.0, slots=slots
    ) as requests:
        port, peer = np.uint64(requests.port(0)), np.uint32(1)
        fault = bench.address(0, "fault")
        for blocks, threads in pushers:
            each = max(1, 400_000 // (blocks * threads))
            args = (port, peer, np.uint32(each), np.uint64(BUFFER // 64), fault)
            before = requests.stats(0)

            def push(args: Any = args, blocks: int = blocks, threads: int = threads) -> None:
                bench.launch(0, "push_many", args, grid=blocks, block=threads)

            ms = timed(bench, push)
            bench.end("push rate")
            count = each * blocks * threads
            stats = requests.stats(0)
            if stats.requests - before.requests != count:
                bench.failures.append(f"{count} pushed, {stats.requests - before.requests} came")
            bench.add("push rate", f"{blocks} x {threads}", slots, count / ms / 1e3, "M requests/s")
            copies = (stats.copies - before.copies) / count
            bench.add("push copies", f"{blocks} x {threads}", slots, copies, "copies a request")
        requests.check()


def soak(bench: Bench) -> None:
    shape = SOAK
    source = np.random.default_rng(2).integers(0, 256, shape.nbytes, "uint8")
    send, *received = (bench.comm.window(shape.nbytes) for _ in range(shape.buffers + 1))
    clocks, table = bench.comm.window(shape.clock_bytes), bench.comm.window(len(shape.table()))
    send.write(source, rank=0)
    table.write(shape.table(), rank=0)
    for window in (*received, clocks):
        window.write(np.zeros(window.nbytes, "uint8"), rank=1)
    with bench.comm.requests(
        [send, *received, clocks, table], chunk=soaks.SLOT, limit=LIMIT_S, spin=5.0
    ) as requests:
        sizes = np.uint32(shape.each), np.uint32(shape.buffers), np.uint64(shape.slots)
        sides = [(np.uint64(requests.port(rank)), np.uint32(1 - rank), *sizes) for rank in RANKS]
        watch = (*sides[1], np.uint64(clocks.address(1)), bench.address(1, "fault"))
        blocks = {"grid": shape.lanes // WATCH_BLOCK, "block": WATCH_BLOCK}
        bench.launch(1, "soak_watch", watch, **blocks)
        args = (*sides[0], bench.address(0, "fault"))
        blocks = {"grid": shape.lanes // SOAK_BLOCK, "block": SOAK_BLOCK}
        ms = timed(bench, lambda: bench.launch(0, "soak", args, **blocks))
        bench.end("soak")
        requests.drain()
        requests.check()
        stats = requests.stats(0)

        def read(buffer: int) -> soaks.Bytes:
            got = np.empty([*received, clocks][buffer].nbytes, "uint8")
            [*received, clocks][buffer].read(got, rank=1)
            return got

        bench.failures += [f"soak: {one}" for one in soaks.wrong(shape, source, read, stats)]
    name = f"{shape.lanes} lanes"
    bench.add("soak", name, soaks.SLOT, stats.requests / 1e6, "M requests, all right")
    bench.add("soak", name, soaks.SLOT, stats.requests / ms / 1e3, "M requests/s")
    bench.add("soak copies", name, soaks.SLOT, stats.copies / stats.requests, "copies a request")


def throughput(bench: Bench) -> None:
    send, receive = bench.windows
    data = np.random.default_rng(1).integers(0, 256, BUFFER, "uint8")
    send.write(data, rank=0)
    got = np.empty_like(data)
    with bench.comm.requests(bench.windows, chunk=KIB, limit=LIMIT_S, spin=5.0) as requests:
        port, peer = np.uint64(requests.port(0)), np.uint32(1)
        for nbytes in MESSAGES:
            count = min(4096, 512 * MIB // nbytes)
            for name, apart in (("contiguous", 1), ("apart", 2)):
                stride = nbytes * apart
                receive.write(np.zeros_like(data), rank=1)
                args = (
                    port,
                    peer,
                    np.uint32(count),
                    np.uint64(nbytes // KIB),
                    np.uint64(stride // KIB),
                    np.uint64(BUFFER // KIB),
                    bench.address(0, "fault"),
                )

                def push(args: Any = args) -> None:
                    bench.launch(0, "messages", args, block=32)

                spans = [timed(bench, push) for _ in range(5)]
                bench.end(f"{name} messages of {nbytes}")
                receive.read(got, rank=1)
                wanted = np.zeros_like(data)
                for m in range(min(count, BUFFER // stride)):
                    wanted[m * stride :][:nbytes] = data[m * stride :][:nbytes]
                if not np.array_equal(got, wanted):
                    bench.failures.append(f"{name} messages of {nbytes}: wrong bytes")
                rate = count * nbytes / statistics.median(spans) / 1e6
                bench.add("throughput", name, nbytes, rate, "GB/s")
            places = np.arange(count, dtype=np.uint64) % (BUFFER // nbytes) * nbytes
            dsts, srcs = receive.address(1) + places, send.address(0) + places
            spans = []
            for _ in range(5):
                began = time.perf_counter_ns()
                _core.copy_by_loop(dsts, srcs, nbytes, 0, bench.streams[0].ptr)
                bench.streams[0].synchronize()
                spans.append(time.perf_counter_ns() - began)
            rate = count * nbytes / statistics.median(spans)
            bench.add("throughput", "memcpy loop", nbytes, rate, "GB/s")
        requests.check()
