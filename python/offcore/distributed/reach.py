"""Whether the ranks of a group can reach each other's memory: on one host, their GPUs peers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from offcore import _core


def facts_of(device: Any) -> str:
    """What the other ranks need to know of this one, for tensors on that device."""
    backend = "cuda" if device.type == "cuda" else "host"
    probed = {name: "" if usable else why for name, usable, why in _core.probe_backends()}
    facts: dict[str, Any] = {"place": str(_core.place_here()), "missing": probed[backend]}
    if device.type == "cuda":
        facts["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        facts["not_peers"] = _without_access(device)
    return json.dumps(facts)


def obstacle(told: Sequence[str]) -> str:
    """Why ranks that told these facts cannot use offcore; empty: they can. The same on all."""
    facts = [json.loads(one) for one in told]
    for rank, one in enumerate(facts):
        if one["place"] != facts[0]["place"]:
            return f"ranks 0 and {rank} are on different hosts, or in different network namespaces"
        if one["missing"]:
            return f"rank {rank}: {one['missing']}"
    for rank, one in enumerate(facts):
        for peer, other in enumerate(facts):
            if other.get("gpu") in one.get("not_peers", ()):
                return f"the GPU of rank {rank} has no peer access to that of rank {peer}"
    return ""


def _without_access(device: Any) -> list[str]:
    """Of the GPUs that this process sees. Those of other ranks it may not see, and then cannot ask
    about: opening a communicator does."""
    here = device.index if device.index is not None else torch.cuda.current_device()
    return [
        str(torch.cuda.get_device_properties(peer).uuid)
        for peer in range(torch.cuda.device_count())
        if peer != here and not torch.cuda.can_device_access_peer(here, peer)
    ]
