"""Groups of a communicator's ranks, what is logged, and NVTX ranges."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import Error
from stores import as_ranks, free_store

ROOT = str(Path(str(offcore.__file__)).parents[1])
TESTS = str(Path(__file__).parents[1])


def seen_by(group: offcore.Communicator, own: int) -> list[int]:
    """Who is in the group, in its order."""
    out = group.empty(group.ranks, "uint8")
    group.all_gather(out, np.full(1, own, np.uint8)).wait()
    group.barrier()
    return [int(rank) for rank in out]


def test_ranks_of_a_color_are_a_group_in_the_order_of_their_keys() -> None:
    def work(comm: offcore.Communicator, rank: int) -> Any:
        wishes = [(7, 1), (3, 0), (7, 0), (None, 0), (7, 1)]
        group = comm.split(*wishes[rank])
        if group is None:
            comm.barrier()
            return None
        with group:
            members = seen_by(group, rank)
            assert members[group.local_ranks[0]] == rank
        comm.barrier()  # the first communicator goes on
        return group.ranks, group.machine, members

    in_seven = (3, "host-3", [2, 0, 4])
    assert as_ranks(5, work, timeout=30) == [in_seven, (1, "host-1", [1]), in_seven, None, in_seven]


def test_groups_of_groups() -> None:
    def work(comm: offcore.Communicator, rank: int) -> Any:
        half = comm.split(rank // 2)
        assert half is not None
        pair = half.split(0, key=1 - half.local_ranks[0])
        assert pair is not None
        members = seen_by(pair, rank)
        pair.close()
        half.close()
        return members

    assert as_ranks(4, work) == [[1, 0], [1, 0], [3, 2], [3, 2]]


REDUCING = """
import sys
import numpy as np
import offcore
from reductions import numbers, reduced, stored

store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
calls = [("sum", "float32", {}), ("sum", "bfloat16", {}), ("avg", "int32", {}),
         ("premul_sum", "float16", {"scale": 0.3}), ("max", "int64", {})]

def reduce(comm, members, seed):
    me, count = members.index(rank), 1031
    for number, (op, dtype, scale) in enumerate(calls):
        inputs = [numbers(count * len(members), dtype, 1000 * seed + 100 * number + one)
                  for one in members]
        wanted = reduced(inputs, op, dtype, **scale)
        for place in (comm.empty, comm.host_array):
            out, whole, part = (place(n, stored(dtype)) for n in (wanted.size, wanted.size, count))
            whole[:] = inputs[me]
            comm.all_reduce(out, whole, op, dtype=dtype, **scale).wait()
            assert np.array_equal(out, wanted), ("all_reduce", op, dtype, members)
            comm.reduce_scatter(part, whole, op, dtype=dtype, **scale).wait()
            mine = wanted[me * count : (me + 1) * count]
            assert np.array_equal(part, mine), ("reduce_scatter", op, dtype, members)
            assert np.array_equal(whole, inputs[me])
            comm.all_reduce(whole, None, op, dtype=dtype, **scale).wait()
            assert np.array_equal(whole, wanted), ("in place", op, dtype, members)

with offcore.Communicator(
    backend="host", store=store, rank=rank, world_size=ranks, timeout=30
) as comm:
    members = [one for one in reversed(range(ranks)) if one % 2 == rank % 2]
    with comm.split(rank % 2, key=ranks - rank) as group:
        assert (group.ranks, group.local_ranks) == (len(members), [members.index(rank)])
        for turn in range(2):  # the group and the communicator in turns
            reduce(group, members, turn)
            reduce(comm, list(range(ranks)), turn)
    reduce(comm, list(range(ranks)), 2)
"""


@pytest.mark.not_tsan("peers' words, which it does not see, order a chunk's sending and its result")
def test_reductions_of_groups_of_processes() -> None:
    """To the bit: sources in the order of the group, which is not that of the communicator."""
    store = free_store()
    path = os.pathsep.join([ROOT, TESTS])
    group = [
        subprocess.Popen(
            [sys.executable, "-c", REDUCING, store, str(rank), "5"],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(5)
    ]
    try:
        for rank, process in enumerate(group):
            told, _ = process.communicate(timeout=60)
            assert process.returncode == 0, f"rank {rank}: {told}"
    finally:
        for process in group:
            process.kill()


def test_what_cannot_be_split() -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        with pytest.raises(Error, match="live in this process") as told:
            comm.split(0)
        assert told.value.code == "unsupported"

    def work(comm: offcore.Communicator, _: int) -> str:
        with pytest.raises(Error) as told:
            comm.split(-1)
        return str(told.value.code)

    assert as_ranks(2, work) == ["invalid", "invalid"]


def logged(level: str) -> list[str]:
    code = """
import offcore
with offcore.Communicator(backend="host", ranks=2) as comm:
    out = comm.window(200)
    for _ in range(3):
        comm.all_gather(out, variant="b2b").wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": ROOT, "OFFCORE_LOG": level},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == (level == "loud"), done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_the_log_tells_what_was_chosen_once() -> None:
    assert logged("off") == []
    lines = logged("info")
    assert all(line.startswith("offcore: 2 ranks: ") for line in lines)
    [chosen] = [line for line in lines if "all_gather" in line]
    assert "new: " in chosen
    assert "b2b, barrier, fenced" in chosen
    assert len([line for line in logged("debug") if "all_gather" in line]) == 3
    assert "OFFCORE_LOG is 'loud': it must be one of off, info, debug" in logged("loud")[-1]


def test_ranges_around_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class annotate:  # noqa: N801 - what nvtx calls it
        def __init__(self, name: str, domain: str) -> None:
            self.name = f"{domain}: {name}"

        def __enter__(self) -> None:
            names.append(self.name)

        def __exit__(self, *_: object) -> None:
            names.append("end")

    monkeypatch.setenv("OFFCORE_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(annotate=annotate))
    with offcore.Communicator(backend="host", ranks=2) as comm:
        out = comm.window(200)
        assert comm.all_gather(out).wait().op == "all_gather"
        comm.requests([out.region(0, 128)]).stop()
    assert names == ["offcore: offcore.all_gather", "end"]
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(Error, match=r"pip install 'offcore\[nvtx\]'") as told:
        offcore.Communicator(backend="host", ranks=2)
    assert told.value.code == "unavailable"
