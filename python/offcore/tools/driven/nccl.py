"""NCCL's library, by ctypes, for all GPUs of this process at once: send and receive."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from offcore.errors import error

UINT8 = 1


def library() -> ctypes.CDLL:
    """That of torch's packages, or the system's. Raises `Error`: unavailable."""
    for folder in map(Path, sys.path):
        for path in sorted((folder / "nvidia").glob("nccl*/lib/libnccl.so.2")):
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError:
        raise error("unavailable", "libnccl.so.2 was not found: pip install torch") from None


class Nccl:
    """Communicators of GPUs 0 to ranks - 1. Raises `Error`: unavailable; driver, from all calls."""

    def __init__(self, ranks: int) -> None:
        self._library, self._comms = library(), (ctypes.c_void_p * ranks)()
        self._call("ncclCommInitAll", self._comms, ranks, (ctypes.c_int * ranks)(*range(ranks)))
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        number = version.value
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def way(
        self, sender: int, receiver: int, src: int, dst: int, nbytes: int, streams: list[int]
    ) -> None:
        """Enqueues a send and its receive, each in its rank's stream. src, dst: addresses."""
        self._call("ncclGroupStart")
        for name, rank, peer, at in (
            ("ncclSend", sender, receiver, src),
            ("ncclRecv", receiver, sender, dst),
        ):
            where = ctypes.c_void_p(at), ctypes.c_size_t(nbytes), UINT8, peer
            comm = ctypes.c_void_p(self._comms[rank])
            self._call(name, *where, comm, ctypes.c_void_p(streams[rank]))
        self._call("ncclGroupEnd")

    def close(self) -> None:
        for comm in self._comms:
            self._call("ncclCommDestroy", ctypes.c_void_p(comm))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            told = self._library.ncclGetErrorString(code).decode()
            raise error("driver", f"{name}: {told} ({code})")
