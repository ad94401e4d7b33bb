"""`offcore calibrate`: what it writes, and that it finds again what is committed."""

import json
from pathlib import Path

import numpy as np
import pytest

import offcore
from offcore import calibrate, machines
from offcore.latte import calibrated, fit, sweep

ROOT = Path(__file__).parents[2]


def test_it_writes_the_costs_and_leaves_the_rest(tmp_path: Path) -> None:
    record = json.loads((ROOT / "machines" / "calibrated" / "mi300x-8.json").read_text())
    for one in record["engines"]["parameters"]:
        if one["name"] == "wake_ns":
            one["value"] = 1234.5
    paths = calibrate.write(record, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "mi300x-8.json",
        "calibrated/mi300x-8.json",
    ]
    before, after = machines.load("mi300x-8"), machines.load(tmp_path / "mi300x-8.json")
    assert (after.cost.wake_ns, after.cost.sync_ns) == (1234.5, before.cost.sync_ns)
    lines = [(ROOT / "machines" / "mi300x-8.json").read_text(), paths[0].read_text()]
    changed = [pair for pair in zip(*(text.splitlines() for text in lines), strict=True)]
    assert [new.strip() for old, new in changed if old != new] == ['"wake_ns": 1234.5,']


def test_a_missing_or_broken_calibration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(offcore.Error, match="h200-4 is not calibrated: run offcore calibrate"):
        calibrated.load("h200-4")
    (tmp_path / "calibrated").mkdir()
    (tmp_path / "calibrated" / "mi300x-8.json").write_text("{}")
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    with pytest.raises(offcore.Error, match="not a calibration") as raised:
        calibrated.load()
    assert raised.value.code == "invalid"


def test_the_document_tells_the_record() -> None:
    text = (ROOT / "docs" / "model.md").read_text("utf-8")
    record = calibrated.load().record
    for part in ("engines", "power", "kv"):
        for one in record[part]["parameters"]:
            assert f"| `{one['name']}` | {one['value']:g} {one['unit']} |" in text
        for name, value in record[part].get("assumed", {}).items():
            assert f"{value:g}" in text, name
    for row in record["engines"]["rows"]:
        shares = f"{100 * row['residual']:+.1f} % | {100 * row['left_out']:+.1f} %"
        told = f"{row['published']:g} | {row['model']:.2f} | {shares} |"
        assert f"| {row['key']} | {row['op']}: {row['claim']} | {told}" in text


def test_other_machines_have_no_published_rows() -> None:
    with pytest.raises(offcore.Error, match="8 x MI300X") as raised:
        calibrate.calibrate("h200-4", 1, 1, print)
    assert raised.value.code == "unsupported"


@pytest.mark.needs("scipy")
def test_a_solution_is_found_within_the_ranges() -> None:
    parameters = (
        fit.Parameter("a", "us", "inside", 1, 100, 10),
        fit.Parameter("b", "us", "beyond its range", 1, 100, 10),
    )
    found = fit.solve(
        parameters,
        lambda v: np.log([v["a"] / 30, v["b"] / 500]),
        {"a": 2.0, "b": 2.0},
        50,
    )
    assert found == pytest.approx({"a": 30, "b": 100}, rel=1e-3)


@pytest.mark.needs("scipy")
def test_the_committed_fit_is_where_the_fit_ends() -> None:
    """From the committed place, and from one 10 % beside it, a few steps find no better one."""
    model = calibrated.load()
    objective = fit.Objective(model.machine, sweep.programs(model.machine))
    cost = objective.cost(model.values)
    for factor in (1.0, 1.1):
        start = {name: value * factor for name, value in model.values.items()}
        found = fit.solve(objective.parameters, objective.vector, start, 25)
        assert objective.cost(found) > 0.97 * cost


@pytest.mark.long
@pytest.mark.needs("scipy")
@pytest.mark.timeout(3600)
def test_calibrate_finds_what_is_committed(tmp_path: Path) -> None:
    record = calibrated.load().record
    told: list[str] = []
    again = calibrate.calibrate("mi300x-8", record["seed"], record["starts"], told.append)
    assert len(told) >= record["starts"]
    for part in ("engines", "power", "kv"):
        for one, known in zip(again[part]["parameters"], record[part]["parameters"], strict=True):
            assert one["value"] == pytest.approx(known["value"], rel=0.02), one["name"]
    calibrate.write(again, tmp_path)
    assert machines.load(tmp_path / "mi300x-8.json").name == "mi300x-8"
