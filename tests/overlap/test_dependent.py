"""GEMMs that depend on a collective, or a collective on them, as they are measured."""

import itertools

import pytest

import needs
from offcore.tools.overlap import dependent, measured, summary
from offcore.tools.overlap.measured import Request

SHAPES = {
    "cb1 all_gather": [8192, 8192, 8192],
    "cb1 reduce_scatter": [8192, 8192, 8192],
    "qkv all_gather": [8192, 2560, 8192],
    "o reduce_scatter": [8192, 8192, 2048],
    "gate_up all_gather": [8192, 14336, 8192],
    "down reduce_scatter": [8192, 8192, 7168],
}


def test_layers_are_divided_among_ranks() -> None:
    """Columns in front of a product that stays divided, rows where products are added up."""
    found = dependent.cases_of(dependent.NAMES, ranks=4, shrink=1)
    assert {f"{one['name']} {one['op']}": one["shape"] for one in found} == SHAPES


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_forms_on_the_host(ranks: int) -> None:
    needs.require("torch")
    request = Request("host", ranks, steps=("matmul",), dependents=("cb1", "qkv", "down"))
    rows = [row for row in measured.rows(request) if "measure" in row]
    forms = ["gemm alone", "one after the other"]
    forms += ["offcore, 1 chunk", "offcore, 2 chunks", "offcore, 4 chunks"]
    by_case = {
        case: [row["form"] for row in found]
        for case, found in itertools.groupby(rows, lambda row: (row["gemm"], row["op"]))
    }
    assert by_case == {
        ("cb1", "all_gather"): [*forms, "offcore, placed"],
        ("cb1", "reduce_scatter"): forms,
        ("qkv", "all_gather"): [*forms, "offcore, placed"],
        ("down", "reduce_scatter"): forms,
    }
    own = [row for row in rows if row["form"].startswith("offcore")]
    assert own
    assert all(row["close"] for row in own)
    assert all(row["time_us"] > 0 for row in rows)
    assert all(row["speedup"] for row in rows if row["form"] != "gemm alone")
    assert len(summary.matmul_lines(rows)) == len(rows)
