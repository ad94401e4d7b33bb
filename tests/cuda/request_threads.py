"""Requests on the stand-in driver, whose GPU threads are threads of this process.

For the processes that the tests start: a port's pointers lead to memory that no CPU reaches; the
stand-in says where it really lies.
"""

import ctypes
import os
import struct

import offcore
from offcore import _core

POINTERS = ("slots", "tail", "head", "taken", "sent", "received", "fault", "fault_here")
POINTERS += ("complaints", "start", "schedule")
ON_HOST = {"slots", "taken", "fault_here", "complaints"}

_library = ctypes.CDLL(os.environ["OFFCORE_LIBCUDA"])
_library.fakecuda_memory.restype = ctypes.c_void_p
_library.fakecuda_memory.argtypes = (ctypes.c_uint64, ctypes.c_uint64)


def seen(address: int, nbytes: int = 8) -> int:
    """Where the CPU finds device memory."""
    found = _library.fakecuda_memory(address, nbytes)
    assert found, hex(address)
    return int(found)


def fields(port: bytes) -> dict[str, int]:
    return dict(zip(POINTERS, struct.unpack_from(f"<{len(POINTERS)}Q", port), strict=True))


def gpu_port(requests: offcore.Requests, rank: int) -> _core.HostPort:
    """The port of the rank's kernels, for threads that stand in for them."""
    port = bytearray(requests._proxy(rank).port)
    for number, (name, address) in enumerate(fields(bytes(port)).items()):
        if address and name not in ON_HOST:
            struct.pack_into("<Q", port, 8 * number, seen(address))
    return _core.host_port(bytes(port))


def wake(requests: offcore.Requests, rank: int, peer: int) -> None:
    """Lets the stand-in's streams see what threads stored for that peer's queue of the rank."""
    address = fields(requests._proxy(rank).port)["start"] + 8 * peer
    assert _library.fakecuda_changed(ctypes.c_uint64(address)) == 0
