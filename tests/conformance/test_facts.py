"""What a result says of the path that ran: commands, engines and syncs as DMA-Latte counts them."""

import pytest
from targets import Target

import offcore

# DMA-Latte section 4 and 5.2.3: 8 GPUs, in place; engines = syncs, and copies if not b2b.
PAPER = {
    ("all_gather", "pcpy"): (56, 56),
    ("all_gather", "bcst"): (32, 32),
    ("all_gather", "b2b"): (56, 8),
    ("all_to_all", "swap"): (28, 28),
}


@pytest.mark.parametrize("prelaunch", ["", "prelaunch_"])
@pytest.mark.parametrize(("op", "variant"), PAPER)
def test_counts_of_the_paper(op: str, variant: str, prelaunch: str) -> None:
    copies, engines = PAPER[op, variant]
    with offcore.Communicator(backend="sim", machine="mi300x-8") as comm:
        result = getattr(comm, op)(comm.empty(8 * 4096), variant=prelaunch + variant).wait()
        program = comm.program(op, 8 * 4096, variant=prelaunch + variant, in_place=True)
    assert (result.engines, result.syncs) == (engines, engines)
    counts = program.counts()
    assert (counts.copies, counts.engines, counts.syncs) == (copies, engines, engines)
    assert counts.commands == result.commands
    assert counts.bytes == 56 * 4096
    assert result.native


@pytest.mark.parametrize("op", ["all_gather", "all_to_all"])
def test_counts_on_every_machine(target: Target, op: str) -> None:
    """b2b and fan need one engine a rank; fan one copy, where there are strided ones."""
    ranks, part = 4, 4096
    total = ranks * part if op == "all_gather" else ranks * ranks * part
    strided = offcore.machines.load(target.name(ranks)).native.strided
    pairs = 2 if op == "all_gather" else 4  # commands of a rank, where bcst reaches two
    with target.communicator(ranks) as comm:
        for variant, copies in (("b2b", 4), ("fan", 1 if strided else pairs)):
            counts = comm.program(op, total, variant=variant).counts()
            assert counts.engines == ranks
            assert counts.copies == ranks * copies
            assert counts.bytes == total * ranks


def test_results(target: Target) -> None:
    ranks = 4
    with target.communicator(ranks) as comm:
        out, inp = comm.empty(4000), comm.empty(1000)
        handle = comm.all_gather(out, inp, variant="b2b")
        result = handle.wait()
        assert handle.done()
        assert handle.wait() is result
        assert (result.op, result.variant, result.ranks, result.bytes) == (
            "all_gather",
            "b2b",
            ranks,
            4000,
        )
        assert (result.backend, result.machine) == (target.backend, target.name(ranks))
        assert (result.protocol, result.staged, result.mode) == ("barrier", False, "eager")
        assert (result.in_place, result.tuned, result.armed_ahead) == (False, False, False)
        assert result.own_copy == "engine"
        assert comm.all_gather(out, variant="b2b").wait().own_copy == "none"
        assert result.kernels is None
        assert result.way == target.way
        assert result.engines == ranks
        phases = result.phases
        parts = (phases.control_us, phases.schedule_us, phases.copy_us, phases.sync_us)
        assert min(parts) >= 0
        if not target.watched:  # only the host's own part of the time is known
            assert 0 < phases.control_us <= result.time_us
            assert parts[1:] == (0, 0, 0)
        else:
            assert sum(parts) == pytest.approx(result.time_us, rel=0.01, abs=0.01)
        arrays = [comm.host_array(4000) for _ in range(ranks)]
        outside = comm.all_gather(arrays, inp).wait()
        assert (outside.protocol, outside.staged) == ("eager", True)
        assert outside.slot_bytes > 0


def test_the_choice_is_one_that_can_be_had(target: Target) -> None:
    with target.communicator(4) as comm:
        for op, in_place in (("all_gather", True), ("all_to_all", True), ("broadcast", False)):
            can = comm.variants(op, in_place)
            program = comm.program(op, 4096, in_place=in_place)
            assert program.variant in can
            for variant in can:
                named = comm.program(op, 4096, variant=variant, in_place=in_place)
                offcore.verify(named)
                assert offcore.Program.parse(named.text) == named
