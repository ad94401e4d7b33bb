"""Ranks on hosts of their own: a process in a user namespace that makes a switch with hosts, each a
network namespace, opens a rank on each, and tells as JSON what operations did. One argument: what
is to be done, as JSON (see `on_hosts` in hosts.py)."""

import json
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from offcore import _core


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True, text=True)


def build(hosts: int, mtu: int) -> None:
    shell("mount -t tmpfs none /run && mkdir /run/netns && ip link set lo up")
    shell(f"ip link add switch0 mtu {mtu} type bridge mcast_snooping 0 && ip link set switch0 up")
    for host in range(hosts):
        shell(f"ip netns add h{host}")
        shell(f"ip link add p{host} mtu {mtu} type veth peer name v0 mtu {mtu} netns h{host}")
        shell(f"ip link set p{host} master switch0 up && ip -n h{host} link set v0 up")
        shell(f"ip -n h{host} address add 10.9.0.{host + 1}/24 dev v0")
        shell(f"ip -n h{host} address add fd09::{host + 1}/64 dev v0 nodad")


def open_nodes(hosts: int, options: dict[str, Any], group: dict[str, Any]) -> list[Any]:
    nodes, addresses = [], []
    per_host = options.pop("by_host", {})
    for host in range(hosts):
        udp = _core.McastUdpOptions()
        udp.interface = "v0"
        udp.namespace_fd = os.open(f"/run/netns/h{host}", os.O_RDONLY)
        for name, value in {**options, **per_host.get(str(host), {})}.items():
            setattr(udp, name, value)
        nodes.append(_core.open_udp_node(udp, _core.McastLoops.start(0, 0, 0)))
        os.close(udp.namespace_fd)
        addresses.append(nodes[-1].address)
    for rank, node in enumerate(nodes):
        mine = _core.McastGroup()
        mine.tag, mine.rank, mine.ranks = 77, rank, hosts
        mine.chunk_bytes = _core.mcast_chunk_bytes_for(addresses, False)
        for name, value in group.items():
            setattr(mine, name, value)
        node.start(mine, addresses)
    return nodes


def pattern(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def run(nodes: list[Any], kind: str, count: int, seed: int) -> dict[str, int]:
    """One operation at all ranks: the sum of their reports, and how many bytes are wrong."""
    ranks = len(nodes)
    counts = [count] * ranks if kind == "all_gather" else [count] + [0] * (ranks - 1)
    blocks = [pattern(seed + rank, n) for rank, n in enumerate(counts)]
    whole = np.concatenate(blocks)
    outs = []
    for rank in range(ranks):
        out = np.zeros(whole.size, np.uint8)
        at = sum(counts[:rank])
        out[at : at + counts[rank]] = blocks[rank]
        outs.append(out)
    operations = [
        node.submit(kind, 0, out.ctypes.data, counts, out)
        for node, out in zip(nodes, outs, strict=True)
    ]
    total: dict[str, int] = {}
    for operation in operations:
        for name, value in operation.wait(30.0).items():
            total[name] = total.get(name, 0) + value
    total["wrong"] = sum(int((out != whole).sum()) for out in outs)
    return total


def leave(nodes: list[Any], kinds: list[list[str]]) -> list[str]:
    """Each rank makes its calls and closes its node at once: how the last one ended, by rank."""
    ranks = len(nodes)
    said = ["" for _ in nodes]

    def one(rank: int) -> None:
        node = nodes[rank]
        try:
            for kind in kinds[rank]:
                out = np.zeros(ranks, np.uint8)
                count = int(kind != "barrier")
                counts = [count] * ranks if kind == "all_gather" else [count] + [0] * (ranks - 1)
                sort = "all_gather" if kind == "all_gather" else "broadcast"
                node.submit(sort, 0, out.ctypes.data, counts, out).wait(10.0)
            said[rank] = "fine"
        except _core.Error as failure:
            said[rank] = failure.code
        node.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def main() -> None:
    task = json.loads(sys.argv[1])
    hosts = task["hosts"]
    build(hosts, task["mtu"])
    for command in task["commands"]:
        shell(command)
    if "leave" in task:
        said = []
        for _ in range(task["rounds"]):
            for command in task["commands"]:
                shell(command)
            said.append(leave(open_nodes(hosts, task["options"], task["group"]), task["leave"]))
        print(json.dumps(said))
        return
    nodes = open_nodes(hosts, task["options"], task["group"])
    reports = [
        run(nodes, kind, count, 1000 * step)
        for step, (kind, count) in enumerate(task["operations"])
    ]
    print(json.dumps({"reports": reports, "counters": [node.counters for node in nodes]}))


main()
