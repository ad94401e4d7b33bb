"""`offcore show`, `verify`, `breakdown`, `doctor`, `demo`."""

import json
import subprocess
import sys
import time

import pytest

from offcore.tools import demo
from offcore.tools.cli import main as cli


def test_show_prints_text_that_verify_accepts(offcore_cli, tmp_path):
    words = ("--machine", "mi300x-8", "--ranks", "4", "--bytes", "64K", "--variant", "b2b")
    shown = offcore_cli("show", "all_gather", *words)
    assert shown.status == 0, shown.err
    assert shown.out.startswith("program all_gather machine=mi300x-8 ranks=4 variant=b2b")
    file = tmp_path / "program.dma"
    file.write_text(shown.out)
    for source, stdin in ((file, None), ("-", shown.out)):
        verified = offcore_cli("verify", source, stdin=stdin)
        assert verified.status == 0, verified.err
        assert verified.out.startswith("ok: all_gather of 4 ranks: ")


def test_show_tells_counts_as_json(offcore_cli):
    words = ("--in-place", "--variant", "pcpy", "--protocol", "promise", "--json", "-")
    ran = offcore_cli("show", "all_gather", *words)
    assert ran.status == 0, ran.err
    [record] = ran.records
    assert record["engines"] == 56
    assert record["copies"] == 56
    assert record["text"].startswith("program all_gather")


def test_a_program_of_many_commands_is_planned_in_their_time(capsys):
    """64 GiB exchanged in place by swaps: 30 s when each was compared with all in front of it. CPU
    time, which other processes do not lengthen; it takes less than one second."""
    words = ("--in-place", "--variant", "swap", "--machine", "h200-4", "--bytes", "64G")
    start = time.process_time()
    cli.app(["show", "all_to_all", *words], standalone_mode=False)
    took_s = time.process_time() - start
    shown = capsys.readouterr().out
    assert shown.startswith("program all_to_all machine=h200-4 ranks=4 variant=swap")
    assert shown.count("  copy ") > 10_000
    assert took_s < 5


def test_verify_tells_line_and_column_of_malformed_text(offcore_cli, tmp_path):
    file = tmp_path / "broken.dma"
    file.write_text("program all_gather machine=mi300x-8 ranks=two\n")
    ran = offcore_cli("verify", file)
    assert ran.status == 1
    assert ran.err.startswith("offcore: invalid: line 1, column ")


def test_verify_rejects_a_planted_hazard(offcore_cli):
    shown = offcore_cli(
        "show", "all_gather", "--ranks", "3", "--bytes", "3K", "--variant", "b2b"
    ).out
    lines = shown.splitlines()
    copy = next(i for i, line in enumerate(lines) if line.strip().startswith("copy"))
    planted = "\n".join([*lines[:copy], lines[copy], *lines[copy:]]) + "\n"
    ran = offcore_cli("verify", "-", "--json", "-", stdin=planted)
    assert ran.status == 1
    assert ran.err.startswith("offcore: verify: ")
    [record] = ran.records
    assert record["ok"] is False
    assert "hazard" in record["message"]


def test_verify_of_a_file_that_is_not_there(offcore_cli):
    ran = offcore_cli("verify", "no-such.dma")
    assert ran.status == 1
    assert ran.err.startswith("offcore: invalid: cannot read 'no-such.dma'")


@pytest.mark.needs("matplotlib")
def test_breakdown_has_the_papers_phases(offcore_cli, tmp_path):
    picture = tmp_path / "phases.png"
    ran = offcore_cli("breakdown", "--machine", "mi300x-8", "--json", "-", "--plot", picture)
    assert ran.status == 0, ran.err
    assert [row["bytes"] for row in ran.records] == [4096 << k for k in range(10)]
    for row in ran.records:
        assert sum(row["phases"].values()) == pytest.approx(row["time_us"], rel=0.01)
    overheads = [row["overhead"] for row in ran.records]
    assert overheads == sorted(overheads, reverse=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_doctor_names_every_backend(offcore_cli):
    ran = offcore_cli("doctor", "--json", "-")
    assert ran.status == 0, ran.err
    [found] = ran.records
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert backends["sim"]["available"]
    assert backends["host"]["available"]
    assert all(b["available"] or b["reason"] for b in backends.values())
    assert {"mi300x-8", "h200-4"} <= {machine["name"] for machine in found["machines"]}
    assert not [machine for machine in found["machines"] if "error" in machine]
    assert "OFFCORE_TIMEOUT_S" in {variable["name"] for variable in found["environment"]}
    assert found["build"]["compiler"].split()[0] in ("gcc", "clang")
    assert found["build"]["date"].startswith("20")
    shown = offcore_cli("doctor")
    assert shown.status == 0, shown.err
    assert "mi300x-8" in shown.out


def test_version(offcore_cli):
    ran = offcore_cli("--version")
    assert ran.status == 0
    assert ran.out.startswith("offcore ")


def test_shells_complete_commands_and_operations(offcore_cli):
    for words, found in (("offcore brea", ["breakdown"]), ("offcore bench all_g", ["all_gather"])):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        ran = offcore_cli(env=asked | {"_OFFCORE_COMPLETE": "complete_bash"})
        assert (ran.status, ran.out.split()) == (0, found), ran.err


def test_demo_without_plots_says_so_first_and_ends_well(monkeypatch, capsys, tmp_path):
    for package in ("matplotlib", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(demo, "SIM_SIZES", "4K")  # the other demo has all, and the paper's claims
    monkeypatch.setattr(demo, "_claims", list)
    cli.app(["demo", "--out", str(tmp_path), "--host-sizes", "4K"], standalone_mode=False)
    out = capsys.readouterr().out
    assert out.startswith("without plots: plots need matplotlib: pip install")
    assert out.rstrip().endswith("no byte is wrong")
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.needs("matplotlib")
def test_demo_shows_both_machines(offcore_cli, tmp_path):
    ran = offcore_cli("demo", "--out", tmp_path, "--host-sizes", "4K")
    assert ran.status == 0, ran.err
    assert "no byte is wrong" in ran.out
    for name in ("mi300x-8.png", "host.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["backend"] for row in rows} == {"sim", "host"}
    assert {row["op"] for row in rows} == {"all_gather", "all_to_all"}
    assert max(row["bytes"] for row in rows) == 4 << 30


@pytest.mark.parametrize("module", ["offcore", "offcore.tools.cli"])
def test_the_command_runs_as_a_module(module):
    import offcore

    ran = subprocess.run(
        (sys.executable, "-m", module, "--version"), capture_output=True, text=True
    )
    assert ran.stdout.startswith(f"offcore {offcore.__version__}"), ran.stderr
