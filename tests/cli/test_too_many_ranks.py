"""More ranks than a machine has are refused before a process starts; a machine may have many."""

import json

import pytest

from offcore import machines
from offcore.tools.bench import collectives, rank_processes
from offcore.tools.cli import main as cli


@pytest.mark.parametrize("ranks", [130, 65536, 2**31 - 1])
@pytest.mark.parametrize("machine", [None, "host-4"])
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_more_ranks_than_the_machine_has(offcore_cli, tmp_path, command, machine, ranks) -> None:
    words = ["bench", "all_gather"] if command == "bench" else ["tune", "--out", tmp_path / "t"]
    words += ["--backend", "host", "--sizes", "1K", "--ranks", ranks]
    ran = offcore_cli(*words, *(["--machine", machine] if machine else []))
    assert ran.status == 1
    assert ran.err.startswith("offcore: invalid: ")
    assert "ranks" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("ranks", [130, 65536, 2**31 - 1, 99999999999])
@pytest.mark.parametrize("machine", ["mi300x-8", "host-2"])
def test_programs_of_more_ranks_than_the_machine_has(offcore_cli, machine, ranks) -> None:
    ran = offcore_cli("show", "all_gather", "--machine", machine, "--ranks", ranks)
    assert ran.status != 0
    assert "Traceback" not in ran.err


def test_no_process_is_started(monkeypatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(rank_processes.RankProcesses, "_start", start)
    request = collectives.Request("all_gather", "host", None, 99999999999, [1024], ["pcpy"])
    with pytest.raises(collectives.offcore.Error, match="ranks") as failed:
        next(collectives.run(request))
    assert failed.value.code == "invalid"


def test_a_machine_of_many_ranks_is_simulated(offcore_cli, tmp_path) -> None:
    """All ranks' bytes would take 16 GiB: above 64M of 8 ranks they are left out."""
    machine = json.loads(machines.path_of("mi300x-8").read_text("utf-8"))
    path = tmp_path / "many.json"
    path.write_text(json.dumps(machine | {"name": "many", "ranks": 256}), "utf-8")
    words = ["--machine", path, "--sizes", "64M", "--variants", "b2b", "--json", "-"]
    ran = offcore_cli("bench", "all_gather", *words)
    assert ran.status == 0, ran.err
    [row] = map(json.loads, ran.out.splitlines())
    assert (row["ranks"], row["wrong"]) == (256, None)


def test_memory_that_ran_out_is_an_error_of_one_line(monkeypatch, capsys) -> None:
    def app() -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "offcore: memory: the host's memory ran out\n"
