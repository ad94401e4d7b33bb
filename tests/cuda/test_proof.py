"""The proofs that no SM is used: the blocks that hold every SM, and what CUPTI's records are judged
by. On the stand-in driver, which knows what takes SMs on a GPU; CUPTI itself needs one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_library import fake_cuda_library
from test_cuda import ROOT, run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from gpu_proof import judge  # noqa: E402


@pytest.mark.parametrize("ranks", [2, 4])
def test_operations_end_while_every_sm_is_held(ranks: int) -> None:
    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "PYTHONPATH": ROOT}
    command = [sys.executable, str(BENCHMARKS / "gpu_proof.py"), "--only", "held"]
    done = subprocess.run(
        [*command, "--ranks", str(ranks)],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held: PROVEN" in done.stdout
    for what in ("all_gather in place", "broadcast in place", "all_to_all out of place"):
        assert f"{what}, auto: ended in" in done.stdout
    assert "a copy that may use SMs: waited for the SMs" in done.stdout
    assert done.stdout.count("waited") == 1


def test_what_waits_for_the_sms_does_not_spoil_what_comes_next() -> None:
    code = f"""
    sys.path.append({str(BENCHMARKS)!r})
    from gpu_proof import Cases, hold
    comm = opened(2, own_copy="sm")
    cases = Cases(comm, 4096)
    cases.fill(9)
    for case in cases.all:  # what it needs is there when the SMs are held
        case.start(comm).wait()
        comm.barrier()
    waited = set()
    for turn in range(2):
        cases.fill(turn)
        for case in cases.all:
            trial = hold(comm, case)
            assert trial.faults == [], (case.name, trial.faults)
            assert cases.wrong_bytes(turn, case) == 0, case.name
            if not trial.ended:
                waited.add(case.name)
    plain = [op + " out of place, " + kind for op in ("all_gather", "all_to_all")
             for kind in ("pcpy", "b2b")]  # whose own slice is a copy by itself
    assert set(plain) <= waited, waited
    # What is left to the table may go through slots, and is copied out of them.
    assert all("out of place" in name or "auto" in name for name in waited), waited
    comm.close()
    """
    assert run(code) == ""


def test_what_is_held_and_for_how_long() -> None:
    code = """
    from offcore import _core
    comm = opened(2, own_copy="sm")
    out, inp = comm.window(2000), comm.window(1000)
    comm.all_gather(out, inp, variant="b2b").wait()
    blocks = _core.Occupation([0, 1], 30.0)
    assert blocks.blocks == 2 * 132 * 4 and blocks.holds
    pending = comm.all_gather(out, inp, variant="b2b")  # a copy within the GPU takes SMs
    assert code_of(lambda: pending.wait(0.2))[0] == "timeout"
    assert blocks.holds and not blocks.control_ran
    assert blocks.release() and blocks.control_ran and not blocks.holds
    pending.wait()

    began = time.monotonic()
    blocks = _core.Occupation([1], 0.3)  # nobody releases it
    while blocks.holds:
        assert time.monotonic() - began < 5
        time.sleep(0.01)
    del blocks
    for devices, limit in (([], 1.0), ([0], 0.0), ([0], 1e9)):
        assert code_of(lambda: _core.Occupation(devices, limit))[0] == "invalid", (devices, limit)
    comm.close()
    del comm, out, inp, pending
    assert not any(live().values()), live()
    """
    assert run(code) == ""


def test_no_room_for_the_blocks() -> None:
    code = """
    from offcore import _core
    blocks = _core.Occupation([0], 30.0)
    code, told = code_of(lambda: _core.Occupation([0], 0.3))
    assert code == "driver" and "something else hold the GPU" in told, (code, told)
    assert blocks.holds and not blocks.control_ran
    assert blocks.release()
    """
    assert run(code) == ""


def mark(name: str) -> dict[str, Any]:
    return {"kind": "mark", "name": name}


COPY = {"kind": "memcpy", "device": 0, "stream": 7, "bytes": 4096, "channel": "engine"}
KERNEL = {"kind": "kernel", "device": 0, "stream": 7, "name": "memcpy_kernel"}
ON_SM = COPY | {"channel": "compute"}
CONTROLS = [mark("control: SM copy"), ON_SM, mark("control: kernels"), KERNEL, mark("end")]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([mark("a"), COPY, COPY, mark("b"), COPY, *CONTROLS], ""),
        ([mark("a"), COPY, mark("b"), COPY, KERNEL, *CONTROLS], "b: 1 kernels or fills: memcpy_k"),
        ([mark("a"), COPY, ON_SM, mark("b"), COPY, *CONTROLS], "a: 1 of 2 copies on no engine"),
        ([mark("a"), COPY, mark("b"), *CONTROLS], "b: no copy was recorded"),
        ([mark("a"), COPY, *CONTROLS], "1 of 2 operations were recorded"),
        ([mark("a"), COPY, mark("b"), COPY, mark("end")], "control"),
        ([mark("a"), COPY, {"kind": "lost", "count": 3}, mark("b"), COPY, *CONTROLS], "lost 3"),
    ],
)
def test_how_records_are_judged(records: list[dict[str, Any]], words: str) -> None:
    failures = judge([json.dumps(record) for record in [{"kind": "ready"}, *records]], 2)
    assert bool(failures) == bool(words)
    assert words in " ".join(failures)
