"""More ranks than a machine has are refused before a process starts."""

import pytest

from offcore.tools.bench import collectives, rank_processes


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
