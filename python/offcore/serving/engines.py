"""Which version of an engine is installed, and whether an adapter knows it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

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
        f"{engine} {version} is not known to offcore, which knows {', '.join(versions)}: "
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
