"""What holds for all commands, and the page that `offcore report` writes."""

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from rich.table import Table

import widths
from offcore.tools import page, plot, report, tables
from offcore.tools.cli import main as cli
from offcore.tools.records import read_records

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FITTING = (
    "bench all_gather --machine mi300x-8 --sizes 4K,1M",
    "bench all_to_all --machine mi300x-8 --in-place --sizes 4K,1G",
    "bench all_reduce --machine mi300x-8 --sizes 4K",
    "bench all_gather --backend host --ranks 2 --sizes 4K --baseline memcpy --iters 1 --calls 1",
    "breakdown",
    "doctor",
    "explain all_reduce --machine h200-4 --bytes 4M",
    "gpu bench --backend host --only ping-pong,push --rounds 3",
    "kv bench --tokens 256,512 --direction load,both --iters 1",
    "mcast simulate all_gather --hosts 16 --sizes 64K,1G",
    "overlap run cb1_896M,mb1_4G",
    "overlap advise 8192x8192x8192 all_gather:896M",
)


def commands(command, name="offcore"):
    if hasattr(command, "commands"):
        for key, one in command.commands.items():
            yield from commands(one, f"{name} {key}")
    else:
        yield name, command


EVERY = dict(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", EVERY)
def test_every_command_writes_json_and_shows_an_example(name):
    command = EVERY[name]
    assert any("--json" in one.opts for one in command.params)
    shown, written = (
        text.partition("\b\n")[2].replace("\\\n    ", "")
        for text in (command.help, inspect.cleandoc(command.callback.__doc__))
    )
    assert re.search(rf"^ *(.*\| )?{name}\b", shown, re.M), shown
    assert shlex.split(shown) == shlex.split(written)


def test_every_command_is_found():
    assert len(EVERY) >= 25
    assert {"offcore bench", "offcore report", "offcore sdma encode"} <= EVERY.keys()


@pytest.mark.parametrize("words", FITTING)
def test_tables_fit_80_columns(offcore_cli, words):
    ran = offcore_cli(*words.split())
    assert ran.status == 0, ran.err
    assert widths.tables(ran.out), ran.out
    assert widths.too_wide(ran.out) == []


@pytest.mark.parametrize("name", EVERY)
def test_help_fits_80_columns(offcore_cli, name):
    words = name.split()[1:]
    ran = offcore_cli(*words, "--help", env={"COLUMNS": "80"})
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= widths.COLUMNS
    assert "\u2026" not in ran.out


@pytest.mark.parametrize("name", EVERY)
def test_a_wrong_command_line_is_code_2(offcore_cli, name):
    ran = offcore_cli(*name.split()[1:], "--no-such-option")
    assert (ran.status, ran.out) == (2, "")
    assert "No such option: --no-such-option" in ran.err


def test_what_does_not_fit_keeps_its_numbers(capsys):
    console = tables.Page()
    console.width = tables.WIDTH
    wide = tables.titled("wide", [f"name {n}" for n in range(12)], ["time us"])
    for row in range(2):
        wide.add_row(*(f"{row}{'x' * 12}" for _ in range(12)), "1,234.56")
    console.print(wide)
    out = capsys.readouterr().out
    assert out.count("1,234.56") == 2 or "time us: 1,234.56" in out
    assert "1xxxxxxxxxxxx" in out


def test_what_is_the_same_in_all_rows_moves_to_the_title(capsys):
    console = tables.Page()
    console.width = 40
    table: Table = tables.titled("load", ["model", "way"], ["time us", "#wrong", ""])
    table.add_row("a-model-with-a-name", "kernel", "1.00", "0", "met")
    table.add_row("a-model-with-a-name", "copies-of-a-page", "2.00", "0", "met")
    console.print(table)
    assert capsys.readouterr().out.startswith("load, model: a-model-with-a-name\n")
    assert [str(one.header) for one in table.columns] == ["way", "time\nus", "#wrong", ""]


def test_times_of_the_simulator_are_marked(offcore_cli):
    for words in ("bench all_gather --sizes 4K --machine h200-4", "overlap run cb1_896M"):
        assert "simulated" in offcore_cli(*words.split()).out
    ran = offcore_cli("bench", "all_reduce", "--machine", "mi300x-8", "--sizes", "4K")
    assert "how fast cores reduce is assumed" in ran.out


def test_tune_tells_how_far_it_is(offcore_cli, tmp_path):
    words = "tune --backend host --ranks 2 --ops broadcast --sizes 1K:64K --iters 1 --calls 1 --out"
    ran = offcore_cli(*words.split(), tmp_path / "t.json")
    told = re.findall(r"^tune: (\d+) % of \d+ runs$", ran.err, re.M)
    assert len(told) > 2
    assert [int(one) for one in told] == sorted(set(map(int, told)))
    assert told[-1] == "100"


def test_no_plot_is_wider_than_a_page():
    rows = report.rows_of(read_records(RESULTS / "cuda-h200-2.jsonl"))
    rows += report.rows_of(read_records(RESULTS / "sim-mi300x-8-all_gather.jsonl"))
    for some in (rows, [row for row in rows if row.op == "all_gather"]):
        figure = plot.rows_figure(some, "time")
        assert figure.get_figwidth() <= plot.PAGE_INCHES
        plot.pyplot().close(figure)
    text = "".join(path.read_text("utf-8") for path in Path(plot.__file__).parent.rglob("*.py"))
    widths = [float(one) for one in re.findall(r"figsize=\(([\d.]+),", text)]
    assert len(widths) > 10
    assert max(widths) <= plot.PAGE_INCHES


@pytest.mark.needs("matplotlib")
def test_a_page_shows_what_was_recorded(offcore_cli, tmp_path):
    names = ("cuda-h200-2.jsonl", "cuda-kv-2.jsonl", "overlap-h200-2.jsonl")
    files = [RESULTS / name for name in (*names, "sim-mi300x-8-all_gather.jsonl")]
    out = tmp_path / "page.html"
    ran = offcore_cli("report", *files, "--html", out, "--json", "-")
    assert ran.status == 0, ran.err
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
    assert json.loads(ran.out) == {"page": str(out), "rows": lines}
    text = out.read_text("utf-8")
    assert all(f"<h2>{file.name}</h2>" in text for file in files)
    assert "2 x NVIDIA H200, driver for CUDA 13.0" in text
    assert text.count("<svg") >= 3
    assert "class='mark'>mi300x-8, simulated" in text
    assert "src=" not in text  # one file, nothing from elsewhere


@pytest.mark.needs("matplotlib")
def test_a_page_measures_where_it_is_given_no_rows(offcore_cli, tmp_path):
    out = tmp_path / "page.html"
    ran = offcore_cli("report", "--html", out)
    assert ran.status == 0, ran.err
    assert "all_to_all on 2 ranks of host-2 (host)" in out.read_text("utf-8")


def test_a_page_that_cannot_be_made_is_one_line(offcore_cli, tmp_path):
    (tmp_path / "none.jsonl").write_text("", "utf-8")
    for words in (("--html", tmp_path / "no" / "page.html"), (tmp_path / "none.jsonl",)):
        ran = offcore_cli("report", *words)
        assert (ran.status, ran.err.count("\n")) == (1, 1)
        assert ran.err.startswith("offcore: invalid: ")


def test_a_page_escapes_what_rows_say():
    assert "<b>" not in page._plain([{"name": "<b>bold</b>"}])
