"""The host's time to submit collectives through offcore.torch, as FSDP2 and as torch.distributed
do, and NCCL's by torch.distributed; one process a GPU.

`python benchmarks/gpu_submit.py [SITE ...]` measures the offcore that is installed, or those at the
given places (folders for PYTHONPATH) in turns, so that a commit can be compared with another one
on the same machine. A virtual machine changes its speed by half for minutes: compare the least
times, or many turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

RANKS = 2
NBYTES = 4096
ROUNDS = 15
CALLS = 40  # enqueued without a wait
WARMUP = 30
LIMIT_S = 120
LARGE = 128 << 20  # of a layer: gathered in bfloat16, reduced in float32 at twice the size
LARGE_CALLS = 8  # so that no stream is full


def timed(
    call: Callable[[], Any], end: Callable[[], Any], calls: int = CALLS
) -> tuple[float, float, float]:
    """Microseconds: to submit a call (median), of a call in a row of them, of one with its end."""
    submits = []
    began = time.perf_counter_ns()
    for _ in range(calls):
        before = time.perf_counter_ns()
        call()
        submits.append(time.perf_counter_ns() - before)
    end()
    row_ns = (time.perf_counter_ns() - began) / calls
    alone = []
    for _ in range(calls):
        before = time.perf_counter_ns()
        call()
        end()
        alone.append(time.perf_counter_ns() - before)
    return statistics.median(submits) / 1e3, row_ns / 1e3, statistics.median(alone) / 1e3


def work(rank: int, port: int) -> None:
    """One rank; rank 0 prints a line for each kind of output."""
    import torch
    import torch.distributed as dist

    import offcore.torch

    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    comm = offcore.torch.Communicator(timeout=60)
    pool = comm.memory_pool(64 << 20)

    def tensors() -> tuple[Any, Any]:
        return (
            torch.zeros(NBYTES, dtype=torch.uint8, device="cuda"),
            torch.ones(NBYTES // RANKS, dtype=torch.uint8, device="cuda"),
        )

    out, inp = tensors()
    with torch.cuda.use_mem_pool(pool):
        pool_out, pool_inp = tensors()
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: comm.all_gather(out, inp),
        "promise": lambda: comm.all_gather(pool_out, pool_inp, protocol="promise"),
        "view": lambda: comm.all_gather_view(inp),
    }
    if importlib.util.find_spec("offcore.fsdp"):  # older commits have none
        calls |= training_calls(rank, out, inp)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARMUP):
            call()
            torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            dist.barrier()
            number = LARGE_CALLS if "large" in name else CALLS
            times[name].append(timed(call, torch.cuda.synchronize, number))
    for name, rows in times.items():
        if rank == 0:
            least = min(row[0] for row in rows)
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            print(name, *(f"{value:.2f}" for value in (least, *medians)), flush=True)
    comm.close()


def late_gather(out: Any, inp: Any, group: Any) -> None:
    """As callers do who wait for the work that `async_op` gives them."""
    import torch.distributed as dist

    dist.all_gather_into_tensor(out, inp, group, async_op=True).wait()


def training_calls(rank: int, out: Any, inp: Any) -> dict[str, Callable[[], Any]]:
    """As FSDP2 makes them (in place, after `allocate`), and as torch.distributed's users do."""
    import torch
    import torch.distributed as dist

    import offcore.distributed  # noqa: F401
    from offcore.fsdp.shards import AllGather, Meeting, ReduceScatter, Shards

    device = torch.device("cuda", rank)
    nccl, ours = dist.new_group(backend="nccl"), dist.new_group(backend="offcore")
    store = dist.PrefixStore("shards", dist.distributed_c10d._get_default_store())
    meeting = Meeting(store, [[*range(dist.get_world_size())]])
    shards = Shards(None, device, 60.0, 4 * LARGE, {}, meeting)

    class Group:  # what AllGather asks of FSDP2's parameters
        _all_gather_process_group = nccl

        class mesh_info:  # noqa: N801
            shard_process_group = nccl

    gather, reduce = AllGather(Group, {nccl: shards}), ReduceScatter(shards)

    def fsdp_gather(nbytes: int) -> None:
        whole = gather.allocate((nbytes // 2,), dtype=torch.bfloat16, device=device)
        part = nbytes // 2 // RANKS
        gather(whole, whole.narrow(0, rank * part, part), nccl)

    def own_gather(nbytes: int) -> None:
        whole = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
        part = nbytes // 2 // RANKS
        dist.all_gather_into_tensor(whole, whole.narrow(0, rank * part, part), nccl)

    grads = torch.zeros(LARGE // 2, device=device)
    part = torch.empty(LARGE // 2 // RANKS, device=device)
    few, few_part = grads[:1024], part[: 1024 // RANKS]
    average = dist.ReduceOp.AVG
    made: dict[str, Callable[[], Any]] = {}
    for kind, nbytes, whole, piece in (
        ("small", NBYTES, few, few_part),
        ("large", LARGE, grads, part),
    ):
        made |= {
            f"fsdp-gather-{kind}": partial(fsdp_gather, nbytes),
            f"nccl-gather-{kind}": partial(own_gather, nbytes),
            f"fsdp-reduce-{kind}": partial(reduce, piece, whole, nccl, average),
            f"nccl-reduce-{kind}": partial(dist.reduce_scatter_tensor, piece, whole, average, nccl),
        }
    for name, group in (("c10d", ours), ("nccl", nccl)):
        made[f"{name}-now-small"] = partial(dist.all_gather_into_tensor, out, inp, group)
        made[f"{name}-late-small"] = partial(late_gather, out, inp, group)
    return made


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def measure(site: str) -> dict[str, list[float]]:
    """Rank 0's lines. Raises SystemExit where a rank fails."""
    env = os.environ | ({"PYTHONPATH": site} if site else {})
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--port", port],
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
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return work(args.rank, args.port)
    found: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(args.turns):
        for site in args.sites:
            for name, row in measure(site).items():
                found.setdefault((name, site), []).append(row)
    print(
        f"all_gather of {NBYTES} bytes (large: {LARGE >> 20} MiB), {RANKS} ranks; us: to submit "
        "(least, median), in a row, alone"
    )
    for (name, site), rows in sorted(found.items()):
        least = min(row[0] for row in rows)
        medians = [statistics.median(row[i] for row in rows) for i in (1, 2, 3)]
        print(f"{name:18} {least:6.2f} " + " ".join(f"{value:6.2f}" for value in medians), site)


if __name__ == "__main__":
    main()
