"""Plans of many ranks: CPU time, which other processes do not lengthen, and memory."""

import time

import pytest

from offcore import _core, machines


def machine_of(name: str, ranks: int) -> _core.Machine:
    machine = machines.load(name)
    machine.ranks = ranks
    machine.tuned = []
    return machine


def planning_s(variant: str, machine: _core.Machine, rounds: int = 1) -> float:
    moves = _core.moves_all_gather([64 << 10] * machine.ranks, False)
    times = []
    for _ in range(rounds):
        start = time.process_time()
        program = _core.plan(moves, variant, machine, _core.Protocol())
        times.append(time.process_time() - start)
        assert program.counts().bytes == machine.ranks**2 * (64 << 10)
    return min(times)


@pytest.mark.parametrize("variant", ["pcpy", "bcst", "b2b", "fan"])
def test_72_ranks_are_planned_in_30_ms(variant: str) -> None:
    assert planning_s(variant, machine_of("nvidia-8", 72), rounds=5) < 0.03


def test_reads_of_many_ranks_are_checked_apart() -> None:
    """512 ranks with 4,608 queues: 3.6 s when every rank's reads were compared with all others'."""
    assert planning_s("pcpy", machine_of("nvidia-8", 512)) < 1.6


def test_cuts_of_a_reduction_of_many_ranks_are_weighed_quickly() -> None:
    """256 ranks: 0.6 s when the estimate of each cut was followed to its end, and went back over a
    caller's polls at each of them."""
    machine = machine_of("nvidia-8", 256)
    parts = [256 << 10] * 256

    def planning() -> float:
        start = time.process_time()
        protocol = _core.Protocol()
        _core.plan_reduction("all_reduce", parts, "sum", "float32", "auto", machine, protocol)
        return time.process_time() - start

    assert min(planning() for _ in range(3)) < 0.5  # what else runs takes its share of caches


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_a_reduction_of_256_ranks_whose_flags_the_host_keeps(op: str) -> None:
    """1.7 million flag words in host memory, which were counted for every rank: 42 GB."""
    machine = machine_of("mi300x-8", 256)
    parts = [256 << 10] * 256
    program = _core.plan_reduction(op, parts, "sum", "float32", "auto", machine, _core.Protocol())
    session = _core.Session("sim", machine, 256, phantom=True)
    assert session.run(program, checked=False).time_ns > 0
