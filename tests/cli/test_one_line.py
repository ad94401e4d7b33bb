"""Whatever a user gets wrong is one line with a code: files of rows, addresses, numbers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

import needs
import offcore
from offcore.tools import plot, records, report
from offcore.tools.bench import tune
from offcore.tools.cli import main as cli
from offcore.tools.kv import plot as kv_plot

ROWS = Path(__file__).parents[2] / "benchmarks" / "results"
STRANGE = ("abc", -1, 0, 1.5, float("nan"), 10**30, True, None, [], {}, [1, 2])


def row_of(name: str) -> dict[str, Any]:
    return records.read_records(ROWS / name)[0]


def whole_numbers(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Every option that takes one, by command, and the most that it takes."""
    for group in app.registered_groups:
        yield from whole_numbers(group.typer_instance)
    for command in app.registered_commands:
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            kind, *about = get_args(hint) or (hint,)
            if about and int in (kind, *get_args(kind)):
                yield f"{command.callback.__name__} {name}", about[0].max


def test_every_whole_number_has_a_limit() -> None:
    """Which the parser refuses before anything is done, and which the core's integers hold."""
    found = dict(whole_numbers(cli.app))
    assert len(found) > 20
    free = [name for name, most in found.items() if most is None or most >= 2**63]
    assert free == ["plot_command figure"]  # one of two, and of no others


def test_a_seed_that_no_engine_holds(offcore_cli) -> None:
    command = json.dumps([{"op": "copy", "dst": 4096, "src": 0, "bytes": 64}])
    ran = offcore_cli("sdma", "run", "-", "--seed", "99999999999999999999", stdin=command)
    assert ran.status == 2
    assert "--seed" in ran.err
    assert offcore_cli("sdma", "run", "-", "--seed", str(2**63 - 1), stdin=command).status == 0


@pytest.mark.parametrize("meeting", ["foo", "127.0.0.1:", "127.0.0.1:70000", ":x"])
def test_a_meeting_that_is_no_address(offcore_cli, meeting) -> None:
    ran = offcore_cli("mcast", "bench", "broadcast", "--hosts", "2", "--meeting", meeting)
    assert ran.status == 1
    assert ran.err.startswith(f"offcore: invalid: {meeting!r} is not an address")
    assert ran.err.count("\n") == 1


def test_mcast_without_torch_says_where_ranks_meet(tmp_path: Path) -> None:
    code = "from offcore import Error, mcast\ntry: mcast.Communicator()\n"
    code += "except Error as failure: print(failure.code, failure)"
    done = subprocess.run(
        (sys.executable, "-c", code),
        env=os.environ | needs.hiding(tmp_path, "torch"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("invalid no meeting place: pass host:port"), done.stderr


FILES = ("", "[]", "[1]", "5", "null", "{", "[" * 100_000, '{"impl": "offcore"}', "\x00")
READERS = (
    ("tune", "--out", "t.json", "--from"),
    ("plot",),
    ("plot", "--figure", "13"),
    ("kv", "plot", "--figure", "16"),
)


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_files_that_hold_no_rows(offcore_cli, tmp_path, monkeypatch, words) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = [*FILES, (ROWS / "cuda-kv-others.jsonl").read_text("utf-8")]
    if words != ("plot",):
        wrong.append((ROWS / "mcast-soak-4.jsonl").read_text("utf-8"))
    for text in wrong:
        (tmp_path / "rows.jsonl").write_text(text, "utf-8")
        ran = offcore_cli(*words, "rows.jsonl")
        assert (ran.status, ran.err.count("\n")) == (1, 1), (text[:80], ran.err)
        assert ran.err.startswith("offcore: invalid: "), ran.err
        assert len(ran.err) < 300, ran.err


def strange(good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (good | {key: value} for key in good for value in STRANGE)


def test_rows_whose_values_are_strange(tmp_path: Path) -> None:
    """They are refused, or a table and a plot can be made of them."""
    good = row_of("cuda-h200-2.jsonl")
    good |= {"impl": "offcore", "variant": "b2b", "protocol": "barrier", "asked": "auto"}
    file = tmp_path / "rows.jsonl"
    codes = []
    for one in strange(good):
        file.write_text(json.dumps(one), "utf-8")
        try:
            found = tune.read(file)
            tune.shown(tune.pick(found), tune.machine_of(found))
            plot._lines(plot.figure_rows([one, one | {"impl": "nccl"}], 13))
            assert report.rows_of([one])[0].busbw_gbps >= 0
        except offcore.Error as failure:
            codes.append(failure.code)
    for one in strange(row_of("cuda-kv.jsonl")):
        try:
            kv_plot.speedups([one | {"impl": impl} for impl in ("loop", "offcore")], 16)
        except offcore.Error as failure:
            codes.append(failure.code)
    assert len(codes) > 100
    assert set(codes) == {"invalid"}
