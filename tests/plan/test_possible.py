"""Every operation x variant x number of engines x protocol has a program that verify accepts, or is
refused as unsupported: before it is planned, where no machine could."""

from collections.abc import Iterator
from itertools import product

import pytest

from offcore import _core, machines
from offcore.tools.bench import collectives
from offcore.tools.cli import options

MACHINES = ("h200-2", "h200-4", "h200-8", "mi300x-8", "host-1", "host-3", "host-8")
ENGINES = ("", ":1", ":2", ":3", ":256")
CHUNKS = ("", ":256", ":1K")
VARIANTS = [
    name + suffix
    for name in _core.variants()
    for suffix in (CHUNKS if name == "pipelined" else ENGINES)
]
PROTOCOLS = [_core.Protocol(*flags) for flags in product((True, False), repeat=3)]
STAGED = _core.Protocol(entry=False, staged=True)


def moves_of_all(ranks: int) -> Iterator[tuple[str, _core.Moves]]:
    for part in (0, 1, 64):
        for in_place in (False, True):
            yield "all_gather", _core.moves_all_gather([part] * ranks, in_place)
            yield "all_to_all", _core.moves_all_to_all(ranks, [part] * ranks**2, in_place)
            yield "broadcast", _core.moves_broadcast(ranks, ranks // 2, part, in_place)
        yield "scatter", _core.moves_scatter(ranks // 2, [part] * ranks)
        yield "gather", _core.moves_gather(ranks // 2, [part] * ranks)
    uneven = [7 * i % 5 * 16 for i in range(ranks * ranks)]
    for in_place in (False, True):
        yield "all_gather_v", _core.moves_all_gather(uneven[:ranks], in_place)
    yield "all_to_all_v", _core.moves_all_to_all(ranks, uneven, False)
    yield "scatter_v", _core.moves_scatter(0, uneven[:ranks])
    yield "gather_v", _core.moves_gather(0, uneven[:ranks])


def outcome(
    moves: _core.Moves, variant: str, machine: _core.Machine, protocol: _core.Protocol
) -> str:
    try:
        _core.plan(moves, variant, machine, protocol)
    except _core.Error as refused:
        return str(refused.code)
    return "planned"


@pytest.mark.parametrize("name", MACHINES)
def test_planned_or_unsupported(name: str) -> None:
    machine = machines.load(name)
    found = set()
    for ranks in range(1, machine.ranks + 1):
        for op, moves in moves_of_all(ranks):
            for variant, protocol in product(VARIANTS, PROTOCOLS):
                said = outcome(moves, variant, machine, protocol)
                assert said in ("planned", "unsupported"), (said, op, ranks, variant)
                if _core.why_not(moves, variant, protocol):
                    assert said == "unsupported", (op, ranks, variant)
                found.add((op, said))
    assert {op for op, said in found if said == "planned"} == {op for op, _ in found}


@pytest.mark.parametrize("variant", ["fan:2", "b2b:3", "pcpy", "pcpy:2", "prelaunch_fan:2"])
def test_in_place_one_engine_keeps_the_order(variant: str) -> None:
    """Two engines: one drains what came in over a chunk that the other has yet to send."""
    moves = _core.moves_all_to_all(4, [64] * 16, True)
    machine = machines.load("h200-4")
    with pytest.raises(_core.Error, match="one engine") as refused:
        _core.lower(moves, variant, machine, STAGED)
    assert refused.value.code == "unsupported"
    program = _core.plan(moves, variant.split(":")[0] + ":1", machine, STAGED)
    queues = [line.split(".")[1] for line in program.text.split("\n") if line.startswith("queue")]
    assert set(queues) - {"caller"} == {"0"}


def test_a_tuned_variant_that_cannot_be_had_is_not_chosen() -> None:
    machine = machines.load("h200-4")
    row = _core.TunedRow()
    row.op, row.ranks, row.in_place, row.variant = "all_to_all", 4, True, "fan:2"
    row.bytes_min, row.bytes_max = 0, 1 << 20
    machine.tuned = [row]
    moves = _core.moves_all_to_all(4, [64] * 16, True)
    variant, tuned = _core.choose(moves, 1024, machine, STAGED)
    assert (variant in ("fan", "b2b"), tuned) == (True, False)
    row.variant = "fan:1"
    machine.tuned = [row]
    assert _core.choose(moves, 1024, machine, STAGED) == ("fan:1", True)


def test_one_list_has_the_variants() -> None:
    """What the command line, benches and errors name are the core's, so a new one is in all."""
    kinds = [name for name in _core.variants() if not name.startswith("prelaunch_")]
    assert list(collectives.KINDS) == kinds
    prelaunched = [f"prelaunch_{kind}" for kind in kinds if kind != "pipelined"]
    assert list(collectives.VARIANTS) == [*kinds, *prelaunched]
    assert options.VARIANT_HELP.startswith(", ".join(kinds))
    moves = _core.moves_all_gather([1, 1], False)
    with pytest.raises(_core.Error, match=f"known are {', '.join(kinds[:-1])}, each also"):
        _core.plan(moves, "none", machines.load("h200-2"), _core.Protocol())
