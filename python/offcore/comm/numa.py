"""The calling thread on the CPUs that are near its GPU: `Communicator(near_gpu=True)`.

Offcore never moves a caller's thread by itself. Host memory of its own lies on the GPU's node
already, where the kernel allows it (core/backend/cuda/facts.h).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from offcore import _core
from offcore.errors import error

NODES = Path("/sys/devices/system/node")


def cpus_in(text: str) -> set[int]:
    """The CPUs of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def keep_near(gpus: Sequence[int], nodes: Path = NODES) -> set[int]:
    """Keeps the calling thread on those of its CPUs that are on the GPUs' nodes; returns them.

    gpus: as the driver counts; -1 is none. Raises `Error`: unsupported without a GPU, unavailable
    where the kernel does not tell the node or the thread may not run there.
    """
    wanted = [gpu for gpu in _core.cuda_facts()["gpus"] if gpu["ordinal"] in gpus]
    if not wanted:
        raise error("unsupported", "near_gpu needs backend cuda: these ranks have no GPU")
    allowed = os.sched_getaffinity(0)
    near: set[int] = set()
    for gpu in wanted:
        file = nodes / f"node{gpu['node']}" / "cpulist"
        if gpu["node"] < 0 or not file.is_file():
            raise error(
                "unavailable",
                f"the kernel does not report the NUMA node of GPU {gpu['ordinal']} ({gpu['pci']}); "
                "omit near_gpu, or set the process's CPUs yourself (numactl, taskset)",
            )
        near |= cpus_in(file.read_text(encoding="ascii")) & allowed
    if not near:
        raise error("unavailable", "this thread may not use any CPU near its GPU: omit near_gpu")
    os.sched_setaffinity(0, near)
    return near
