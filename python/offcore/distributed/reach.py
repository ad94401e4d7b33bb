"""Where the ranks of a group are, and whether those of a host reach each other's memory."""

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
    place = f"{_core.place_here()} {_core.env('OFFCORE_HOST')}"
    facts: dict[str, Any] = {"place": place, "missing": probed[backend]}
    if device.type == "cuda":
        facts["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        facts["not_peers"] = _without_access(device)
    return json.dumps(facts)


def hosts_of(told: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, or network namespace, in the order of its first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        hosts.setdefault(json.loads(one)["place"], []).append(rank)
    return [*hosts.values()]


def obstacle(told: Sequence[str]) -> str:
    """Why ranks that told these facts cannot use offcore; empty: they can. The same on all."""
    facts = [json.loads(one) for one in told]
    hosts = hosts_of(told)
    if len(hosts) > 1 and (why := _uneven(hosts)):
        return f"ranks 0 and {hosts[1][0]} are on different hosts: {why}"
    for rank, one in enumerate(facts):
        if one["missing"]:
            return f"rank {rank}: {one['missing']}"
    for host in hosts:
        for rank in host:
            for peer in host:
                if facts[peer].get("gpu") in facts[rank].get("not_peers", ()):
                    return f"the GPU of rank {rank} has no peer access to that of rank {peer}"
    return ""


def _uneven(hosts: list[list[int]]) -> str:
    """What keeps a group from using offcore within its hosts; empty: nothing."""
    counts = [len(ranks) for ranks in hosts]
    if min(counts) != max(counts):
        return f"hosts have from {min(counts)} to {max(counts)} ranks: give each as many"
    if counts[0] == 1:
        return "each host has one rank only"
    for ranks in hosts:
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            return f"the ranks of a host, {ranks}, do not follow each other: number them by host"
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
