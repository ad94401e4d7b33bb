"""`offcore overlap`, as a user runs it."""

import json
import re
from pathlib import Path

import pytest

import needs
from offcore import overlap


def test_the_command_line(offcore_cli, tmp_path: Path) -> None:
    ran = offcore_cli("overlap", "run", "cb1_896M,mb1_4G", "--json", "-")
    assert ran.status == 0
    assert len(ran.records) == 2 * 2 * 7
    assert {one["strategy"] for one in ran.records} == overlap.STRATEGIES.keys()
    assert {one["bytes"] for one in ran.records} == {896 << 20, 4 << 30}
    assert all(one["ideal_published"] <= one["ideal_least"] for one in ran.records)
    advised = offcore_cli("overlap", "advise", "8192x8192x8192", "all_gather:896M", "--json", "-")
    assert advised.records[0]["strategy"] == "ConCCL"
    assert advised.records[0]["kernels"][1]["class"] == "cb"
    rows_file = tmp_path / "rows.jsonl"
    rows_file.write_text(ran.out, "utf-8")
    out = tmp_path / "tables.json"
    assert offcore_cli("overlap", "characterise", "--out", out).status == 0
    assert json.loads(out.read_text("utf-8"))["machine"] == "mi300x-8"
    for words in (("cb1_896M,x",), ("cb1_0G",), ("cb1_12",)):
        assert offcore_cli("overlap", "run", *words).status == 2
    refused = offcore_cli("overlap", "advise", "8192x8192", "all_gather:1G")
    assert refused.status == 2
    assert "MxNxK" in refused.err
    if not needs.missing("matplotlib"):
        to = tmp_path / "10.png"
        ran = offcore_cli("overlap", "plot", rows_file, "--figure", "10", "--out", to)
        assert ran.status == 0, ran.err
        assert to.stat().st_size > 5000


@pytest.mark.needs("torch")
def test_a_measurement_on_this_machine(offcore_cli, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    words = ("overlap", "run", "cb1_896M", "--backend", "host", "--ops", "all_gather")
    ran = offcore_cli(*words, "--strategies", "serial,base,ConCCL", "--json", file)
    assert ran.status == 0
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    names = [row["strategy"] for row in rows if "strategy" in row]
    assert names == ["serial", "base", "ConCCL"]
    assert all(row["backend"] == "host" for row in rows if "strategy" in row)
    assert "measured: speed-up over one after the other" in ran.out
    assert re.search(r"^ all_gather +cb1_\S+ .* \d\.\d\d +\d\.\d\d *$", ran.out, re.M)
    none = offcore_cli(*words, "--ranks", "1")
    assert none.status == 1
    assert "nothing was measured" in none.err
    assert offcore_cli("overlap", "run", "cb1_896M", "--ops", "all_reduce").status == 1
    for wrong in (("cb9_1G",), ("--ops", "x"), ("--strategies", "x")):
        assert offcore_cli("overlap", "run", *wrong, "--backend", "host").status == 2


@pytest.mark.needs("torch")
def test_tables_of_this_machine(offcore_cli, tmp_path: Path) -> None:
    file, rows, again = (tmp_path / name for name in ("t.json", "rows.jsonl", "again.json"))
    words = ("overlap", "characterise", "--backend", "host")
    peaks = ("--peaks", "0.1,10,10")
    ran = offcore_cli(*words, *peaks, "--gemms", "m128_mb1", "--out", file, "--json", rows)
    assert ran.status == 0, ran.err
    tables = overlap.load(file)
    kinds = {row["row"] for row in tables.rows}
    assert kinds == {"slowdown", "latency", "bandwidth", "beside"}
    assert {row["kernel"] for row in tables.rows} == {"cb", "mb", "all_gather", "all_to_all"}
    assert re.search(r"^m128_mb1 by cores: \d+:1.00 ", ran.out, re.M)
    # The rows make the same tables.
    ran = offcore_cli("overlap", "characterise", "--rows", rows, *peaks, "--out", again)
    assert ran.status == 0, ran.err
    assert overlap.load(again).rows == tables.rows
    none = offcore_cli(*words, "--out", file)
    assert none.status == 1
    assert "no peaks of host-2 are known: give --peaks" in none.err


def test_what_would_be_ignored_is_refused(offcore_cli, tmp_path: Path) -> None:
    rows = Path(__file__).parents[2] / "benchmarks" / "results" / "overlap-h200-2.jsonl"
    for words, told in (
        (("--rows", rows, "--machine", "h100-2"), "--machine is simulated"),
        (("--backend", "host", "--machine", "h200-2"), "--machine is simulated"),
        (("--peaks", "1,2,3"), "--peaks need --rows"),
        (("--backend", "cuda", "--counters", "--ranks", "3"), "--counters are of one GPU"),
    ):
        out = tmp_path / "x.json"
        ran = offcore_cli("overlap", "characterise", *words, "--out", out)
        assert ran.status == 1
        assert told in ran.err
        assert not out.exists()
    for backend in ("host", "cuda"):
        ran = offcore_cli("overlap", "run", "--backend", backend, "--machine", "mi300x-8")
        assert ran.status == 1
        assert "--machine is simulated: no --backend" in ran.err


def test_what_a_machine_lacks_is_told(offcore_cli, tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    ran = offcore_cli("overlap", "run", "cb1_896M", "--machine", "h100-2")
    assert "calibrate --rows FILE, of benchmarks/gpu_overlap.py without --quick" in ran.err
    quick = results / "overlap-h100-2-quick.jsonl"
    ran = offcore_cli("overlap", "calibrate", "--rows", quick, "--out", tmp_path)
    assert "rows lack the curve of cb1: all rows of benchmarks/gpu_overlap.py" in ran.err
    ran = offcore_cli("overlap", "run", "cb1_896M", "--machine", "h200-2")
    assert "h200-2: parameters are partly fitted" in ran.out


@pytest.mark.needs("torch")
def test_curves_of_one_rank(offcore_cli, tmp_path: Path) -> None:
    words = ("overlap", "characterise", "--backend", "host", "--ranks", "1")
    ran = offcore_cli(*words, "--json", "-")
    assert ran.status == 0, ran.err
    assert {row["gemm"] for row in ran.records if "measure" in row} == {"cb1", "m64_mb1"}
    assert "no tables: collectives are part of them" in ran.err
    refused = offcore_cli(*words, "--out", tmp_path / "x.json")
    assert "tables need two ranks" in refused.err
    for wrong in (("--gemms", "cb1"), ("--ranks", "2"), ("--counters",)):
        assert offcore_cli("overlap", "characterise", *wrong).status == 1
    assert offcore_cli("overlap", "characterise", "--peaks", "1,2").status == 2
