"""The collectives of DMA-Latte's section 5.2: their programs, and how long each takes.

Eight GPUs, 1 KB to 4 GB in powers of two. An all-gather is in place. An all-to-all is in place by
swap, else between two buffers, and its copies are those to peers alone: the paper counts seven
engines a GPU, so a GPU's own part is not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offcore import _core

RANKS = 8
SIZES = tuple(1 << power for power in range(10, 33))
OPS = ("all_gather", "all_to_all")
COPY_SIZES = tuple(4096 << power for power in range(10))  # of a single copy: 4 KB to 2 MB

Key = tuple[str, str, int]  # operation, variant, total bytes
Times = NDArray[np.float64]  # us, by SIZES


def pair_of(op: str) -> str:
    """The variant whose commands reach two peers."""
    return "bcst" if op == "all_gather" else "swap"


def variants_of(op: str) -> tuple[str, ...]:
    kinds = ("pcpy", pair_of(op), "b2b")
    return (*kinds, *(f"prelaunch_{kind}" for kind in kinds))


def program_of(machine: _core.Machine, op: str, variant: str, nbytes: int) -> _core.Program:
    part = nbytes // RANKS
    if op == "all_gather":
        moves = _core.moves_all_gather([part] * RANKS, True)
    elif variant.endswith("swap"):
        moves = _core.moves_all_to_all(RANKS, [part] * RANKS * RANKS, True)
    else:
        moves = _core.moves_listed(
            RANKS,
            [("in", "window", nbytes), ("out", "window", nbytes)],
            [
                (
                    (2, (rank + step) % RANKS, rank * part),
                    (1, rank, (rank + step) % RANKS * part),
                    part,
                )
                for rank in range(RANKS)
                for step in range(1, RANKS)
            ],
        )
    return _core.plan(moves, variant, machine, _core.Protocol(entry=False))


def programs(machine: _core.Machine) -> dict[Key, _core.Program]:
    """All of them. They depend on what the machine can do, not on its costs."""
    return {
        (op, variant, nbytes): program_of(machine, op, variant, nbytes)
        for op in OPS
        for variant in variants_of(op)
        for nbytes in SIZES
    }


def copy_program(nbytes: int) -> _core.Program:
    """One copy between two GPUs and the signal that tells of it (section 3.2)."""
    return _core.Program.parse(
        "program copy machine=m ranks=2 variant=v mode=eager protocol=promise native=yes flags=4 "
        f"span=1\nbuffer w window {nbytes}\nqueue 0.0\n copy w[1]+0 <- w[0]+0 bytes={nbytes}\n"
        " signal flag[host]:0 = 1\nqueue 1.caller\n poll flag[host]:0 >= 1\n"
    )


@dataclass(frozen=True)
class Curve:
    """RCCL's time for a collective: a latency, and the bytes that leave a GPU at a bandwidth."""

    latency_us: float
    gbps: float

    def times_us(self, ranks: int = RANKS) -> Times:
        return self.latency_us + np.array(SIZES) * ((ranks - 1) / ranks / self.gbps / 1e3)


@dataclass(frozen=True)
class Sweep:
    """Times by operation and variant, RCCL's beside them, and a single copy's phases by size."""

    times: Mapping[tuple[str, str], Times]
    rccl: Mapping[str, Times]
    copies: Mapping[int, _core.Phases]

    def best(self, op: str, variants: Iterable[str]) -> Times:
        least: Times = np.min([self.times[op, variant] for variant in variants], axis=0)
        return least


def _sweep(
    run: Callable[[_core.Program], float],
    machine: _core.Machine,
    rccl: Mapping[str, Curve],
    made: Mapping[Key, _core.Program],
) -> Sweep:
    return Sweep(
        times={
            (op, variant): np.array([run(made[op, variant, nbytes]) / 1e3 for nbytes in SIZES])
            for op in OPS
            for variant in variants_of(op)
        },
        rccl={op: curve.times_us() for op, curve in rccl.items()},
        copies={n: _core.estimate(copy_program(n), machine) for n in COPY_SIZES},
    )


def estimated(
    machine: _core.Machine, rccl: Mapping[str, Curve], made: Mapping[Key, _core.Program]
) -> Sweep:
    """By the cost model: what the fit asks thousands of times."""
    return _sweep(lambda one: _core.estimate(one, machine).total_ns, machine, rccl, made)


def simulated(machine: _core.Machine, rccl: Mapping[str, Curve]) -> Sweep:
    """By the simulator: what is reported."""
    session = _core.Session("sim", machine, RANKS, phantom=True)
    return _sweep(lambda one: float(session.run(one).time_ns), machine, rccl, programs(machine))
