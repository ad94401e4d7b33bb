"""`offcore bench`: rows, columns, checks, skips and refusals."""

import json
import os
import xml.etree.ElementTree as ElementTree

import pytest

from offcore.tools.bench.collectives import Request, run_processes
from offcore.tools.bench.layout import OPS
from offcore.tools.report import Row, Skip

FIELDS = {
    "impl", "op", "backend", "machine", "ranks", "bytes", "in_place", "variant", "native",
    "protocol", "mode", "time_us", "time_us_min", "time_us_max", "algbw_gbps", "busbw_gbps",
    "wrong", "commands", "engines", "syncs", "phases", "run", "versions", "commit", "date",
    "timing", "asked", "named", "signals", "own_copy", "staged", "tuned", "armed_ahead", "kernels",
    "nvls", "dtype", "reduction", "sms",
}  # fmt: skip
SIM = ("--backend", "sim", "--machine", "mi300x-8")
HOST = ("--backend", "host", "--ranks", "2", "--iters", "2", "--calls", "3", "--warmup", "1")


def check_rows(rows, op):
    assert rows
    for row in rows:
        assert set(row) == FIELDS
        assert row["op"] == op
        assert row["time_us_min"] <= row["time_us"] <= row["time_us_max"]
        if row["time_us"]:
            expected = row["bytes"] / row["time_us"] / 1e3
            assert row["algbw_gbps"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert len({row["run"] for row in rows}) == 1


@pytest.mark.parametrize("op", OPS)
def test_sim_moves_every_byte_right(offcore_cli, op):
    ran = offcore_cli("bench", op, *SIM, "--sizes", "64,4K,100003,1M", "--json", "-")
    assert ran.status == 0, ran.err
    check_rows(ran.records, op)
    assert {row["bytes"] for row in ran.records} == {64, 4096, 100003, 1 << 20}
    assert {row["wrong"] for row in ran.records} == {0}
    assert {row["ranks"] for row in ran.records} == {8}
    assert all(row["time_us_min"] == row["time_us_max"] for row in ran.records)
    factor = 1 if op == "broadcast" else 7 / 8
    for row in ran.records:
        assert row["busbw_gbps"] == pytest.approx(factor * row["algbw_gbps"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_sizes_of_none_and_one_byte_work(offcore_cli, op):
    ran = offcore_cli("bench", op, *SIM, "--sizes", "0,1", "--json", "-")
    assert ran.status == 0, ran.err
    assert {row["bytes"] for row in ran.records} == {0, 1}
    assert {row["wrong"] for row in ran.records} == {0}


def test_sim_repeats_exactly(offcore_cli):
    words = ("bench", "all_gather", *SIM, "--sizes", "1K:1M:32", "--json", "-")
    first, second = (offcore_cli(*words).records for _ in range(2))
    keep = ("bytes", "variant", "time_us", "phases", "commands", "engines", "syncs")
    assert [[r[k] for k in keep] for r in first] == [[r[k] for k in keep] for r in second]


def test_large_sizes_run_without_bytes(offcore_cli):
    words = ("--sizes", "64M,128M,4G", "--variants", "pcpy", "--json", "-")
    ran = offcore_cli("bench", "all_gather", *SIM, *words)
    assert ran.status == 0, ran.err
    assert [row["wrong"] for row in ran.records] == [0, None, None]


@pytest.mark.parametrize("place", [SIM, HOST], ids=["sim", "host"])
def test_nothing_is_claimed_where_nothing_was_checked(offcore_cli, place):
    words = ("--sizes", "4K", "--variants", "pcpy", "--no-check", "--json", "-")
    ran = offcore_cli("bench", "all_gather", *place, *words)
    assert ran.status == 0, ran.err
    assert [row["wrong"] for row in ran.records] == [None]


def test_in_place_all_to_all_has_swap(offcore_cli):
    ran = offcore_cli("bench", "all_to_all", *SIM, "--in-place", "--sizes", "64K", "--json", "-")
    assert ran.status == 0, ran.err
    assert {row["wrong"] for row in ran.records} == {0}
    assert {"swap", "prelaunch_swap"} <= {row["variant"] for row in ran.records}
    assert all(row["in_place"] for row in ran.records)


def test_swap_is_skipped_among_all_and_refused_by_name(offcore_cli):
    among = offcore_cli("bench", "all_gather", *SIM, "--sizes", "4K")
    assert among.status == 0, among.err
    assert "skipped swap" in among.out
    named = offcore_cli("bench", "all_gather", *SIM, "--sizes", "4K", "--variants", "pcpy,swap")
    assert named.status == 1
    assert "offcore: unsupported:" in named.err


def test_indivisible_all_to_all_in_place_is_refused(offcore_cli):
    ran = offcore_cli("bench", "all_to_all", *SIM, "--in-place", "--sizes", "1000003")
    assert ran.status == 1
    assert ran.err.startswith("offcore: unsupported:")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("all_gather", "--machine", "nonesuch-8"), "invalid"),
        (("all_gather", *SIM, "--variants", "warp", "--sizes", "4K"), "invalid"),
        (("all_gather", *SIM, "--ranks", "9", "--sizes", "4K"), "invalid"),
        (("gather", *SIM, "--in-place", "--sizes", "4K"), "unsupported"),
        (("all_gather", *SIM, "--baseline", "memcpy", "--sizes", "4K"), "unsupported"),
        (("all_gather", *HOST, "--baseline", "mpi", "--sizes", "4K"), "invalid"),
        (("all_gather", *HOST, "--baseline", "nccl", "--sizes", "4K"), "unsupported"),
        (("all_gather", *HOST, "--signals", "fenced", "--sizes", "4K"), "unsupported"),
        (("all_gather", *HOST, "--own-copy", "engine,sm", "--sizes", "4K"), "unsupported"),
        (("all_gather", *HOST, "--own-copy", "engine", "--sizes", "4K"), "unsupported"),
        (("all_gather", *SIM, "--sizes", "4K", "--plot", "no-such-folder/p.png"), "invalid"),
        (("all_gather", *SIM, "--sizes", "4K", "--plot", "plot.txt"), "invalid"),
        (("all_gather", *SIM, "--sizes", "4K", "--json", "no-such-folder/r.jsonl"), "invalid"),
    ],
)
def test_failures_are_one_line_with_a_code(offcore_cli, words, code):
    ran = offcore_cli("bench", *words)
    assert ran.status == 1
    assert ran.err.startswith(f"offcore: {code}: ")
    assert ran.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("all_turn",),
        ("all_gather", "--sizes", "4X"),
        ("all_gather", "--sizes", "2M:1M"),
        ("all_gather", "--iters", "0"),
        ("all_gather", "--backend", "tpu"),
        ("all_gather", "--variants", ","),
        ("all_gather", "--protocol", "auto,polite"),
        ("all_gather", "--timing", "chain,never"),
        ("all_gather", "--signals", "smoke"),
        ("all_gather", "--no-such-option"),
    ],
)
def test_a_wrong_call_has_status_two(offcore_cli, words):
    ran = offcore_cli("bench", *words)
    assert ran.status == 2
    assert ran.out == ""


@pytest.mark.parametrize("op", OPS)
def test_host_processes_move_every_byte_right(offcore_cli, op):
    ran = offcore_cli("bench", op, *HOST, "--sizes", "1,4K,100003", "--json", "-")
    assert ran.status == 0, ran.err
    check_rows(ran.records, op)
    assert {row["bytes"] for row in ran.records} == {1, 4096, 100003}
    assert {row["wrong"] for row in ran.records} == {0}
    assert {row["backend"] for row in ran.records} == {"host"}


def test_host_beside_memcpy(offcore_cli):
    words = ("--sizes", "64K", "--variants", "auto", "--baseline", "memcpy", "--json", "-")
    ran = offcore_cli("bench", "all_gather", *HOST, *words)
    assert ran.status == 0, ran.err
    assert [row["impl"] for row in ran.records] == ["offcore", "memcpy"]
    assert ran.records[1]["variant"] is None
    assert ran.records[1]["time_us"] > 0


@pytest.mark.parametrize("backend", ["sim", "host"])
@pytest.mark.parametrize(
    "words", [("all_gather",), ("all_gather", "--in-place"), ("all_to_all",)], ids=" ".join
)
def test_credits_and_views(offcore_cli, words, backend):
    rest = ("--sizes", "4K", "--variants", "pcpy", "--protocol", "credits,view", "--ranks", "2")
    ran = offcore_cli("bench", *words, "--backend", backend, *rest, "--json", "-")
    assert ran.status == 0, ran.err
    assert [(row["protocol"], row["wrong"]) for row in ran.records] == [("credits", 0), ("view", 0)]


def test_each_protocol_and_timing_has_its_rows(offcore_cli):
    words = ("--sizes", "4K", "--variants", "pcpy,b2b", "--protocol", "auto,eager")
    ran = offcore_cli("bench", "all_gather", *HOST, *words, "--timing", "chain,call", "--json", "-")
    assert ran.status == 0, ran.err
    told = sorted((row["variant"], row["asked"], row["timing"]) for row in ran.records)
    assert told == sorted(
        (variant, asked, timing)
        for variant in ("pcpy", "b2b")
        for asked in ("auto", "eager")
        for timing in ("chain", "call")
    )
    assert {row["protocol"] for row in ran.records if row["asked"] == "eager"} == {"eager"}
    assert {row["wrong"] for row in ran.records} == {0}
    assert {row["named"] for row in ran.records} == {True}


def test_a_baseline_that_is_not_installed_is_named_and_left_out(cli_without):
    words = ("--baseline", "gloo,memcpy", "--iters", "2", "--calls", "2", "--json", "-")
    ran = cli_without(["torch"], "bench", "all_gather", *HOST, "--sizes", "4K", *words)
    assert ran.status == 0, ran.err
    assert ran.err.splitlines()[0] == "baseline gloo: unavailable: needs torch (pip install torch)"
    assert {row["impl"] for row in ran.records} == {"offcore", "memcpy"}


@pytest.mark.needs("torch")
def test_a_baseline_whose_ranks_cannot_open_it_is_left_out(offcore_cli, tmp_path):
    """torch is there, and has no gloo: only the ranks, which import it, can tell."""
    (tmp_path / "torch").mkdir()
    for name in ("__init__", "distributed"):
        text = "def is_available(): return False\n"
        (tmp_path / "torch" / f"{name}.py").write_text(text, "utf-8")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    words = ("--sizes", "4K", "--baseline", "gloo,memcpy", "--iters", "2", "--calls", "2")
    ran = offcore_cli("bench", "all_gather", *HOST, *words, env={"PYTHONPATH": path})
    assert ran.status == 0, ran.err
    assert "baseline gloo: needs a torch that was built with gloo" in ran.out
    assert "memcpy" in ran.out


@pytest.mark.needs("torch")
def test_host_beside_gloo():
    """All operations in the same two processes: to import torch takes longer than all else."""
    few = {"batches": 2, "calls": 3, "warmup": 1, "baselines": ["gloo"]}
    requests = [Request(op, "host", None, 2, [64 << 10, 100003], ["auto"], **few) for op in OPS]
    found = list(run_processes(requests))
    rows = [row for row in found if isinstance(row, Row)]
    assert {row.wrong for row in rows} == {0}
    # It has no exact form of what two ranks do not divide, but where nothing is divided.
    gloo = {(row.op, row.bytes) for row in rows if row.impl == "gloo"}
    assert gloo == {(op, 64 << 10) for op in OPS} | {("broadcast", 100003)}
    assert {skip.name for skip in found if isinstance(skip, Skip)} == {"gloo"}
    assert len(rows) == len(gloo) + 2 * len(OPS)


@pytest.mark.needs("matplotlib")
def test_the_table_has_the_columns_and_marks_the_best(offcore_cli, tmp_path):
    file, picture = tmp_path / "rows.jsonl", tmp_path / "plot.svg"
    words = ("--sizes", "1K,4M", "--json", file, "--plot", picture)
    ran = offcore_cli("bench", "all_gather", *SIM, *words)
    assert ran.status == 0, ran.err
    for column in ("size", "variant", "time", "us", "algbw", "busbw", "#wrong", "engines", "syncs"):
        assert column in ran.out
    assert "* best of its size" in ran.out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    check_rows(rows, "all_gather")
    for size in (1024, 4 << 20):
        best = min((r for r in rows if r["bytes"] == size), key=lambda row: row["time_us"])
        assert f"{best['variant']} *" in ran.out or f"{best['variant']} + *" in ran.out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
