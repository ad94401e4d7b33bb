"""Where a switch has one port for all that a rank gets, ranks send chunks in step."""

import re

import pytest

from offcore import _core, machines
from offcore.comm.programs import program_of

MIB = 1 << 20
STEP_SLOT_BYTES = 192 * MIB  # two chunks of all peers


def sending(program, rank):
    """The first queue of a rank, a command a line."""
    text = str(program).split(f"queue {rank}.0\n")[1]
    return [line.split() for line in text.split("queue")[0].splitlines()]


def peers_polled(lines):
    """Between the signals of one chunk and the copies of the next: words that are polled."""
    groups, words = [], 0
    signalled = False
    for line in lines:
        if line[0] == "signal":
            signalled, words = True, 0
        elif line[0] == "poll":
            words += int((re.search(r"rows=(\d+)", " ".join(line)) or [0, 1])[1])
        elif line[0] == "copy" and signalled:
            groups.append(words)
            signalled = False
    return groups


def program(machine, op, nbytes, variant="auto", protocol="auto"):
    loaded = machine if isinstance(machine, _core.Machine) else machines.load(machine)
    return program_of(loaded, op, loaded.ranks, nbytes, variant, False, protocol)


@pytest.mark.parametrize("machine", ["h100-4", "h200-8", "nvidia-4"])
def test_each_waits_until_all_have_sent_the_chunk_before(machine):
    ranks = int(machine[-1])
    reduced = program(machine, "reduce_scatter", 256 * MIB)
    gathered = program(machine, "all_gather", 256 * MIB, "pipelined:4M", "eager")
    for one in (reduced, gathered):
        _core.verify(one)
        for rank in range(ranks):
            groups = peers_polled(sending(one, rank))
            assert groups
            assert all(words >= ranks - 1 for words in groups)


@pytest.mark.parametrize("machine", ["h100-2", "mi300x-8"])
def test_no_one_waits_where_peers_do_not_share_a_port(machine):
    assert not any(peers_polled(sending(program(machine, "reduce_scatter", 64 * MIB), 0)))


def test_a_ring_for_chunks_in_step_holds_two_of_each_peer():
    for machine in ("h100-4", "h100-8"):
        text = str(program(machine, "reduce_scatter", 4096 * MIB))
        [line] = [line for line in text.splitlines() if line.startswith("buffer slot")]
        assert int(line.split()[-1]) <= STEP_SLOT_BYTES


def test_a_step_that_costs_more_leads_to_larger_chunks():
    machine = machines.load("h200-4")
    chunks = []
    for step_ns in (0, 25_000, 200_000):
        machine.cost.step_ns = step_ns
        chunks.append(program(machine, "reduce_scatter", 256 * MIB).flag_span)
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > chunks[2]


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("protocol", ["auto", "eager"])
def test_callers_gather_a_small_all_reduce_themselves(ranks, protocol):
    """One chunk that cores exchange: no engine has a part in it."""
    loaded = machines.load("h200-8")
    for op in ("all_reduce", "reduce"):
        one = program_of(loaded, op, ranks, MIB, "pipelined", False, protocol)
        _core.verify(one)
        assert re.findall(r"^queue \d+\.(\w+)", str(one), re.MULTILINE) == ["caller"] * ranks
        assert " copy " not in str(one)
