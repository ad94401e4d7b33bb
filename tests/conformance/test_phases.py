"""Programs of several phases: a later one reads what an earlier one wrote, by way of words that
are signalled more than once a launch. Rings and pipelines are made of these."""

import numpy as np
import pytest
from targets import Target

from offcore import _core
from oracles import noise

CHUNK = 96
SLICES = 4


def program_of(ranks: int, queues: list[str], nbytes: int) -> _core.Program:
    head = (
        f"program phases machine=m ranks={ranks} variant=v mode=eager protocol=promise native=yes "
        f"flags={ranks} span={max(ranks - 1, SLICES)}\nbuffer out window {nbytes}\n"
    )
    return _core.Program.parse(head + "".join(queues))


def ring_all_gather(ranks: int) -> _core.Program:
    """In step s, rank r passes on the chunk that it got in step s - 1; a word counts the steps."""
    queues = []
    for rank in range(ranks):
        right = (rank + 1) % ranks
        text = f"queue {rank}.0\n"
        for step in range(ranks - 1):
            chunk = (rank - step) % ranks * CHUNK
            if step > 0:
                text += f" poll flag[{rank}]:0 >= {step}\n"
            text += f" copy out[{right}]+{chunk} <- out[{rank}]+{chunk} bytes={CHUNK}\n"
            text += f" signal flag[{right}]:0 = {step + 1}\n"
        queues.append(text + f"queue {rank}.caller\n poll flag[{rank}]:0 >= {ranks - 1}\n")
    return program_of(ranks, queues, ranks * CHUNK)


def chain_broadcast(ranks: int) -> _core.Program:
    """Rank 0's array goes down a chain in slices: every rank forwards one while the next comes."""
    queues = []
    for rank in range(ranks):
        text = ""
        if rank + 1 < ranks:
            text = f"queue {rank}.0\n"
            for part in range(SLICES):
                if rank > 0:
                    text += f" poll flag[{rank}]:0 >= {part + 1}\n"
                at = part * CHUNK
                text += f" copy out[{rank + 1}]+{at} <- out[{rank}]+{at} bytes={CHUNK}\n"
                text += f" signal flag[{rank + 1}]:0 = {part + 1}\n"
        if rank > 0:
            text += f"queue {rank}.caller\n poll flag[{rank}]:0 >= {SLICES}\n"
        queues.append(text)
    return program_of(ranks, queues, SLICES * CHUNK)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_all_gather(target: Target, ranks: int) -> None:
    session = target.session(ranks)
    for launch in range(3):
        arrays = [np.zeros(ranks * CHUNK, np.uint8) for _ in range(ranks)]
        parts = [noise(CHUNK, launch, rank) for rank in range(ranks)]
        for rank, part in enumerate(parts):
            arrays[rank][rank * CHUNK : (rank + 1) * CHUNK] = part
        session.run(ring_all_gather(ranks), {"out": arrays})
        for array in arrays:
            assert np.array_equal(array, np.concatenate(parts))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chain_broadcast(target: Target, ranks: int) -> None:
    session = target.session(ranks)
    arrays = [noise(SLICES * CHUNK, 7, rank) for rank in range(ranks)]
    wanted = arrays[0].copy()
    session.run(chain_broadcast(ranks), {"out": arrays})
    for array in arrays:
        assert np.array_equal(array, wanted)


def refusal(program: _core.Program, old: str, new: str) -> str:
    text = str(program)
    assert old in text
    with pytest.raises(_core.Error) as caught:
        _core.verify(_core.Program.parse(text.replace(old, new, 1)))
    assert caught.value.code == "verify"
    return str(caught.value)


def test_a_phase_waits_for_what_it_reads() -> None:
    _core.verify(ring_all_gather(4))
    assert refusal(ring_all_gather(4), "  poll flag[1]:0 >= 2\n", "").startswith("hazard")
    too_early = "queue 1.caller\n  poll flag[1]:0 >= 2"
    assert refusal(ring_all_gather(4), too_early[:-1] + "3", too_early).startswith("exit")
