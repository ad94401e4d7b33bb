"""Times of collectives on GPUs next to NCCL's kernels, as one rank of several processes.

Run by h200_check.py.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CALLS = 20
SIZES = [1 << shift for shift in range(10, 31, 2)]
STRIDED_MAX = 16 << 20  # one strided copy is slow beyond
SMALL_MAX = 1 << 20
ARMED_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
Row = dict[str, Any]


class Gate:
    """Holds a stream until the host lets it go."""

    def __init__(self, torch: Any) -> None:
        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._turn = 0

    def close(self, stream: Any) -> None:
        self._turn += 1
        wait = self._driver.cuStreamWaitValue32_v2
        wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        code = wait(stream.cuda_stream, self._word.data_ptr(), self._turn, 0)
        if code:
            raise RuntimeError(f"cuStreamWaitValue32: {code}")

    def open(self) -> None:
        self._word[0] = self._turn


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import offcore.torch as offcore_torch

        self.torch, self.dist = torch, dist
        self.rank, self.ranks, self.largest = args.rank, args.ranks, args.largest
        torch.cuda.set_device(args.rank)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.ports[1])}
        minutes = datetime.timedelta(minutes=3)
        dist.init_process_group(
            "nccl",
            rank=args.rank,
            world_size=args.ranks,
            timeout=minutes,
            device_id=torch.device("cuda", args.rank),
        )
        self.gloo = dist.new_group(backend="gloo", timeout=minutes)
        self.stream = torch.cuda.Stream()
        self.gate = Gate(torch)
        self.comms = {
            form: offcore_torch.Communicator(self.gloo, signals=form, timeout=30)
            for form in ("fenced", "copy_order")
        }
        self.buffers = {}
        for form, comm in self.comms.items():
            nbytes = self.largest if form == "fenced" else SMALL_MAX
            self.buffers[form] = [comm.empty(nbytes), comm.empty(nbytes)]
        self.rows: list[Row] = []

    def slowest(self, value: float) -> float:
        shared = self.torch.tensor([value])
        self.dist.all_reduce(shared, self.dist.ReduceOp.MAX, group=self.gloo)
        return float(shared[0])

    def batch(self, call: Any, calls: int = CALLS) -> float:
        """Microseconds a call, all of them enqueued before the first one runs."""
        torch, stream = self.torch, self.stream
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "fl")
        handles = []
        with torch.cuda.stream(stream):
            self.gate.close(stream)
            handles.append(call())  # ranks let go at different times: this one meets them
            first.record(stream)
            for _ in range(calls):
                handles.append(call())
            last.record(stream)
        self.dist.barrier(self.gloo)
        self.gate.open()
        stream.synchronize()
        for handle in handles:
            if handle is not None:
                handle.wait()
        return self.slowest(first.elapsed_time(last) * 1e3 / calls)

    def seen(self, call: Any) -> float:
        """Microseconds of one call, from the host's call until it sees the end."""
        times = []
        for _ in range(30):
            self.dist.barrier(self.gloo)
            with self.torch.cuda.stream(self.stream):
                began = time.perf_counter()
                call()
                self.stream.synchronize()
                times.append((time.perf_counter() - began) * 1e6)
        return self.slowest(statistics.median(times))

    def note(
        self, impl: str, op: str, nbytes: int, times: list[float], seen: float | None, **facts: Any
    ) -> None:
        row = {
            "impl": impl,
            "op": op,
            "ranks": self.ranks,
            "bytes": nbytes,
            "time_us": round(statistics.median(times), 3),
            "time_us_min": round(min(times), 3),
            "time_us_max": round(max(times), 3),
            "seen_us": seen and round(seen, 3),
            **facts,
        }
        self.rows.append(row)

    def nccl(self, op: str, nbytes: int, repeats: int) -> None:
        torch, dist = self.torch, self.dist
        part = nbytes // self.ranks
        out = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        inp = out[self.rank * part : (self.rank + 1) * part]
        if op == "all_to_all":
            inp = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

        def call() -> None:
            if op == "all_gather":
                dist.all_gather_into_tensor(out, inp)
            else:
                dist.all_to_all_single(out, inp)

        with torch.cuda.stream(self.stream):
            for _ in range(3):
                call()
        self.stream.synchronize()
        times = [self.batch(call) for _ in range(repeats)]
        seen = self.seen(call) if nbytes <= SMALL_MAX else None
        self.note("nccl", op, nbytes, times, seen, mode="eager", in_place=op == "all_gather")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        times = [self.batch(graph.replay, 1) / CALLS for _ in range(repeats)]
        self.note("nccl", op, nbytes, times, None, mode="graph", in_place=op == "all_gather")

    def offcore(self, op: str, nbytes: int, repeats: int, form: str, armed: bool = False) -> None:
        comm, (out, inp) = self.comms[form], self.buffers[form]
        names = ["pcpy", "b2b"]
        if nbytes <= STRIDED_MAX:
            names += ["fan"] + (["bcst"] if op == "all_gather" and self.ranks > 2 else [])
        if armed:
            names = ["prelaunch_fan"]
        for protocol in ("promise", "auto", "eager"):
            if protocol == "eager" and (armed or nbytes > SMALL_MAX):
                continue
            for variant in names:

                def call(variant: str = variant, protocol: str = protocol) -> Any:
                    if op == "all_gather":
                        return comm.all_gather(out[:nbytes], variant=variant, protocol=protocol)
                    return comm.all_to_all(
                        out[:nbytes], inp[:nbytes], variant=variant, protocol=protocol
                    )

                with self.torch.cuda.stream(self.stream):
                    result = [call().wait() for _ in range(2)][-1]
                self.dist.barrier(self.gloo)
                times = [self.batch(call) for _ in range(repeats)]
                seen = self.seen(call) if nbytes <= SMALL_MAX else None
                self.note(
                    "offcore",
                    op,
                    nbytes,
                    times,
                    seen,
                    mode="eager",
                    variant=result.variant,
                    protocol=protocol,
                    signals=form,
                    in_place=op == "all_gather",
                    armed_ahead=result.armed_ahead,
                    staged=result.staged,
                )

    def verify(self, op: str, nbytes: int) -> None:
        """The measured buffers hold what they must, after a call on fresh bytes."""
        comm, (out, inp) = self.comms["fenced"], self.buffers["fenced"]
        torch = self.torch
        part = nbytes // self.ranks
        ramp = torch.arange(part, device="cuda", dtype=torch.int64)

        def chunk(src: int, dst: int) -> Any:
            return (ramp * (2 * src + 3) + 31 * dst + 7 * src).to(torch.uint8)

        variant = "fan" if nbytes <= STRIDED_MAX else "pcpy"
        out[:nbytes] = 0
        everyone = range(self.ranks)
        if op == "all_gather":
            out[self.rank * part : (self.rank + 1) * part] = chunk(self.rank, 0)
        else:
            for peer in everyone:
                inp[peer * part : (peer + 1) * part] = chunk(self.rank, peer)
        torch.cuda.default_stream().synchronize()
        self.dist.barrier(self.gloo)
        if op == "all_gather":
            comm.all_gather(out[:nbytes], variant=variant).wait()
        else:
            comm.all_to_all(out[:nbytes], inp[:nbytes], variant=variant).wait()
        for peer in everyone:
            wanted = chunk(peer, 0 if op == "all_gather" else self.rank)
            wrong = int((out[peer * part : (peer + 1) * part] != wanted).sum())
            if wrong:
                raise RuntimeError(f"{op} of {nbytes} bytes: {wrong} wrong ones from rank {peer}")
        self.dist.barrier(self.gloo)

    def run(self) -> None:
        for nbytes in (size for size in SIZES if size <= self.largest):
            repeats = 9 if nbytes <= 64 << 20 else 5
            for op in ("all_gather", "all_to_all"):
                self.verify(op, nbytes)
                self.nccl(op, nbytes, repeats)
                self.offcore(op, nbytes, repeats, "fenced")
                if nbytes <= SMALL_MAX:
                    self.offcore(op, nbytes, repeats, "copy_order")
            if self.rank == 0:
                print(f"measured {nbytes}", flush=True)
        # Last, because nothing may wait for a whole device while a program is parked on it.
        for nbytes in (size for size in ARMED_SIZES if size <= self.largest):
            for op in ("all_gather", "all_to_all"):
                self.offcore(op, nbytes, 9, "fenced", armed=True)


def measure(args: argparse.Namespace) -> int:
    bench = Bench(args)
    failure = None
    try:
        bench.run()
    except Exception as error:
        failure = error
    if args.rank == 0:
        finish(bench)
    if failure is not None:
        raise failure
    for comm in bench.comms.values():
        comm.close()
    bench.dist.destroy_process_group()
    return 0


def finish(bench: Bench) -> None:
    torch = bench.torch
    named = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    facts = {
        "machine": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "commit": named.stdout.strip() or os.environ.get("OFFCORE_COMMIT", ""),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if folder := os.environ.get("OUT"):
        with (Path(folder) / "h200_check.jsonl").open("a") as file:
            for row in bench.rows:
                file.write(json.dumps(row | facts) + "\n")
    table(bench.rows)


def table(rows: list[Row]) -> None:
    """For each size the best variant of each way to enter, next to NCCL. Microseconds a call."""
    columns = (
        ("promise", {"impl": "offcore", "protocol": "promise", "signals": "fenced"}),
        ("safe", {"impl": "offcore", "protocol": "auto", "signals": "fenced"}),
        ("eager", {"impl": "offcore", "protocol": "eager", "signals": "fenced"}),
        ("promise co", {"impl": "offcore", "protocol": "promise", "signals": "copy_order"}),
        ("safe co", {"impl": "offcore", "protocol": "auto", "signals": "copy_order"}),
        ("nccl graph", {"impl": "nccl", "mode": "graph"}),
        ("nccl", {"impl": "nccl", "mode": "eager"}),
    )
    for op in ("all_gather", "all_to_all"):
        print(f"\n{op}, us a call, enqueued ahead (co: copy_order; in brackets: seen by the host)")
        print(f"{'bytes':>11}" + "".join(f"{name:>26}" for name, _ in columns))
        for nbytes in sorted({row["bytes"] for row in rows}):
            line = f"{nbytes:>11}"
            for _, wanted in columns:
                found = [
                    row
                    for row in rows
                    if row["op"] == op
                    and row["bytes"] == nbytes
                    and all(row.get(key) == value for key, value in wanted.items())
                ]
                best = min(found, key=lambda row: row["time_us"], default=None)
                cell = "-"
                if best is not None:
                    seen = f" [{best['seen_us']:.0f}]" if best["seen_us"] else ""
                    cell = f"{best['time_us']:.1f} {best.get('variant', '')}{seen}"
                line += f"{cell:>26}"
            print(line, flush=True)
