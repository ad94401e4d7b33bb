"""Calls of a communicator: what is retried, what fails alone, what a program is bound to."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offcore
from offcore import Error, machines
from stores import as_ranks, free_store

Array = np.ndarray[Any, Any]


def as_two(work: Callable[[offcore.Communicator, int], Any], timeout: float = 30) -> list[Any]:
    """What `work(comm, rank)` returns, with each of two ranks a thread."""
    return as_ranks(2, work, timeout)


def sent(rank: int, call: int) -> Array:
    return np.arange(64, dtype=np.uint8) + np.uint8(rank * 100 + call)


def gathered(call: int) -> Array:
    return np.concatenate([sent(0, call), sent(1, call)])


def outputs() -> list[Array]:
    return [np.zeros(128, np.uint8) for _ in range(2)]


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_a_prelaunched_variant_of_the_environment_is_bound_to_its_buffers(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFCORE_VARIANT", "prelaunch_b2b")
    with offcore.Communicator(backend=backend, ranks=2) as comm:
        for call in range(4):
            out = outputs()
            result = comm.all_gather(out, [sent(rank, call) for rank in range(2)]).wait()
            assert result.variant == "prelaunch_b2b"
            for array in out:
                assert (array == gathered(call)).all()


def test_a_tuned_prelaunch_is_bound_to_its_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tuned").mkdir()
    row = {
        "op": "all_gather",
        "ranks": 2,
        "in_place": False,
        "bytes_min": 0,
        "bytes_max": 1 << 20,
        "bytes": 1024,
        "variant": "prelaunch_pcpy",
        "time_us": 1.0,
        "signals": None,
        "entry": True,
        "staged": False,
        "date": "2026-01-01",
        "commit": "abc",
    }
    (tmp_path / "tuned" / "h200-2.json").write_text(json.dumps([row]))
    shutil.copy(Path(__file__).parents[2] / "machines" / "h200-2.json", tmp_path)
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    assert [tuned.variant for tuned in machines.load("h200-2").tuned] == ["prelaunch_pcpy"]
    with offcore.Communicator(backend="sim", machine="h200-2") as comm:
        for call in range(3):
            out = outputs()
            result = comm.all_gather(out, [sent(rank, call) for rank in range(2)]).wait()
            assert (result.variant, result.tuned) == ("prelaunch_pcpy", True)
            assert all((array == gathered(call)).all() for array in out)


def test_a_first_call_that_timed_out_may_be_repeated() -> None:
    late = threading.Event()

    def work(comm: offcore.Communicator, rank: int) -> list[bool]:
        out = comm.empty(128)
        if rank == 0:
            comm.timeout = 0.1
            for _ in range(3):
                with pytest.raises(
                    Error, match="rank 1 has not reached call 0 of lane 0"
                ) as raised:
                    comm.all_gather(out, sent(rank, 0))
                assert raised.value.code == "timeout"
            comm.timeout = 30
            late.set()
        late.wait(30)
        right = []
        for call in range(4):
            comm.all_gather(out, sent(rank, call)).wait()
            right.append(bool((out == gathered(call)).all()))
            comm.barrier()
        return right

    assert as_two(work) == [[True] * 4] * 2


def test_a_bad_name_is_refused_before_any_rank_hears_of_the_call() -> None:
    def work(comm: offcore.Communicator, rank: int) -> bool:
        out = comm.empty(128)
        if rank == 0:
            for names in ({"variant": "pcopy"}, {"protocol": "none"}):
                with pytest.raises(Error, match="known are") as raised:
                    comm.all_gather(out, sent(rank, 0), **names)
                assert raised.value.code == "invalid"
        comm.all_gather(out, sent(rank, 1)).wait()
        return bool((out == gathered(1)).all())

    assert as_two(work) == [True, True]


ALONE = """\
import resource, sys
import numpy as np
import offcore
rank = int(sys.argv[2])
comm = offcore.Communicator(backend="host", machine="mi300x-8", store=sys.argv[1], rank=rank,
                            world_size=2, timeout=20)
out = comm.empty(200)
comm.barrier()
if rank == 1:  # no file descriptor is left for the scratch of an unaligned swap
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    comm.all_to_all(out, variant="swap").wait()
except offcore.Error as error:
    print(error.code, error)
"""


def test_a_rank_that_fails_alone_tells_its_peers(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--sanitized"):
        pytest.skip("a sanitizer's runtime cannot do without file descriptors")
    store = free_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, store, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=15)[0] for rank in ranks]
    assert said[1].startswith(("memory ", "driver "))
    assert said[0].startswith("peer rank 1 died or aborted")


def test_an_own_abort_is_cancelled_and_a_peers_is_not() -> None:
    aborted = threading.Event()

    def work(comm: offcore.Communicator, rank: int) -> str:
        out = comm.empty(128)
        comm.all_gather(out, sent(rank, 0)).wait()
        if rank == 0:
            handle = comm.all_gather(out, sent(rank, 1))
            threading.Timer(0.05, comm.abort).start()
            with pytest.raises(Error, match=r"aborted by this rank: .*queue 0\.") as raised:
                handle.wait()
            aborted.set()
            assert raised.value.code == "cancelled"
        aborted.wait(30)
        with pytest.raises(Error) as raised:
            comm.all_gather(out, sent(rank, 2))
        return str(raised.value.code)

    assert as_two(work) == ["cancelled", "peer"]


def test_a_dead_rank_0_is_no_abort() -> None:
    fault = {"kind": "dead_rank", "rank": 0}
    with offcore.Communicator(backend="sim", machine="h200-2", faults=[fault]) as comm:
        for _ in range(2):
            with pytest.raises(Error, match="rank 0") as raised:
                comm.all_gather(outputs(), [sent(rank, 0) for rank in range(2)]).wait()
            assert raised.value.code == "peer"


NO_TIMES = [(float("nan"), "invalid"), (-1.0, "invalid"), (-1e300, "invalid"), (0.0, "timeout")]


@pytest.mark.parametrize(("wait_s", "code"), NO_TIMES)
def test_no_time_is_no_time(wait_s: float, code: str) -> None:
    def work(comm: offcore.Communicator, rank: int) -> str:
        out = comm.empty(128)
        comm.all_gather(out, sent(rank, 0)).wait(float("inf"))
        if rank == 1:
            return ""
        handle = comm.all_gather(out, sent(rank, 1))
        with pytest.raises(Error) as raised:
            handle.wait(wait_s)
        return str(raised.value.code)

    assert as_two(work) == [code, ""]


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_buffers_of_local_ranks_lie_apart(backend: str) -> None:
    shared = np.zeros(192, np.uint8)
    inputs = [sent(rank, 0) for rank in range(2)]
    apart = outputs()
    with offcore.Communicator(backend=backend, ranks=2) as comm:
        bad: list[Callable[[], Any]] = [
            lambda: comm.all_gather([shared[:128], shared[:128]], inputs),
            lambda: comm.all_gather([shared[:128], shared[64:]], inputs),
            lambda: comm.all_gather([apart[0], apart[1]], [inputs[0], apart[0][64:]]),
            lambda: comm.all_gather([apart[0], apart[1]], [apart[1][:64], inputs[1]]),
            lambda: comm.broadcast([shared[:64], shared[:64]]),
            lambda: comm.gather([shared[:128], None], [inputs[0], shared[64:128]]),
        ]
        for call in bad:
            with pytest.raises(Error, match="buffers of ranks 0 and 1 overlap") as raised:
                call()
            assert raised.value.code == "invalid"
        # Readers may share, and what an operation does not touch is nobody's business.
        comm.all_gather(apart, [inputs[0], inputs[0]]).wait()
        assert (apart[1] == np.tile(inputs[0], 2)).all()
        comm.gather([shared[:128], shared[:128]], [inputs[0], inputs[0]]).wait()
        assert (shared[:128] == np.tile(inputs[0], 2)).all()
        comm.broadcast([shared[:64], shared[64:128]], [inputs[1], shared[128:]]).wait()
        assert (shared[64:128] == inputs[1]).all()


def test_an_operation_of_a_dead_rank_has_ended_and_a_stuck_one_has_not() -> None:
    for kind, ended, code in (("dead_rank", True, "peer"), ("lost_signal", False, "timeout")):
        fault = {"kind": kind, "rank": 0}
        with offcore.Communicator(backend="sim", machine="h200-2", faults=[fault]) as comm:
            handle = comm.all_gather(outputs(), [sent(rank, 0) for rank in range(2)])
            assert handle.done() == ended
            with pytest.raises(Error) as raised:
                handle.wait()
            assert raised.value.code == code
