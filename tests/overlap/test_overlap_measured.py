"""Overlap as it was measured on 2 x H200, and what a measurement does with failures."""

import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import needs
import offcore
from offcore import overlap
from offcore.errors import error
from offcore.tools.cli.main import app
from offcore.tools.overlap import energy, engines, measure, summary, tabled
from offcore.tools.overlap.measure import Case, Sweep
from offcore.tools.overlap.stage import GEMM, Part, Shape
from offcore.tools.records import read_records

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROWS = read_records(RESULTS / "overlap-h200-2.jsonl")


def test_tables_that_come_along_are_of_the_recorded_rows() -> None:
    """To make them anew: offcore overlap characterise --rows ... --out ..."""
    tables = overlap.load("h200-2")
    assert tables == tabled.tables_of(ROWS, tables.source)


def test_plans_on_combinations_that_tables_are_not_of() -> None:
    found = tabled.judged(ROWS, overlap.load("h200-2"))
    assert len(found) == 32
    published = [one for one in found if "m128" not in one.name and "m256" not in one.name]
    assert sum(one.right for one in found) >= 29
    assert sum(one.right for one in published) >= 25  # of 28; the paper's: 24 of 30
    lost = sorted(round(100 * one.lost, 1) for one in published if not one.right)
    assert lost == [2.1, 5.1, 12.5]
    told = tabled.lines(found)
    assert len(told) == 1 + sum(not one.right for one in found)


def test_estimates_beside_measurements() -> None:
    """The mean is more than the 10 points that one would like."""
    found = tabled.errors(ROWS, overlap.load("h200-2"))
    assert {name: round(statistics.fmean(points), 1) for name, points in found.items()} == {
        "sp": 10.8,
        "sp_rp": 25.4,
        "ConCCL": 16.1,
    }


def test_figure_9_is_what_the_documents_say() -> None:
    benched = engines.speedups(read_records(RESULTS / "cuda-h200-2.jsonl"))
    assert [len(points) for points in benched.values()] == [21, 21]
    gather, exchange = benched["all_gather"], benched["all_to_all"]
    below = [1 / min(value for size, value in points.items() if size < 1 << 20)
             for points in (gather, exchange)]  # fmt: skip
    assert [round(one, 1) for one in below] == [1.9, 1.5]
    assert round(max(gather.values()), 2) == 1.47
    assert min(value for size, value in gather.items() if size >= 4 << 20) > 1.05
    assert round(exchange[1 << 30], 2) == 0.69
    large = engines.speedups(ROWS)
    exchange = large["all_to_all"]
    assert [round(exchange[size << 20], 2) for size in (128, 256, 1024, 27136)] == [
        0.95, 0.96, 0.89, 0.82
    ]  # fmt: skip
    gather = {size: one for size, one in large["all_gather"].items() if size >= 128 << 20}
    assert [round(pick(gather.values()), 2) for pick in (min, max)] == [1.21, 1.5]
    assert round(1 / large["all_gather"][64 << 10], 1) == 2.2


def test_figure_9_takes_only_calls_by_engines_as_they_are_by_default() -> None:
    row = {"op": "all_gather", "bytes": 1024, "timing": "chain", "mode": "eager"}
    library = [row | {"impl": "nccl", "time_us": 9}, row | {"impl": "nccl", "time_us": 8}]
    own = row | {"impl": "offcore", "asked": "auto", "own_copy": "engine", "signals": "fenced"}
    others = [
        own | {"own_copy": "sm", "time_us": 1},
        own | {"signals": "copy_order", "time_us": 1},
        own | {"asked": "promise", "time_us": 1},
        own | {"mode": "graph", "time_us": 1},
        own | {"timing": "call", "time_us": 1},
        row | {"impl": "nccl-ce", "time_us": 1},
        own | {"op": "broadcast", "time_us": 1},
    ]
    for rows in (library, [*library, *others], [own | {"time_us": 4}]):
        with pytest.raises(offcore.Error, match=r"x\.jsonl: .* both engines and") as raised:
            engines.speedups(rows, "x.jsonl")
        assert raised.value.code == "invalid"
    ours = [own | {"time_us": 5}, own | {"time_us": 4}]
    assert engines.speedups([*library, *others, *ours]) == {"all_gather": {1024: 2.0}}


def test_figure_9_is_drawn(tmp_path: Path) -> None:
    needs.require("matplotlib")
    for name, count in (("cuda-h200-2", 42), ("overlap-h200-2", 28)):
        out = tmp_path / f"{name}.svg"
        made = CliRunner().invoke(
            app,
            ["overlap", "plot", str(RESULTS / f"{name}.jsonl"), "--figure", "9", "--published",
             "--out", str(out), "--json", "-"],
        )  # fmt: skip
        assert made.exit_code == 0, made.output
        assert out.stat().st_size > 8000
        assert f'"rows": {count}' in made.output or f'"points": {count}' in made.output, made.output


def test_rows_without_curves_make_no_tables() -> None:
    few = [row for row in ROWS if row.get("measure") != "gemm"]
    with pytest.raises(offcore.Error, match="lack the curve of cb1"):
        tabled.tables_of(few, "")
    with pytest.raises(offcore.Error, match="no peaks of"):
        tabled.tables_of([], "")


class Failing:
    """A stage of a rank where one strategy fails."""

    backend, machine, library, rank, ranks, cores = "none", "toy", "nccl", 0, 2, 8
    comm = None

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def prepare(self, shape: Shape) -> None:
        pass

    def room(self, op: str) -> int:
        return 1 << 40

    def refusal(self, part: Part) -> str:
        return ""

    def ends_us(self, parts: list[Part], warmup: int, measured: int) -> list[list[float]]:
        if [part.what for part in parts] == [GEMM, "kernel"] and not parts[1].behind:
            raise self._failure
        return [[10.0] * len(parts)] * measured

    def facts(self) -> dict[str, Any]:
        return {}

    def agreed(self, failure: str) -> str:
        return f"rank 0: {failure}" if failure else ""

    def elapsed_s(self) -> float:
        return 0.0


CASES = ("serial", "base", "ConCCL")


def rows_of(failure: Exception) -> list[dict[str, Any]]:
    stage: Any = Failing(failure)
    sweep = Sweep(stage, (8,), (8,), 100.0)
    return list(sweep.rows([Case("cb1", Shape(8, 8, 8), "all_gather", 8192)], CASES))


def test_a_failure_is_a_row_and_the_rest_goes_on() -> None:
    found = rows_of(RuntimeError("no memory"))
    assert found[1] == {"failed": "all_gather cb1 8192 base: rank 0: RuntimeError: no memory"}
    assert [row.get("strategy") for row in found] == ["serial", None, "ConCCL"]


def test_processes_that_hang_end_the_sweep() -> None:
    with pytest.raises(offcore.Error, match="rank 1: the GPU"):
        rows_of(error("timeout", "rank 1: the GPU has not ended a run"))


class Small(Failing):
    """Operands of more than 8 rows do not fit, and nothing runs on 2 cores."""

    def prepare(self, shape: Shape) -> None:
        if shape.m > 8:
            raise self._failure

    def ends_us(self, parts: list[Part], warmup: int, measured: int) -> list[list[float]]:
        if parts[0].cores == 2:
            raise self._failure
        return [[80.0 / (parts[0].cores or 8)]] * measured


def test_a_gemm_that_fails_leaves_the_curves_of_others() -> None:
    stage: Any = Small(RuntimeError("no memory"))
    shapes = {"large": Shape(9, 8, 8), "small": Shape(8, 8, 8)}
    found = list(measure.gemm_curve(stage, shapes, (4, 2, 1, 8)))
    assert [row.get("slowdown", row.get("failed")) for row in found] == [
        "large on 8 cores: rank 0: RuntimeError: no memory",
        *(1.0, 2.0, "small on 2 cores: rank 0: RuntimeError: no memory", 8.0),
    ]


class Counting(Failing):
    """A stage whose loops take 1 ms a run and draw 300 W, or 100 W when idle."""

    def energy(self, parts: list[Part], seconds: float) -> dict[str, float]:
        watts, runs = (300.0, round(seconds * 1e3)) if parts else (100.0, 0)
        joules = watts * seconds + 100.0 * 0.05
        found = {"joules": joules, "watts": joules / (seconds + 0.05), "runs": runs}
        return found | {"busy_s": seconds, "counted_s": seconds + 0.05, "sm_mhz": 1980}


def test_joules_of_a_run_are_without_the_idle_rest() -> None:
    stage: Any = Counting(RuntimeError())
    cases = [
        Case("cb1", Shape(8, 8, 8), "all_gather", 8192),
        Case("", Shape(1, 1, 1), "all_gather", 1 << 20),
    ]
    job = {"energy_s": 6.0, "trials": 5, "limit_s": 99.0, "loops": ["base", "sp", "ConCCL"]}
    told = list(energy.rows(stage, cases, job | {"energy_cores": 4}))
    assert len([row for row in told if "at" in row]) == 5 * 5  # of 6 s each: no long silence
    rows = [row for row in told if "at" not in row]
    assert [row["strategy"] for row in rows] == ["base", "sp", "ConCCL", "kernel", "engines"]
    assert [row["joules"] for row in rows] == pytest.approx([0.3] * 5)
    assert [row["joules_above_idle"] for row in rows] == pytest.approx([0.2] * 5)
    assert rows[-1]["joules_a_gb"] == pytest.approx(0.3 / (1 << 20) * 1e9, rel=1e-3)
    assert rows[0]["joules_a_gb"] is None
    assert len(summary.energy_lines(rows)) == 5
