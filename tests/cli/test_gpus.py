"""The command line on GPUs: two, by the stand-in driver, one process each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offcore.tools.bench.breakdown import phases_of
from offcore.tools.bench.layout import OPS

ROOT = Path(__file__).parents[2]
QUICK = ("--backend", "cuda", "--iters", "2", "--calls", "3", "--warmup", "1", "--timeout", "10")


@pytest.mark.parametrize("op", OPS)
def test_every_byte_arrives(gpu_cli, op):
    ran = gpu_cli("bench", op, *QUICK, "--sizes", "1,4K,100003", "--json", "-")
    assert ran.status == 0, ran.err
    assert {row["bytes"] for row in ran.records} == {1, 4096, 100003}
    assert {row["wrong"] for row in ran.records} == {0}
    for row in ran.records:
        assert (row["backend"], row["machine"], row["ranks"]) == ("cuda", "h200-2", 2)
        assert (row["mode"], row["timing"], row["signals"]) == ("eager", "chain", "fenced")
        assert row["kernels"] is None
        assert 0 < row["time_us_min"] <= row["time_us"] <= row["time_us_max"]
    assert any(row["variant"].startswith("prelaunch_") for row in ran.records)


def test_rows_of_each_protocol_signal_form_and_timing(gpu_cli):
    ways = ("--protocol", "auto,promise", "--signals", "fenced,copy_order")
    words = ("--in-place", "--sizes", "4K,64K", "--variants", "auto", "--timing", "chain,call")
    ran = gpu_cli("bench", "all_gather", *QUICK, *ways, *words, "--json", "-")
    assert ran.status == 0, ran.err
    told = [(r["bytes"], r["asked"], r["signals"], r["timing"]) for r in ran.records]
    assert len(told) == len(set(told)) == 2 * 2 * 2 * 2
    assert {row["named"] for row in ran.records} == {False}
    promised = {row["protocol"] for row in ran.records if row["asked"] == "promise"}
    assert promised == {"promise"}
    assert {row["wrong"] for row in ran.records} == {0}


def test_rows_tell_what_copied_the_own_slice(gpu_cli):
    words = ("--own-copy", "engine,sm", "--sizes", "4K", "--variants", "pcpy", "--json", "-")
    ran = gpu_cli("bench", "all_to_all", *QUICK, *words)
    assert ran.status == 0, ran.err
    assert [row["own_copy"] for row in ran.records] == ["engine", "sm"]
    assert {row["wrong"] for row in ran.records} == {0}
    words = ("--own-copy", "engine,engines", "--sizes", "4K,64M", "--variants", "pcpy")
    ran = gpu_cli("bench", "all_to_all", *QUICK, *words, "--json", "-")
    assert ran.status == 0, ran.err
    assert [row["own_copy"] for row in ran.records] == [*["engine"] * 3, "engines"]
    assert {row["wrong"] for row in ran.records} == {0}


def test_a_view_in_place_takes_what_next_input_gave(gpu_cli):
    words = ("--in-place", "--protocol", "view", "--sizes", "4K,1M", "--variants", "auto")
    ran = gpu_cli("bench", "all_gather", *QUICK, *words, "--json", "-")
    assert ran.status == 0, ran.err
    assert [(row["in_place"], row["own_copy"]) for row in ran.records] == [(True, "none")] * 2
    assert {row["wrong"] for row in ran.records} == {0}


def test_chains_are_no_longer_than_a_stream_holds(gpu_cli):
    """Swaps of a large array take many commands: fewer calls at once, or none."""
    words = ("--in-place", "--sizes", "32M,1G", "--variants", "swap", "--calls", "40")
    ran = gpu_cli("bench", "all_to_all", *QUICK[:4], *words, "--no-check", "--json", "-")
    assert ran.status == 0, ran.err
    assert [row["bytes"] for row in ran.records] == [32 << 20]
    assert "streams do not hold two ahead" in ran.err


def test_large_sizes_take_fewer_calls_and_no_check_reads_nothing(gpu_cli):
    words = ("--sizes", "32M", "--variants", "pcpy", "--no-check", "--json", "-")
    ran = gpu_cli("bench", "all_gather", *QUICK, *words)
    assert ran.status == 0, ran.err
    assert [row["wrong"] for row in ran.records] == [None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--baseline", "gloo"), "unsupported: --baseline gloo is measured beside --backend host"),
        (("--variants", "swap"), "unsupported: "),
    ],
)
def test_refusals(gpu_cli, words, message):
    ran = gpu_cli("bench", "all_gather", *QUICK, "--sizes", "4K", *words)
    assert ran.status == 1
    assert ran.err.startswith(f"offcore: {message}"), ran.err


def test_without_torch_nccl_is_named_and_left_out(cli_without):
    words = ("--sizes", "4K", "--baseline", "nccl,nccl-ce")
    ran = cli_without(["torch"], "bench", "all_gather", *QUICK, *words, gpus=True)
    assert ran.status == 0, ran.err
    told = "unavailable: needs torch (pip install torch)"
    lines = [f"baseline {name}: {told}" for name in ("nccl", "nccl-ce")]
    assert ran.err.splitlines()[:2] == lines
    assert "fan" in ran.out


@pytest.mark.needs("matplotlib")
def test_breakdown_is_made_of_differences(gpu_cli, tmp_path):
    picture = tmp_path / "phases.svg"
    words = ("--backend", "cuda", "--sizes", "4K,64K", "--json", "-", "--plot", picture)
    ran = gpu_cli("breakdown", *words)
    assert ran.status == 0, ran.err
    assert [row["bytes"] for row in ran.records] == [4096, 65536]
    for row in ran.records:
        assert (row["backend"], row["machine"]) == ("cuda", "h200-2")
        assert sum(row["phases"].values()) == pytest.approx(row["time_us"], abs=0.01)
        assert min(row["phases"].values()) >= 0
        assert row["armed_us"] > 0
    assert "the driver shows no line between them" in ran.err
    assert picture.exists()


@pytest.mark.parametrize(
    ("control_us", "full_us", "copy_us", "empty_us"),
    [
        (6.0, 12.0, 10.0, 5.0),
        (6.0, 25.0, 22.0, 5.0),  # the copy is under way while the host submits the signal
        (6.0, 9.0, 10.0, 11.0),  # differences below the noise
        (6.0, 90.0, 50.0, 5.0),
    ],
)
def test_no_phase_is_negative(
    control_us: float, full_us: float, copy_us: float, empty_us: float
) -> None:
    phases = phases_of(20.0, control_us, full_us, copy_us, empty_us)
    assert sum(phases.values()) == pytest.approx(20.0)
    assert min(phases.values()) >= 0
    assert phases["control_us"] <= control_us


def test_breakdown_of_a_backend_without_engines(offcore_cli):
    ran = offcore_cli("breakdown", "--backend", "host")
    assert ran.status == 1
    assert ran.err.startswith("offcore: unsupported: there is no breakdown of host")


def test_auto_chooses_by_the_table_that_tune_writes(gpu_cli, tmp_path):
    table = tmp_path / "tuned" / "h200-2.json"
    words = ("--sizes", "4K,256K", "--iters", "2", "--calls", "3", "--ops", "all_gather")
    forms = ("--signals", "fenced,copy_order", "--timeout", "10")
    ran = gpu_cli("tune", "--backend", "cuda", *words, *forms, "--out", table)
    assert ran.status == 0, ran.err
    rows = json.loads(table.read_text())
    assert len(rows) == 2 * 3 * 2 * 2  # places; entry round, slots, promised; forms; sizes
    promised, entered, staged = (
        row
        for row in rows
        if row["in_place"] and row["signals"] == "copy_order" and row["bytes"] == 4096
    )
    ways = [(row["entry"], row["staged"]) for row in (promised, entered, staged)]
    assert ways == [(False, False), (True, False), (False, True)]
    slots = staged["time_us"] < 0.97 * entered["time_us"]
    words = ("--in-place", "--sizes", "2K", "--variants", "auto", "--signals", "copy_order")
    env = {"OFFCORE_MACHINES": str(tmp_path)}
    ran = gpu_cli("bench", "all_gather", *QUICK, *words, "--json", "-", env=env)
    assert ran.status == 0, ran.err
    told = [(row["variant"], row["staged"], row["tuned"]) for row in ran.records]
    assert told == [((staged if slots else entered)["variant"], slots, True)]


def test_the_quick_measurement_of_everything(gpu_cli, tmp_path):
    from cuda_library import fake_cuda_library

    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "OFFCORE_FAKE_CUDA_DEVICES": "2"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    largest = ("--largest", "4096")
    done = subprocess.run(
        (sys.executable, ROOT / "benchmarks" / "gpu_bench.py", "--no-nccl", "--quick", *largest),
        env=os.environ | given | {"OUT": str(tmp_path), "OFFCORE_COMMIT": "abc"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "cuda-h200-2.jsonl").open()]
    assert {(r["op"], r["in_place"]) for r in records} == {
        ("all_gather", True),
        ("all_to_all", False),
    }
    assert {row["signals"] for row in records} == {"fenced", "copy_order"}
    assert {row["asked"] for row in records} == {"promise", "auto", "view"}
    assert {row["timing"] for row in records} == {"chain", "call"}
    assert "view  promised    safe" in done.stdout
    assert f"{len(records)} rows, 0 wrong bytes" in done.stdout
