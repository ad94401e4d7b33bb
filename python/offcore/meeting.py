"""How ranks on different hosts find each other: every rank hands over a few bytes and gets all
ranks' bytes. By way of an address that rank 0 listens at, a torch.distributed store, or a group.

Whoever can reach the address or the store can take part and read what is handed over.
"""

from __future__ import annotations

import datetime
import socket
import struct
import time
from typing import Any, Protocol

from offcore import _core
from offcore.defaults import number
from offcore.errors import error

BLOB_BYTES_MAX = 1 << 16
_HELLO = struct.Struct(">8sIII")  # magic, rank, world size, bytes that follow
_MAGIC = b"ocmeet1\n"
_RETRY_S = 0.05


class Meeting(Protocol):
    rank: int
    world_size: int

    def all_gather(self, blob: bytes, timeout: float) -> list[bytes]:
        """Every rank's blob, by rank. Collective; raises `Error`: timeout, mismatch."""


def meeting_of(meeting: Any, rank: int | None, world_size: int | None) -> Meeting:
    """What the caller gave as a place to meet. Raises `Error`: invalid."""
    if meeting is None and _core.env("OFFCORE_STORE"):
        meeting = _core.env("OFFCORE_STORE")
    if isinstance(meeting, str) or hasattr(meeting, "wait"):
        here = number("rank", rank, "OFFCORE_RANK")
        ranks = number("world_size", world_size, "OFFCORE_WORLD_SIZE")
        if not 0 <= here < ranks:
            raise error("invalid", f"rank {here} of {ranks} ranks")
        if isinstance(meeting, str):
            return AddressMeeting(meeting, here, ranks)
        return StoreMeeting(meeting, here, ranks)
    if meeting is None or hasattr(meeting, "size"):
        return GroupMeeting(meeting)
    raise error(
        "invalid",
        f"a {type(meeting).__name__} is no place to meet: pass host:port, a torch.distributed "
        "store or a process group",
    )


class GroupMeeting:
    """By a torch.distributed group's own collectives. None: the default group."""

    def __init__(self, group: Any) -> None:
        try:
            import torch.distributed as dist
        except ImportError:
            dist = None
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise error(
                "invalid",
                "there is no place to meet: pass host:port (rank 0 listens there), set "
                "OFFCORE_STORE, or call torch.distributed.init_process_group first",
            )
        self._dist, self._group = dist, group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def all_gather(self, blob: bytes, timeout: float) -> list[bytes]:
        """The group's own timeout counts."""
        blobs: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(blobs, blob, group=self._group)
        return blobs


class StoreMeeting:
    """By a torch.distributed store. The n-th meeting of each rank is one, whatever the store."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, blob: bytes, timeout: float) -> list[bytes]:
        """Leaves its keys in the store: nobody knows when the last rank has read them."""
        _check_size(blob)
        turn = self._store.add(f"offcore/meetings/{self.rank}", 1)
        keys = [f"offcore/meeting/{turn}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], blob)
        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout))
        except RuntimeError as failure:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise _late(missing, timeout, "the store") from failure
        return [self._store.get(key) for key in keys]


def _late(missing: list[int], timeout: float, where: str) -> _core.Error:
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return error("timeout", f"rank {ranks} did not come to {where} within {timeout:.1f} s")


class AddressMeeting:
    """At host:port, where rank 0 listens meanwhile."""

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise error("invalid", f"{address!r} is no address: it must be host:port or [v6]:port")
        self._address = address
        self._at = (host.strip("[]") or "127.0.0.1", int(port))
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, blob: bytes, timeout: float) -> list[bytes]:
        """Rank 0 hands everything to all once all have come."""
        _check_size(blob)
        end = time.monotonic() + timeout
        if self.rank == 0:
            return self._host(blob, end, timeout)
        while True:
            try:
                return self._visit(blob, end)
            except (OSError, EOFError):  # nobody listens yet, or it was an earlier meeting
                if time.monotonic() + _RETRY_S >= end:
                    raise _late([0], timeout, self._address) from None
                time.sleep(_RETRY_S)

    def _visit(self, blob: bytes, end: float) -> list[bytes]:
        with socket.create_connection(self._at, timeout=_left(end)) as peer:
            peer.sendall(_HELLO.pack(_MAGIC, self.rank, self.world_size, len(blob)) + blob)
            blobs = []
            for _ in range(self.world_size):
                magic, _, ranks, nbytes = _HELLO.unpack(_read(peer, _HELLO.size, end))
                self._check_ranks(magic, ranks)
                blobs.append(_read(peer, nbytes, end))
            return blobs

    def _check_ranks(self, magic: bytes, ranks: int) -> None:
        if magic != _MAGIC or ranks != self.world_size:
            raise error(
                "mismatch",
                f"{self._address}: rank 0 has {ranks} ranks, this rank {self.world_size}",
            )

    def _host(self, blob: bytes, end: float, timeout: float) -> list[bytes]:
        family = socket.AF_INET6 if ":" in self._at[0] else socket.AF_INET
        try:
            listener = socket.create_server(
                self._at, family=family, backlog=self.world_size, reuse_port=False
            )
        except OSError as failure:
            raise error("driver", f"cannot listen at {self._address}: {failure}") from failure
        blobs: dict[int, bytes] = {0: blob}
        told: set[int] = set()
        peers: dict[int, socket.socket] = {}
        try:
            with listener:
                while len(blobs) < self.world_size:
                    came = self._accept(listener, blobs, end)
                    if came is not None:
                        peers[came[0]] = came[1]
            everything = b"".join(
                _HELLO.pack(_MAGIC, rank, self.world_size, len(blobs[rank])) + blobs[rank]
                for rank in range(self.world_size)
            )
            told.add(0)
            for rank, peer in peers.items():
                peer.settimeout(_left(end))
                peer.sendall(everything)
                told.add(rank)
        except OSError as failure:
            there = told if len(blobs) == self.world_size else set(blobs)
            missing = [rank for rank in range(self.world_size) if rank not in there]
            raise _late(missing, timeout, self._address) from failure
        finally:
            for peer in peers.values():
                peer.close()
        return [blobs[rank] for rank in range(self.world_size)]

    def _accept(
        self, listener: socket.socket, blobs: dict[int, bytes], end: float
    ) -> tuple[int, socket.socket] | None:
        """The next visitor if it is one of us; a stranger gets no answer and a second at most."""
        listener.settimeout(_left(end))
        peer, _ = listener.accept()
        soon = min(end, time.monotonic() + 1)
        try:
            magic, rank, ranks, nbytes = _HELLO.unpack(_read(peer, _HELLO.size, soon))
            if magic == _MAGIC and ranks != self.world_size:
                peer.sendall(_HELLO.pack(_MAGIC, 0, self.world_size, 0))
                raise error(
                    "mismatch",
                    f"{self._address}: rank {rank} has {ranks} ranks, rank 0 {self.world_size}",
                )
            fits = magic == _MAGIC and rank < ranks and nbytes <= BLOB_BYTES_MAX
            if fits and rank not in blobs:
                blobs[rank] = _read(peer, nbytes, soon)
                return rank, peer
        except (OSError, EOFError):
            pass
        except BaseException:
            peer.close()
            raise
        peer.close()
        return None


def _check_size(blob: bytes) -> None:
    if len(blob) > BLOB_BYTES_MAX:
        raise error("invalid", f"{len(blob)} bytes to hand over: at most {BLOB_BYTES_MAX}")


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(peer: socket.socket, nbytes: int, end: float) -> bytes:
    """Raises EOFError where the other side hangs up, and OSError where it is late."""
    data = bytearray()
    while len(data) < nbytes:
        peer.settimeout(_left(end))
        part = peer.recv(min(nbytes - len(data), 1 << 16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
