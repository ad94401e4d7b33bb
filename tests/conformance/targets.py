"""The backends that the conformance suite runs on. A backend joins by one line in TARGETS."""

from dataclasses import dataclass
from typing import Any

import pytest

import offcore
from offcore import _core


@dataclass(frozen=True)
class Target:
    """A backend and the machine that it runs or pretends to be; {} is the number of ranks."""

    backend: str
    machine: str

    def name(self, ranks: int) -> str:
        return self.machine.format(ranks)

    def has(self, ranks: int) -> bool:
        return offcore.machines.load(self.name(ranks)).ranks >= ranks

    def communicator(self, ranks: int, **options: Any) -> offcore.Communicator:
        """All ranks in this process. Skips where the machine or the backend cannot be had."""
        self.need(ranks)
        return offcore.Communicator(
            backend=self.backend,
            machine=self.name(ranks),
            ranks=ranks,
            **{"timeout": 30.0, **options},
        )

    def session(self, ranks: int) -> _core.Session:
        """Runs programs, with all ranks in this process."""
        self.need(ranks)
        return _core.Session(self.backend, offcore.machines.load(self.name(ranks)), ranks)

    def need(self, ranks: int) -> None:
        if not self.has(ranks):
            pytest.skip(f"{self.machine} has no {ranks} ranks")
        for name, available, reason in offcore.probe_backends():
            if name == self.backend and not available:
                pytest.skip(reason)


TARGETS = {
    "sim-mi300x-8": Target("sim", "mi300x-8"),
    "sim-h200-8": Target("sim", "h200-8"),
    "sim-h200-4": Target("sim", "h200-4"),
    "host": Target("host", "host-{}"),
}
