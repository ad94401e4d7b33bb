"""Groups that span hosts beside torch's own backend, on one machine that says it is several.

    python benchmarks/hosts.py [--gpus] [--mcast INTERFACE] [--hosts H] [--ranks L] [--sizes ...]

Starts H x L ranks, by default 2 x 2, checks every collective against torch's own backend (gloo, or
with --gpus NCCL) and prints the median time of both, in microseconds, by the bytes of the whole
tensor, and what a rank got from other hosts. The hosts share one machine and its links, so the
times say what the steps cost, not what a network saves. With --gpus each rank has a GPU. With
--mcast all-gathers, broadcasts and reduce-scatters go between hosts by multicast on that interface,
such as lo; tensors on GPUs are staged in pinned memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import offcore
import offcore.distributed
from offcore.mcast.torch import McastOptions

CALLS = 20


def cases(whole: Any, part: Any, group: Any) -> dict[str, tuple[Callable[[], Any], Any]]:
    """Each call, and the tensor that it writes."""
    out, share = torch.empty_like(whole), torch.empty_like(part)
    same = whole.clone()

    def reduce() -> None:
        same.copy_(whole)
        dist.all_reduce(same, group=group)

    def tell() -> None:
        same.copy_(whole)
        dist.broadcast(same, 1, group=group)

    return {
        "all_gather": (lambda: dist.all_gather_into_tensor(out, part, group=group), out),
        "all_to_all": (lambda: dist.all_to_all_single(out, whole, group=group), out),
        "broadcast": (tell, same),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(share, whole, group=group), share),
        "all_reduce": (reduce, same),
    }


def median_us(call: Callable[[], Any], settle: Callable[[], Any]) -> float:
    times = []
    for _ in range(CALLS):
        settle()
        dist.barrier()
        settle()
        begun = time.perf_counter()
        call()
        settle()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def rank_main(rank: int, given: Any, place: str) -> None:
    ranks = given.hosts * given.ranks
    device = torch.device("cuda", rank) if given.gpus else torch.device("cpu")
    settle = torch.cuda.synchronize if given.gpus else (lambda: None)
    if given.gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    os.environ["OFFCORE_HOST"] = str(rank // given.ranks)
    offcore.distributed.configure(all_reduce_from=0)
    if given.mcast:
        offcore.distributed.configure(between=McastOptions(interface=given.mcast))
    dist.init_process_group("offcore", init_method=place, rank=rank, world_size=ranks)
    plain = dist.new_group(backend="nccl" if given.gpus else "gloo")
    torch.manual_seed(rank)
    for size in given.sizes:
        count = size // 4 // ranks
        whole = torch.randint(0, 99, (count * ranks,), device=device).float()
        ours, theirs = (cases(whole, whole[:count].clone(), group) for group in (None, plain))
        for name, (call, out) in ours.items():
            times = [median_us(one, settle) for one in (call, theirs[name][0])]
            right = torch.tensor(int(torch.equal(out, theirs[name][1])), device=device)
            dist.all_reduce(right, op=dist.ReduceOp.MIN, group=plain)
            if rank == 0:
                row = f"{name:15} {size:>11} B  offcore {times[0]:9.1f}  plain {times[1]:9.1f}"
                print(row, "equal" if right.item() else "WRONG", flush=True)
            if not right.item():
                raise SystemExit(f"rank {rank}: {name} of {size} B differs")
    told = offcore.distributed.report()
    if told["handed"] or device.type not in told["hosts"]:
        raise SystemExit(f"rank {rank}: torch's own backend made calls: {told}")
    if rank == 0:
        print(offcore.__version__, torch.__version__, told["hosts"])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--mcast", metavar="INTERFACE")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 16, 1 << 20, 1 << 24])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'meeting'}"
        torch.multiprocessing.spawn(rank_main, (given, place), given.hosts * given.ranks)


if __name__ == "__main__":
    main()
