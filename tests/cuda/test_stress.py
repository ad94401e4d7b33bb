"""The stress of the signal forms, and what `signals="auto"` makes of it, on the stand-in driver."""

import json
import subprocess
from pathlib import Path

import pytest
from test_cuda import run, start

from stores import free_store

TRIALS = """
from offcore import _core
from offcore.comm import signal_forms
stressed = _core.Stress(list(range(int(sys.argv[1]))))

def trial(signals, shape, size, planted=False, operations=100):
    return stressed.run(signals=signals, shape=shape, planted=planted, chunk_bytes=size,
                        operations=operations, timeout_s=10)
"""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_both_forms_hold_where_copies_stay_in_order(ranks: int) -> None:
    code = """
    for signals in signal_forms.FORMS:
        for shape in signal_forms.SHAPES:
            for size in (4, 1024, 65536):
                seen = trial(signals, shape, size)
                assert (seen.operations, seen.wrong_words, seen.stuck) == (100, 0, False), (
                    signals, shape, size, seen.wrong_words)
    """
    assert run(code, str(ranks), prelude=TRIALS) == ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_flags_before_data_are_seen(ranks: int) -> None:
    code = """
    for size in (1024, 65536):
        seen = trial("fenced", "bcst", size, planted=True)
        assert seen.wrong_words > 0 and not seen.stuck
        clean = trial("fenced", "bcst", size)  # and nothing of it is left
        assert clean.wrong_words == 0 and clean.operations == 100
    """
    assert run(code, str(ranks), prelude=TRIALS) == ""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_that_overtake_are_seen(ranks: int) -> None:
    """Where copies of a stream overtake each other only the write-value's fence helps."""
    code = """
    for shape in signal_forms.SHAPES:
        for size in (1024, 65536):
            assert trial("copy_order", shape, size).wrong_words > 0, (shape, size)
            assert trial("fenced", shape, size).wrong_words == 0, (shape, size)
    """
    assert run(code, str(ranks), prelude=TRIALS, OFFCORE_FAKE_CUDA_LOOSE="1") == ""


def test_a_flag_that_never_comes_ends_the_trial() -> None:
    code = """
    began = time.monotonic()
    seen = stressed.run(signals="fenced", shape="bcst", planted=False, chunk_bytes=1024,
                        operations=10, timeout_s=0.5)
    assert seen.stuck and time.monotonic() - began < 5
    del stressed
    assert not any(live().values()), live()
    """
    assert run(code, "3", prelude=TRIALS, OFFCORE_FAKE_CUDA_STRIDED_RIGHT="20") == ""


def test_a_trial_that_is_cut_off_saw_nothing_wrong() -> None:
    """What its readers find once they are let go of, before the data, is nobody's fault."""
    code = """
    for signals in signal_forms.FORMS:
        seen = stressed.run(signals=signals, shape="fan", planted=False, chunk_bytes=262144,
                            operations=100_000, timeout_s=0.2)
        # On a busy machine a round may end just as the time does: then no flag is missing.
        assert seen.stuck or seen.operations < 100_000, signals
        assert seen.wrong_words == 0, (signals, seen.wrong_words)
        after = trial(signals, "fan", 1024)
        assert (after.operations, after.wrong_words, after.stuck) == (100, 0, False)
    """
    assert run(code, "3", prelude=TRIALS) == ""


def test_a_trial_that_fails_half_way() -> None:
    code = """
    code, told = code_of(lambda: trial("fenced", "bcst", 1024, operations=10))
    assert code == "memory", (code, told)  # what the driver was told to say
    seen = trial("fenced", "bcst", 1024)  # all was let go
    assert (seen.operations, seen.wrong_words, seen.stuck) == (100, 0, False)
    for wrong in ({"size": 3}, {"size": 1 << 20}, {"shape": "swap"}, {"signals": "loose"}):
        given = {"signals": "fenced", "shape": "fan", "size": 1024} | wrong
        assert code_of(lambda: trial(**given))[0] == "invalid", wrong
    del stressed
    assert not any(live().values()), live()
    """
    assert run(code, "3", prelude=TRIALS, OFFCORE_FAKE_CUDA_FAIL="cuMemcpy2DAsync:20") == ""


def test_auto_is_what_the_stress_has_shown(tmp_path: Path) -> None:
    doctor = """
    from offcore.tools.cli.main import main
    sys.argv = ["offcore", "doctor", "--stress", "--operations", "500", *sys.argv[1:]]
    main()
    """
    auto = """
    comm = opened(2)
    out = comm.window(2000)
    print(comm.all_gather(out).wait().signals, end="")
    """
    env = {"OFFCORE_CACHE": str(tmp_path / "cache"), "OFFCORE_FAKE_CUDA_DEVICES": "3"}
    assert run(auto, **env) == "fenced"  # nothing is known
    told = run(doctor, **env)
    assert "signals='auto' is copy_order" in " ".join(told.split())
    assert run(auto, **env) == "copy_order"
    assert run(auto, **env, OFFCORE_FAKE_CUDA_NAME="another GPU") == "fenced"
    assert run(auto, **env, OFFCORE_FAKE_CUDA_DRIVER="13010") == "fenced"  # another driver

    told = run(doctor, "--json", "-", **env, OFFCORE_FAKE_CUDA_LOOSE="1")
    rows = {row["signals"]: row for row in map(json.loads, told.splitlines()[:2])}
    assert [rows[form]["passed"] for form in ("fenced", "copy_order")] == [True, False]
    assert rows["copy_order"]["wrong_words"] > 0
    assert rows["copy_order"]["planted_wrong_words"] > 0
    assert run(auto, **env) == "fenced"  # the newer verdict has replaced the older one

    (tmp_path / "cache" / "signals.json").write_text("{")
    assert run(auto, **env) == "fenced"


def test_ranks_have_one_form(tmp_path: Path) -> None:
    """Where only rank 0 knows of a stress its choice is everybody's; different wishes are told."""
    verdict = {
        "driver": "CUDA 13.0", "gpu": "NVIDIA H200 (stand-in)", "signals": "copy_order",
        "passed": True, "told": "", "operations": 1, "wrong_words": 0, "planted_wrong_words": 1,
        "strided": True, "gpus": 4, "date": "2026-01-01",
    }  # fmt: skip
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "signals.json").write_text(json.dumps([verdict]))
    code = """
    store, rank, signals, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    def made():
        comm = offcore.Communicator(backend="cuda", store=store, rank=rank, world_size=2,
                                    timeout=20, signals=signals)
        print(comm.all_gather(comm.window(2000)).wait().signals)
    code, told = code_of(made)
    print(code, told)
    sys.exit(code != wanted)
    """
    for wishes, wanted, words in (
        (("auto", "auto"), "", "copy_order"),
        (("fenced", "auto"), "mismatch", "rank 1 for auto"),
    ):
        store = free_store()
        group = [
            start(code, store, str(rank), wish, wanted, OFFCORE_CACHE=str(tmp_path / str(rank)))
            for rank, wish in enumerate(wishes)
        ]
        told = [process.communicate(timeout=60)[0] for process in group]
        assert [process.returncode for process in group] == [0, 0], told
        assert words in told[0], told
        assert words in told[1] or wanted, told


@pytest.mark.needs("ptxas")
def test_the_kernels_assemble(tmp_path: Path) -> None:
    """As the driver compiles them, for the GPUs from Turing to Blackwell."""
    source = Path(__file__).parents[2] / "studies" / "proof" / "resident.cpp"
    text = source.read_text("utf-8").split('R"(')[1].split(')";')[0]
    (tmp_path / "kernels.ptx").write_text(text)
    for target in ("sm_75", "sm_90", "sm_100"):
        command = ["ptxas", f"-arch={target}", "kernels.ptx", "-o", "kernels.cubin"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_doctor_tells_of_the_gpus(tmp_path: Path) -> None:
    doctor = """
    from offcore.tools.cli.main import main
    sys.argv = ["offcore", "doctor", *sys.argv[1:]]
    main()
    """
    env = {"OFFCORE_CACHE": str(tmp_path), "OFFCORE_FAKE_CUDA_NO_PEER": "0-1"}
    env |= {"OFFCORE_FAKE_CUDA_DEVICES": "3"}
    found = json.loads(run(doctor, "--json", "-", **env))["cuda"]
    assert found["driver"].endswith("CUDA 13.0") or "(CUDA 13.0)" in found["driver"]
    assert [gpu["peers"] for gpu in found["gpus"]] == [[2], [2], [0, 1]]
    assert (found["signals"], found["multicast"]) == ("fenced", "never used")
    assert "offcore doctor --stress" in found["signals_why"]
    shown = run(doctor, **env)
    for words in ("NVIDIA H200 (stand-in)", "0000:10:00.0", "never used", "NUMA node"):
        assert words in shown, shown
