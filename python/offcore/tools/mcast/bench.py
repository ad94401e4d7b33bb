"""`offcore mcast bench`: collectives between hosts, beside gloo and a ring of ours.

On a testbed of up to PROCESSES_MAX hosts every rank is a process that runs all implementations in
turn; beyond, offcore's ranks share few processes (see nodes.py). On real hosts each rank is
started by hand and measures the same.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offcore.bootstrap import bootstrap_of
from offcore.errors import error
from offcore.mcast.communicator import CHAINS
from offcore.tools.bench.baselines import check_baseline
from offcore.tools.mcast.fat_tree import received_bytes
from offcore.tools.mcast.nodes import Nodes
from offcore.tools.testbed import launcher
from offcore.tools.testbed.fabric import DEVICE, Testbed
from offcore.tools.testbed.launcher import Place

OPS = ("broadcast", "all_gather", "reduce_scatter")
IMPLS = ("offcore", "ring", "gloo")  # ring: offcore's fetch ring alone, multicast off
PARTNER = "reduce_scatter"  # what runs beside an all-gather
_ITEM_BYTES = 4  # reduce-scatters are of float32
PROCESSES_MAX = 16
_MEETING_PORT = 29_400
_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class Request:
    op: str
    sizes: list[int]  # the total array
    impls: list[str]
    batches: int = 5
    timeout_s: float = 60.0
    buffer_bytes: int = _BUFFER_BYTES  # of a rank's receiving socket
    chains: int = CHAINS  # roots that send at once
    beside: bool = False  # a reduce-scatter of as many bytes runs at the same time
    options: dict[str, Any] = field(default_factory=dict)  # of the communicator

    def check(self, hosts: int) -> None:
        """Raises invalid, unsupported, unavailable: before anything has been started."""
        if self.op not in OPS:
            raise error("invalid", f"no operation '{self.op}': {', '.join(OPS)}")
        if self.beside and self.op != "all_gather":
            raise error("invalid", "a concurrent reduce-scatter needs an all_gather")
        reduces = PARTNER in self.ops
        if reduces and "ring" in self.impls and not self.beside:
            raise error(
                "invalid", "a reduce-scatter is the same with multicast off: leave ring out"
            )
        unit = hosts * (_ITEM_BYTES if reduces else 1)
        if self.op != "broadcast" and (odd := [n for n in self.sizes if n % unit or n < unit]):
            raise error(
                "invalid",
                f"{hosts} hosts do not divide {odd[0]} bytes{' of float32' if reduces else ''}: "
                "give sizes of one rank (--per-rank)",
            )
        if self.chains > max(hosts, CHAINS):  # the default suits any number
            raise error("invalid", f"{self.chains} chains need as many hosts: there are {hosts}")
        if min(self.sizes) < 1:
            raise error("unsupported", "0 bytes cannot be measured")
        if "gloo" in self.impls:
            check_baseline("gloo", "host")

    @property
    def ops(self) -> list[str]:
        """What runs at the same time."""
        return [self.op, PARTNER] if self.beside else [self.op]


def got_bytes(op: str, nbytes: int, hosts: int) -> float:
    """What a leaf receives; ranks that reduce themselves receive all other ranks' shares."""
    return received_bytes("all_gather" if op == PARTNER else op, nbytes, hosts)


def row_of(record: dict[str, Any], request: Request, hosts: int, **facts: Any) -> dict[str, Any]:
    """A row, in the order that people read."""
    received = sum(got_bytes(op, record["bytes"], hosts) for op in request.ops)
    place = {"impl": record["impl"], "op": request.op, "hosts": hosts, "bytes": record["bytes"]}
    rest = {name: value for name, value in record.items() if name not in place}
    facts = {"chains": request.chains, "beside": PARTNER if request.beside else None} | facts
    rate = {"goodput_gbps": round(received / record["time_us"] / 1e3, 6)}
    return place | facts | {"time_us": rest.pop("time_us")} | rate | rest


def on_testbed(request: Request, place: Place) -> Iterator[dict[str, Any]]:
    """Rows measured on a testbed. Raises as what it runs does."""
    together = place.hosts > PROCESSES_MAX
    if together and "gloo" in request.impls:
        raise error(
            "unsupported",
            f"gloo is measured on up to {PROCESSES_MAX} hosts, a process each: leave it out",
        )
    if together and PARTNER in request.ops:
        raise error(
            "unsupported",
            f"a reduce-scatter connects every two ranks: it is measured on {PROCESSES_MAX} hosts",
        )
    request.check(place.hosts)
    task = "offcore.tools.mcast.bench:" + ("in_few_processes" if together else "in_processes")
    facts = {
        "loss": place.faults.loss,
        "faults": {k: v for k, v in asdict(place.faults).items() if v and k != "loss"},
        "mtu": place.mtu,
        "offloads": place.offloads,
        "ranks_as": "nodes" if together else "processes",
    }
    for record in launcher.run(task, place, {"request": asdict(request)}):
        yield row_of(record, request, place.hosts, **facts)


def spread(times_us: Sequence[float]) -> dict[str, float]:
    """Median, least, largest, and the time that nine of ten did not exceed."""
    ordered = sorted(times_us)
    found = {
        "time_us": statistics.median(ordered),
        "time_us_min": ordered[0],
        "time_us_p90": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "time_us_max": ordered[-1],
    }
    return {name: round(value, 3) for name, value in found.items()}


def in_few_processes(testbed: Testbed, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs on the testbed: sizes and implementations one after the other."""
    wanted = Request(**request)
    for impl in wanted.impls:
        nodes = Nodes(
            testbed, impl == "offcore", wanted.timeout_s, wanted.buffer_bytes, wanted.chains
        )
        for nbytes in wanted.sizes:
            nodes.run(wanted.op, nbytes)  # bridges learn where hosts are
            runs = [nodes.run(wanted.op, nbytes) for _ in range(wanted.batches)]
            times = [one.time_us for one in runs]
            yield {
                "impl": impl,
                "bytes": nbytes,
                **spread(times),
                "calls": len(runs),
                "wrong": sum(one.wrong for one in runs),
                "fetched_chunks": sum(one.fetched_chunks for one in runs),
                "duplicates": sum(one.duplicates for one in runs),
                "switch_bytes": int(statistics.median(one.switch_bytes for one in runs)),
            }
        nodes.close()


def orders(
    request: Request, hosts: int, meeting: str, counted: bool, **options: Any
) -> Iterator[dict[str, Any]]:
    """What each rank is told."""
    shared = {
        "ops": request.ops,
        "sizes": request.sizes,
        "impls": request.impls,
        "hosts": hosts,
        "meeting": meeting,
        "batches": request.batches,
        "timeout_s": request.timeout_s,
        "counted": counted,
        "options": {
            "buffer_bytes": request.buffer_bytes,
            "chains": request.chains,
            **options,
            **request.options,
        },
    }
    return ({"rank": rank} | shared for rank in range(hosts))


def command(order: dict[str, Any], interface: str) -> list[str]:
    """Starts a rank; gloo finds its interface in its environment only."""
    words = [sys.executable, "-m", "offcore.tools.mcast.rank", json.dumps(order)]
    return ["env", f"GLOO_SOCKET_IFNAME={interface}", *words]


def counted(testbed: Testbed) -> list[int]:
    """Bytes so far: through all switch ports, out of all hosts, into all hosts."""
    ports = testbed.ports()
    towards = [ports[testbed.port(host)] for host in range(testbed.hosts)]
    return [
        sum(port.bytes for port in ports.values()),
        sum(port.rx_bytes for port in towards),
        sum(port.tx_bytes for port in towards),
    ]


def in_processes(testbed: Testbed, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs on the testbed: a process on each host; rank 0 tells, and asks for the counters."""
    meeting = f"{testbed.address(0)}:{_MEETING_PORT}"
    children: list[subprocess.Popen[Any]] = []
    for order in orders(Request(**request), testbed.hosts, meeting, True, interface=DEVICE):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        more: dict[str, Any] = pipes if order["rank"] == 0 else {"stdin": subprocess.DEVNULL}
        children.append(testbed.spawn(order["rank"], command(order, DEVICE), **more))
    first = children[0]
    assert first.stdout is not None
    assert first.stdin is not None
    try:
        for line in first.stdout:
            record = json.loads(line)
            if "ask" in record:
                first.stdin.write(f"{json.dumps(counted(testbed))}\n")
                first.stdin.flush()
            elif "raised" in record:
                raise error(*record["raised"])
            else:
                yield record
        failed = [rank for rank, child in enumerate(children) if child.wait()]
        if failed:
            raise error("peer", f"rank {failed[0]} ended before it was done")
    finally:
        for child in children:
            child.kill()


def on_real_hosts(
    request: Request, hosts: int, rank: int, meeting: str, interface: str
) -> Iterator[dict[str, Any]]:
    """This host's rank of a measurement that every host starts alike; rows at rank 0."""
    request.check(hosts)
    if not 0 <= rank < hosts:
        raise error("invalid", f"--rank {rank}: {hosts} hosts have the ranks 0 to {hosts - 1}")
    bootstrap_of(meeting, rank, hosts)  # raises invalid for what is no address
    order = next(
        one
        for one in orders(request, hosts, meeting, False, interface=interface)
        if one["rank"] == rank
    )
    with subprocess.Popen(
        command(order, interface), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            record = json.loads(line)
            if "raised" in record:
                raise error(*record["raised"])
            yield row_of(record, request, hosts, loss=None, ranks_as="hosts")
        if child.wait():
            raise error("peer", f"rank {rank} ended with status {child.returncode}")
