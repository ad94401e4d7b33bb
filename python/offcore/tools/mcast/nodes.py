"""All ranks of a testbed in few processes: a node of core/mcast/udp in each host's namespace.

Hundreds of hosts on a few cores are bound by what processes cost; nodes share the threads of one.
What moves is the same: sockets of each namespace, its interface, the tree's bridges. A process
holds HOSTS_MAX nodes, because the descriptors of one process are limited.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from offcore import _core
from offcore.errors import Error, error
from offcore.tools.testbed import namespaces
from offcore.tools.testbed.fabric import DEVICE, Testbed

HOSTS_MAX = 256
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Ran:
    """One operation over all hosts."""

    time_us: float
    wrong: int
    fetched_chunks: int
    duplicates: int
    switch_bytes: int


@dataclass(frozen=True)
class Setting:
    """What all nodes of a communicator share."""

    multicast: bool
    timeout_s: float
    buffer_bytes: int
    chains: int
    tag: int
    secret: bytes


class Share:
    """The nodes of some hosts, in the process that has them."""

    def __init__(self, testbed: Testbed, hosts: Sequence[int], setting: Setting) -> None:
        self._ranks, self._hosts, self._setting = testbed.hosts, hosts, setting
        loops = _core.McastLoops.start(0, 0, 0)
        self._nodes = []
        for host in hosts:
            options = _core.McastUdpOptions()
            options.interface = DEVICE
            options.namespace_fd = testbed.namespace(host)
            options.buffer_bytes = setting.buffer_bytes
            self._nodes.append(_core.open_udp_node(options, loops))
        self.addresses = [node.address for node in self._nodes]
        self._outs: list[Bytes] = []
        self._expected: Bytes = np.zeros(0, np.uint8)
        self._counts: list[int] = []

    def start(self, addresses: list[bytes]) -> None:
        """Joins the nodes of all shares."""
        setting = self._setting
        for host, node in zip(self._hosts, self._nodes, strict=True):
            group = _core.McastGroup()
            group.rank, group.ranks, group.tag = host, self._ranks, setting.tag
            group.set_secret(setting.secret)
            group.multicast = setting.multicast
            group.chains = setting.chains
            # Hosts share cores: late is not dead, and each gets a small part of this machine.
            group.timeout_ns = group.silence_ns = int(setting.timeout_s * 1e9)
            group.link_bytes_s = 2e8 / self._ranks
            group.chunk_bytes = _core.mcast_chunk_bytes_for(addresses, False)
            node.start(group, addresses)

    def prepare(self, op: str, nbytes: int) -> None:
        """Fresh buffers for one operation; root 0."""
        ranks = self._ranks
        gathered = op == "all_gather"
        self._counts = [nbytes // ranks] * ranks if gathered else [nbytes] + [0] * (ranks - 1)
        self._expected = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
        self._outs = [np.zeros(nbytes, np.uint8) for _ in self._hosts]
        for host, out in zip(self._hosts, self._outs, strict=True):
            own = slice(sum(self._counts[:host]), sum(self._counts[: host + 1]))
            out[own] = self._expected[own]

    def run(self, op: str) -> tuple[float, float]:
        """When it began and ended here, in seconds of the machine's clock."""
        began_s = time.monotonic()
        operations = [
            node.submit(op, 0, out.ctypes.data, self._counts, out)
            for node, out in zip(self._nodes, self._outs, strict=True)
        ]
        for operation in operations:
            operation.wait(self._setting.timeout_s)
        return began_s, time.monotonic()

    def checked(self) -> tuple[int, int, int]:
        """Wrong bytes of the last operation; chunks fetched and duplicates so far."""
        wrong = sum(int(np.count_nonzero(out != self._expected)) for out in self._outs)
        counters = [node.counters for node in self._nodes]
        names = ("fetched_chunks", "duplicates")
        fetched, duplicates = (sum(one[name] for one in counters) for name in names)
        return wrong, fetched, duplicates

    def close(self) -> None:
        for node in self._nodes:
            node.close()


def _serve(ours: Connection, testbed: Testbed, hosts: Sequence[int], setting: Setting) -> None:
    """A process of a share: calls its methods by name until it is closed."""
    namespaces.die_with_parent()
    try:
        share = Share(testbed, hosts, setting)
        ours.send(share.addresses)
        while True:
            name, arguments = ours.recv()
            ours.send(getattr(share, name)(*arguments))
            if name == "close":
                return
    except Error as failure:
        ours.send(failure_of(failure))


def failure_of(failure: Error) -> dict[str, str]:
    """An error as it goes between processes."""
    return {"code": failure.code, "message": str(failure)}


class Nodes:
    """A communicator over a testbed's hosts."""

    def __init__(
        self, testbed: Testbed, multicast: bool, timeout_s: float, buffer_bytes: int, chains: int
    ) -> None:
        self._testbed, self._timeout_s = testbed, timeout_s
        key = (secrets.randbits(63), secrets.token_bytes(16))
        setting = Setting(multicast, timeout_s, buffer_bytes, chains, *key)
        forked = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        for first in range(0, testbed.hosts, HOSTS_MAX):
            hosts = range(first, min(testbed.hosts, first + HOSTS_MAX))
            ours, theirs = forked.Pipe()
            forked.Process(
                target=_serve, args=(theirs, testbed, hosts, setting), daemon=True
            ).start()
            theirs.close()
            self._pipes.append(ours)
        addresses = [address for share in self._answers() for address in share]
        self._all("start", addresses)
        self._counted = [0, 0]

    def _answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(2 * self._timeout_s):
                raise error("timeout", "ranks of a testbed are too slow: give them more time")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise error("peer", "a process of a testbed's ranks died") from None
            if isinstance(answers[-1], dict):
                raise error(answers[-1]["code"], answers[-1]["message"])
        return answers

    def _all(self, name: str, *arguments: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((name, arguments))
        return self._answers()

    def run(self, op: str, nbytes: int) -> Ran:
        """One operation on `nbytes`, the total array; root 0."""
        self._all("prepare", op, nbytes)
        ports = self._testbed.ports()
        times = self._all("run", op)
        carried = self._testbed.switch_bytes(ports)
        took_s = max(ended for _, ended in times) - min(began for began, _ in times)
        checked = self._all("checked")
        totals = [sum(one[place] for one in checked) for place in range(3)]
        fetched, duplicates = (totals[1 + place] - self._counted[place] for place in range(2))
        self._counted = totals[1:]
        return Ran(took_s * 1e6, totals[0], fetched, duplicates, carried)

    def close(self) -> None:
        self._all("close")
