"""Offcore: GPU communication that runs off the cores, on copy (DMA) engines.

Collectives become programs of DMA commands, which a backend runs: `cuda` (NVIDIA's copy engines),
`sdma` (AMD's), `host` (software engines over shared memory) or `sim` (a simulated machine, in
virtual time). See docs/quickstart.md.
"""

from offcore import _core, device, kv, machines, mcast
from offcore._core import Counts, Machine, Program, fill, probe_backends, verify, wrong_bytes
from offcore.batch import BatchHandle, BatchPolicy, BatchResult, batch_copy, batch_program
from offcore.comm import (
    Communicator,
    Handle,
    Put,
    Registration,
    Requests,
    RequestStats,
    Result,
    View,
    Window,
    show_program,
    variants,
)
from offcore.errors import Error
from offcore.facts import Phases

__version__: str = _core.build()[1]

__all__ = [
    "BatchHandle",
    "BatchPolicy",
    "BatchResult",
    "Communicator",
    "Counts",
    "Error",
    "Handle",
    "Machine",
    "Phases",
    "Program",
    "Put",
    "Registration",
    "RequestStats",
    "Requests",
    "Result",
    "View",
    "Window",
    "batch_copy",
    "batch_program",
    "device",
    "fill",
    "kv",
    "machines",
    "mcast",
    "probe_backends",
    "show_program",
    "variants",
    "verify",
    "wrong_bytes",
]
