"""Measures all-gather and broadcast by multicast beside gloo, between hosts that are pretended.

    python benchmarks/mcast_beside_gloo.py --hosts 4

Each host is a network namespace at one bridge, with the kernel's default offloads for both, and has
one rank: a process that calls both implementations in turn. Ranks meet before a batch of calls, one
after the other; its time is the slowest rank's, divided by the calls; medians of batches. Bytes are
compared in calls of their own. Rows go to mcast-beside-gloo-HOSTS-MTU.jsonl in $OUT where it is
set, else in benchmarks/results. It needs torch, iproute2, and a kernel that gives unprivileged
users namespaces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from offcore import mcast
from offcore.report import JsonLines, Stamp
from offcore.sizes import parse_sizes

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = {"all_gather": "64K,256K,1M,4M,16M", "broadcast": "1M,4M,16M,64M"}
BATCH_BYTES = 64 << 20  # that a rank receives in a batch, about, but in 3 calls at least
BATCHES = 9


def shell(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


def build(hosts: int, mtu: int) -> None:
    """Inside a user namespace of our own, so it is gone with this process."""
    shell("mount -t tmpfs none /run", "mkdir /run/netns", "ip link set lo up")
    shell(f"ip link add switch0 mtu {mtu} type bridge mcast_snooping 0", "ip link set switch0 up")
    for host in range(hosts):
        shell(
            f"ip netns add h{host}",
            f"ip link add p{host} mtu {mtu} type veth peer name v0 mtu {mtu} netns h{host}",
            f"ip link set p{host} master switch0 up",
            f"ip -n h{host} link set v0 up",
            f"ip -n h{host} address add 10.9.0.{host + 1}/24 dev v0",
            f"ip -n h{host} link set lo up",
        )


def calls_of(op: str, count: int, comm: mcast.Communicator) -> dict[str, Callable[[], object]]:
    """Each implementation's call, on tensors of its own."""
    rank, ranks = comm.rank, comm.ranks
    ours, theirs = (
        torch.zeros(count * (ranks if op == "all_gather" else 1), dtype=torch.uint8)
        for _ in range(2)
    )
    part = torch.full((count,), rank + 1, dtype=torch.uint8)
    if op == "all_gather":
        return {
            "offcore": lambda: comm.all_gather(ours, part).wait(),
            "gloo": lambda: dist.all_gather_into_tensor(theirs, part),
        }
    return {
        "offcore": lambda: comm.broadcast(ours).wait(),
        "gloo": lambda: dist.broadcast(theirs, 0),
    }


def wrong_bytes(op: str, count: int, comm: mcast.Communicator) -> int:
    """Of ours, at all ranks."""
    draw = [np.random.default_rng(rank).integers(0, 256, count, np.uint8) for rank in range(8)]
    if op == "all_gather":
        out = np.zeros((comm.ranks, count), np.uint8)
        comm.all_gather(out, draw[comm.rank]).wait()
        wrong = sum(int((out[rank] != draw[rank]).sum()) for rank in range(comm.ranks))
    else:
        array = draw[0] if comm.rank == 0 else np.zeros(count, np.uint8)
        comm.broadcast(array).wait()
        wrong = int((array != draw[0]).sum())
    total = torch.tensor([wrong])
    dist.all_reduce(total)
    return int(total)


def measure(op: str, count: int, comm: mcast.Communicator) -> dict[str, list[float]]:
    """Seconds of a call of each implementation, batch by batch, of the slowest rank."""
    calls = calls_of(op, count, comm)
    times: dict[str, list[float]] = {impl: [] for impl in calls}
    received = count * (comm.ranks - 1 if op == "all_gather" else 1)
    batch = min(20, max(3, BATCH_BYTES // received))
    for step in range(BATCHES + 1):
        for impl, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(batch):
                call()
            if step > 0:
                times[impl].append((time.perf_counter() - began) / batch)
    for impl, own in times.items():
        slowest = torch.tensor(own)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[impl] = slowest.tolist()
    return times


def run_rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.store}", rank=rank, world_size=arguments.hosts
    )
    path = (
        Path(os.environ.get("OUT", RESULTS))
        / f"mcast-beside-gloo-{arguments.hosts}-{arguments.mtu}.jsonl"
    )
    comm = mcast.Communicator(dist.group.WORLD, interface="v0", receive_workers=0, send_workers=0)
    with JsonLines(str(path) if rank == 0 else None) as lines:
        stamp = asdict(Stamp())
        for op, sizes in SIZES.items():
            for count in parse_sizes(sizes):
                before = comm.counters
                times = measure(op, count, comm)
                fetched = comm.counters["fetched_chunks"] - before["fetched_chunks"]
                wrong = wrong_bytes(op, count, comm)
                for impl, own in times.items():
                    median = statistics.median(own)
                    row = {
                        "impl": impl,
                        "op": op,
                        "hosts": arguments.hosts,
                        "mtu": arguments.mtu,
                        "bytes": count * (arguments.hosts if op == "all_gather" else 1),
                        "time_us": median * 1e6,
                        "time_us_min": min(own) * 1e6,
                        "time_us_max": max(own) * 1e6,
                        "wrong": wrong if impl == "offcore" else None,
                        "fetched_chunks": fetched if impl == "offcore" else None,
                        "load": os.getloadavg()[0],
                    }
                    lines.write(row | stamp)
                if rank == 0:
                    ours, theirs = (statistics.median(times[impl]) for impl in ("offcore", "gloo"))
                    print(
                        f"{op:10} {count:9} bytes a rank  {ours * 1e6:9.0f} us, gloo "
                        f"{theirs * 1e6:9.0f} us: {theirs / ours:.1f}x  wrong {wrong}",
                        flush=True,
                    )
    dist.barrier()
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_rank(arguments.rank, arguments)
    words = [sys.executable, __file__, f"--hosts={arguments.hosts}", f"--mtu={arguments.mtu}"]
    if arguments.store is None:  # outside
        with tempfile.TemporaryDirectory() as folder:
            inside = ["unshare", "-Urnmpf", "--map-root-user", "--kill-child", *words]
            sys.exit(subprocess.run([*inside, f"--store={folder}/store"]).returncode)
    build(arguments.hosts, arguments.mtu)
    os.environ["GLOO_SOCKET_IFNAME"] = "v0"
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"h{host}", *words, f"--store={arguments.store}",
             f"--rank={host}"]
        )
        for host in range(arguments.hosts)
    ]  # fmt: skip
    sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    main()
