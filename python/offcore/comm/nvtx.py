"""NVTX ranges around the calls of operations: OFFCORE_NVTX=1, with PyPI's nvtx installed."""

from __future__ import annotations

import importlib
from typing import Any

from offcore import _core
from offcore.errors import error


class Annotated:
    """A core communicator whose operations start inside a range of their name.

    The range covers the call on the host; what the engines do, a profiler shows by itself.
    """

    def __init__(self, core: _core.Communicator, nvtx: Any) -> None:
        self._core = core
        self._annotate = nvtx.annotate

    def start(self, op: str, *rest: Any) -> _core.Pending:
        with self._annotate(f"offcore.{op}", domain="offcore"):
            return self._core.start(op, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def annotated(core: _core.Communicator) -> Any:
    """The communicator, with ranges where the environment asks for them. Raises `Error`:
    unavailable without nvtx."""
    if _core.env("OFFCORE_NVTX") == "0":
        return core
    try:
        return Annotated(core, importlib.import_module("nvtx"))
    except ImportError:
        raise error(
            "unavailable", "OFFCORE_NVTX=1 needs nvtx: pip install 'offcore[nvtx]'"
        ) from None
