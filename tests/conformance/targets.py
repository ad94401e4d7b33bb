"""The backends that the conformance suite runs on. A backend joins by one line in TARGETS."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from gpu import SDMA_WAY, GpuCommunicator, add_toy, hsa_stand_in, stand_in

import offcore
from offcore import _core


@dataclass(frozen=True)
class Target:
    """A backend and the machine that it runs or pretends to be; {} is the number of ranks."""

    backend: str
    machine: str
    swaps: bool = True  # runs swap commands that were not legalized for a machine
    watched: bool = True  # shows when each command ran, on one clock
    batches: bool = True  # takes batches of copies
    cyclic: bool = True  # compares flag values cyclically
    way: str | None = None  # sdma: how copies get to the engines

    @property
    def ahead(self) -> bool:
        """Whether engines can have a program before its call."""
        return self.way in (None, "queues")

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

    @staticmethod
    def driver() -> Any:
        """Where GPUs are asked for, that the right driver is found."""
        return nullcontext()

    def need(self, ranks: int) -> None:
        if not self.has(ranks):
            pytest.skip(f"{self.machine} has no {ranks} ranks")
        for name, available, reason in offcore.probe_backends():
            if name == self.backend and not available:
                pytest.skip(reason)


class Gpus(Target):
    """As many GPUs as the case has ranks: stood in for, or with OFFCORE_TEST_REAL_CUDA=1 real."""

    def name(self, ranks: int) -> str:
        return offcore.machines.for_gpus(ranks)

    def communicator(self, ranks: int, **options: Any) -> offcore.Communicator:
        self.need(ranks)
        with self.driver():
            return self.opened(ranks, **options)

    def opened(self, ranks: int, **options: Any) -> offcore.Communicator:
        given = {"machine": self.name(ranks), "timeout": 30.0, **options}
        return GpuCommunicator(backend=self.backend, ranks=ranks, **given)

    def session(self, ranks: int) -> _core.Session:
        with self.driver():
            return super().session(ranks)

    def need(self, ranks: int) -> None:
        with self.driver():
            self.count(ranks)

    @staticmethod
    def driver() -> Any:
        """Only these tests see the stand-in: for others `auto` is to stay what it is."""
        if os.environ.get("OFFCORE_TEST_REAL_CUDA") == "1":
            return nullcontext()
        return patch.dict(os.environ, stand_in())

    def count(self, ranks: int) -> None:
        super().need(ranks)
        found = next(told for name, _, told in offcore.probe_backends() if name == self.backend)
        if int(found.split()[0]) < ranks:
            pytest.skip(f"{ranks} ranks need as many GPUs; there are {found}")


class AmdGpus(Target):
    """GPUs of a stand-in HSA runtime, whose SDMA queues are emulated engines."""

    @staticmethod
    def driver() -> Any:
        return patch.dict(os.environ, hsa_stand_in())

    def need(self, ranks: int) -> None:
        with self.driver():
            super().need(ranks)

    def communicator(self, ranks: int, **options: Any) -> offcore.Communicator:
        with self.driver():
            return super().communicator(ranks, **options)

    def session(self, ranks: int) -> _core.Session:
        with self.driver():
            return super().session(ranks)


class Toy(Target):
    """The smallest backend that stands on the shared executor (toy/toy.cpp): a library of its own,
    which no package has."""

    def need(self, ranks: int) -> None:
        add_toy()
        super().need(ranks)


TARGETS = {
    "sim-mi300x-8": Target("sim", "mi300x-8"),
    "sim-h200-8": Target("sim", "h200-8"),
    "sim-h200-4": Target("sim", "h200-4"),
    "host": Target("host", "host-{}"),
    "toy": Toy("toy", "host-{}", watched=False, batches=False),
    "cuda": Gpus("cuda", "h200", swaps=False, watched=False),
    "sdma": AmdGpus("sdma", "mi300x-8", watched=False, batches=False, cyclic=False, way=SDMA_WAY),
}
