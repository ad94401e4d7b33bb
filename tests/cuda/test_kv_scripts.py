"""The scripts that measure transfers on GPUs' machines run on the stand-in driver too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_library import fake_cuda_library, without_torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def on_stand_in(*command: object, **env: str) -> subprocess.CompletedProcess:
    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), **without_torch(), **env}
    return subprocess.run(
        (sys.executable, *map(str, command)),
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_measurement_tells_of_every_step(tmp_path: Path) -> None:
    words = ("--only", "pages,alone,scattered,gemm", "--pages", "512")
    words += ("--quick", "--layers", "1", "--rounds", "1", "--jobs", "20")
    alone = {"OUT": str(tmp_path), "OFFCORE_FAKE_CUDA_DEVICES": "1"}
    done = on_stand_in(BENCHMARKS / "gpu_kv.py", *words, **alone)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "cuda-kv.jsonl").open()]
    told = {(row["step"], row["impl"], row["blocks"], row["direction"]) for row in rows}
    every = ("offcore", "loop", "batch", "kernel")
    assert told == {
        (step, impl, count, direction)
        for step, impls, counts, directions in (
            ("pages", every, (64, 256), ("load", "store", "both")),
            ("alone", every[:1], (64, 256), ("load", "store", "both")),
            ("scattered", every, (256,), ("load", "store")),
        )
        for impl in impls
        for count in counts
        for direction in directions
    }
    assert "there is no torch with a GPU" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{len(rows)} rows, 0 wrong bytes, 0 steps")
    # Two GPUs: the second one's link may be used too.
    words = ("--only", "links", *words[2:])
    two = {"OUT": str(tmp_path), "OFFCORE_FAKE_CUDA_DEVICES": "2"}
    done = on_stand_in(BENCHMARKS / "gpu_kv.py", *words, **two)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "cuda-kv.jsonl").open()]
    assert [len(row["links"]) for row in rows] == [1, 1, 1, 1, 2, 2, 2, 2]
    # What a step cannot do is told, and the others go on.
    done = on_stand_in(
        BENCHMARKS / "gpu_kv.py",
        *("--only", "calls,scattered", *words[2:]),
        OUT=str(tmp_path),
        OFFCORE_FAKE_CUDA_FAIL="cuMemHostRegister:2",
    )
    assert (done.returncode, "calls: FAILED" in done.stdout) == (1, True), done.stdout


@pytest.mark.long
def test_the_drivers_own_calls_are_told() -> None:
    done = on_stand_in(BENCHMARKS / "kv_calls.py", OFFCORE_FAKE_CUDA_SEED="0")
    assert done.returncode == 0, done.stderr
    assert "cuMemHostAlloc is absent" in done.stdout
    # Of pages of three sizes, either way; from memory of three kinds.
    lines = ("rows of a copy", "threads", "3-D batches of", "small pages", "huge pages")
    for line in (*lines, "pages apart", "kernel of        | 16 "):
        assert done.stdout.count(f"\n  {line}") == 6, done.stdout
    assert done.stdout.count("cuMemAlloc named ") == 18
    assert done.stdout.count(" | 256 ") == 4
    # As many workgroups as blocks, and batches of 32 pages.
    assert len(re.findall(r"kernel of .* \| 64 \d+/", done.stdout)) == 6
    assert len(re.findall(r"pages apart .* \| 32 \d+/", done.stdout)) == 6


def test_the_hosts_share_is_told_of_each_layout(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    alone = {"OFFCORE_FAKE_CUDA_DEVICES": "1"}
    words = (BENCHMARKS / "kv_host.py", "--repetitions", "1", "--json", rows_file)
    done = on_stand_in(*words, **alone)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in rows_file.open()]
    calls = [row for row in rows if row["metric"] == "call"]
    assert {(row["layout"], row["direction"], row["state"]) for row in calls} == {
        (layout, direction, state)
        for layout in ("1 block a row", "16 blocks a row", "K and V in rows apart")
        for direction in ("load", "store")
        for state in ("warm", "cold", "asleep")
    }
    pages = [row for row in rows if row["metric"] != "call"]
    assert {(row["metric"], row["layout"], row["page_bytes"]) for row in pages} == {
        (metric, layout, page << 10)
        for metric in ("transfer", "plan_batch")
        for layout in ("one tensor", "a tensor a layer")
        for page in (8, 16, 64)
    }
    assert all(0 < row["least_us"] <= row["median_us"] for row in rows)


@pytest.mark.parametrize("step", ["pool", "adopted", "gemm"])
def test_a_step_that_begins_late_measures_its_first_case(step: str, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    words = ("--backend", "host", "--smaller", "16", "--rounds", "1", "--rows", rows_file)
    late = ("--step", step, "--seconds", "0")
    done = on_stand_in(BENCHMARKS / "gpu_kv_layouts.py", *words, *late)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in rows_file.open()]
    own = [(row["page_bytes"], row["direction"]) for row in rows if row["impl"] == "offcore"]
    assert sorted(own) == [(32 << 10, "load"), (32 << 10, "store")]
    assert "no time is left for further cases" in done.stdout
