"""The host's time to submit collectives through offcore.torch, without a GPU: on the stand-in
driver (tests/fakes), 2 processes. gpu_submit.py is the same on GPUs.

`python benchmarks/submit.py [SITE ...]` measures the offcore that is installed, or those at the
given places (folders for PYTHONPATH) in turns, so that a commit can be compared with another one on
the same machine. Times are the calling thread's CPU time, so that others on the machine count
little; the stand-in's own part of it is about half. Tensors are torch's, at addresses of the
stand-in, and say that they are on a GPU.

--cold: single calls where caches hold other things (cold.py), also those of torch.distributed, as
DDP makes them; and what they are made of.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cold

RANKS = 2
NBYTES = 4096
BUCKET = 25 << 20  # of DDP
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


def communicator(kind: Any, rank: int, store: str) -> Any:
    if importlib.util.find_spec("offcore.bootstrap") is None:  # of any age
        import offcore

        made = object.__new__(kind)
        made._device = rank
        place: dict[str, Any] = {"rank": rank, "world_size": RANKS, "device": rank}
        offcore.Communicator.__init__(made, backend="cuda", store=store, timeout=60, **place)
        return made
    from offcore.bootstrap import bootstrap_of

    return kind(bootstrap_of(store, rank, RANKS), device=rank, timeout=60)


def group_calls(rank: int, stores: list[str]) -> dict[str, Callable[[], Any]]:
    """torch.distributed's, on tensors of its own; `bucket` is what DDP does with one of 25 MiB."""
    import torch
    import torch.distributed as dist

    sides: Any = importlib.import_module("offcore.distributed.sides")  # of any age
    dist.init_process_group("offcore", init_method=f"tcp://{stores[1]}", rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    comm = communicator(sides.OnStreams, rank, stores[2])
    given = comm, "stand-in", rank, 60.0, torch.device("cuda", rank)
    try:
        from offcore.distributed.direct import DirectSide

        group.collectives.direct = side = DirectSide(*given)
    except ImportError:  # older ones have none
        side = sides.side_of(*given)
    group.collectives._sides["cuda"] = side
    window = comm.window(BUCKET + 4 * NBYTES)
    at = window.address(rank)
    bucket = tensor_at(at, BUCKET).view(torch.float32)
    small = tensor_at(at + BUCKET, NBYTES).view(torch.float32)
    whole = tensor_at(at + BUCKET + NBYTES, NBYTES)
    part = tensor_at(at + BUCKET + 2 * NBYTES, NBYTES // RANKS)

    def late(tensor: Any, _: Any = window) -> Any:  # whose memory it keeps
        work = group.allreduce([tensor], torch._C._distributed_c10d.AllreduceOptions())
        work.get_future()
        return work

    class Now:  # a call in the stream that is current, with no work to wait for
        def __init__(self, call: Callable[[], Any]) -> None:
            call()

        def wait(self) -> None:
            comm.barrier()

    shards = shards_of(comm, side, rank)
    ring = shards.ring._window.address(rank)
    gathered, own = tensor_at(ring, NBYTES), tensor_at(ring + NBYTES, NBYTES // RANKS)

    return {
        "fsdp gather": lambda: Now(lambda: shards.all_gather(gathered, own, False)),
        "fsdp reduce": lambda: Now(
            lambda: shards.reduce_scatter(part.view(torch.float32), small, "avg", 1.0, False)
        ),
        "c10d all_reduce": lambda: Now(lambda: dist.all_reduce(small)),
        "c10d all_gather": lambda: Now(lambda: dist.all_gather_into_tensor(whole, part)),
        "c10d late": lambda: late(small),
        "c10d bucket": lambda: late(bucket),
    }


def shards_of(comm: Any, side: Any, rank: int) -> Any:
    """FSDP2's, of a communicator that is there."""
    from offcore.fsdp import shards

    module: Any = shards  # which has a ring wherever that is defined
    made: Any = object.__new__(shards.Shards)
    made._rank, made.hosts = rank, []
    made.ring = module.Ring(comm, 4 * NBYTES)
    made.ran = {name: shards.Ran() for name in ("all_gather", "reduce_scatter")}
    made._sides = {
        name: type(side)(comm, "shards", rank, 60.0, side.device, ran.add)
        for name, ran in made.ran.items()
    }
    made._gathers, made._reduces = made._sides.values()  # older ones have only the table
    return made


def streams_are(module: Any, stream_of: Callable[[int], int]) -> None:
    """By the name of it now, and by the one that older trees have."""
    module._stream_of = module.stream_of = stream_of


def counted(comm: Any, window: Any, rank: int) -> Callable[[], Any]:
    """An all_to_all_v whose counts are on the device, in parts of the window that others leave."""
    import numpy as np
    import torch

    at = window.address(rank)
    counts, received = (
        tensor_at(at + NBYTES + 256 * n, 8 * RANKS).view(torch.int64) for n in (0, 1)
    )
    window.write(np.ones(RANKS, np.int64), NBYTES, rank=rank)
    parts = [tensor_at(at + 3 * NBYTES * n, NBYTES // 2).view(-1, 64) for n in (0, 1)]
    return lambda: comm.all_to_all_v(*parts, counts, counts_on_device=True, received=received)


def work(rank: int, stores: list[str], is_cold: bool) -> None:
    """One rank; rank 0 prints a line for each kind of call."""
    import torch
    from torch_cuda import Driver, use  # type: ignore[import-not-found]

    import offcore.torch

    comm = communicator(offcore.torch.Communicator, rank, stores[0])
    driver = Driver(os.environ["OFFCORE_LIBCUDA"], rank)
    window = comm.window(4 * NBYTES)
    at = window.address(rank)
    out, inp = tensor_at(at, NBYTES), tensor_at(at + 2 * NBYTES, NBYTES // RANKS)
    use(driver, rank)
    streams_are(offcore.torch, lambda _: 0)  # the default one
    kept: list[Any] = []
    calls: dict[str, Callable[[], Any]] = {
        "auto": lambda: comm.all_gather(out, inp),
        "promise": lambda: comm.all_gather(out, inp, protocol="promise"),
        "view": lambda: comm.all_gather_view(inp),
    }
    if hasattr(comm, "all_reduce"):
        calls["reduce"] = lambda: comm.all_reduce(out, op="max")
        calls["counted"] = counted(comm, window, rank)
    for call in calls.values():
        for _ in range(WARMUP):
            call().wait()
    if is_cold:
        streams_are(offcore.torch, torch._C._cuda_getCurrentRawStream)
        calls |= group_calls(rank, stores)
        for name, values in cold.measure(calls, comm.barrier, rank == 0).items():
            if rank == 0:
                print(name.replace(" ", "-"), *(f"{value:.1f}" for value in values), flush=True)
        comm.barrier()
        os._exit(0)
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


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    stores = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return stores


def measure(site: str, library: str, counter: Path | None) -> dict[str, list[float]]:
    env = os.environ | ({"PYTHONPATH": site} if site else {}) | {"OFFCORE_LIBCUDA": library}
    env |= {"OFFCORE_FAKE_CUDA_SEED": "0", "OFFCORE_FAKE_CUDA_QUEUE_DEPTH": "100000"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if counter is not None:
        env |= {"LD_PRELOAD": str(counter)}
    given = ["--stores", *free_ports(3), *(["--cold"] if counter else [])]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), *given],
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
    parser.add_argument("--stores", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(FAKES))
    if args.rank is not None:
        return work(args.rank, args.stores, args.cold)
    library = str(importlib.import_module("cuda_library").fake_cuda_library())
    found: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        counter = cold.counter(Path(folder)) if args.cold else None
        for _ in range(args.turns):
            for site in args.sites:
                for name, row in measure(site, library, counter).items():
                    found.setdefault((name, site), []).append(row)
    print(
        f"{NBYTES} bytes, {RANKS} ranks; us of the calling thread's CPU time: least, median", end=""
    )
    print("; calls of the driver, frames of Python, allocations" if args.cold else "")
    for (name, site), rows in sorted(found.items()):
        least = min(row[0] for row in rows)
        median = statistics.median(row[1] for row in rows)
        counts = " ".join(f"{min(row[n] for row in rows):5.0f}" for n in range(2, len(rows[0])))
        print(f"{name:18} {least:6.2f} {median:6.2f} {counts} {site}")


if __name__ == "__main__":
    main()
