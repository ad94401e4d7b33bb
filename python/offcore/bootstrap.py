"""How the ranks of a job meet: by an all-gather of a few bytes, whatever carries them.

At an address rank 0 listens meanwhile. A torch.distributed store or group does as well, and needs
no port. Who may take part is in docs/security.md.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from typing import Any

from offcore import _core
from offcore.defaults import number
from offcore.errors import error
from offcore.operands import NUMBER_MAX, checked

KEY_MAX = (1 << 62) - 1
_WORLD = struct.Struct(">I")
_NAP_S = 0.005  # between two looks at a store


def bootstrap_of(place: Any, rank: int | None, world_size: int | None) -> _core.Bootstrap:
    """Of what a caller gave as a place to meet: host:port or a torch.distributed store, which need
    `rank` and `world_size` (or the environment's); or a group, of which None is the default one.
    Raises `Error`: invalid."""
    if isinstance(place, _core.Bootstrap):
        return place
    if isinstance(place, str) or hasattr(place, "check"):
        here = checked("rank", number("rank", rank, "OFFCORE_RANK"), NUMBER_MAX)
        ranks = number("world_size", world_size, "OFFCORE_WORLD_SIZE")
        of = _core.Bootstrap.at if isinstance(place, str) else _of_store
        return of(place, here, checked("world_size", ranks, NUMBER_MAX))
    if place is None or hasattr(place, "size"):
        return _of_group(place)
    raise error(
        "invalid",
        f"a {type(place).__name__} cannot be a meeting place: pass host:port, a torch.distributed "
        "store or a process group",
    )


def _of_group(group: Any) -> _core.Bootstrap:
    """By the group's own collectives, whose own timeout counts."""
    try:
        import torch.distributed as dist
    except ImportError:
        dist = None
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise error(
            "invalid",
            "no meeting place: pass host:port (rank 0 listens there), set "
            "OFFCORE_STORE, or call torch.distributed.init_process_group first",
        )
    ranks: int = dist.get_world_size(group)

    def all_gather(blob: bytes, _: float) -> list[bytes]:
        blobs: list[Any] = [None] * ranks
        dist.all_gather_object(blobs, blob, group=group)
        return blobs

    return _core.Bootstrap("the torch group", dist.get_rank(group), ranks, all_gather)


def _of_store(store: Any, here: int, ranks: int) -> _core.Bootstrap:
    """The n-th meeting of each rank at a store is one, so threads that meet at once need a store
    each (torch.distributed.PrefixStore). Keys stay: nobody knows when the last rank has read."""

    def read(keys: dict[int, str]) -> list[bytes]:
        said = {rank: store.get(key) for rank, key in keys.items()}
        for rank, one in said.items():
            if (theirs := _WORLD.unpack_from(one)[0]) != ranks:
                raise error(
                    "mismatch",
                    f"rank {rank} expects {theirs} ranks at the store, rank {here} expects {ranks}"
                    ": give every rank the same world size",
                )
        return [one[_WORLD.size :] for one in said.values()]

    def all_gather(blob: bytes, timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        turn = store.add(f"offcore/meetings/{here}", 1)
        keys = {rank: f"offcore/meeting/{turn}/{rank}" for rank in range(ranks)}
        store.set(keys[here], _WORLD.pack(ranks) + blob)
        # Not by wait(), which keeps other threads from the store.
        while not store.check([*keys.values()]):
            if time.monotonic() > end:
                came = {rank: key for rank, key in keys.items() if store.check([key])}
                read(came)  # those of another world wait for others
                late = _core.rank_list([rank for rank in keys if rank not in came])
                raise error("timeout", f"{late} did not arrive at the store within {timeout:.2f} s")
            time.sleep(_NAP_S)
        return read(keys)

    return _core.Bootstrap("the store", here, ranks, all_gather)


@contextlib.contextmanager
def part_of(
    core: _core.Communicator, color: int | None, key: int, timeout: float
) -> Iterator[_core.Bootstrap | None]:
    """How this rank meets those of a communicator that gave the same color, ordered by key, then
    rank: by that communicator's exchanges. None for color None. Raises `Error` as
    Communicator.split does."""
    wish: tuple[int, ...] = ()
    if color is not None:
        wish = checked("color", color, KEY_MAX), checked("key", key, KEY_MAX)
    wishes = core.exchange("split", " ".join(map(str, wish)).encode(), timeout)
    pairs = [(rank, [int(word) for word in text.split()]) for rank, text in enumerate(wishes)]
    group = sorted((pair[1], rank) for rank, pair in pairs if pair and pair[0] == color)
    members = [rank for _, rank in group]
    took_part = False

    def all_gather(blob: bytes, left: float) -> list[bytes]:
        nonlocal took_part
        took_part = True
        blobs = core.exchange("split meets", blob, left)
        for rank in members:
            if not blobs[rank]:
                raise error("peer", f"rank {rank} could not open its group's communicator")
        return [blobs[rank] for rank in members]

    try:
        if not members:
            yield None
        else:
            here = members.index(core.local_ranks[0])
            yield _core.Bootstrap(f"the split of color {color}", here, len(members), all_gather)
    finally:
        if not took_part:  # the other ranks' exchange is everybody's
            core.exchange("split meets", b"", timeout)
