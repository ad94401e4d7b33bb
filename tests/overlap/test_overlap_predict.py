"""The model of h200-2, whose parameters are of a few measured rows, beside all others."""

import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from typer.testing import CliRunner

import offcore
from offcore.overlap import Collective
from offcore.tools.cli.main import app
from offcore.tools.overlap import gpu_fit, gpu_model, predict
from offcore.tools.overlap import model as models
from offcore.tools.overlap.gpu_model import GpuModel
from offcore.tools.overlap.model import Load
from offcore.tools.overlap.predict import COMPUTED, GIVEN, Prediction
from offcore.tools.records import read_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = tuple(f"overlap-h200-2{run}" for run in ("", "-matched", "-256M", "-reductions"))
ROWS = {name: read_records(RESULTS / f"{name}.jsonl") for name in FILES}
FITTED_FROM = FILES[0]


@pytest.fixture(scope="module")
def model() -> GpuModel:
    return gpu_model.load("h200-2")


@pytest.fixture(scope="module")
def found(model: GpuModel) -> dict[tuple[str, str], list[Prediction]]:
    return {
        (name, isolated): predict.predictions(rows, model, isolated)
        for name, rows in ROWS.items()
        for isolated in predict.ISOLATED
    }


def test_recorded_parameters_are_of_the_recorded_rows(model: GpuModel) -> None:
    """To make them anew: offcore overlap calibrate --rows ... --out machines"""
    made = gpu_fit.record_of(ROWS[FITTED_FROM], f"{FITTED_FROM}.jsonl")
    assert json.loads(json.dumps(made)) == model.record
    page = (ROOT / "docs" / "measurements" / "model.md").read_text("utf-8")
    for one in made["parameters"]:
        told = f"{one['value']:g} {one['unit']}".strip()
        assert f"| `{one['name']}` | {told} | " in page
    bases = {one["basis"] for one in made["parameters"]}
    assert bases == {"measured", "fitted", "datasheet", "documented", "assumed"}
    for one in made["parameters"]:
        assert one["source"]
        assert one["meaning"]
        assert math.isfinite(one["value"])
        assert one.get("low", one["value"]) <= one["value"] <= one.get("high", one["value"])


def test_parameters_are_of_four_combinations_and_curves() -> None:
    """Of a hundred other rows none is needed."""
    made = gpu_fit.record_of(ROWS[FITTED_FROM], "")
    known = {tuple(one) for one in made["combinations"]}
    assert len(known) == 4
    few = [
        row
        for row in ROWS[FITTED_FROM]
        if "strategy" not in row
        or row.get("measure") == "energy"
        or (row["op"], row["gemm"], row["bytes"]) in known
    ]
    assert len(few) < len(ROWS[FITTED_FROM]) / 2
    assert gpu_fit.record_of(few, "") == made


def held_out(some: list[Prediction]) -> list[Prediction]:
    return [one for one in some if not one.fitted]


# Mean and median in points, and mean in percent of the time, of the rows that are held out.
ERRORS = {
    ("overlap-h200-2", GIVEN): (192, 13.0, 7.1, 3.6),
    ("overlap-h200-2", COMPUTED): (192, 15.5, 9.7, 4.2),
    ("overlap-h200-2-matched", GIVEN): (168, 8.9, 6.0, 2.8),
    ("overlap-h200-2-matched", COMPUTED): (168, 9.5, 5.8, 3.0),
    ("overlap-h200-2-256M", GIVEN): (12, 9.8, 6.4, 3.0),
    ("overlap-h200-2-256M", COMPUTED): (12, 9.6, 5.8, 2.9),
    ("overlap-h200-2-reductions", GIVEN): (48, 15.1, 9.2, 3.4),
    ("overlap-h200-2-reductions", COMPUTED): (48, 15.4, 9.8, 3.4),
}


def test_errors_are_what_the_documents_say(
    found: dict[tuple[str, str], list[Prediction]],
) -> None:
    page = (ROOT / "docs" / "measurements" / "overlap.md").read_text("utf-8")
    for key, some in found.items():
        points = [abs(one.points) for one in held_out(some)]
        percents = [abs(one.percent) for one in held_out(some)]
        told = len(points), round(fmean(points), 1), round(median(points), 1)
        assert (*told, round(fmean(percents), 1)) == ERRORS[key], key
        large = fmean(abs(one.points) for one in held_out(some) if one.ideal >= predict.LARGE)
        _, mean, middle, percent = ERRORS[key]
        assert f"| {mean:.1f} | {middle:.1f} | {large:.1f} | {percent:.1f} |" in page, key


def test_sums_and_means_are_what_the_documents_say(
    found: dict[tuple[str, str], list[Prediction]],
) -> None:
    page = (ROOT / "docs" / "measurements" / "overlap.md").read_text("utf-8")
    some = held_out(found[FITTED_FROM, GIVEN])
    for op, name in (("all_gather", "all-gather"), ("all_to_all", "all-to-all")):
        cells = [
            predict.shares([one for one in some if (one.op, one.strategy) == (op, strategy)])
            for strategy in predict.PREDICTED
        ]
        line = f"| {name} | " + " | ".join(f"{measured}, {own}" for measured, own in cells) + " |"
        assert line in page
    means = {}
    for isolated in predict.ISOLATED:
        every = [one for name in FILES for one in held_out(found[name, isolated])]
        large = [one for one in every if one.ideal >= predict.LARGE]
        counts = len(every), len(large)
        assert counts == (420, 264)
        means[isolated] = [round(fmean(abs(one.points) for one in x), 1) for x in (every, large)]
    assert means == {GIVEN: [11.5, 7.3], COMPUTED: [12.9, 8.8]}
    fitted = [abs(one.points) for one in found[FITTED_FROM, GIVEN] if one.fitted]
    assert (len(fitted), round(fmean(fitted), 1)) == (24, 5.0)


def test_the_same_measured_twice_differs_as_much() -> None:
    twice = {name: [points for points, _ in predict.repeated(rows)] for name, rows in ROWS.items()}
    assert {name: (len(some), round(fmean(some), 1)) for name, some in twice.items()} == {
        "overlap-h200-2": (28, 13.5),
        "overlap-h200-2-matched": (22, 9.6),
        "overlap-h200-2-256M": (2, 1.2),
        "overlap-h200-2-reductions": (5, 21.3),
    }


def test_each_part_of_the_model_counts(model: GpuModel) -> None:
    """Errors without it, as the documents say."""

    def error(other: GpuModel, isolated: str) -> float:
        some = predict.predictions(ROWS[FITTED_FROM], other, isolated)
        return round(fmean(abs(one.points) for one in held_out(some)), 1)

    first = with_values(model, behind=1, scattered_cb=1, scattered_mb=1, rounds_mb=1, few_cores=1)
    assert error(first, GIVEN) == 18.5
    nothing = with_values(model, memory_contention=0, l2_contention=0, engines_contention=0)
    assert error(nothing, GIVEN) == 16.4
    assert error(with_values(model, cap_w=1e6), COMPUTED) == 51.8


def test_what_is_fitted_counts_apart(found: dict[tuple[str, str], list[Prediction]]) -> None:
    fitted = {name: {(one.op, one.gemm) for one in some if one.fitted} for (name, _), some in
              found.items()}  # fmt: skip
    assert fitted.pop(FITTED_FROM) == {
        (op, gemm) for op in ("all_gather", "all_to_all") for gemm in ("cb1", "m64_mb1")
    }
    assert not any(fitted.values()), "another run's rows are held out, whatever their sizes"


def test_predictions_do_not_see_measured_times(model: GpuModel) -> None:
    rows = [
        row
        for row in ROWS[FITTED_FROM]
        if (row.get("gemm"), row.get("bytes")) == ("cb4", 1 << 30) and "speedup" in row
    ]
    assert len({row["op"] for row in rows}) == 4, "reductions are among them, and left out"
    other = [row | {"time_us": 2 * row["time_us"], "ends_us": {}, "tried_us": {}} for row in rows]
    for isolated in predict.ISOLATED:
        some, same = (predict.predictions(one, model, isolated) for one in (rows, other))
        assert [one.predicted_us for one in some] == [one.predicted_us for one in same]
        assert [one.percent for one in some] != [one.percent for one in same]
        assert len(some) == 12
    longer = [row | {"gemm_us": 1.2 * row["gemm_us"]} for row in rows]
    given, computed = (
        [one.predicted_us for one in predict.predictions(longer, model, isolated)]
        for isolated in predict.ISOLATED
    )
    assert given != [one.predicted_us for one in predict.predictions(rows, model, GIVEN)]
    assert computed == [one.predicted_us for one in predict.predictions(rows, model, COMPUTED)]


def with_values(model: GpuModel, **values: float) -> GpuModel:
    parameters = [
        one | {"value": values.get(one["name"], one["value"])} for one in model.record["parameters"]
    ]
    return GpuModel(model.record | {"parameters": parameters})


def test_power_by_hand(model: GpuModel) -> None:
    """Joules are given, and the clock is where a run and its pause take the limit."""
    short, long = (model.gemm(8192 * times, 8192, 8192, "g") for times in (1, 40))
    full = Load(short, None), Load(long, None)
    # The pause makes up for it.
    assert model.isolated_us(full[0]) == pytest.approx(model.alone_us(full[0]))
    took_us = model.isolated_us(full[1])
    assert took_us > 1.1 * model.alone_us(full[1])
    rate = long.flops / took_us / 1e6
    values = {one["name"]: one["value"] for one in model.record["parameters"]}
    joules = long.flops / 1e12 * values["gemm_joules"] * (
        rate / values["energy_tflops"]
    ) ** values["energy_exponent"]  # fmt: skip
    spent = joules + values["awake_w"] * took_us / 1e6
    limit = values["cap_w"] * took_us + (values["cap_w"] - values["idle_w"]) * values["pause_us"]
    assert spent == pytest.approx(limit / 1e6, rel=1e-4)
    free = with_values(model, cap_w=5000)
    assert free.isolated_us(full[1]) == pytest.approx(free.alone_us(full[1]))


def test_given_isolated_times(model: GpuModel) -> None:
    """They are kept, or where power limits a GEMM, approached."""
    long = model.gemm(18432, 8192, 16384, "g")
    before, slower = (
        one.isolated_us(Load(long, 132))
        for one in (model, model.with_isolated({("g", False): 9000.0}))
    )
    assert before < slower < 9000
    gemm, gather = model.gemm(8192, 8192, 4096, "g"), Collective("all_gather", 1 << 30, 2)
    given = model.with_isolated(
        {(gemm.name, False): 900.0, (gather.name, False): 1800.0, (gather.name, True): 1500.0}
    )
    assert given.isolated_us(Load(gemm, 132)) == pytest.approx(900)
    assert given.isolated_us(Load(gather, 32)) == pytest.approx(1800)
    assert given.isolated_us(Load(gather, None)) == 1500
    assert given.alone_us(Load(gather, 8)) > 2 * 1800
    assert model.isolated_us(Load(gemm, 132)) < 750


def test_curves_between_and_beyond_measured_counts(model: GpuModel) -> None:
    gemm = model.gemm(8192, 8192, 8192, "g")
    full, some, fewer, four = (model.alone_us(Load(gemm, n)) for n in (132, 100, 108, 4))
    curve = model.record["curves"]["cb"]
    assert some / full == pytest.approx(curve["100"])
    assert model.alone_us(Load(gemm, 104)) == pytest.approx((some + fewer) / 2)
    assert four / full == pytest.approx(2 * curve["8"])


def test_what_does_not_interfere_overlaps(model: GpuModel) -> None:
    none = with_values(
        model, memory_contention=0, l2_contention=0, engines_contention=0, cap_w=5000
    )
    gemm, gather = none.gemm(8192, 8192, 8192, "g"), Collective("all_gather", 256 << 20, 2)
    alone = none.alone_us(Load(gemm, 132))
    times = {"g": 132, gather.name: None}
    assert none.play((gemm, gather), lambda _: times) == pytest.approx(alone)
    # Half of its rate until the collective ends.
    taken = none.alone_us(Load(gather, None))
    both = none.play((gemm, gather), lambda _: times, {"g": 0.5})
    assert both == pytest.approx(alone + taken / 2)


def test_machines_without_measured_parameters() -> None:
    for load, name in (
        (models.load, "h200-2"),
        (gpu_model.load, "mi300x-8"),
        (gpu_model.load, "h100-2"),
    ):
        with pytest.raises(offcore.Error) as raised:
            load(name)
        assert raised.value.code == "unsupported"
    assert gpu_model.any_of("mi300x-8").name == "mi300x-8"


def without(what: str) -> list[dict[str, Any]]:
    rows = ROWS[FITTED_FROM]
    return {
        "curve of cb1": [row for row in rows if row.get("measure") != "gemm"],
        "joules of": [row for row in rows if row.get("measure") != "energy"],
        "by its cores": [row for row in rows if row.get("measure") != "collective"],
        "under sp": [row for row in rows if row.get("strategy") != "sp"],
        "power limit": [],
    }[what]


@pytest.mark.parametrize(
    "what", ["curve of cb1", "joules of", "by its cores", "under sp", "power limit"]
)
def test_rows_that_lack_something_give_no_parameters(what: str) -> None:
    with pytest.raises(offcore.Error, match=what) as raised:
        gpu_fit.record_of(without(what), "")
    assert raised.value.code == "invalid"


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    rows = str(RESULTS / f"{FITTED_FROM}.jsonl")
    made = CliRunner().invoke(app, ["overlap", "calibrate", "--rows", rows])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "calibrated" / "h200-2-overlap.json").exists()
    both = ["overlap", "calibrate", "--rows", rows, "--machine", "h200-2"]
    assert CliRunner().invoke(app, both).exit_code
    other = str(RESULTS / "overlap-h200-2-256M.jsonl")
    told = CliRunner().invoke(app, ["overlap", "predict", other, "--json", "-"])
    assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(lines) == 24
    assert {one["isolated"] for one in lines} == {GIVEN, COMPUTED}
    for words in ("points of the ideal on average", "measured twice", "parameters of h200-2"):
        assert words in told.stderr
    nothing = tmp_path / "none.jsonl"
    nothing.write_text('{"machine": "h200-2"}\n', "utf-8")
    refused = CliRunner().invoke(app, ["overlap", "predict", str(nothing)])
    assert refused.exit_code
