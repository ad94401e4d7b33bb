"""Every `offcore` command that a document or a help page shows runs as it is written, but for the
sizes, batches and hosts with torch: few and small ones here, with those of the text only read."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import ready
import widths
from offcore.sizes import parse_sizes
from offcore.tools.cli import main as cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/**/*.md")
BARE = (
    "bench",
    "show",
    "verify",
    "explain",
)  # want arguments: where they stand alone they are only named
# What a document shows to fail, and how.
FAILING = {
    "grep -v poll": "offcore: verify: ",
    "--variants swap": "offcore: unsupported: ",
    "unfenced.json": "offcore: verify: ",
}
KV_ROWS = "kv.jsonl"
OVERLAP_ROWS = "overlap.jsonl"
PLACEHOLDERS = {"OP": "all_gather", "V": "b2b", "FILE": "program.dma", "ROWS": "rows"}
# Their words are read, and nothing is run: they want GPUs.
ON_GPUS = ("--backend cuda", "--stress")
ON_NAMESPACES = ("offcore mcast testbed", "offcore mcast bench")
# So here: `calibrate` takes minutes and writes beside the machine's file; `reproduce` has tests.
LONG = ("offcore calibrate", "offcore overlap calibrate", "offcore reproduce", "--send-mbit 200")


def commands_of(text: str) -> set[str]:
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^    ((?:echo .* \| )?offcore .*)$", text, re.M)
    spans = re.findall(r"`(offcore [^`]+)`", text)
    spans = [span.replace(r"\|", "|").replace("\n", " ") for span in spans]
    found = set()
    for command in (*lines, *spans):
        command = re.sub(r"\s+(#.*)?$", "", re.sub(r" +", " ", command))
        words = command.split()
        if (
            words[1] == "demo"
            or words[1:] == ["mcast", words[-1]]
            or command.startswith("offcore: ")
            or words[1:] in [[b] for b in BARE]
        ):
            continue
        found.add(command)
    return found


def help_pages(app: typer.Typer) -> Iterator[str]:
    for group in app.registered_groups:
        yield from help_pages(group.typer_instance)
    for made in (*app.registered_commands, app.registered_callback):
        yield (made and made.callback.__doc__) or ""


def shown() -> list[str]:
    texts = [path.read_text("utf-8") for name in DOCUMENTS for path in ROOT.glob(name)]
    return sorted(set().union(*map(commands_of, (*texts, *help_pages(cli.app)))))


def only_read(command: str) -> str:
    before, dashes, after = command.partition(" -- ")
    return f"{before} --help{dashes}{after}"


def made_cheap(command: str) -> str:
    if "kv plot" in command:
        command = re.sub(r"\bFILE(\.jsonl)?\b", KV_ROWS, command)
    if "overlap plot" in command:
        command = command.replace("rows.jsonl", OVERLAP_ROWS)
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"\b{name}\b", value, command)
    if any(part in command for part in (*ON_GPUS, *LONG)):
        return only_read(command)
    if "--hosts 188" in command and command.startswith(ON_NAMESPACES):
        return only_read(command)
    if command.startswith("offcore kv bench"):
        return re.sub(r"--tokens \d+", "--tokens 64", command)
    if command.startswith("offcore tune"):
        return command + " --sizes 4K --iters 3 --calls 3"
    if "--help" in command:
        return command
    if " mcast bench " in command:
        if "gloo" in command:  # its ranks take longest to import torch
            command = command.replace("--hosts 4", "--hosts 2")
        command = re.sub(r" --sizes \S+", "", command)
        return command.replace("mcast bench", "mcast bench --sizes 64K --batches 1")
    measured = command.startswith("offcore bench")
    if not (measured or command.startswith("offcore mcast simulate")):
        return command
    given = re.search(r"--sizes (\S+)", command)
    if given is None:
        return command + (" --sizes 256K" if "mcast" in command else " --sizes 4K")
    sizes = parse_sizes(given[1])
    few = len(sizes) <= 3 and (max(sizes) <= 1 << 20 or not measured)
    return command if few else command.replace(given[0], f"--sizes {min(sizes)}")


def distinct(commands: list[str]) -> list[str]:
    """Without those that run as another one does, or as one that writes rows besides."""
    run = {made_cheap(command): command for command in commands}
    rows = [line.partition(" --json ")[0] for line in run if " --json " in line]
    return [command for line, command in run.items() if line not in rows]


def needed(command: str) -> tuple[str, ...]:
    """What it needs to be run, as `made_cheap` leaves it."""
    if "--help" in made_cheap(command):
        return ()
    if command.startswith(ON_NAMESPACES):
        return ("namespaces", "tc", *(("torch",) if "gloo" in command else ()))
    return ("matplotlib",) if re.search(r" --plot |^offcore (kv |overlap )?plot ", command) else ()


def folder_of(tmp_path: Path, command: str) -> dict[str, str]:
    """Makes what commands find where they run, and their environment."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in (("offcore", "-m offcore.tools.cli "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n', "utf-8")
        (tools / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    shutil.copytree(ROOT / "machines" / "overlap", tmp_path / "machines" / "overlap")
    results = ROOT / "benchmarks" / "results"
    rows = results / "cuda-h200-2.jsonl"
    (tmp_path / KV_ROWS).write_bytes((results / "cuda-kv.jsonl").read_bytes())
    overlap_rows = results / "sim-mi300x-8-overlap.jsonl"
    (tmp_path / OVERLAP_ROWS).write_bytes(overlap_rows.read_bytes())
    (tmp_path / "rows.jsonl").write_bytes(rows.read_bytes())
    for named in set(re.findall(r"benchmarks/results/\S+\.jsonl", command)):
        (tmp_path / named).write_bytes((ROOT / named).read_bytes())
    lists = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "sdma.md").read_text("utf-8"), re.S)
    for name, commands in zip(("commands.json", "unfenced.json"), lists, strict=True):
        (tmp_path / name).write_text(commands, "utf-8")
    # What `tune` measures here would else decide how the other tests' calls run.
    machines = {"OFFCORE_MACHINES": str(tmp_path)}
    return os.environ | machines | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def piped(line: str, tmp_path: Path, env: dict[str, str]) -> tuple[int, str]:
    """Runs the programs of a pipe one after the other. How the last one ended, and all errors."""
    errors = tmp_path / "errors"
    errors.touch()
    given = tmp_path / "given"
    given.touch()
    for number, program in enumerate(line.split(" | ")):
        words, told = shlex.split(program), tmp_path / f"told{number}"
        told.touch()
        if words[0] == "offcore":
            streams = (given, told, errors)
            status = ready.run(100, ready.command, words[1:], env, str(tmp_path), streams)
            assert status is not None, errors.read_text("utf-8")
        else:
            with given.open() as stdin, told.open("w") as stdout:
                status = subprocess.call(words, stdin=stdin, stdout=stdout, timeout=100)
        given = told
    return status, errors.read_text("utf-8")


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=pytest.mark.needs(*needed(one))) for one in distinct(shown())],
)
def test_a_shown_command_runs(command: str, tmp_path: Path) -> None:
    env = folder_of(tmp_path, command)
    line = made_cheap(command)
    if (program := PLACEHOLDERS["FILE"]) in line:
        show = "offcore show all_gather --ranks 2 --variant b2b"
        assert piped(show, tmp_path, env)[0] == 0
        (tmp_path / "told0").rename(tmp_path / program)
    status, errors = piped(line, tmp_path, env)
    assert "Traceback" not in errors, errors
    expected = [start for part, start in FAILING.items() if part in command]
    assert (status != 0) == bool(expected), errors
    assert all(start in errors for start in expected), errors
    for told in tmp_path.glob("told*"):
        assert widths.too_wide(told.read_text("utf-8")) == []


def test_documents_and_help_pages_show_commands() -> None:
    texts = list(help_pages(cli.app))
    assert len(set().union(*map(commands_of, texts))) > 15
    assert {command.split()[1] for command in shown()} >= {*BARE, "breakdown", "doctor"}


def test_contributing_names_tests_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    selections = re.findall(r"python -m pytest ([^`]+)`", text)
    assert selections
    for words in selections:
        command = (sys.executable, "-m", "pytest", "--collect-only", "-q", *words.split())
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout


def test_scripts_that_documents_show_have_their_options() -> None:
    """Most want GPUs or minutes: they are read."""
    lacking, found = [], 0
    for name in (*DOCUMENTS, "CHANGELOG.md", "CONTRIBUTING.md"):
        for page in ROOT.glob(name):
            text = page.read_text("utf-8").replace("\\\n", " ")
            for script, rest in re.findall(
                r"(?<![\w/])((?:benchmarks|examples)/[\w/]+\.py)([^\n`#|]*)", text
            ):
                options = re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
                source = (ROOT / script).read_text("utf-8")
                lacking += [(page.name, script, one) for one in options if f'"{one}"' not in source]
                found += len(options)
    assert lacking == []
    assert found > 60
