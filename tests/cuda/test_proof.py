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
from gpu_loop_calls import CONTROL, Span, judge_calls  # noqa: E402
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


def loop_records() -> list[dict[str, Any]]:
    """Of loops between 100 and 200 whose CPU only submits copies, and of launches after 300."""
    loops = [{"kind": "kernel", "name": "offcore_loop", "start": 50, "end": 250} for _ in range(2)]
    copies = [{"kind": "call", "name": "cuMemcpyBatchAsync", "start": at} for at in (20, 120, 160)]
    launch = {"kind": "call", "name": "cuLaunchCooperativeKernel", "start": 40}
    control = [{"kind": "call", "name": "cuLaunchKernel", "start": 310 + at} for at in range(20)]
    control += [one | {"kind": "kernel", "end": one["start"] + 1} for one in control]
    return [{"kind": "ready"}, *loops, launch, *copies, *control]


SPANS = [Span("proxy", 100, 200, [500, 480]), Span(CONTROL, 300, 400, [20, 20])]


def judged(records: list[dict[str, Any]], spans: list[Span] = SPANS) -> list[str]:
    return judge_calls([json.dumps(one) for one in records], spans)


def test_what_the_cpu_calls_beside_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(loop_records()) == []
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["launches"], one["kernels begun"], one["copies"]) for one in told] == [
        (0, 0, 2),
        (20, 20, 0),
    ]
    assert told[0]["iterations"] == [500, 480]
    assert told[0]["calls"] == {"cuMemcpyBatchAsync": 2}


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"kind": "call", "name": "cuGraphLaunch", "start": 150}, "1 launches, 0 kernels begun"),
        ({"kind": "kernel", "name": "copy", "start": 150, "end": 151}, "0 launches, 1 kernels"),
        ({"kind": "kernel", "name": "other", "start": 1, "end": 900}, "that ran throughout"),
        ({"kind": "lost", "count": 3}, "CUPTI lost 3 records"),
    ],
)
def test_launches_beside_a_loop_are_told(more: dict[str, Any], wrong: str) -> None:
    [told] = judged([*loop_records(), more])
    assert wrong in told


def test_a_recorder_that_sees_nothing_proves_nothing() -> None:
    told = judged([{"kind": "ready"}], [Span("armed", 100, 200, [3, 900]), SPANS[1]])
    assert [one.partition(":")[0] for one in told] == ["armed"] * 3 + ["control"]
    assert "only 3 iterations" in told[0]
