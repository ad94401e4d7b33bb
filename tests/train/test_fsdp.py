"""FSDP2 with offcore's communication, on CPU tensors, between processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.needs("torch")
@pytest.mark.parametrize("more", [(), pytest.param(("long",), marks=pytest.mark.long)])
def test_models_train_to_the_same_weights(more: tuple[str, ...]) -> None:
    script = str(Path(__file__).with_name("fsdp_ranks.py"))
    done = subprocess.run(
        [sys.executable, script, *more], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.needs("torch", "transformers")
def test_losses_are_the_same_whoever_gathers() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_train.py"
    words = ("--models", "tiny", "--device", "cpu", "--ranks", "2", "--tokens", "64")
    done = subprocess.run(
        [sys.executable, script, *words, "--curves", "3"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["arm"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert all(rows[arm]["equal"] for arm in ("own", "again", "gather"))
    assert (rows["own"]["carried"], rows["again"]["carried"]) == ({}, {})
    assert rows["gather"]["carried"]["all_gather"] > 0
    assert rows["gather"]["carried"]["reduce_scatter"] == 0
    assert all(count > 0 for count in rows["offcore"]["carried"].values())
