"""Faults for the simulator that a launch of a program meets, from a seed."""

import random
from typing import Any

from offcore import _core

KINDS = ("slow_engine", "late_signal", "lost_signal", "flipped_byte", "dead_rank")


def random_fault(seed: int, program: _core.Program) -> dict[str, Any]:
    """As `Communicator` takes it; `Fault(**fault)` for a session."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    places = []  # rank, queue, what of it the fault may hit
    for rank, queue, commands in program.queues:
        ops = [text.split()[0] for text in commands]
        hit = {
            "late_signal": ops.count("signal"),
            "lost_signal": ops.count("signal"),
            "flipped_byte": ops.count("copy") + ops.count("swap"),
        }.get(kind, int(queue != "caller"))
        if hit:
            places.append((rank, queue, hit))
    rank, queue, hit = rng.choice(places)
    counted = kind in ("late_signal", "lost_signal", "flipped_byte")
    return {
        "kind": kind,
        "rank": rank,
        "queue": queue,
        "nth": rng.randrange(hit) if counted else 0,
        "factor": 2.0 + rng.randrange(30),
        "ns": rng.randrange(20_000),
    }
