"""How ranks on different hosts find each other: every rank hands over a few bytes and gets all
ranks' bytes. By way of an address that rank 0 listens at, a torch.distributed store, or a group.

Who takes part at an address has proved to be of the job. A store and a group are trusted as
torch.distributed trusts them (docs/security.md).
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Iterable
from typing import Any, Protocol

from offcore import _core
from offcore.defaults import number
from offcore.errors import error

BLOB_BYTES_MAX: int = _core.CARD_BYTES_MAX
_WORLD = struct.Struct(">I")


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
        self._store.set(keys[self.rank], _WORLD.pack(self.world_size) + blob)
        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout))
        except RuntimeError as failure:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            present = [rank for rank in range(self.world_size) if rank not in missing]
            self._read(keys, present)  # those of another world wait for others
            raise _late(missing, timeout, "the store") from failure
        return self._read(keys, range(self.world_size))

    def _read(self, keys: list[str], ranks: Iterable[int]) -> list[bytes]:
        said = {rank: self._store.get(keys[rank]) for rank in ranks}
        for rank, one in said.items():
            (world_size,) = _WORLD.unpack_from(one)
            if world_size != self.world_size:
                raise error(
                    "mismatch",
                    f"rank {rank} expects {world_size} ranks at the store, rank {self.rank} "
                    f"expects {self.world_size}: give every rank the same world size",
                )
        return [one[_WORLD.size :] for one in said.values()]


def _late(missing: list[int], timeout: float, where: str) -> _core.Error:
    ranks = "s " * (len(missing) > 1) or " "
    ranks += ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return error("timeout", f"rank{ranks} did not come to {where} within {timeout:.1f} s")


class AddressMeeting:
    """At host:port, where rank 0 listens meanwhile: core/window/bootstrap.h."""

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        _, _, port = address.rpartition(":")
        if not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise error("invalid", f"{address!r} is no address: it must be host:port or [v6]:port")
        self._address = address
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, blob: bytes, timeout: float) -> list[bytes]:
        """Among processes of one user on one host, or that share OFFCORE_JOB_SECRET. Raises `Error`
        also invalid, peer and driver."""
        _check_size(blob)
        return _core.meet(self._address, self.rank, self.world_size, blob, timeout)


def _check_size(blob: bytes) -> None:
    if len(blob) > BLOB_BYTES_MAX:
        raise error("invalid", f"{len(blob)} bytes to hand over: at most {BLOB_BYTES_MAX}")
