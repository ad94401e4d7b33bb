"""What carried the calls of a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from offcore.distributed.group import BACKENDS, Calls
from offcore.errors import error


def report(group: Any = None) -> dict[str, Any]:
    """Numbers of calls by name since the group was created: `carried` by Offcore, `handed` to
    torch's own backends. Per device type: `memory`, the `bytes` for `allocate_tensor` and the
    number of tensors `refused` because it was full; `obstacles`, why no call can be carried; and
    `hosts`, if the group spans hosts: their number, the `ranks` of each, and bytes `received` from
    other hosts. group: default: the default group. Raises `Error`: invalid for other backends.
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
