"""`offcore bench | show | explain` of operations that reduce, on each backend that has cores."""

import pytest
from test_bench import HOST, SIM, check_rows
from test_gpus import QUICK

from offcore.comm.programs import REDUCING
from offcore.sizes import busbw_factor
from offcore.tools.bench.collectives import Request, run_processes
from offcore.tools.bench.layout import Layout
from offcore.tools.bench.subjects import in_torch
from offcore.tools.bench.values import DTYPES, REDUCTIONS
from offcore.tools.report import Row, Skip

PLACES = pytest.mark.parametrize("place", [(), ("--in-place",)], ids=["apart", "in_place"])
FEW = {"batches": 2, "calls": 3, "warmup": 1}


def check_reduced(rows, op, in_place, dtype="float32", reduction="sum"):
    check_rows(rows, op)
    assert {row["wrong"] for row in rows} == {0}
    facts = {(row["in_place"], row["dtype"], row["reduction"]) for row in rows}
    assert facts == {(in_place, dtype, reduction)}
    variants = {"pipelined", "one_shot"} if op == "all_reduce" else {"pipelined"}
    assert {row["variant"] for row in rows} == variants


@PLACES
@pytest.mark.parametrize("op", REDUCING)
def test_sim_reduces_every_byte_right(offcore_cli, op, place):
    ran = offcore_cli("bench", op, *SIM, *place, "--sizes", "0,4,100004,1M", "--json", "-")
    assert ran.status == 0, ran.err
    check_reduced(ran.records, op, bool(place))
    assert {row["sms"] for row in ran.records} == {None}
    factor = {"all_reduce": 2 * 7 / 8, "reduce_scatter": 7 / 8, "reduce": 1}[op]
    assert busbw_factor(op, 8) == factor
    for row in ran.records:
        assert row["busbw_gbps"] == pytest.approx(factor * row["algbw_gbps"], rel=1e-3, abs=1e-5)


@PLACES
@pytest.mark.parametrize("op", REDUCING)
def test_sim_reduces_large_sizes_without_bytes(offcore_cli, op, place):
    words = ("--sizes", "4G", "--variants", "auto", "--json", "-")
    ran = offcore_cli("bench", op, *SIM, *place, *words)
    assert ran.status == 0, ran.err
    [row] = ran.records
    assert (row["wrong"], row["in_place"], row["variant"]) == (None, bool(place), "pipelined")
    assert 0 < row["busbw_gbps"] < 7 * 64  # what a GPU's links carry


@PLACES
@pytest.mark.parametrize("op", REDUCING)
def test_host_processes_reduce_every_byte_right(offcore_cli, op, place):
    ran = offcore_cli("bench", op, *HOST, *place, "--sizes", "4,4K,100004", "--json", "-")
    assert ran.status == 0, ran.err
    check_reduced(ran.records, op, bool(place))
    assert {row["backend"] for row in ran.records} == {"host"}


def test_each_dtype_and_reduction():
    """In the same processes: to start them takes longer than all else."""
    requests = [
        Request("all_reduce", "host", None, 2, [4096], ["auto"], dtype=one, reduction=other, **FEW)
        for one in DTYPES
        for other in REDUCTIONS
    ]
    found = list(run_processes(requests))
    assert [(row.dtype, row.reduction) for row in found] == [
        (one, other) for one in DTYPES for other in REDUCTIONS
    ]
    assert {row.wrong for row in found} == {0}


@PLACES
@pytest.mark.parametrize("op", REDUCING)
def test_gpus_reduce_every_byte_right(gpu_cli, op, place):
    words = ("--sizes", "4,100004", "--dtype", "bfloat16", "--reduction", "max", "--sms", "3")
    ran = gpu_cli("bench", op, *QUICK, *place, *words, "--json", "-")
    assert ran.status == 0, ran.err
    check_reduced(ran.records, op, bool(place), "bfloat16", "max")
    assert all(0 < row["sms"] <= 3 for row in ran.records)


def test_each_protocol_that_there_is_has_its_rows(offcore_cli):
    words = ("--protocol", "auto,eager,promise,credits,view", "--variants", "auto")
    ran = offcore_cli("bench", "all_reduce", *HOST, "--sizes", "1M", *words, "--json", "-")
    assert ran.status == 0, ran.err
    told = [(row["asked"], row["staged"]) for row in ran.records]
    assert told == [("auto", False), ("eager", True), ("promise", False)]
    assert "no protocol credits" in ran.err
    assert "have views" in ran.err


@pytest.mark.needs("torch")
def test_host_beside_gloo():
    several = [("all_reduce", {}), ("reduce_scatter", {"in_place": True}), ("reduce", {})]
    several += [("all_reduce", {"dtype": "bfloat16", "reduction": "max"})]
    several += [("all_reduce", {"reduction": "avg"}), ("all_reduce", {"dtype": "int16"})]
    requests = [
        Request(op, "host", None, 2, [64 << 10], ["auto"], baselines=["gloo", "memcpy"], **given)
        for op, more in several
        for given in [FEW | more]
    ]
    found = list(run_processes(requests))
    rows = [row for row in found if isinstance(row, Row)]
    assert {row.wrong for row in rows} == {0}
    gloo = [(row.op, row.dtype, row.reduction, row.in_place) for row in rows if row.impl == "gloo"]
    assert gloo == [
        ("all_reduce", "float32", "sum", True),
        ("reduce_scatter", "float32", "sum", True),
        ("reduce", "float32", "sum", True),
        ("all_reduce", "bfloat16", "max", True),
    ]
    skips = [(skip.name, skip.reason) for skip in found if isinstance(skip, Skip)]
    told = [reason for name, reason in skips if name == "gloo"]
    assert told == ["gloo has no avg", "gloo: Invalid scalar type"]
    assert [name for name, _ in skips].count("memcpy") == len(several)


def test_torch_reduces_in_place():
    for op, in_place in (("all_reduce", True), ("reduce", True), ("reduce_scatter", False)):
        assert in_torch(Layout(op, 2, 4096, False)).in_place == in_place


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("all_gather", *SIM, "--dtype", "int8"), "unsupported", "--dtype is for operations that"),
        (("all_gather", *HOST, "--reduction", "sum"), "unsupported", "--reduction is for"),
        (("all_reduce", *HOST, "--sms", "4"), "unsupported", "--sms is for GPUs: host has none"),
        (("all_reduce", *SIM, "--sizes", "4K,4097"), "invalid", "4097 bytes are not a whole"),
        (("reduce", *SIM, "--variants", "one_shot"), "unsupported", "only all_reduce has"),
        (("all_reduce", *SIM, "--variants", "pcpy"), "unsupported", "pipelined and one_shot"),
    ],
)
def test_refusals(offcore_cli, words, code, text):
    ran = offcore_cli("bench", *words)
    assert ran.status == 1
    assert ran.err.startswith(f"offcore: {code}: ")
    assert text in ran.err


@pytest.mark.parametrize(
    "words", [("--dtype", "float17"), ("--reduction", "median"), ("--sms", "0"), ("--sms", "65")]
)
def test_a_wrong_call_has_status_two(offcore_cli, words):
    assert offcore_cli("bench", "all_reduce", *words).status == 2


def test_the_table_names_what_is_reduced(offcore_cli):
    words = ("--sizes", "64K", "--dtype", "float16", "--reduction", "premul_sum")
    ran = offcore_cli("bench", "all_reduce", *SIM, *words)
    assert ran.status == 0, ran.err
    assert "all_reduce (premul_sum of float16) on 8 ranks of mi300x-8 (simulated)" in ran.out
    assert "one_shot" in ran.out


@pytest.mark.parametrize("op", REDUCING)
def test_show_prints_text_that_verify_accepts(offcore_cli, op):
    words = ("--machine", "h200-4", "--bytes", "64K", "--dtype", "int32", "--reduction", "min")
    shown = offcore_cli("show", op, *words)
    assert shown.status == 0, shown.err
    assert f"program {op} machine=h200-4 ranks=4" in shown.out
    assert "\nreduction min int32\n" in shown.out
    verified = offcore_cli("verify", "-", stdin=shown.out)
    assert verified.status == 0, verified.err
    ran = offcore_cli("show", "scatter", "--dtype", "int32")
    assert (
        ran.err == "offcore: invalid: scatter does not reduce: it has neither dtype nor reduction\n"
    )


def test_explain_has_both_variants_of_an_all_reduce(offcore_cli):
    words = ("--bytes", "64K", "--machine", "h200-4", "--dtype", "bfloat16", "--json", "-")
    ran = offcore_cli("explain", "all_reduce", *words)
    assert ran.status == 0, ran.err
    [why] = ran.records
    assert (why["chosen"]["variant"], why["runner_up"]["variant"]) == ("one_shot", "pipelined")
    assert (why["dtype"], why["reduction"], why["tuned"]) == ("bfloat16", "sum", False)
    ran = offcore_cli("explain", "reduce", *words[:4])
    assert ran.status == 0, ran.err
    assert "pipelined *" in ran.out
