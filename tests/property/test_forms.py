"""In place or not is each rank's own affair where a rank may not know (a broadcast's leaf, a rank
that contributes nothing): what ranks tell each other has to be the same in both forms."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from worlds import MACHINES, PROTOCOLS, VARIANTS, machine_of

from offcore import _core

Words = dict[str, list[str]]


def words_of(program: Any, ranks: int) -> Words:
    """What the queues signal and poll, but for start words, which are a rank's own."""
    words: Words = {}
    queue = ""
    for line in str(program).splitlines():
        if line.startswith("queue "):
            queue = line.split()[1]
        elif line.split()[0] in ("signal", "poll"):
            word = int(line.split(":")[1].split()[0])
            if not ranks <= word < 2 * ranks:
                words.setdefault(queue, []).append(line)
    return words


def commands_of(program: Any, rank: int) -> list[str]:
    """All that a rank's queues hold."""
    lines: list[str] = []
    own = False
    for line in str(program).splitlines():
        if line.startswith("queue "):
            own = int(line.split()[1].split(".")[0]) == rank
        if own:
            lines.append(line)
    return lines


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[Any, int, str, Any]:
    machine = machine_of(
        draw(st.sampled_from([name for name in MACHINES if name != "host-1"])),
        draw(
            st.sampled_from(
                [[], [("native", "strided_flags", False)], [("native", "bcst_rows", 2)]]
            )
        ),
        draw(st.sampled_from([1, 2, 3, 14])),
    )
    if draw(st.booleans()):  # links with room for several engines, as on a host of many cores
        links = machine.links
        links.link_gbps = 4 * links.engine_gbps
        machine.links = links
    ranks = draw(st.integers(2, machine.ranks))
    variant = draw(st.sampled_from(VARIANTS))
    protocols = list(PROTOCOLS.values())
    if machine.flags == _core.FlagHome.peer:  # where programs can be captured
        protocols += [_core.Protocol(staged=staged, captured=True) for staged in (False, True)]
    return machine, ranks, variant, draw(st.sampled_from(protocols))


SIZES = st.sampled_from([1, 64, 4096, 300_000, 3 << 20, 40 << 20])


@given(settings_of(), SIZES, st.data())
def test_leaves_of_a_broadcast_have_one_program(
    setting: tuple[Any, int, str, Any], nbytes: int, data: st.DataObject
) -> None:
    machine, ranks, variant, protocol = setting
    root = data.draw(st.integers(0, ranks - 1))
    forms = [_core.moves_broadcast(ranks, root, nbytes, in_place) for in_place in (False, True)]
    reasons = [_core.why_not(moves, variant, protocol) for moves in forms]
    assert bool(reasons[0]) == bool(reasons[1])
    if reasons[0]:
        return
    programs = [_core.plan(moves, variant, machine, protocol) for moves in forms]
    assert words_of(programs[0], ranks) == words_of(programs[1], ranks)
    for leaf in set(range(ranks)) - {root}:
        assert commands_of(programs[0], leaf) == commands_of(programs[1], leaf)


@given(settings_of(), SIZES, st.data())
def test_ranks_of_an_all_gather_tell_each_other_the_same(
    setting: tuple[Any, int, str, Any], nbytes: int, data: st.DataObject
) -> None:
    machine, ranks, variant, protocol = setting
    counts = data.draw(st.lists(st.sampled_from([0, nbytes]), min_size=ranks, max_size=ranks))
    forms = [_core.moves_all_gather(counts, in_place) for in_place in (False, True)]
    if any(_core.why_not(moves, variant, protocol) for moves in forms):
        return
    programs = [_core.plan(moves, variant, machine, protocol) for moves in forms]
    assert words_of(programs[0], ranks) == words_of(programs[1], ranks)
