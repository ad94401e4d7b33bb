"""What adapters share: which version of an engine is installed, and host memory for a cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from offcore import kv

STEPS = 8  # of a load that comes layer by layer, at least
STEP_BYTES = 16 << 20  # of a step, if there are more: a link takes a third of a millisecond for it
STEPPED_FROM = 16 << 20  # bytes: smaller ones come together, by fewer commands
log = logging.getLogger("offcore.serving")
_said: set[str] = set()


def say_once(text: str) -> None:
    """Warns in the log; the same text only once a process."""
    if text not in _said:
        _said.add(text)
        log.warning(text)


def known(engine: str, version: str, versions: Sequence[str]) -> bool:
    """Whether a version is one of these, "5.17" for all 5.17.x; if not, that is said once."""
    numbers = version.split("+")[0].split(".")
    if any(numbers[: one.count(".") + 1] == one.split(".") for one in versions):
        return True
    say_once(
        f"offcore supports {engine} {', '.join(versions)}, not {version}: "
        f"{engine} keeps its own copies"
    )
    return False


def fits(engine: str, function: Callable[..., Any], arguments: Sequence[str]) -> bool:
    """Whether a function of an engine takes these arguments, `self` left out; says so if not."""
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    if found == list(arguments):
        return True
    say_once(
        f"{engine}: {function.__qualname__}({', '.join(found)}) was expected to take "
        f"({', '.join(arguments)}): {engine} keeps its own copies"
    )
    return False


def layers_together(layers: int, nbytes: int) -> int:
    """How many layers of a load come together; 0: all."""
    steps = max(STEPS, nbytes // STEP_BYTES)
    return -(-layers // steps) if nbytes >= STEPPED_FROM else 0


def pool_for(layout: kv.Layout, rows: int, **options: Any) -> kv.HostPool:
    """Host memory with so many rows for blocks of a cache, near the GPU that it lies on."""
    if layout.device == -1:
        return kv.HostPool(layout.block_bytes, rows, backend="host", **options)
    return kv.HostPool(layout.block_bytes, rows, backend="cuda", device=layout.device, **options)
