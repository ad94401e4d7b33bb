"""What test_hosts.py runs on a testbed: ranks on hosts that multicast to each other. Ranks are
forks of one process that has imported torch, each in its host's network namespace."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crew
import fsdp_ranks
import hosts_ranks
import torch
import torch.distributed as dist

import offcore
import offcore.distributed
from offcore.distributed.report import calls_of
from offcore.mcast.torch import McastOptions
from offcore.tools.testbed.fabric import DEVICE, Testbed

LOCAL, CALLS, COUNT = 2, 4, 1 << 18
BETWEEN = McastOptions(interface=DEVICE, alpha_us=1e6, settle_us=1e5)  # what is late is not fetched


def counts() -> dict[str, int]:
    """Of this rank's multicasts."""
    side: Any = calls_of(None).collectives._sides["cpu"]
    return side.comm._rail.communicator.counters


def gathers(rank: int, ranks: int) -> None:
    """Every rank sends its part once, whatever the number of hosts."""
    part, whole = torch.empty(COUNT), torch.empty(ranks, COUNT)
    before = counts()
    for turn in range(CALLS):
        part.fill_(10.0 * turn + rank)
        dist.all_gather_into_tensor(whole, part)
        assert (whole == 10.0 * turn + torch.arange(ranks).view(-1, 1)).all()
    now = {name: value - before[name] for name, value in counts().items()}
    far = CALLS * (ranks // LOCAL - 1) * part.nbytes
    assert now["sent_bytes"] == CALLS * part.nbytes
    assert (now["datagram_bytes"], now["fetched_chunks"]) == (far, 0)
    assert offcore.distributed.report()["hosts"]["cpu"]["received"] == far


def everything(rank: int, ranks: int) -> None:
    hosts_ranks.results(rank, ranks, turns=10)
    before = counts()
    given, sums = torch.ones(ranks, COUNT), torch.empty(COUNT)
    dist.reduce_scatter_tensor(sums, given)
    assert (sums == ranks).all()
    assert counts()["shares"] > before["shares"]
    gloo = dist.new_group(backend="gloo")
    mesh = dist.device_mesh.DeviceMesh.from_group(gloo, "cpu")
    plain, _ = fsdp_ranks.trained(mesh=mesh, steps=2)
    options = {"reduce_scatter": False, "between": BETWEEN}
    ours, told = fsdp_ranks.trained(fsdp_ranks.with_offcore(**options), mesh=mesh, steps=2)
    fsdp_ranks.same(plain, ours, exactly=True)
    (facts,) = told["hosts"].values()
    assert facts["received"] > 0


def start(testbed: Testbed, main: Any, hosts: int) -> None:
    ranks = hosts * LOCAL
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'meeting'}"

        def be(rank: int) -> None:
            os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
            offcore.distributed.configure(between=BETWEEN)
            crew.be(rank, ranks, main, "offcore", place, 30)

        children = [
            testbed.fork(host, lambda rank=rank: be(rank))
            for host in range(hosts)
            for rank in range(host * LOCAL, (host + 1) * LOCAL)
        ]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks, main.__name__


def call(testbed: Testbed) -> Iterator[dict[str, Any]]:
    for hosts in (2, 3):
        before = testbed.ports()
        start(testbed, gathers, hosts)
        ports = [testbed.ports()[f"h{host}"].since(before[f"h{host}"]) for host in range(hosts)]
        yield {
            "hosts": hosts,
            "sent": [port.rx_bytes for port in ports],
            "received": [port.tx_bytes for port in ports],
            "least": CALLS * LOCAL * 4 * COUNT,
        }
    start(testbed, everything, 2)
