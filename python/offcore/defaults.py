"""What a communicator is where its maker does not say."""

from __future__ import annotations

import math

from offcore import _core, machines
from offcore.errors import error


def backend(machine: str | None) -> str:
    """What `auto` stands for: the simulator for a machine that is named and not this one, else
    the best that is available here."""
    if machine is not None:
        return "host" if machine.startswith("host") else "sim"
    available = {name for name, usable, _ in _core.probe_backends() if usable}
    return "cuda" if "cuda" in available else "host"


def machine(backend: str, ranks: int) -> str:
    """The machine that a backend runs as where none is named."""
    if backend in ("sim", "sdma"):
        return "mi300x-8"
    return machines.for_gpus(ranks) if backend == "cuda" else f"host-{ranks}"


def seconds(given: float | None) -> float:
    """The timeout that was given, else the environment's. Raises `Error`: invalid for what is no
    number of seconds of 0 or more."""
    name = "OFFCORE_TIMEOUT_S" if given is None else "timeout"
    value = _core.env(name) if given is None else given
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise error("invalid", f"{name} is {value!r}; it must be 0 s or more")
    return number


def number(name: str, given: int | None, variable: str) -> int:
    """What was given, else what the environment says. Raises `Error`: invalid without either."""
    if given is not None:
        return given
    if not (text := _core.env(variable)):
        raise error("invalid", f"{name} is missing: pass {name}=N or set {variable}")
    return int(text)
