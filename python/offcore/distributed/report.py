"""What carried the calls of a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from offcore.distributed.group import BACKENDS, Calls
from offcore.errors import error


def report(group: Any = None) -> dict[str, Any]:
    """Calls since the group was made: `carried` by offcore and `handed` to torch's own backends,
    by name. By type of device: `memory`, the bytes for `allocate_tensor` and how many tensors were
    `refused` since it was full; `obstacles`, why no call can be carried; and `hosts`, of a group
    that spans hosts: how many, the `ranks` of each, and bytes `received` from others. group: None
    is the default one. Raises `Error`: invalid for a group of another backend.
    """
    found = calls_of(group)
    if found is None:
        raise error("invalid", 'the group has another backend: make it with backend="offcore"')
    core = found.collectives
    return {
        "carried": dict(core.carried),
        "handed": dict(found.handed),
        "memory": {
            kind: {"bytes": one.nbytes, "refused": one.refused} for kind, one in core.memory.items()
        },
        "obstacles": dict(core.obstacles),
        "hosts": core.hosts(),
    }


def calls_of(group: Any) -> Calls | None:
    """A group's back end; None: it is another's."""
    given = dist.group.WORLD if group is None else group
    if isinstance(given, Calls) or not BACKENDS:
        return given if isinstance(given, Calls) else None
    for device in given._device_types:
        backend = given._get_backend(device)
        if isinstance(backend, Calls):
            return backend
    return None
