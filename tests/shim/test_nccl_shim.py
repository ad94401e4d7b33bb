"""The NCCL shim in front of a stand-in NCCL, on the stand-in driver."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_library import ROOT, fake_cuda_library

RANK = Path(__file__).with_name("nccl_rank.py")
LIMIT_S = 60
ALL = (
    "all_gather=8K,all_to_all=8K,all_reduce=8K,reduce_scatter=8K,broadcast=8K,gather=8K,scatter=8K"
)


def shim() -> Path:
    spec = importlib.util.find_spec("offcore")
    assert spec is not None
    return Path(str(spec.origin)).with_name("liboffcore_nccl.so")


pytestmark = pytest.mark.skipif(not shim().exists(), reason="no shim was built on this machine")


def environment(**given: str) -> dict[str, str]:
    stand_in = fake_cuda_library().with_name("libnccl.so.2")
    told = {
        "OFFCORE_LIBCUDA": str(fake_cuda_library()),
        "OFFCORE_NCCL_LIBRARY": str(stand_in),
        "OFFCORE_NCCL_MIN_BYTES": "all_reduce=8K",
        "OFFCORE_NCCL_REPORT": "1",
        "TEST_NCCL": str(shim()),
        "TEST_STAND_IN": str(stand_in),
    }
    return {name: value for name, value in (os.environ | told | given).items() if value}


def unique_id() -> str:
    made = ctypes.create_string_buffer(128)
    assert ctypes.CDLL(environment()["TEST_STAND_IN"]).ncclGetUniqueId(made) == 0
    return made.raw.hex()


def start(
    case: str, ranks: int, last: dict[str, str] | None = None, **given: str
) -> list[subprocess.Popen[str]]:
    """`last`: the last rank's own variables."""
    uid = unique_id()
    own = [given] * (ranks - 1) + [given | (last or {})]
    return [
        subprocess.Popen(
            [sys.executable, str(RANK), case, str(rank), str(ranks), uid],
            env=environment(**own[rank]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def end(started: list[subprocess.Popen[str]]) -> tuple[list[dict[str, Any]], str]:
    """What the ranks told last, and all that they said on stderr."""
    told, said = [], ""
    for process in started:
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out + err
        told.append(json.loads(out.splitlines()[-1]))
        said += err
    return told, said


def run(
    case: str, ranks: int, last: dict[str, str] | None = None, **given: str
) -> tuple[list[dict[str, Any]], str]:
    return end(start(case, ranks, last, **given))


def test_every_collective_from_its_size_on() -> None:
    told, said = run("collectives", 2, OFFCORE_NCCL_MIN_BYTES=ALL)
    assert told[0] == told[1]
    # By NCCL's all-gathers ranks meet, three more times to settle, and twice at a size.
    assert {name: counts for name, counts in told[0].items() if name != "AllGather"} == {
        name: [1, 0, 0] for name in told[0] if name != "AllGather"
    }
    assert told[0]["AllGather"] == [2, 5, 0]
    assert said.count("2 ranks: ") == 1
    assert "all_reduce from 8 KiB" in said
    assert "by copy engines; all else by NCCL 2.28.9" in said
    assert "all_reduce 2 taken, 1 forwarded" in said


def test_what_is_not_ours() -> None:
    told, _ = run("not_ours", 2)
    assert [one["operations"] for one in told] == [2, 2]
    assert [one["captured"] for one in told] == [1, 1]


def test_groups() -> None:
    told, _ = run("groups", 2)
    assert [one["calls"] for one in told] == [[0, 2], [0, 2]]


def test_sends_in_a_group_do_not_decide_where_a_reduction_goes() -> None:
    """Other ranks may have none in theirs."""
    told, _ = run("uneven_groups", 3)
    assert [one["calls"] for one in told] == [[0, 0]] * 3
    assert [one["sends"] for one in told] == [2, 2, 0]


@pytest.mark.parametrize("given", [{}, {"OFFCORE_FAKE_CUDA_NO_PEER": "1"}])
def test_communicators_that_do_not_block(given: dict[str, str]) -> None:
    """What a group has begun is under way before its reduction comes, whosever that is."""
    told, _ = run("uneven_groups", 3, FAKENCCL_NO_BLOCK="1", TEST_END="7", **given)
    assert [one["calls"] for one in told] == [[1, 1] if given else [0, 0]] * 3


@pytest.mark.parametrize("stream", ["0", "1"])  # one that is made; the default one
def test_communicators_of_a_group_may_come_in_any_order(stream: str) -> None:
    told, said = run("crossed_groups", 2, TEST_STREAM=stream)
    assert [one["calls"] for one in told] == [[0, 0, 0]] * 2
    assert said.count("all_reduce 3 taken, 0 forwarded") == 4


def test_ranks_that_leave_one_behind_wait_no_more() -> None:
    started = start("shrunk", 2)
    out, said = started[0].communicate(timeout=LIMIT_S)
    assert started[0].returncode == 0, said
    assert json.loads(out)["shrunk"] == 2
    started[1].communicate("\n", timeout=LIMIT_S)


def test_a_communicator_that_is_not_ready_is_told() -> None:
    """And is asked again: one rank must not go by NCCL alone."""
    told, said = run("not_ready", 2, {"FAKENCCL_NOT_READY": "1"})
    assert [one["codes"] for one in told] == [[0], [4, 0]]
    assert [one["calls"] for one in told] == [0, 0]
    assert "NCCL's CommCount gives 4" in said


def test_gathers_in_place_at_their_root_are_not_ours() -> None:
    """All the rest stays so."""
    told, said = run("rooted_in_place", 2, OFFCORE_NCCL_MIN_BYTES=ALL, OFFCORE_TIMEOUT_S="2")
    assert told == [{"Gather": 2, "Scatter": 2, "AllReduce": 0}] * 2
    assert "everything goes by NCCL" not in said


def test_parts_of_the_ranks() -> None:
    told, said = run("split", 4)
    assert [one["taken"] for one in told] == [0] * 4
    assert "all_reduce 2 taken, 0 forwarded" in said


def test_registered_memory() -> None:
    told, said = run("windows", 2, OFFCORE_NCCL_MIN_BYTES="registered_all_gather=8K")
    # One more to meet, three to settle; then one to register and two to agree on the first of ours.
    assert [one["taken"] for one in told] == [[5, 3, 0, 1]] * 2
    assert "all_gather of registered memory from 8 KiB" in said


@pytest.mark.parametrize("last", [{}, {"TEST_ALONE": "1"}])
def test_windows_of_a_group(last: dict[str, str]) -> None:
    """They are registered in whatever order, before its collectives. Another rank need not have a
    group."""
    told, said = run("grouped_windows", 2, last, OFFCORE_NCCL_MIN_BYTES="registered_all_gather=8K")
    each = 7  # of both: to meet, settle, register and agree
    assert [one["taken"] for one in told] == [[2 * each] * 2] * 2
    assert said.count("all_gather 2 taken, 0 forwarded") == 4


def test_an_abort_is_told() -> None:
    started = start("aborted", 2)
    assert started[0].stdout is not None
    assert started[0].stdout.readline() == "started\n"
    assert started[1].stdin is not None
    started[1].stdin.write("\n")
    started[1].stdin.flush()
    (first, _), _ = end(started)
    assert first["state"] == 6
    assert first["code"] == 6
    # By the communicator, and by none, as torch asks; not of another one, and not once it is gone.
    told = ["rank 1 died or aborted" in text for text in first["told"]]
    assert told == [True, True, False, False]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"OFFCORE_FAKE_CUDA_NO_PEER": "1"}, "no peer access"),
        (
            {"OFFCORE_FAKE_CUDA_NAME": "NVIDIA A100", "OFFCORE_NCCL_MIN_BYTES": ""},
            "nothing is known to be faster on 2 x NVIDIA A100",
        ),
        ({"OFFCORE_FAKE_CUDA_FAIL": "cuMemCreate:1"}, "cannot allocate"),
    ],
)
def test_what_cannot_be_goes_by_nccl(given: dict[str, str], why: str) -> None:
    told, said = run("plain_reduce", 2, **given)
    assert [one["calls"] for one in told] == [2, 2]
    assert said.count("everything goes by NCCL: ") == 1
    assert why in said


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ({"OFFCORE_FAKE_CUDA_FAIL": "cuMemCreate:1"}, "rank 1: cannot allocate"),
        ({"OFFCORE_FAKE_CUDA_FAIL": "cuMemCreate:5"}, "all_reduce of 8 KiB: rank"),
    ],
)
def test_what_fails_on_one_rank_goes_by_nccl_on_all(last: dict[str, str], why: str) -> None:
    told, said = run("plain_reduce", 2, last, OFFCORE_TIMEOUT_S="2")
    assert [one["calls"] for one in told] == [2, 2]
    assert f"everything goes by NCCL: {why}" in said


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("all_reduce=8K", "all_reduce=4K"),
        ("all_reduce=8K", ""),
        ("", "all_reduce=8K"),
        ("never", "all_reduce=8K"),
        ("", "never"),
    ],
)
def test_sizes_that_differ_go_by_nccl_on_all(first: str, last: str) -> None:
    """Also where a rank would never ask the others."""
    told, said = run(
        "plain_reduce", 2, {"OFFCORE_NCCL_MIN_BYTES": last}, OFFCORE_NCCL_MIN_BYTES=first
    )
    assert [one["calls"] for one in told] == [2, 2]
    why = "OFFCORE_NCCL_MIN_BYTES of ranks 0 and 1 differ"
    assert said.count(f"everything goes by NCCL: {why}") == 1
    assert said.count(f"2 forwarded; all by NCCL: {why}") == 2


def test_sizes_that_differ_where_one_rank_would_register_windows() -> None:
    last = {"OFFCORE_NCCL_MIN_BYTES": ""}
    first = {"OFFCORE_NCCL_MIN_BYTES": "registered_all_gather=8K", "TEST_ALONE": "1"}
    told, said = run("grouped_windows", 2, last, **first)
    assert [one["taken"] for one in told] == [[4, 6]] * 2  # one of each to meet; then NCCL's
    assert said.count("everything goes by NCCL: OFFCORE_NCCL_MIN_BYTES") == 1


def test_a_late_rank_is_waited_for() -> None:
    told, _ = run("plain_reduce", 2, {"TEST_LATE_S": "1"}, OFFCORE_TIMEOUT_S="0.3")
    assert [one["calls"] for one in told] == [0, 0]


def test_a_killed_rank_is_told() -> None:
    started = start("aborted", 2)
    assert started[0].stdout is not None
    assert started[0].stdout.readline() == "started\n"
    started[1].kill()
    out, _ = started[0].communicate(timeout=LIMIT_S)
    started[1].communicate(timeout=LIMIT_S)
    assert json.loads(out)["state"] == 6


def test_two_ranks_in_one_process() -> None:
    told, said = run("threads", 1)
    assert [one["codes"] for one in told[0]["told"]] == [[0, 0, 0]] * 2
    assert [one["calls"] for one in told[0]["told"]] == [0, 0]
    assert said.count("all_reduce 3 taken, 0 forwarded") == 2


def test_one_thread_of_two_gpus_goes_by_nccl() -> None:
    """And so does a rank of its communicator in another process."""
    told, said = run("one_thread", 2)
    assert [one["calls"] for one in told] == [[2, 2], [1, 1]]
    assert "everything goes by NCCL: one thread drives ranks 0 and 1" in said


def test_default_streams_of_a_thread_on_two_gpus() -> None:
    """Of communicators that each have the thread once."""
    told, said = run("streams_of_thread", 2)
    assert [one["calls"] for one in told] == [[0, 0, 0]] * 2
    assert said.count("all_reduce 3 taken, 0 forwarded") == 4


def names() -> list[str]:
    """All that the shim exports and the stand-in has, but what changes something."""
    text = (ROOT / "shim" / "names.h").read_text("utf-8")
    plain = sorted(set(re.findall(r"\bnccl[A-Z]\w+", text)))
    return [*plain, *(f"p{name}" for name in plain)]


def test_every_name_is_exported_and_passed_on() -> None:
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(shim())], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[2] for line in exported.splitlines()} == set(names())
    effects = re.compile(
        r"^ncclComm(Init|Destroy|Abort|Split|Count|UserRank|CuDevice|Window|GetAsync)|^ncclGet|"
        r"^nccl(AllGather|AlltoAll|AllReduce|ReduceScatter|Broadcast|Bcast|Gather|Scatter)$|"
        r"^nccl(TeamWorld|PutSignal)$|"
        r"^ncclScatterConfig$"
    )
    told, said = run(
        "forwarded", 1, TEST_NAMES=" ".join(n for n in names() if not effects.match(n))
    )
    assert told[0]["lost"] == []
    assert told[0]["sums"] == [66, 66]
    assert told[0]["team"] == [7, 5, 3]
    assert told[0]["lacking"] == 5
    assert told[0]["words"] == "stand-in"
    assert said.count("has no ncclScatterConfig") == 1


@pytest.mark.parametrize("mode", ["0", "256"])  # RTLD_LOCAL, RTLD_GLOBAL
def test_preloaded(mode: str) -> None:
    told, said = run(
        "preloaded",
        2,
        LD_PRELOAD=str(shim()),
        LD_LIBRARY_PATH=str(fake_cuda_library().parent),
        OFFCORE_NCCL_LIBRARY="",
        TEST_NCCL="",
        TEST_NCCL_MODE=mode,
    )
    assert [one["calls"] for one in told] == [1, 1]
    assert "all_reduce 1 taken, 1 forwarded" in said


def test_the_command_line_tells_where_it_is() -> None:
    command = [sys.executable, "-m", "offcore.tools.cli", "nccl-shim"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{shim()}\n"
    assert "LD_PRELOAD=$(offcore nccl-shim)" in done.stderr


def test_a_missing_library_is_told() -> None:
    told, said = run("missing", 1, OFFCORE_NCCL_LIBRARY="/nowhere/libnccl.so.2")
    assert told[0]["code"] == 2
    assert told[0]["reduced"] == 2
    assert "OFFCORE_NCCL_LIBRARY" in told[0]["words"]
    assert "/nowhere/libnccl.so.2" in said


def test_a_wrong_size_is_told() -> None:
    told, said = run("wrong_size", 2, OFFCORE_NCCL_MIN_BYTES="all_reduce=many")
    assert [one["code"] for one in told] == [4, 4]
    assert "OFFCORE_NCCL_MIN_BYTES: 'all_reduce=many'" in said
