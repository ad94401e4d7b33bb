"""Ranks of large communicators plan a shape whole once, and then only their own parts."""

from typing import Any

import numpy as np
import pytest

import offcore
from oracles import noise
from stores import as_ranks

RANKS = 16
KNOWN = "of a known shape"
FACTS = ("op", "variant", "protocol", "signals", "native", "staged", "tuned", "in_place",
         "own_copy", "bytes", "slot_bytes")  # fmt: skip
COUNTS = ("commands", "copies", "engines", "syncs", "bytes")
Told = list[tuple[Any, ...]]


def told(handle: offcore.Handle) -> tuple[Any, ...]:
    result = handle.wait()._core
    counts = [getattr(result.counts, count) for count in COUNTS]
    return *(getattr(result, fact) for fact in FACTS), *counts


def calls(comm: offcore.Communicator, sizes: list[int], **how: Any) -> Told:
    """All-gathers and all-to-alls of these sizes, whose outputs are checked."""
    results: Told = []
    room = comm.empty(RANKS * max(sizes))
    of_rank = [room] if isinstance(room, np.ndarray) else room
    for size in sizes:
        outs = [whole[: RANKS * size] for whole in of_rank]
        for op in ("all_gather", "all_to_all"):
            parts = size if op == "all_gather" else RANKS * size
            inputs = [noise(parts, size, rank) for rank in comm.local_ranks]
            one = len(outs) == 1
            out, inp = (outs[0], inputs[0]) if one else (outs, inputs)
            comm.barrier()
            results.append(told(getattr(comm, op)(out, inp, **how)))
            for rank, got in zip(comm.local_ranks, outs, strict=True):
                sent = [noise(parts, size, peer) for peer in range(RANKS)]
                if op == "all_to_all":
                    sent = [data[rank * size :][:size] for data in sent]
                assert (got == np.concatenate(sent)).all()
    comm.barrier()
    return results


@pytest.mark.parametrize(
    "how",
    [
        {"variant": "pcpy"},
        {"variant": "b2b", "protocol": "credits"},
        {"variant": "fan", "protocol": "eager"},
        {"variant": "b2b", "protocol": "promise"},
        {"variant": "prelaunch_b2b"},
    ],
    ids=lambda how: "-".join(how.values()),
)
def test_parts_of_known_shapes_do_the_same(
    how: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFCORE_LOG", "info")
    sizes = [64, 96, 8, 200]
    of_ranks = as_ranks(RANKS, lambda comm, _: calls(comm, sizes, **how))
    lines = capfd.readouterr().err.splitlines()
    planned = [line for line in lines if " new: " in line and " counts=0x" not in line]
    parts = [line for line in planned if KNOWN in line]
    assert len(planned) == RANKS * 2 * len(sizes)
    assert len(parts) == RANKS * 2 * (len(sizes) - 1)
    with offcore.Communicator(backend="host", ranks=RANKS) as comm:
        whole = calls(comm, sizes, **how)
    assert KNOWN not in capfd.readouterr().err
    for results in of_ranks:
        assert results == whole
