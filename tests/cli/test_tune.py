"""How `offcore tune` picks: from planted rows."""

import itertools
import json

import numpy as np
import pytest

import offcore
from offcore import machines
from offcore.comm.programs import program_of
from offcore.tools.bench import tune
from offcore.tools.bench.collectives import Request

FIELDS = {
    "impl": "offcore", "op": "all_gather", "ranks": 2, "in_place": True, "machine": "h200-2",
    "asked": "auto", "protocol": "barrier", "staged": False, "timing": "chain", "signals": "fenced",
    "wrong": 0, "date": "2026-11-22", "commit": "abc",
}  # fmt: skip


def row(variant, nbytes, time_us, commands=4, spread=0.1, **more):
    times = {"time_us": time_us, "time_us_min": time_us - spread, "time_us_max": time_us + spread}
    return FIELDS | {"variant": variant, "bytes": nbytes, "commands": commands} | times | more


def test_the_fastest_of_each_size_wins_its_range():
    rows = [
        row("fan", 1024, 7.0), row("pcpy", 1024, 9.0),
        row("fan", 65536, 8.0), row("pcpy", 65536, 9.5),
        row("fan", 1 << 20, 20.0), row("pcpy", 1 << 20, 14.0),
    ]  # fmt: skip
    table = tune.pick(rows)
    assert [(r["variant"], r["bytes"], r["time_us"]) for r in table] == [
        ("fan", 1024, 7.0),
        ("fan", 65536, 8.0),
        ("pcpy", 1 << 20, 14.0),
    ]
    assert table[0]["bytes_min"] == 0
    assert table[-1]["bytes_max"] == 2**63 - 1
    for one, more in itertools.pairwise(table):
        assert one["bytes"] <= one["bytes_max"] == more["bytes_min"] - 1
    assert table[0]["bytes_max"] == 8192  # half way by ratio: 1K x 8 x 8 = 64K


@pytest.mark.parametrize(
    ("measured", "barrier", "eager", "promise"),
    [
        (("barrier", "eager", "promise"), "fan", "b2b", "pcpy"),
        (("barrier", "eager"), "fan", "b2b", "fan"),
        (("barrier", "promise"), "fan", "pcpy", "pcpy"),
        (("promise",), "pcpy", "pcpy", "pcpy"),
    ],
)
def test_each_way_to_enter_has_rows_of_its_own(
    tmp_path, monkeypatch, measured, barrier, eager, promise
):
    """Other variants win in each; a table without rows of a way answers by the nearest."""
    times_us = {"barrier": (7, 9, 8), "eager": (20, 15, 16), "promise": (6, 5, 4)}
    rows = [
        row(variant, 1024, time_us, protocol=way, staged=way == "eager")
        for way in measured
        for variant, time_us in zip(("fan", "b2b", "pcpy"), times_us[way], strict=True)
    ]
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    tune.write(tune.pick(rows), tmp_path / "tuned" / "h200-2.json")
    machine = machines.load("h200-2")
    for protocol, variant in (("barrier", barrier), ("eager", eager), ("promise", promise)):
        program = program_of(machine, "all_gather", 2, 1024, "auto", True, protocol)
        assert program.variant == variant, protocol


def test_how_a_call_enters_counts_more_than_its_signals(tmp_path, monkeypatch):
    rows = [
        row("fan", 1024, 7.0, signals="copy_order"),
        row("b2b", 1024, 6.0, signals="fenced", protocol="promise"),
    ]
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    tune.write(tune.pick(rows), tmp_path / "tuned" / "h200-2.json")
    machine = machines.load("h200-2")
    machine.signals = "fenced"
    for protocol, variant in (("barrier", "fan"), ("promise", "b2b")):
        program = program_of(machine, "all_gather", 2, 1024, "auto", True, protocol)
        assert program.variant == variant


def tuned_all_reduce(variant, ranks, folder, machine):
    found = row(variant, 1 << 20, 90.0, op="all_reduce", ranks=ranks, machine=machine)
    form = {"in_place": False, "asked": "eager", "protocol": "eager", "staged": True}
    tune.write(tune.pick([found | form | {"signals": None}]), folder / "tuned" / f"{machine}.json")


@pytest.mark.parametrize("variant", ["one_shot", "pipelined"])
def test_all_reduces_take_the_tables_variant(tmp_path, monkeypatch, variant):
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    tuned_all_reduce(variant, 2, tmp_path, "host-2")
    with offcore.Communicator(backend="host", ranks=2) as comm:
        for count in (3, 1 << 10, 1 << 20):
            given = [np.full(count, rank + 1, "int32") for rank in range(2)]
            out = [np.empty(count, "int32") for _ in range(2)]
            result = comm.all_reduce(out, given).wait()
            assert (result.variant, result.tuned) == (variant, True)
            assert all((one == 3).all() for one in out)
        named = comm.all_reduce(out, given, variant="one_shot").wait()
        assert (named.variant, named.tuned) == ("one_shot", False)
        assert not comm.reduce_scatter([one[: count // 2] for one in out], given).wait().tuned


def test_what_was_not_measured_stays_in_the_table(offcore_cli, tmp_path, monkeypatch):
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    old = [row("fan", 1024, 7.0), row("pcpy", 1024, 9.0, op="all_to_all")]
    own = tmp_path / "tuned" / "h200-2.json"
    tune.write(tune.pick(old), own)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("b2b", 1024, 5.0, op="all_to_all")), "utf-8")
    ran = offcore_cli("tune", "--from", rows)
    assert ran.status == 0
    assert "kept: 1 rows of other operations or ranks" in ran.out.replace("\n", " ")
    told = {one["op"]: one["variant"] for one in json.loads(own.read_text("utf-8"))}
    assert told == {"all_gather": "fan", "all_to_all": "b2b"}
    other = tmp_path / "other.json"
    assert offcore_cli("tune", "--from", rows, "--out", other).status == 0
    assert len(json.loads(other.read_text("utf-8"))) == 1


def test_explain_tells_of_an_all_reduce_by_the_table(offcore_cli, tmp_path, monkeypatch):
    words = ("explain", "all_reduce", "--machine", "h200-2", "--bytes", "1M", "--json", "-")
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    assert not offcore_cli(*words).records[0]["tuned"]
    tuned_all_reduce("one_shot", 2, tmp_path, "h200-2")
    assert offcore_cli(*words).records[0]["tuned"]
    tuned_all_reduce("pipelined:4", 2, tmp_path, "h200-2")
    assert "the tuned table has pipelined:4 for all_reduce" in offcore_cli(*words).err


def test_a_table_has_no_all_reduce_in_one_shot_where_it_is_too_large(tmp_path, monkeypatch):
    """Above 32 MiB of all peers: arrays of 11 MiB between four."""
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    tuned_all_reduce("one_shot", 4, tmp_path, "h200-4")
    machine = machines.load("h200-4")
    small, large = (
        program_of(machine, "all_reduce", 4, size, "auto", False, "eager").variant
        for size in (10 << 20, 11 << 20)
    )
    assert (small, large) == ("one_shot", "pipelined")


def test_what_is_within_noise_goes_to_fewer_commands():
    near = [row("pcpy", 1024, 7.00, commands=12), row("fan", 1024, 7.10, commands=4)]
    assert tune.pick(near)[0]["variant"] == "fan"
    apart = [row("pcpy", 1024, 7.00, commands=12), row("fan", 1024, 7.50, commands=4)]
    assert tune.pick(apart)[0]["variant"] == "pcpy"
    noisy = [row("pcpy", 1024, 7.0, 12, spread=0.6), row("fan", 1024, 7.50, commands=4)]
    assert tune.pick(noisy)[0]["variant"] == "fan"
    # Noise never counts for more than a tenth.
    wild = [row("pcpy", 1024, 7.0, 12, spread=5.0), row("fan", 1024, 8.0, commands=4)]
    assert tune.pick(wild)[0]["variant"] == "pcpy"


def test_signal_forms_and_places_have_rows_of_their_own():
    rows = [
        row("fan", 1024, 7.0),
        row("pcpy", 1024, 6.0, signals="copy_order"),
        row("b2b", 1024, 5.0, in_place=False),
    ]
    told = {(r["in_place"], r["signals"]): r["variant"] for r in tune.pick(rows)}
    assert told == {(True, "fenced"): "fan", (True, "copy_order"): "pcpy", (False, "fenced"): "b2b"}


@pytest.mark.parametrize(
    "change",
    [
        {"wrong": 3},
        {"impl": "nccl"},
        {"asked": "credits"},
        {"timing": "call"},
        {"variant": "prelaunch_fan"},
    ],
)
def test_rows_that_no_table_may_use(change):
    rows = [row("pcpy", 1024, 9.0), row("fan", 1024, 1.0) | change]
    assert [r["variant"] for r in tune.pick(rows)] == ["pcpy"]
    with pytest.raises(offcore.Error, match="no row to tune from"):
        tune.pick(rows[1:])


def test_prelaunched_variants_win_where_asked():
    rows = [row("pcpy", 1024, 9.0), row("prelaunch_fan", 1024, 1.0)]
    assert tune.pick(rows, prelaunch=True)[0]["variant"] == "prelaunch_fan"


def test_rows_of_one_machine_are_needed():
    with pytest.raises(offcore.Error, match="not of h200-2, h200-4"):
        tune.machine_of([row("fan", 1, 1.0), row("fan", 1, 1.0, machine="h200-4")])


def test_from_recorded_rows_to_a_table_that_machines_read(offcore_cli, tmp_path, monkeypatch):
    source = tmp_path / "rows.jsonl"
    rows = [row("fan", 1024, 7.0), row("pcpy", 1024, 6.0, signals="copy_order")]
    source.write_text("".join(json.dumps(one) + "\n" for one in rows))
    env = {"OFFCORE_MACHINES": str(tmp_path)}
    ran = offcore_cli("tune", "--from", source, env=env)
    assert ran.status == 0, ran.err
    path = tmp_path / "tuned" / "h200-2.json"
    assert str(path) in ran.out.replace("\n", "")
    assert "7.00 at 1K" in ran.out
    table = json.loads(path.read_text())
    assert {found["op"] for found in table} == set(tune.OPS[:2])  # others of the packaged table
    for found in (one for one in table if one["op"] == "all_gather"):
        assert found["time_us"] > 0
        assert (found["date"], found["commit"]) == ("2026-11-22", "abc")
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path))
    # The rows of the form that is used count first.
    machine = machines.load("h200-2")
    assert {(r.variant, r.signals) for r in machine.tuned if r.op == "all_gather"} == {
        ("fan", "fenced"),
        ("pcpy", "copy_order"),
    }
    for form, chosen in (("fenced", "fan"), ("copy_order", "pcpy"), ("", machine.tuned[0].variant)):
        machine.signals = form
        program = program_of(machine, "all_gather", 2, 1024, "auto", True, "promise")
        assert program.variant == chosen


def test_host_is_tuned_by_measuring(offcore_cli, tmp_path):
    out = tmp_path / "tuned" / "host-2.json"
    words = ("--sizes", "4K,64K", "--iters", "2", "--calls", "3", "--ops", "broadcast")
    ran = offcore_cli("tune", "--backend", "host", "--ranks", "2", *words, "--out", out)
    assert ran.status == 0, ran.err
    rows = json.loads(out.read_text())
    assert {(r["op"], r["in_place"]) for r in rows} == {("broadcast", True)}
    # Promised, entered, and through slots: a broadcast enters there too.
    assert [(r["entry"], r["staged"], r["bytes"]) for r in rows] == [
        (False, False, 4096),
        (False, False, 65536),
        (True, False, 4096),
        (True, False, 65536),
        (True, True, 4096),
        (True, True, 65536),
    ]
    assert {r["signals"] for r in rows} == {None}


def test_large_sizes_are_measured_unchecked_and_no_form_is_asked_that_is_not():
    sizes = [1024, 1 << 30]
    template = Request("all_gather", "cuda", None, 2, sizes, ["fan"])
    asked = tune.requests(template, ["all_to_all", "scatter", "broadcast"])
    assert [(r.op, r.in_place, r.sizes, r.check) for r in asked if r.sizes == [1024]] == [
        ("all_to_all", False, [1024], True),
        ("all_to_all", True, [1024], True),
        ("scatter", False, [1024], True),
        ("broadcast", True, [1024], True),
    ]
    assert [r.check for r in asked if r.sizes == [1 << 30]] == [False] * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "sim"), "unsupported: times on sim are a model's"),
        (("--from", "no-such.jsonl"), "invalid: cannot read 'no-such.jsonl'"),
        (("--from", __file__), "invalid: "),
    ],
)
def test_refusals(offcore_cli, words, message):
    ran = offcore_cli("tune", *words)
    assert ran.status == 1
    assert ran.err.startswith(f"offcore: {message}")
