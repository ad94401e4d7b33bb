"""The measurement of batches beside the driver's own calls, on the stand-in driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cuda_library import fake_cuda_library

ROOT = Path(__file__).parents[2]


def measured(tmp_path: Path, *words: str, **env: str) -> list[dict]:
    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "OUT": str(tmp_path), **env}
    small = ("--pages", "512", "--blocks", "40", "--paged", "5x6", "--rounds", "2")
    done = subprocess.run(
        (sys.executable, ROOT / "benchmarks" / "gpu_batch.py", *small, *words),
        env=os.environ | given | {"OFFCORE_COMMIT": "abc"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "cuda-batch.jsonl").open()]
    assert f"{len(rows)} rows, 0 wrong bytes" in done.stdout
    return rows


def test_rows_of_every_implementation(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--sub-batches", "16")
    told = {(row["impl"], row["direction"], row["layout"]) for row in rows}
    impls = {"ceiling", "offcore", "batch", "loop", "offcore by 16"}
    wanted = {
        (impl, direction, layout)
        for layout, more in (("scattered", set()), ("paged", {"offcore, unfolded"}))
        for direction in ("load", "store")
        for impl in impls | more
    }
    assert told == wanted
    for row in rows:
        assert row["wrong"] == 0
        assert 0 < row["submit_us"] <= row["time_us"]
        assert row["gbps"] > 0
    paths = {(row["impl"], row["layout"]): row["path"] for row in rows}
    assert paths["offcore", "scattered"] == paths["batch", "paged"] == "batches"
    assert paths["offcore", "paged"] == "strided"
    assert paths["loop", "paged"] == "loop"


def test_a_driver_without_batches(tmp_path: Path) -> None:
    rows = measured(tmp_path, OFFCORE_FAKE_CUDA_DRIVER="12080")
    assert {row["impl"] for row in rows} == {"ceiling", "offcore", "loop", "offcore, unfolded"}
