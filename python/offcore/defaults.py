"""What the library knows of backends before one is open, and what stands where none is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from offcore import _core, machines
from offcore.errors import error


def _on_host(ranks: int) -> str:
    return f"host-{ranks}"


@dataclass(frozen=True)
class Traits:
    """Of a backend. The rest, `_core` tells of one that is open."""

    gpus: bool = False  # what is passed lies in memory of GPUs, and streams may order it
    virtual: bool = False  # its time is virtual, and memory may have no bytes
    batches: bool = True
    machine: Callable[[int], str] = _on_host  # that it runs as, by the number of ranks
    pages_machine: Callable[[int], str] | None = None  # the same for KV transfers

    def machine_of_pages(self, ranks: int) -> str:
        """That KV transfers run on where none is named."""
        return (self.pages_machine or self.machine)(ranks)


BACKENDS = {
    "sim": Traits(virtual=True, machine=lambda _: "mi300x-8", pages_machine=lambda _: "h200-2"),
    "host": Traits(),
    "cuda": Traits(gpus=True, machine=machines.for_gpus),
    "sdma": Traits(batches=False, machine=lambda _: "mi300x-8"),
}
_BEST = ("cuda", "host")  # the first that is available


def traits(backend: str) -> Traits:
    """Of a backend; of one that is not known here as of one that has nothing special."""
    return BACKENDS.get(backend, Traits())


def backend(machine: str | None) -> str:
    """What `auto` stands for: the simulator for a machine that is named and not this one, else
    the best that is available here."""
    if machine is not None:
        return "host" if machine.startswith("host") else "sim"
    available = {name for name, usable, _ in _core.probe_backends() if usable}
    return next(name for name in _BEST if name in available)


def machine(backend: str, ranks: int) -> str:
    """The machine that a backend runs as where none is named."""
    return traits(backend).machine(ranks)


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
