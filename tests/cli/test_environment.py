"""Environment variables are checked by name, and the user's folders come first."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import offcore
from offcore import _core, folders, kv, machines, mcast
from offcore.comm import signal_forms
from offcore.tools.cli import model as model_commands
from offcore.tools.papers import calibrate

WRONG = {
    "OFFCORE_BACKEND": ("gpu",),
    "OFFCORE_HOST_CORES": ("many", "-1", "2.5", "99999999999"),
    "OFFCORE_LOG": ("loud",),
    "OFFCORE_NVTX": ("yes",),
    "OFFCORE_RANK": ("first", "-1"),
    "OFFCORE_STORE": ("here", "127.0.0.1:", "127.0.0.1:70000"),
    "OFFCORE_TIMEOUT_S": ("abc", "nan", "inf", "-1", "0", "1e300", "3 "),
    "OFFCORE_VARIANT": ("warp", "pcpy:0"),
    "OFFCORE_WORLD_SIZE": ("2.0",),
}


def call() -> None:
    with offcore.Communicator(machine=None if "OFFCORE_STORE" in os.environ else "host-2") as comm:
        comm.all_gather(comm.window(2048)).wait()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("OFFCORE_RANK", "OFFCORE_WORLD_SIZE"):
        monkeypatch.setenv("OFFCORE_STORE", "127.0.0.1:29999")
        monkeypatch.setenv("OFFCORE_RANK", "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(offcore.Error, match=f"^{name}") as raised:
        call()
    assert raised.value.code == "invalid"
    assert repr(value) in str(raised.value)


def test_a_wrong_timeout_is_named_by_everything_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFCORE_TIMEOUT_S", "abc")
    page = np.zeros(64, np.uint8)
    for waits in (
        lambda: offcore.batch_copy([page], [page.copy()]),
        lambda: kv.HostPool(64, 1, backend="host"),
        lambda: mcast.Communicator("127.0.0.1:9", rank=0, world_size=1),
    ):
        with pytest.raises(offcore.Error, match=r"^OFFCORE_TIMEOUT_S is 'abc'") as raised:
            waits()
        assert raised.value.code == "invalid"


def test_the_table_knows_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("auto", *(name for name, *_ in offcore.probe_backends())):
        monkeypatch.setenv("OFFCORE_BACKEND", name)
        assert _core.env("OFFCORE_BACKEND") == name


def test_show_and_program_take_the_variant_of_the_environment(offcore_cli, monkeypatch) -> None:
    env = {"OFFCORE_VARIANT": "prelaunch_b2b"}
    assert " variant=prelaunch_b2b " in offcore_cli("show", "all_gather", env=env).out
    assert " variant=pcpy " in offcore_cli("show", "all_gather", "--variant", "pcpy", env=env).out
    ran = offcore_cli("show", "all_gather", env={"OFFCORE_VARIANT": "warp"})
    assert ran.err.startswith("offcore: invalid: OFFCORE_VARIANT: unknown variant 'warp'")
    monkeypatch.setenv("OFFCORE_VARIANT", "prelaunch_b2b")
    with offcore.Communicator(backend="sim", machine="mi300x-8") as comm:
        assert comm.program("all_gather", 1 << 16).variant == "prelaunch_b2b"


def test_doctor_flags_wrong_values_and_unknown_names(offcore_cli) -> None:
    env = {"OFFCORE_TIMEOUT_S": "abc", "OFFCORE_TIMOUT_S": "3", "OFFCORE_VARIANT": "warp"}
    env |= {"OFFCORE_HOST_CORES": "x", "OFFCORE_BACKEND": "gpu", "OFFCORE_LOG": "loud"}
    ran = offcore_cli("doctor", "--json", "-", env=env)
    assert ran.status == 0, ran.err
    told = {one["name"]: one["problem"] for one in ran.records[0]["environment"]}
    assert {name for name, problem in told.items() if problem} >= env.keys()
    assert told["OFFCORE_TIMOUT_S"] == "not read by offcore: did you mean OFFCORE_TIMEOUT_S?"
    assert told["OFFCORE_CACHE"] is None
    assert "did you mean" in " ".join(offcore_cli("doctor", env=env).out.split())


def home(folder: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache")}


def test_tune_writes_to_the_users_folder_which_is_read_first(offcore_cli, tmp_path) -> None:
    words = ("--backend", "host", "--ranks", "2", "--ops", "broadcast", "--sizes", "4K")
    words += ("--iters", "2", "--calls", "2")
    written = tmp_path / "config" / "offcore" / "machines" / "tuned" / "host-2.json"
    ran = offcore_cli("tune", *words, env=home(tmp_path))
    assert ran.status == 0, ran.err
    assert f"table: {written}" in ran.out
    [found] = offcore_cli("doctor", "--json", "-", env=home(tmp_path)).records
    host = next(one for one in found["machines"] if one["name"] == "host-N")
    assert host["tuned"] == [str(written)]
    yours = {one["use"]: one["path"] for one in found["folders"]}
    assert yours["machine files, tuned tables"] == str(written.parents[1])
    assert yours["verdicts of doctor --stress"] == str(tmp_path / "cache/offcore/signals.json")


def test_the_users_files_count_before_those_that_come_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = machines.path_of("h200-2")
    table = json.loads(machines.tables()["h200-2"].read_text("utf-8"))
    for name, value in home(tmp_path).items():
        monkeypatch.setenv(name, value)
    mine = folders.machines()
    (mine / "tuned").mkdir(parents=True)
    (mine / "tuned" / "h200-2.json").write_text(json.dumps(table[:1]), "utf-8")
    assert machines.path_of("h200-2") == packaged
    assert len(machines.load("h200-2").tuned) == 1
    shutil.copy(packaged, mine)
    assert machines.path_of("h200-2") == mine / "h200-2.json"
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path / "others"))
    assert machines.path_of("h200-2") == packaged
    assert machines.tuned_path("h200-2") == tmp_path / "others" / "tuned" / "h200-2.json"
    assert signal_forms.memory() == tmp_path / "cache" / "offcore" / "signals.json"


def test_calibrate_makes_its_folder_before_it_fits(
    offcore_cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fit(*_: object) -> None:
        asked.append([path.is_dir() for path in (tmp_path / "new" / "folder", tmp_path / "mine")])
        raise InterruptedError

    monkeypatch.setattr(calibrate, "calibrate", fit)
    monkeypatch.setenv("OFFCORE_MACHINES", str(tmp_path / "mine"))
    for out in (tmp_path / "new" / "folder", None):
        with pytest.raises(InterruptedError):
            model_commands.calibrate_command(seed=1, starts=1, out=out, json=None)
    assert asked == [[True, False], [True, True]]
    (tmp_path / "file").touch()
    for command in ("calibrate", "tune"):  # where nothing can be written, at once
        ran = offcore_cli(command, "--out", tmp_path / "file" / "below" / "t.json", timeout=20)
        assert (ran.status, ran.err.count("\n")) == (1, 1)
        assert ran.err.startswith("offcore: invalid: cannot write to '")
