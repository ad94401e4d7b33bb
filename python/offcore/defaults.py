"""What a communicator is where its maker does not say."""

from __future__ import annotations

from offcore import _core
from offcore.errors import error


def backend(machine: str | None) -> str:
    """What `auto` stands for: the simulator for a machine that is named and not this one, else
    the best that is available here."""
    if machine is not None:
        return "host" if machine.startswith("host") else "sim"
    available = {name for name, usable, _ in _core.probe_backends() if usable}
    return "cuda" if "cuda" in available else "host"


def number(name: str, given: int | None, variable: str) -> int:
    """What was given, else what the environment says. Raises `Error`: invalid without either."""
    if given is not None:
        return given
    if not (text := _core.env(variable)):
        raise error("invalid", f"{name} is missing: pass {name}=N or set {variable}")
    return int(text)
