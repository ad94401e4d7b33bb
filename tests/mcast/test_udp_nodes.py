"""The UDP transport by itself: what strangers send to it, and what it leaves behind."""

import os
import random
import socket
import threading
import time

import numpy as np
import pytest
from crews import on_ranks

import offcore
from offcore import _core, mcast


def card_of(node: _core.McastNode) -> tuple[int, int]:
    """Its TCP port, and the UDP port for credits."""
    *_, tcp_port, credit_port, _ = node.address.split()
    return int(tcp_port), int(credit_port)


def open_pair(port: int, gro: bool = True, sealed: bool = False) -> list[_core.McastNode]:
    options = _core.McastUdpOptions()
    options.interface, options.multicast_group, options.port = "lo", "239.192.77.1", port
    options.datagram_bytes, options.gro = 1472, gro
    nodes = [_core.open_udp_node(options, _core.McastLoops.start(0, 0, 0)) for _ in range(2)]
    addresses = [node.address for node in nodes]
    for rank, node in enumerate(nodes):
        group = _core.McastGroup()
        group.tag, group.rank, group.ranks = 99, rank, 2
        group.sealed = sealed
        group.chunk_bytes = _core.mcast_chunk_bytes_for(addresses, sealed)
        node.start(group, addresses)
    return nodes


def gather(nodes: list[_core.McastNode], count: int, seed: int) -> None:
    blocks = [np.random.default_rng(seed + rank).integers(0, 256, count, np.uint8)
              for rank in range(len(nodes))]  # fmt: skip
    outs = [np.zeros(count * len(nodes), np.uint8) for _ in nodes]
    for rank, out in enumerate(outs):
        out[rank * count : (rank + 1) * count] = blocks[rank]
    counts = [count] * len(nodes)
    operations = [
        node.submit("all_gather", 0, out.ctypes.data, counts, out)
        for node, out in zip(nodes, outs, strict=True)
    ]
    for operation in operations:
        operation.wait(20.0)
    for out in outs:
        assert (out == np.concatenate(blocks)).all()


def throw_at(nodes: list[_core.McastNode], port: int, stop: threading.Event) -> None:
    """Bytes that make no sense, to everything that a node listens at."""
    dice = random.Random(5)
    head = bytes.fromhex("4f430100") + bytes(4) + (99).to_bytes(8, "big")
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    held: list[socket.socket] = []
    while not stop.is_set():
        tcp_port, credit_port = card_of(nodes[dice.randrange(2)])
        for prefix in (b"", head, head[:3] + b"\x40" + head[4:], head[:3] + b"\x80" + head[4:]):
            junk = prefix + dice.randbytes(dice.choice([0, 1, 16, 300, 1440, 1457]))
            udp.sendto(junk, ("239.192.77.1", port))
            udp.sendto(junk, ("127.0.0.1", credit_port))
            tcp = socket.create_connection(("127.0.0.1", tcp_port))
            tcp.sendall(junk)
            held = [*held[-50:], tcp]
    for tcp in held:
        tcp.close()


def test_strangers_do_no_harm() -> None:
    port = random.randrange(20_000, 30_000)
    nodes = open_pair(port)
    gather(nodes, 10, 0)
    stop = threading.Event()
    stranger = threading.Thread(target=throw_at, args=(nodes, port, stop))
    stranger.start()
    try:
        for step in range(60):
            gather(nodes, 50_000, 10 * step)
    finally:
        stop.set()
        stranger.join()
    for node in nodes:
        counters = node.counters
        assert counters["foreign"] + counters["malformed"] + counters["stale"] > 20
        assert counters["tcp_strangers"] > 20


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("gro", [False, True])
def test_what_is_written_before_it_is_checked(gro: bool, sealed: bool) -> None:
    """What docs/mcast.md says: with GRO anybody's bytes get to places of chunks that are missing,
    and nowhere else, until the right ones are written over them."""
    port = random.randrange(20_000, 30_000)
    nodes = open_pair(port, gro, sealed)
    chunk = 1472 - (40 if sealed else 32)
    count = 3 * chunk
    blocks = [np.full(count, 10 + rank, np.uint8) for rank in range(2)]
    outs = [np.zeros(2 * count, np.uint8) for _ in nodes]
    inputs = [block.copy() for block in blocks]

    def submit(rank: int) -> _core.McastOperation:
        kept = (outs[rank], inputs[rank])
        return nodes[rank].submit(
            "all_gather", 0, outs[rank].ctypes.data, [count] * 2, kept, inputs[rank].ctypes.data
        )

    first = submit(1)  # it is ready to receive, and waits for rank 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setsockopt(
            socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1")
        )
        deadline = time.monotonic() + 10
        while nodes[1].counters["foreign"] < 8 and time.monotonic() < deadline:
            for nbytes in (1472, 1471, 40, 1472 * 3):  # whole datagrams, and what is none
                stranger.sendto(b"\xee" * nbytes, ("239.192.77.1", port))
            time.sleep(0.01)
    counters = nodes[1].counters
    assert counters["foreign"] >= 8
    strange = outs[1] == 0xEE
    assert strange[:count].any() == (counters["udp_gro_sockets"] > 0)
    assert not strange[count:].any()  # its own block
    assert (inputs[1] == blocks[1]).all()
    for operation in (first, submit(0)):
        operation.wait(20.0)
    for out in outs:
        assert (out == np.concatenate(blocks)).all()


def test_a_datagram_that_is_too_large_for_the_interface() -> None:
    options = _core.McastUdpOptions()
    options.interface, options.datagram_bytes = "lo", 1000
    node = _core.open_udp_node(options, _core.McastLoops.start(0, 0, 0))
    group = _core.McastGroup()
    group.ranks, group.chunk_bytes = 1, 1400
    with pytest.raises(offcore.Error, match="chunks of 1400 bytes do not fit") as failure:
        node.start(group, [node.address])
    assert failure.value.code == "invalid"


@pytest.mark.parametrize("interface", ["nowhere0", "192.0.2.77"])
def test_an_interface_that_is_not_there(interface: str) -> None:
    options = _core.McastUdpOptions()
    options.interface = interface
    with pytest.raises(offcore.Error, match=f"no interface {interface} with an IPv4 address"):
        _core.open_udp_node(options, _core.McastLoops.start(0, 0, 0))


def held() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_a_hundred_communicators_leave_nothing_behind() -> None:
    def body(comm: mcast.Communicator) -> None:
        out = np.zeros((comm.ranks, 2000), np.uint8)
        comm.all_gather(out, np.full(2000, comm.rank, np.uint8)).wait()
        assert (out == np.arange(comm.ranks)[:, None]).all()

    on_ranks(2, body)
    before = held()
    for _ in range(50):  # of two ranks each
        on_ranks(2, body, receive_workers=1, send_workers=1)
    deadline = time.monotonic() + 5
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined is listed for a moment
    assert held() <= before
