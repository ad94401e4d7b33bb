"""What a rank keeps: large, it has a queue of its own; small, it goes into the slot."""

import pytest

from offcore import _core, machines
from offcore.comm.programs import program_of


def commands(op, nbytes, variant, protocol, in_place, machine="h200-4"):
    """The commands of each queue, as text: {"1.0": ["copy ...", ...]}."""
    loaded = machines.load(machine)
    program = program_of(loaded, op, loaded.ranks, nbytes, variant, in_place, protocol)
    queues, found = {}, []
    for line in str(program).splitlines():
        if line.startswith("queue "):
            found = queues.setdefault(line.split()[1], [])
        elif line.startswith("  "):
            found.append(line.strip())
    return queues


def within(lines, rank):
    return [line for line in lines if line.startswith("copy") and line.count(f"[{rank}]") == 2]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("variant", ["b2b", "fan", "prelaunch_b2b"])
def test_one_copy_drains_a_small_slot(variant, in_place):
    queues = commands("all_gather", 4096, variant, "eager", in_place)
    for rank in range(4):
        lines = queues[f"{rank}.0"]
        last_poll = max(i for i, line in enumerate(lines) if line.startswith("poll"))
        [drain] = lines[last_poll + 1 :]
        middle = rank in (1, 2)
        assert drain.endswith(f"bytes={4096 if middle else 3072}")
        if variant == "fan":  # the own part may be a row of what goes to the peers
            continue
        kept = within(lines[:last_poll], rank)
        # An edge rank's own part lies beside what it drains: out of place it goes to `out` itself.
        assert len(kept) == (1 if middle or not in_place else 0)
        assert all(line.startswith("copy slot") == middle for line in kept)


@pytest.mark.parametrize(("variant", "nbytes"), [("pcpy", 4096), ("b2b", 64 << 20)])
def test_other_slots_are_drained_around_the_own_part(variant, nbytes):
    """Several engines have no order for it, and a large part takes longer than a second copy."""
    lines = commands("all_gather", nbytes, variant, "eager", True)["1.0"]
    drains = [line for line in lines if line.startswith("copy out[1]")]
    assert [line.split("bytes=")[1] for line in drains] == [str(nbytes // 4), str(nbytes // 2)]


def test_an_engine_that_overlaps_copies_drains_in_two():
    lines = commands("all_gather", 4096, "b2b", "eager", True, "mi300x-8")["1.0"]
    assert len([line for line in lines if line.startswith("copy out[1]")]) == 2


@pytest.mark.parametrize(
    ("variant", "nbytes", "apart"),
    [
        ("b2b", 4 << 20, True),
        ("b2b", 64 << 10, False),
        ("b2b:1", 4 << 20, False),
        ("prelaunch_b2b", 4 << 20, False),
    ],
)
def test_a_large_own_part_has_a_queue_of_its_own(variant, nbytes, apart):
    queues = commands("all_to_all", nbytes, variant, "barrier", False)
    for rank in range(4):
        assert len(within(queues[f"{rank}.0"], rank)) == (0 if apart else 1)
        own = queues.get(f"{rank}.1", [])
        assert len(own) == len(within(own, rank)) == int(apart)  # it waits for nobody, tells nobody


def test_what_a_rank_keeps_is_read_before_it_is_overwritten():
    """Moves read what was there before. A copy to all ranks, the own one too, comes before what
    stays within the rank, and here writes what that reads: refused, not reordered."""
    buffers = [("a", "window", 96)]
    everywhere = [((1, rank, 2), (1, 1, 0), 1) for rank in (0, 1)]
    moves = _core.moves_batch(2, buffers, [*everywhere, ((1, 1, 3), (1, 1, 2), 1)])
    machine, entered = machines.load("h200-2"), _core.Protocol(entry=True)
    with pytest.raises(_core.Error, match="hazard"):
        _core.plan(moves, "fan", machine, entered)
    apart = _core.moves_batch(2, buffers, [*everywhere, ((1, 1, 3), (1, 1, 8), 1)])
    lines = [line.strip() for line in str(_core.plan(apart, "fan", machine, entered)).splitlines()]
    assert lines[-2].startswith("signal")
    assert lines[-1] == "copy a[1]+3 <- a[1]+8 bytes=1"
