"""The simulator through packets: the same bytes, times and phases as directly."""

import numpy as np
import pytest

import offcore
from offcore import _core, machines
from oracles import Case, equal_case, kinds_of, noise

OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
BOTH = (False, True)  # directly, through packets
PROTOCOLS = {"barrier": (True, False), "promise": (False, False), "eager": (False, True)}


def cases() -> list[tuple[Case, str, str]]:
    found = []
    for op in OPS:
        for in_place in (False, True) if op in OPS[:2] else (False,):
            case = equal_case(op, 8, 192, in_place)
            for protocol, (_, staged) in PROTOCOLS.items():
                for kind in sorted(kinds_of(case, staged)):
                    found.append((case, kind, protocol))
                    if kind != "pipelined":
                        found.append((case, f"prelaunch_{kind}", protocol))
    return found


def program_of(case: Case, variant: str, protocol: str, machine: _core.Machine) -> _core.Program:
    counts = list(case.counts)
    moves = {
        "all_gather": lambda: _core.moves_all_gather(counts, case.in_place),
        "all_to_all": lambda: _core.moves_all_to_all(case.ranks, counts, case.in_place),
        "broadcast": lambda: _core.moves_broadcast(case.ranks, 0, counts[0], case.in_place),
        "scatter": lambda: _core.moves_scatter(0, counts),
        "gather": lambda: _core.moves_gather(0, counts),
    }[case.op]()
    entry, staged = PROTOCOLS[protocol]
    return _core.plan(moves, variant, machine, _core.Protocol(entry=entry, staged=staged))


def told(report: _core.RunReport) -> list[object]:
    commands = [
        (c.queue, c.command, c.start_ns, c.end_ns, c.phases.total_ns) for c in report.commands
    ]
    phases = report.phases
    parts = (phases.control_ns, phases.schedule_ns, phases.copy_ns, phases.sync_ns)
    return [report.times_ns, parts, commands, report.timestamps_ns]


@pytest.mark.parametrize(("case", "variant", "protocol"), cases(), ids=str)
def test_identical_in_every_byte_and_nanosecond(case: Case, variant: str, protocol: str) -> None:
    machine = machines.load("mi300x-8")
    program = program_of(case, variant, protocol, machine)
    results = []
    for packets in BOTH:
        arrays = {
            name: [noise(nbytes, ord(name[0]), rank) for rank in range(1 if kind == "host" else 8)]
            for name, kind, nbytes in program.buffers
        }
        session = _core.Session("sim", machine, 8, seed=3, packets=packets)
        report = session.run(program, arrays, repeat=3, epoch=2**32 - 2)
        left = {name: [array.tobytes() for array in of] for name, of in arrays.items()}
        results.append((left, told(report), session.now_ns))
    assert results[0] == results[1]


@pytest.mark.parametrize("variant", ["pcpy", "prelaunch_b2b", "bcst"])
def test_phantom_gigabytes_through_packets(variant: str) -> None:
    """Addresses without bytes do; and a size that the largest copy splits."""
    machine = machines.load("mi300x-8")
    program = program_of(equal_case("all_gather", 8, 3 << 29), variant, "promise", machine)
    sessions = [_core.Session("sim", machine, 8, True, packets=packets) for packets in BOTH]
    direct, through = (told(session.run(program)) for session in sessions)
    assert direct == through
    assert program.counts().copies > 8


def test_a_communicator_through_packets() -> None:
    results = []
    for packets in BOTH:
        with offcore.Communicator(
            backend="sim", machine="mi300x-8", ranks=8, packets=packets
        ) as comm:
            out = [np.zeros(8 * 100, np.uint8) for _ in range(8)]
            sent = [noise(100, rank) for rank in range(8)]
            for variant in ("auto", "prelaunch_bcst", "b2b"):
                result = comm.all_gather(out, sent, variant=variant).wait()
                assert all(np.array_equal(one, np.concatenate(sent)) for one in out)
                results.append((variant, result.time_us, result.commands, result.engines))
    assert results[:3] == results[3:]


def test_commands_that_are_several_packets() -> None:
    """What was not legalized runs as the packets that the machine needs: later, and right."""
    text = """\
program test machine=m ranks=4 variant=v mode=eager protocol=promise native=yes flags=8 span=4
buffer a window 4096
queue 0.0
  copy a[1]+0 <- a[0]+0 bytes=1024 rows=3 dst_step=rank src_step=0
  signal flag[1]:0 = 1 rows=3 step=rank
"""
    program = _core.Program.parse(text)
    machine = machines.load("mi300x-8")
    commands, times = [], []
    for packets in BOTH:
        arrays = {"a": [noise(4096, rank) for rank in range(4)]}
        session = _core.Session("sim", machine, 4, packets=packets)
        report = session.run(program, arrays, checked=False)
        for rank in range(1, 4):
            assert np.array_equal(arrays["a"][rank][:1024], arrays["a"][0][:1024])
        commands.append(len(report.commands))
        times.append(report.time_ns)
    assert commands == [2, 5]  # a broadcast, a copy and three fences
    assert times[1] > times[0]


def test_packets_are_of_amd_machines() -> None:
    with pytest.raises(offcore.Error, match="packets are AMD's") as refused:
        offcore.Communicator(backend="sim", machine="h200-4", packets=True)
    assert refused.value.code == "unsupported"
    with pytest.raises(offcore.Error, match="packets are options of backend sim") as refused:
        offcore.Communicator(backend="host", ranks=2, packets=True)
    assert refused.value.code == "unsupported"
