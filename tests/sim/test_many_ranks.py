"""Many ranks: the simulator's time, and rates that are only nearly max-min fair."""

import time

import pytest

from offcore import _core, machines


def machine_of(name: str, ranks: int) -> _core.Machine:
    machine = machines.load(name)
    machine.ranks = ranks
    machine.tuned = []
    return machine


def test_crowded_links_of_many_ranks_are_shared_in_seconds() -> None:
    """All 128 ranks' copies share links with each other's: worked out anew at each event, as they
    were, they took 28 s of CPU time."""
    machine = machine_of("mi300x-8", 128)
    moves = _core.moves_all_gather([512 << 10] * 128, False)
    program = _core.plan(moves, "pcpy", machine, _core.Protocol())
    session = _core.Session("sim", machine, 128, phantom=True)
    start = time.process_time()
    assert session.run(program, checked=False).time_ns > 0
    assert time.process_time() - start < 10


@pytest.mark.parametrize("ranks", [64, 128])
def test_a_crowded_port_is_full_all_the_time(ranks: int) -> None:
    machine = machine_of("nvidia-8", ranks)
    nbytes = 16 << 20
    moves = _core.moves_gather(0, [nbytes] * ranks)
    program = _core.plan(moves, "pcpy", machine, _core.Protocol())
    session = _core.Session("sim", machine, ranks, phantom=True)
    took_ns = session.run(program, checked=False).time_ns
    ideal_ns = (ranks - 1) * nbytes / machine.links.ingress_gbps
    assert ideal_ns < took_ns < 1.002 * ideal_ns + 100_000
