"""Measures the receive path of multicast on the loopback interface.

    python benchmarks/mcast_loopback.py

A root and a leaf in one process: broadcasts, of which the leaf checks every datagram, marks it in
its bitmap and puts its chunk in place. `receive`: one receive worker, by bytes of a datagram, with
and without GSO and GRO. `workers`: as many subgroups as receive workers, of one 8 MiB buffer (the
paper's Figure 13). `sealed`: one receive worker, without and with a MAC in every datagram.
`state`: bytes of protocol state that a rank holds for a 16 GB buffer (III-D). Bytes are compared
after the last broadcast. Rows go to $OUT/mcast-loopback.jsonl where OUT is set,
else to benchmarks/results. It belongs on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from offcore import _core
from offcore.tools.report import JsonLines, Stamp

RESULTS = Path(__file__).resolve().parent / "results"
FIGURE_13_BYTES = 8 << 20


def open_pair(
    datagram_bytes: int, merged: bool, workers: int, subgroups: int, sealed: bool = False
) -> tuple[_core.McastNode, _core.McastNode]:
    """A root and a leaf. Only the leaf has receive workers."""
    options = _core.McastUdpOptions()
    options.interface = "lo"
    options.gso = options.gro = merged
    options.datagram_bytes = datagram_bytes
    root, leaf = (
        _core.open_udp_node(options, _core.McastLoops.start(count, 0, 0)) for count in (0, workers)
    )
    addresses = [root.address, leaf.address]
    for rank, node in enumerate((root, leaf)):
        group = _core.McastGroup()
        group.tag = 0x0FFC000000000000 + os.getpid() + (datagram_bytes << 24)
        group.rank, group.ranks, group.subgroups = rank, 2, subgroups
        group.sealed = sealed
        group.chunk_bytes = _core.mcast_chunk_bytes_for(addresses, sealed)
        node.start(group, addresses)
    return root, leaf


def broadcasts(
    nodes: tuple[_core.McastNode, _core.McastNode], count: int, seconds: float
) -> dict[str, Any]:
    """One after the other for so long; the leaf's goodput."""
    source = np.random.default_rng(1).integers(0, 256, count, np.uint8)
    target = np.zeros_like(source)
    times: list[float] = []
    lost = 0
    until = time.monotonic() + seconds
    while len(times) < 5 or time.monotonic() < until:
        began = time.perf_counter()
        operations = [
            node.submit("broadcast", 0, array.ctypes.data, [count, 0], array)
            for node, array in zip(nodes, (source, target), strict=True)
        ]
        lost += [operation.wait(30.0) for operation in operations][1]["lost_chunks"]
        times.append(time.perf_counter() - began)
    wrong = int((source != target).sum())
    counters = nodes[1].counters
    return {
        "bytes": count,
        "operations": len(times),
        "time_us": statistics.median(times) * 1e6,
        "time_us_min": min(times) * 1e6,
        "time_us_max": max(times) * 1e6,
        "gbitps": count * 8 / statistics.median(times) / 1e9,
        "wrong": wrong,
        "lost_chunks": lost,
        "datagrams_run": counters["udp_received_datagrams"] / max(counters["udp_receive_runs"], 1),
        "buffer_bytes": counters["udp_receive_buffer_bytes"],
        "gso": nodes[0].counters["udp_gso_sockets"] > 0,
        "gro": counters["udp_gro_sockets"] > 0,
    }


def state_bytes(datagram_bytes: int) -> int:
    """With a buffer that is never touched: the root does not come."""
    count = 16_000_000_000
    nodes = open_pair(datagram_bytes, True, 0, 1)
    buffer = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=3)
    whole = np.frombuffer(buffer, np.uint8)
    nodes[1].submit("all_gather", 0, whole.ctypes.data, [count, 0], whole)
    while nodes[1].counters["state_bytes"] < count / datagram_bytes / 8:
        time.sleep(0.001)
    return int(nodes[1].counters["state_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure")
    parser.add_argument("--workers", default="1,2,4,8", help="receive workers to try")
    arguments = parser.parse_args()
    path = Path(os.environ.get("OUT", RESULTS)) / "mcast-loopback.jsonl"
    with JsonLines(str(path)) as lines:
        stamp = asdict(Stamp())

        def record(measure: str, **row: Any) -> None:
            print(measure, {name: row[name] for name in row}, flush=True)
            machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
            lines.write({"measure": measure, **machine, **row, **stamp})

        for merged in (True, False):
            for datagram_bytes in (1472, 8972):
                for count in (8 << 20, 64 << 20):
                    nodes = open_pair(datagram_bytes, merged, 1, 1)
                    row = broadcasts(nodes, count, arguments.seconds)
                    record("receive", workers=1, datagram_bytes=datagram_bytes, **row)
        for workers in map(int, arguments.workers.split(",")):
            nodes = open_pair(4096 + 32, True, workers, workers)
            row = broadcasts(nodes, FIGURE_13_BYTES, arguments.seconds)
            record("workers", workers=workers, datagram_bytes=4096 + 32, **row)
        for sealed in (False, True):
            nodes = open_pair(1472, True, 1, 1, sealed)
            row = broadcasts(nodes, 64 << 20, arguments.seconds)
            record("sealed", workers=1, datagram_bytes=1472, sealed=sealed, **row)
        for datagram_bytes in (1472, 4096 + 32):
            record("state", datagram_bytes=datagram_bytes, state_bytes=state_bytes(datagram_bytes))


if __name__ == "__main__":
    main()
