"""Copies that running kernels ask for, between two GPUs of this machine, beside copies that the
host submits. Needs cupy.

    CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER \\
        timeout 300 python benchmarks/gpu_driven.py --json FILE

ping-pong   One way: half of a round trip, by the GPU's clock, median. `proxy`: requests; `armed`:
            by a schedule, with signals that are written or, `armed co`, copied in copy order;
            `events`: two events and two waits of streams for them a way (C-Drv),
            all enqueued ahead; `host`: the host synchronises twice a way, Python's time included.
            Then rounds in which a block fills and checks every byte.
put cost    What a put of it takes the kernel's thread, at the GPU's peak clock, median.
held        The same ping-pong while blocks fill every SM but one of both GPUs.
form        The same by words and streams alone (gpu_armed_forms.py).
push        What a push costs its thread; until the engine has taken it, seen from the GPU; requests
            a second from many blocks, until all have ended (`bytes`: slots of the ring), and copies
            that they became.
throughput  Messages in flight, all bytes compared: side by side (merged by the engine) or apart;
            beside a loop of cuMemcpyAsync of the same.

Each section (--only) is a process of its own with a limit (--section-s), and its rows are written
as they come, so that one which fails or hangs loses no other's. The exit status is 0 where no byte
was wrong and no call failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy  # type: ignore[import-not-found]
import numpy as np
from gpu_armed_forms import chases

import offcore
from offcore import _core

KERNELS = [
    "ping",
    "ping_checked",
    "push_cost",
    "push_many",
    "messages",
    "stamp_time",
    "hold",
    "chase",
]
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB)
MESSAGES = (KIB, 4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
BUFFER = 64 * MIB
PUSHERS = ((1, 1), (1, 32), (64, 1), (64, 32), (128, 32), (128, 128), (128, 512))
RANKS = (0, 1)
LIMIT_S = 5.0


class Bench:
    """Two ranks, their kernels and streams."""

    def __init__(self, rounds: int, file: Path, signals: str = "fenced") -> None:
        self.rounds = rounds
        self.file = file
        self.comm = offcore.Communicator(backend="cuda", ranks=2, timeout=20, signals=signals)
        self.windows = [self.comm.window(BUFFER) for _ in range(2)]
        self.failures: list[str] = []
        self.kernels: list[dict[str, Any]] = []
        self.streams: list[Any] = []
        self.results: list[dict[str, Any]] = []
        source = Path(__file__).with_suffix(".cu").read_text("utf-8")
        options = ("-std=c++17", f"-I{offcore.device.include_path()}")
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

    def add(self, what: str, engine: str, nbytes: int, value: float, unit: str) -> None:
        row = {"what": what, "engine": engine, "bytes": nbytes, "value": value, "unit": unit}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{what:<12} {engine:<12} {nbytes:>9} {value:>12.2f} {unit}", flush=True)

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
    """The same while all SMs but one are full."""
    holders = []
    for rank in RANKS:  # nothing is allocated once they run
        with cupy.cuda.Device(rank):
            flags = cupy.zeros(3, "uint32")
            cupy.cuda.get_current_stream().synchronize()
            sms = cupy.cuda.Device(rank).attributes["MultiProcessorCount"]
            stream, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            holders.append((rank, flags, stream, side, sms))
    for rank, flags, stream, _, sms in holders:
        with cupy.cuda.Device(rank), stream:
            words = tuple(np.uint64(flags.data.ptr + 4 * word) for word in range(3))
            bench.kernels[rank]["hold"]((2 * (sms - 1),), (1024,), words)
    for rank, flags, _, side, sms in holders:
        with cupy.cuda.Device(rank), side:
            deadline = time.monotonic() + 5
            while int(flags.get(stream=side)[0]) < 2 * (sms - 1):
                if time.monotonic() > deadline:
                    bench.failures.append(f"rank {rank}: the SMs did not fill")
                    break
    us = ping_pong(bench, requests, chunks, 3 * bench.rounds)
    for rank, flags, stream, side, _ in holders:
        with cupy.cuda.Device(rank):
            gone = int(flags.get(stream=side)[2])
            flags[1:2].set(np.ones(1, "uint32"), stream=side)
            stream.synchronize()
        if gone:
            bench.failures.append(f"rank {rank}: {gone} blocks had gone before the ping-pong ended")
    bench.add("held", engine, nbytes, us, "us one way")


def by_events(bench: Bench, nbytes: int) -> None:
    """Kernel, event, copy, event, kernel on the other GPU; all enqueued ahead of the first."""
    rounds = 40
    copies = []
    flags = bench.results[0]["flags"]
    for rank in RANKS:
        with cupy.cuda.Device(rank):
            copies.append(cupy.cuda.Stream(non_blocking=True))
    with cupy.cuda.Device(0):
        flags.fill(0)
        cupy.cuda.get_current_stream().synchronize()
    gate = np.uint64(flags.data.ptr)
    bench.launch(0, "hold", (gate, gate + np.uint64(8), gate + np.uint64(16)))
    kept = []
    for k in range(rounds):
        for rank in RANKS:
            bench.launch(rank, "stamp_time", (bench.address(rank, "times") + np.uint64(8 * k),))
            for after, before in (
                (bench.streams[rank], copies[rank]),
                (copies[rank], bench.streams[1 - rank]),
            ):
                with cupy.cuda.Device(rank):
                    event = cupy.cuda.Event(disable_timing=True)
                    event.record(after)
                    if before is copies[rank]:
                        before.wait_event(event)
                        cupy.cuda.runtime.memcpyAsync(
                            bench.windows[1].address(1 - rank),
                            bench.windows[0].address(rank),
                            nbytes,
                            4,
                            before.ptr,
                        )
                if before is not copies[rank]:
                    with cupy.cuda.Device(1 - rank):
                        before.wait_event(event)
                kept.append(event)
    with cupy.cuda.Device(0):
        side = cupy.cuda.Stream(non_blocking=True)
        flags[1:2].set(np.ones(1, "uint64"), stream=side)
    bench.end("events")
    times = np.diff(bench.results[0]["times"].get()[:rounds].astype(np.int64))[5:]
    us = statistics.median(times.tolist()) / 2e3
    bench.add("ping-pong", "events", nbytes, us, "us one way")


def by_host(bench: Bench, nbytes: int) -> None:
    rounds, times = 200, []
    for k in range(rounds):
        rank = k % 2
        began = time.perf_counter_ns()
        bench.launch(rank, "stamp_time", (bench.address(rank, "times"),))
        with cupy.cuda.Device(rank):
            bench.streams[rank].synchronize()
            cupy.cuda.runtime.memcpyAsync(
                bench.windows[1].address(1 - rank),
                bench.windows[0].address(rank),
                nbytes,
                4,
                bench.streams[rank].ptr,
            )
            bench.streams[rank].synchronize()
        times.append(time.perf_counter_ns() - began)
    bench.add("ping-pong", "host", nbytes, statistics.median(times) / 1e3, "us one way")


def by_the_host(bench: Bench) -> None:
    for nbytes in SIZES:
        by_events(bench, nbytes)
        by_host(bench, nbytes)


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


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "proxy": lambda bench: ping_pongs(bench, "proxy"),
    "armed": lambda bench: ping_pongs(bench, "armed"),
    "armed-co": lambda bench: ping_pongs(bench, "armed co"),
    "forms": lambda bench: chases(bench, bench.windows),
    "host": by_the_host,
    "push": pushes,
    "throughput": throughput,
}


def measure(section: str, rounds: int, rows: Path) -> int:
    """One section, in this process."""
    bench = None
    try:
        bench = Bench(rounds, rows, "copy_order" if section == "armed-co" else "fenced")
        SECTIONS[section](bench)
    except Exception as error:  # a driver's too: told like the others
        print(f"{section}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # nothing of a failed context is taken down
    for failure in bench.failures:
        print(f"{section}: {failure}", file=sys.stderr, flush=True)
    return len(bench.failures) > 0


def run_section(section: str, rounds: int, rows: Path, limit_s: float) -> str:
    """Why it failed; empty: it did not."""
    command = [sys.executable, str(Path(__file__)), "--section", section]
    command += ["--rounds", str(rounds), "--json", str(rows)]
    try:
        done = subprocess.run(command, timeout=limit_s, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return f"{section}: did not end within {limit_s:g} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else "\n".join(lines[-8:]) or f"{section}: it crashed"


def table(rows: list[dict[str, Any]]) -> None:
    print("what         engine           bytes        value unit")
    for row in rows:
        print(
            f"{row['what']:<12} {row['engine']:<12} {row['bytes']:>9} "
            f"{row['value']:>12.2f} {row['unit']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-driven.jsonl"))
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--section-s", type=float, default=55, help="seconds that each may take")
    parser.add_argument("--section", choices=SECTIONS, help="just this one, in this process")
    given = parser.parse_args()
    if given.section:
        return measure(given.section, given.rounds, given.json)
    given.json.write_text("", "utf-8")
    failures = [
        failure
        for section in given.only.split(",")
        if (failure := run_section(section, given.rounds, given.json, given.section_s))
    ]
    print("\n" + "\n".join(failures or ["no failure, every byte right"]))
    table([json.loads(line) for line in given.json.read_text("utf-8").splitlines()])
    return len(failures) > 0


if __name__ == "__main__":
    sys.exit(main())
