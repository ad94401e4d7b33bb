"""benchmarks/compare.py on rows that the command line wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"


@pytest.fixture
def rows(offcore_cli, tmp_path):
    file = tmp_path / "old.jsonl"
    words = ("--backend", "sim", "--sizes", "1K,64K", "--variants", "pcpy,b2b", "--json", file)
    assert offcore_cli("bench", "all_gather", *words).status == 0
    return file


def compare(*words):
    done = subprocess.run(
        (sys.executable, SCRIPT, *words), capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_the_same_rows_are_no_slower(rows):
    status, text = compare(rows, rows)
    assert status == 0
    assert "4 rows in both, 0 slower" in text


def test_a_slower_row_is_told(rows, tmp_path):
    slower = [json.loads(line) for line in rows.read_text().splitlines()]
    slower[0]["time_us"] *= 1.5
    new = tmp_path / "new.jsonl"
    new.write_text("".join(json.dumps(row) + "\n" for row in slower))
    status, text = compare(rows, new)
    assert status == 1
    assert "4 rows in both, 1 slower" in text
    assert compare(rows, new, "--threshold", "0.6")[0] == 0


def test_what_is_no_row_is_named_by_line(rows, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(rows.read_text() + "{}\n")
    status, text = compare(rows, broken)
    assert status == 1
    assert "line 5: no benchmark row" in text


def test_rows_count_by_what_copied_within_a_gpu(rows, tmp_path):
    """By spare engines, which are the default, though one engine was faster; SMs are apart."""
    row = json.loads(rows.read_text().splitlines()[0]) | {"backend": "cuda", "time_us": 3.0}
    old, new = tmp_path / "one.jsonl", tmp_path / "both.jsonl"
    old.write_text(json.dumps(row | {"own_copy": "engine"}) + "\n")
    ways = {"engine": 1.0, "engines": 6.0, "sm": 2.0}
    made = [row | {"own_copy": way, "time_us": time_us} for way, time_us in ways.items()]
    new.write_text("".join(json.dumps(one) + "\n" for one in made))
    status, text = compare(old, new)
    assert status == 1
    assert "3.00         6.00   2.000  slower" in text
    assert "1 rows in both, 1 slower by more than 10%, 0 only in the old file, 1 only in" in text
