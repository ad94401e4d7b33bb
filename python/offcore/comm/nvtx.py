"""NVTX ranges around the calls of operations: OFFCORE_NVTX=1, with PyPI's nvtx installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from offcore import _core
from offcore.errors import error


def annotated(start: Callable[..., Any]) -> Callable[..., Any]:
    """What starts operations, whose name it takes first, inside ranges of that name where the
    environment asks for them. A range covers the call on the host; what the engines do, a profiler
    shows by itself. Raises `Error`: unavailable without nvtx."""
    if _core.env("OFFCORE_NVTX") == "0":
        return start
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        raise error(
            "unavailable", "OFFCORE_NVTX=1 needs nvtx: pip install 'offcore[nvtx]'"
        ) from None

    def within(op: str, *rest: Any) -> Any:
        with nvtx.annotate(f"offcore.{op}", domain="offcore"):
            return start(op, *rest)

    return within
