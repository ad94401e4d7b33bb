"""Where the NCCL shim is, and how it is used: `offcore nccl-shim`."""

from __future__ import annotations

from pathlib import Path

from offcore import _core
from offcore.errors import error

USE = """\
  a program that links NCCL (torch):    LD_PRELOAD=$(offcore nccl-shim) torchrun train.py
  one that opens it by path (vLLM):     VLLM_NCCL_SO_PATH=$(offcore nccl-shim) vllm serve ...
Large reductions of ranks on one host go by offcore, everything else by the real libnccl.so.2.
OFFCORE_NCCL_REPORT=1 tells what went where; docs/nccl-shim.md has the other variables."""


def path() -> Path:
    """The shared library. Raises `Error`: unavailable where none was built."""
    found = Path(_core.__file__).with_name("liboffcore_nccl.so")
    if not found.exists():
        raise error("unavailable", "no NCCL shim was built: there is one for x86-64 alone")
    return found
