"""The host's time to submit collectives through offcore.torch, without a GPU: on the stand-in
driver (tests/fakes), 2 processes. gpu_submit.py is the same on GPUs.

`python benchmarks/submit.py [SITE ...]` measures the offcore that is installed, or those at the
given places (folders for PYTHONPATH) in turns, so that a commit can be compared with another one on
the same machine. Times are the calling thread's CPU time, so that others on the machine count
little; the stand-in's own part of it is about half. Tensors are torch's, at addresses of the
stand-in, and say that they are on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 2
NBYTES = 4096
ROUNDS = 60
CALLS = 24  # enqueued without a wait
WARMUP = 40
LIMIT_S = 120
FAKES = Path(__file__).parents[1] / "tests" / "fakes"


def tensor_at(address: int, nbytes: int) -> Any:
    """A tensor whose memory the CPU cannot read."""
    import torch

    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def row_us(call: Callable[[], Any], end: Callable[[], Any]) -> float:
    """CPU time of this thread for a call, of a row of them."""
    began = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    took = time.thread_time_ns() - began
    end()
    return took / CALLS / 1e3


def make_current(rank: int) -> None:
    """The GPU's context in this thread, as torch leaves it."""
    driver = ctypes.CDLL(os.environ["OFFCORE_LIBCUDA"])
    context = ctypes.c_void_p()
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank) != 0:
        raise SystemExit("the stand-in has no such device")
    driver.cuCtxSetCurrent(context)


def work(rank: int, store: str) -> None:
    """One rank; rank 0 prints a line for each kind of call."""
    import numpy as np
    import torch

    import offcore.torch

    comm: Any = object.__new__(offcore.torch.Communicator)
    comm._device = rank
    offcore.Communicator.__init__(
        comm, backend="cuda", store=store, rank=rank, world_size=RANKS, device=rank, timeout=60
    )
    make_current(rank)
    window = comm.window(4 * NBYTES)
    at = window.address(rank)
    out, inp = tensor_at(at, NBYTES), tensor_at(at + 2 * NBYTES, NBYTES // RANKS)
    torch.Tensor.is_cuda, torch.Tensor.get_device = True, lambda _: rank  # as if on the GPU
    offcore.torch._stream_of = lambda _: 0  # the default one
    kept: list[Any] = []
    calls: dict[str, Callable[[], Any]] = {
        "auto": lambda: comm.all_gather(out, inp),
        "promise": lambda: comm.all_gather(out, inp, protocol="promise"),
        "view": lambda: comm.all_gather_view(inp),
    }
    counts, received = (
        tensor_at(at + NBYTES + 256 * n, 8 * RANKS).view(torch.int64) for n in (0, 1)
    )
    window.write(np.ones(RANKS, np.int64), NBYTES, rank=rank)
    parts = [tensor_at(at + 3 * NBYTES * n, NBYTES // 2).view(-1, 64) for n in (0, 1)]
    calls["counted"] = lambda: comm.all_to_all_v(
        *parts, counts, counts_on_device=True, received=received
    )
    if hasattr(comm, "all_reduce"):
        calls["reduce"] = lambda: comm.all_reduce(out, op="max")
    for call in calls.values():
        for _ in range(WARMUP):
            call().wait()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            comm.barrier()

            def keep(call: Callable[[], Any] = call) -> None:
                kept.append(call())

            times[name].append(row_us(keep, lambda: kept[-1].wait()))
            kept.clear()
    for name, row in times.items():
        if rank == 0:
            print(name, f"{min(row):.3f} {statistics.median(row):.3f}", flush=True)
    comm.barrier()
    comm.close()


def measure(site: str, library: str) -> dict[str, list[float]]:
    env = os.environ | ({"PYTHONPATH": site} if site else {}) | {"OFFCORE_LIBCUDA": library}
    env |= {"OFFCORE_FAKE_CUDA_SEED": "0", "OFFCORE_FAKE_CUDA_QUEUE_DEPTH": "100000"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{found.getsockname()[1]}"
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--store", store],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    told = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    if any(rank.returncode != 0 for rank in ranks):
        raise SystemExit(f"a rank failed with offcore of {site or 'this environment'}")
    rows = (line.split() for line in told[0].splitlines())
    return {name: [float(value) for value in values] for name, *values in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sites", nargs="*", default=[""], metavar="SITE")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return work(args.rank, args.store)
    sys.path.insert(0, str(FAKES))
    library = str(importlib.import_module("cuda_library").fake_cuda_library())
    found: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(args.turns):
        for site in args.sites:
            for name, row in measure(site, library).items():
                found.setdefault((name, site), []).append(row)
    print(f"{NBYTES} bytes, {RANKS} ranks; us of the calling thread's CPU time: least, median")
    for (name, site), rows in sorted(found.items()):
        least = min(row[0] for row in rows)
        median = statistics.median(row[1] for row in rows)
        print(f"{name:18} {least:6.2f} {median:6.2f} {site}")


if __name__ == "__main__":
    main()
