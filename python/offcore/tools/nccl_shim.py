"""Where the NCCL shim is, and how it is used: `offcore nccl-shim`."""

from __future__ import annotations

from pathlib import Path

from offcore import _core
from offcore.errors import error

USE = """\
  a program that links NCCL (torch):    LD_PRELOAD=$(offcore nccl-shim) torchrun train.py
  a program that opens it by path:      VLLM_NCCL_SO_PATH=$(offcore nccl-shim) vllm serve ...
Offcore runs large reductions between ranks on one host. All other calls go to libnccl.so.2.
OFFCORE_NCCL_REPORT=1 reports which calls went where. See docs/nccl-shim.md for other variables."""


def path() -> Path:
    """The shared library. Raises `Error`: unavailable where none was built."""
    found = Path(_core.__file__).with_name("liboffcore_nccl.so")
    if not found.exists():
        raise error("unavailable", "the NCCL shim was not built: it is available for x86-64 only")
    return found
