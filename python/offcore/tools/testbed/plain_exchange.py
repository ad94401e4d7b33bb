"""Exchanges between the hosts of a testbed, by one process with a socket in each namespace.

They check a testbed and are what its counters are compared with: multicast without a protocol (a
lost datagram is lost), and a ring of TCP connections. Blocks hold a pattern that tells rank and
place, so a byte that is wrong is seen.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from offcore.errors import error
from offcore.tools.testbed.fabric import DEVICE, Testbed

GROUP, PORT = "239.77.0.1", 47700
DATAGRAM_HEADERS = 14 + 20 + 8  # Ethernet, IPv4, UDP
STREAM_HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with time stamps
_UDP_SEGMENT, _UDP_GRO = 103, 104
_BURST_BYTES = 60_000
_QUIET_S = 0.2
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Exchanged:
    """An all-gather: every host's time is that of the slowest. Wrong counts what is missing too."""

    time_us: float
    wrong: int
    switch_bytes: int
    switch_packets: int


def blocks(hosts: int, nbytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """What each host gives."""
    ranks = np.arange(hosts, dtype=np.uint32)[:, None]
    places = np.arange(nbytes, dtype=np.uint32)[None, :]
    return ((ranks * 131 + places * 7 + (places >> 8) * 13 + 1) & 0xFF).astype(np.uint8)


def _received(source: object, into: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Bytes that came from a socket into the array's start."""
    assert isinstance(source, socket.socket)  # a selector calls it a file
    return source.recv_into(into.data)


def datagram_bytes(testbed: Testbed) -> int:
    """The payload of one packet of the testbed."""
    return testbed.mtu - 28


def multicast_all_gather(testbed: Testbed, nbytes: int) -> Exchanged:
    """Host after host multicasts its block; the next one when all have taken the last."""
    hosts = testbed.hosts
    inputs = blocks(hosts, nbytes)
    outputs = np.zeros((hosts, hosts, nbytes), np.uint8)
    sockets = [testbed.within(host, multicast_socket) for host in range(hosts)]
    chunk = datagram_bytes(testbed)
    with selectors.DefaultSelector() as selector:
        for host, one in enumerate(sockets):
            selector.register(one, selectors.EVENT_READ, host)
        before = testbed.ports()
        started_s = time.monotonic()
        for root in range(hosts):
            outputs[root, root] = inputs[root]
            _multicast(sockets[root], inputs[root], chunk, testbed.offloads)
            _collect(selector, outputs, root, nbytes, hosts)
        took_s = time.monotonic() - started_s
        carried = testbed.carried(before)
    for one in sockets:
        one.close()
    return Exchanged(took_s * 1e6, _wrong(outputs, inputs), *carried)


def multicast_socket() -> socket.socket:
    """One that sends to and receives from the group, on the host whose namespace this is."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    made.bind((GROUP, PORT))
    index = socket.if_nametoindex(DEVICE)
    any_address = socket.inet_aton("0.0.0.0")
    request = struct.pack("4s4si", socket.inet_aton(GROUP), any_address, index)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, request)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    made.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
    return made


def _multicast(
    source: socket.socket,
    block: np.ndarray[tuple[int], np.dtype[np.uint8]],
    chunk: int,
    together: bool,
) -> None:
    """Sends a block as datagrams of `chunk` bytes, many a call where they may stay together."""
    step = max(1, _BURST_BYTES // chunk) * chunk if together else chunk
    size = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("H", chunk))]
    for first in range(0, len(block), step):
        part = block[first : first + step]
        controls = size if len(part) > chunk else []
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                source.sendmsg([part.data], controls, 0, (GROUP, PORT))
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise error("timeout", "a testbed's interface takes no more packets") from None
                time.sleep(0.0005)


def _collect(
    selector: selectors.BaseSelector,
    outputs: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]],
    root: int,
    nbytes: int,
    hosts: int,
) -> None:
    """Takes what one root has sent, in the order that it comes, until nothing more does."""
    got = [0] * hosts
    missing = (hosts - 1) * nbytes
    while missing > 0:
        ready = selector.select(_QUIET_S)
        if not ready:
            return  # the rest is lost
        for key, _ in ready:
            host = key.data
            try:
                while got[host] < nbytes:
                    rest = outputs[host, root, got[host] :]
                    size = _received(key.fileobj, rest)
                    got[host] += size
                    missing -= size
            except BlockingIOError:
                continue


def ring_all_gather(testbed: Testbed, nbytes: int) -> Exchanged:
    """Every block once around a ring of TCP connections."""
    hosts = testbed.hosts
    inputs = blocks(hosts, nbytes)
    outputs = np.zeros((hosts, hosts, nbytes), np.uint8)
    for host in range(hosts):
        outputs[host, host] = inputs[host]
    rights, lefts = _ring(testbed)
    for one in (*rights, *lefts):
        one.setblocking(False)
    flat = outputs.reshape(hosts, -1)
    before = testbed.ports()
    started_s = time.monotonic()
    _turn(rights, lefts, flat, nbytes)
    took_s = time.monotonic() - started_s
    carried = testbed.carried(before)
    for one in (*rights, *lefts):
        one.close()
    return Exchanged(took_s * 1e6, _wrong(outputs, inputs), *carried)


def _ring(testbed: Testbed) -> tuple[list[socket.socket], list[socket.socket]]:
    """A connection from each host to the next one: both ends."""
    listeners, rights, lefts = [], [], []
    for host in range(testbed.hosts):
        address = (testbed.address(host), PORT)
        listeners.append(testbed.within(host, partial(socket.create_server, address)))
    for host in range(testbed.hosts):
        target = (testbed.address((host + 1) % testbed.hosts), PORT)
        rights.append(testbed.within(host, partial(socket.create_connection, target, 30)))
    for listener in listeners:
        listener.settimeout(30)
        lefts.append(listener.accept()[0])
        listener.close()
    return rights, lefts


def _turn(
    rights: list[socket.socket],
    lefts: list[socket.socket],
    flat: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    nbytes: int,
) -> None:
    """Moves hosts - 1 blocks over each connection; what has come in part is sent on in part."""
    hosts = len(rights)
    total = (hosts - 1) * nbytes
    got, sent = [0] * hosts, [0] * hosts
    deadline_s = time.monotonic() + _TIMEOUT_S

    def place(host: int, done: int) -> int:
        """Where the byte number `done` that the host sends lies: blocks go down from its own."""
        return (host - done // nbytes) % hosts * nbytes + done % nbytes

    with selectors.DefaultSelector() as selector:
        for host, one in enumerate(lefts):
            selector.register(one, selectors.EVENT_READ, host)

        def push(host: int) -> None:
            limit = min(total, got[host] + nbytes)
            while sent[host] < limit:
                first = place(host, sent[host])
                end = first + min(nbytes - sent[host] % nbytes, limit - sent[host])
                try:
                    sent[host] += rights[host].send(flat[host, first:end].data)
                except BlockingIOError:
                    waiting.add(host)
                    return
            waiting.discard(host)

        waiting: set[int] = set()
        for host in range(hosts):
            push(host)
        while min(got) < total or min(sent) < total:
            if time.monotonic() > deadline_s:
                raise error("timeout", f"the ring takes more than {_TIMEOUT_S:g} s")
            for key, _ in selector.select(0.001 if waiting else 1.0):
                host = key.data
                first = place(host - 1, got[host])
                end = first + nbytes - got[host] % nbytes
                got[host] += _received(key.fileobj, flat[host, first:end])
                if got[host] == total:
                    selector.unregister(key.fileobj)
                push(host)
            for host in list(waiting):
                push(host)


def _wrong(
    outputs: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]],
    inputs: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> int:
    return sum(int(np.count_nonzero(output != inputs)) for output in outputs)
