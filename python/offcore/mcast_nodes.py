"""All ranks of a testbed in one process: a node of core/mcast/udp in each host's namespace.

Hundreds of hosts on a few cores are bound by what processes cost; nodes share a few threads. What
moves is the same: sockets of each namespace, its interface, the tree's bridges.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from offcore import _core
from offcore.testbed import DEVICE, Testbed

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Ran:
    """One operation over all hosts."""

    time_us: float
    wrong: int | None
    fetched_chunks: int
    duplicates: int
    switch_bytes: int


class Nodes:
    """A communicator over a testbed's hosts."""

    def __init__(
        self, testbed: Testbed, multicast: bool, timeout_s: float, buffer_bytes: int
    ) -> None:
        self._testbed, self._timeout_s = testbed, timeout_s
        loops = _core.McastLoops.start(0, 0, 0)
        self._nodes = []
        for host in range(testbed.hosts):
            options = _core.McastUdpOptions()
            options.interface = DEVICE
            options.namespace_fd = testbed.namespace(host)
            options.gso = options.gro = testbed.offloads
            options.buffer_bytes = buffer_bytes
            self._nodes.append(_core.open_udp_node(options, loops))
        addresses = [node.address for node in self._nodes]
        tag, secret = secrets.randbits(63), secrets.token_bytes(16)
        for rank, node in enumerate(self._nodes):
            group = _core.McastGroup()
            group.rank, group.ranks, group.tag = rank, testbed.hosts, tag
            group.set_secret(secret)
            group.multicast = multicast
            group.timeout_ns = int(timeout_s * 1e9)
            group.silence_ns = int(timeout_s * 1e9)  # hosts share cores: late is not dead
            # What one of so many hosts gets of this machine, about: the cutoff timer's bandwidth.
            group.link_bytes_s = 2e8 / testbed.hosts
            group.chunk_bytes = _core.mcast_chunk_bytes_for(addresses, False)
            node.start(group, addresses, timeout_s)

    def run(self, op: str, nbytes: int, check: bool) -> Ran:
        """One operation on `nbytes`, the total array; root 0."""
        hosts = len(self._nodes)
        counts = [nbytes // hosts] * hosts if op == "all_gather" else [nbytes] + [0] * (hosts - 1)
        expected = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
        outs = [np.zeros(nbytes, np.uint8) for _ in range(hosts)]
        for rank, out in enumerate(outs):
            own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
            out[own] = expected[own]
        before, ports = self._counted(), self._testbed.ports()
        started_s = time.perf_counter()
        operations = [
            node.submit(op, 0, out.ctypes.data, counts, out)
            for node, out in zip(self._nodes, outs, strict=True)
        ]
        for operation in operations:
            operation.wait(self._timeout_s)
        took_s = time.perf_counter() - started_s
        carried = self._testbed.switch_bytes(ports)
        after = self._counted()
        wrong = sum(int(np.count_nonzero(out != expected)) for out in outs) if check else None
        return Ran(
            took_s * 1e6,
            wrong,
            after["fetched_chunks"] - before["fetched_chunks"],
            after["duplicates"] - before["duplicates"],
            carried,
        )

    def _counted(self) -> dict[str, int]:
        counters = [node.counters for node in self._nodes]
        return {
            name: sum(one[name] for one in counters) for name in ("fetched_chunks", "duplicates")
        }

    def close(self) -> None:
        for node in self._nodes:
            node.close()
        self._nodes = []
