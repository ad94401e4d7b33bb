"""A rank that knows the secret and keeps to no rule can make operations fail, and no more."""

import socket
import struct

import numpy as np
import pytest

import offcore
from offcore import _core

SECRET = bytes(range(16))
TAG = 99
HELLO, BARRIER, FETCH, REPLY, FINAL, SHARE, TAKEN = 0, 1, 3, 4, 5, 10, 11
PIECE = 256 << 10
CHUNK = 1000


def message(kind: int, op: int = 1, **fields: int) -> bytes:
    names = ("source", "psn", "chunks")
    value, payload = fields.get("value", 0), fields.get("payload_bytes", 0)
    return struct.pack(
        ">HBBIQIIIB3xQQ", 0x4F43, 1, kind, 0, op, *(fields.get(name, 0) for name in names),
        fields.get("sequence", 0), value, payload,
    )  # fmt: skip


class BadPeer:
    """Rank 1 of 2, beside a node that is rank 0. Everything goes through the ring."""

    def __init__(self, timeout_s: float) -> None:
        options = _core.McastUdpOptions()
        options.interface = "lo"
        self.node = _core.open_udp_node(options, _core.McastLoops.start(0, 0, 0))
        self.listener = socket.create_server(("127.0.0.1", 0))
        words = self.node.address.decode().split()
        self.port = int(words[4])
        words[4] = str(self.listener.getsockname()[1])
        group = _core.McastGroup()
        group.tag, group.ranks, group.chunk_bytes, group.multicast = TAG, 2, CHUNK, False
        group.timeout_ns = int(timeout_s * 1e9)
        group.fetch_bytes = 64 << 20  # all in one fetch
        group.set_secret(SECRET)
        self.node.start(group, [self.node.address, " ".join(words).encode()])

    def link(self) -> socket.socket:
        proof = _core.mcast_siphash(SECRET, struct.pack(">QII", TAG, 1, 0))
        opened = socket.create_connection(("127.0.0.1", self.port))
        opened.sendall(message(HELLO, TAG, source=1, value=proof))
        assert opened.recv(48, socket.MSG_WAITALL)[3] == HELLO
        return opened

    def gather(self, out: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> _core.McastOperation:
        counts = [out.size // 2] * 2
        return self.node.submit("all_gather", 0, out.ctypes.data, counts, out)

    def reduce(self, inp: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> _core.McastOperation:
        """In place: this rank's part is the first half."""
        counts, at = [inp.size // 2] * 2, inp.ctypes.data
        return self.node.submit(
            "reduce_scatter", 0, at, counts, inp, inp=at, reduction=("max", "uint8", 1.0)
        )


def said_until(peer: socket.socket, kind: int) -> bytes:
    while (head := peer.recv(48, socket.MSG_WAITALL))[3] != kind:
        assert head
    return head


@pytest.mark.parametrize("empty", [True, False])
def test_a_reply_that_comes_twice_at_once_is_written_once(empty: bool) -> None:
    """The second one, and one without a payload, must not end what the first still writes."""
    bad = BadPeer(20.0)
    out = np.zeros(2 * CHUNK, np.uint8)
    speaks = bad.link()  # before the node opens one itself
    operation = bad.gather(out)
    barrier = said_until(speaks, BARRIER)
    speaks.sendall(barrier)  # the same digest
    said_until(speaks, FETCH)
    reply = {"source": 1, "psn": 0, "chunks": 1}
    whole = message(REPLY, **reply, payload_bytes=CHUNK)
    speaks.sendall(whole + b"\1" * (CHUNK // 2))
    also = bad.link()
    if empty:
        also.sendall(message(REPLY, **reply) + message(FINAL))
    else:
        also.sendall(whole + b"\2" * CHUNK + message(FINAL))
    with pytest.raises(offcore.Error, match="it goes on"):
        operation.wait(0.2)
    assert out[CHUNK:].max() <= 1
    speaks.sendall(b"\1" * (CHUNK // 2))
    operation.wait(10.0)
    assert (out[CHUNK:] == 1).all()
    assert bad.node.counters["refused_messages"] == 1
    bad.node.close()


def test_final_before_the_replies_were_read_is_refused() -> None:
    """Their data would be read after the operation has ended."""
    bad = BadPeer(1.0)
    chunks = 40_000  # more than the kernel's buffers take
    out = np.zeros(2 * chunks * CHUNK, np.uint8)
    speaks = bad.link()  # before the node opens one itself
    operation = bad.gather(out)
    barrier = said_until(speaks, BARRIER)
    speaks.sendall(barrier)
    said_until(speaks, FETCH)
    speaks.sendall(message(FETCH, source=0, psn=0, chunks=chunks))
    also = bad.link()
    also.sendall(message(FINAL))
    also.sendall(message(REPLY, source=1, psn=0, chunks=chunks, payload_bytes=chunks * CHUNK))
    also.sendall(bytes(chunks * CHUNK))
    with pytest.raises(offcore.Error) as caught:
        operation.wait(10.0)
    assert caught.value.code == "timeout"
    bad.node.close()


def test_shares_that_nobody_awaits_are_refused_and_so_is_taken_before_they_were_read() -> None:
    bad = BadPeer(1.0)
    inp = np.zeros(2 * 4 * PIECE, np.uint8)
    speaks = bad.link()  # before the node opens one itself
    operation = bad.reduce(inp)
    barrier = said_until(speaks, BARRIER)
    assert barrier[28] == 1  # of the reductions
    speaks.sendall(barrier)

    def share(psn: int, nbytes: int, value: bytes = b"\1") -> bytes:
        head = message(SHARE, psn=psn, sequence=1, payload_bytes=nbytes)
        return head + value * nbytes

    speaks.sendall(message(TAKEN, psn=5, sequence=1))  # more than there is
    speaks.sendall(share(1, PIECE, b"\7") + share(0, PIECE - 1, b"\7") + share(0, PIECE))
    speaks.sendall(share(0, PIECE, b"\7") + share(1, PIECE) + share(2, PIECE) + share(3, PIECE))
    speaks.sendall(message(TAKEN, psn=4, sequence=1))  # while it has read no share
    with pytest.raises(offcore.Error, match="waiting for rank 1, 4 shares have come") as caught:
        operation.wait(10.0)
    assert caught.value.code == "timeout"
    assert (inp[: 4 * PIECE] == 1).all()  # this rank's part is right nevertheless
    assert bad.node.counters["refused_messages"] == 5
    bad.node.close()
