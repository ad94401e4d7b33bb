"""How a communicator's ranks part into groups."""

from __future__ import annotations

from typing import Any

from offcore import _core
from offcore.errors import error
from offcore.operands import checked
from offcore.ports import free_port

KEY_MAX = (1 << 62) - 1


def join_group(
    core: _core.Communicator, color: int | None, key: int, timeout: float
) -> dict[str, Any]:
    """Where this rank's group meets, as a communicator's options; empty for color None.

    The ranks tell each other color and key by their rendezvous; the first of each group then names
    a port. Raises `Error` as Communicator.split does.
    """
    wish = (
        ""
        if color is None
        else f"{checked('color', color, KEY_MAX)} {checked('key', key, KEY_MAX)}"
    )
    wishes = core.exchange("split", wish, timeout)
    own = core.local_ranks[0]
    group = []
    if color is not None:
        pairs = [(rank, [int(word) for word in text.split()]) for rank, text in enumerate(wishes)]
        group = sorted((pair[1], rank) for rank, pair in pairs if pair and pair[0] == color)
    members = [rank for _, rank in group]
    first = bool(members) and members[0] == own
    ports = core.exchange("split port", str(free_port()) if first else "", timeout)
    if not members:
        return {}
    port = ports[members[0]]
    if not port:
        raise error("mismatch", f"rank {members[0]} names no port for the group of color {color}")
    return {"store": f"127.0.0.1:{port}", "rank": members.index(own), "world_size": len(members)}
