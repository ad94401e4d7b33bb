"""Every `offcore` command that a document shows runs as it is written, but for the sizes: few and
small ones here, with those of the document only read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offcore import cli
from offcore.sizes import parse_sizes

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/*.md")
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
PLACEHOLDERS = {"OP": "all_gather", "V": "b2b", "FILE": "program.dma", "ROWS": "rows"}
# Their words are read, and nothing is run: they want GPUs, or rows of theirs.
ON_GPUS = ("--backend cuda", "--stress", "kv plot")
ON_NAMESPACES = ("offcore mcast testbed", "offcore mcast bench")
# So here: `calibrate` takes minutes and writes beside the machine's file; `reproduce` has tests.
LONG = ("offcore calibrate", "offcore reproduce")


def commands_of(text: str) -> set[str]:
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^    (offcore .*)$", text, re.M)
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


def shown() -> list[str]:
    texts = [path.read_text("utf-8") for name in DOCUMENTS for path in ROOT.glob(name)]
    return sorted(set().union(*map(commands_of, (*texts, cli.bench.__doc__ or ""))))


def made_cheap(command: str) -> str:
    for name, value in PLACEHOLDERS.items():
        command = re.sub(rf"\b{name}\b", value, command)
    if any(part in command for part in (*ON_GPUS, *LONG)):
        return command + " --help"
    if "--hosts 188" in command and command.startswith(ON_NAMESPACES):
        return command + " --help"
    if command.startswith("offcore tune"):
        return command + " --sizes 4K --iters 3 --calls 3"
    if not command.startswith("offcore bench") or "--help" in command:
        return command
    given = re.search(r"--sizes (\S+)", command)
    if given is None:
        return command + " --sizes 4K"
    sizes = parse_sizes(given[1])
    few = len(sizes) <= 3 and max(sizes) <= 1 << 20
    return command if few else command.replace(given[0], f"--sizes {min(sizes)}")


def needed(command: str) -> tuple[str, ...]:
    """What it needs to be run, as `made_cheap` leaves it."""
    if "--help" in made_cheap(command):
        return ()
    if command.startswith(ON_NAMESPACES):
        return ("namespaces", "tc")
    return ("matplotlib",) if re.search(r" --plot |^offcore plot ", command) else ()


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.needs(*needed(one))) for one in shown()]
)
def test_a_documents_command_runs(command: str, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "offcore"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m offcore.cli "$@"\n', "utf-8")
    tool.chmod(0o755)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    rows = ROOT / "benchmarks" / "results" / "cuda-h200-2.jsonl"
    for copied in (tmp_path / "rows.jsonl", tmp_path / "benchmarks" / "results" / rows.name):
        copied.write_bytes(rows.read_bytes())
    lists = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "sdma.md").read_text("utf-8"), re.S)
    for name, commands in zip(("commands.json", "unfenced.json"), lists, strict=True):
        (tmp_path / name).write_text(commands, "utf-8")
    line = f"PATH={tool.parent}:$PATH; {made_cheap(command)}"
    if (program := PLACEHOLDERS["FILE"]) in line:
        line = f"{tool} show all_gather --ranks 2 --variant b2b > {program}; {line}"
    done = subprocess.run(
        ("bash", "-c", line),
        cwd=tmp_path,
        # What `tune` measures here would else decide how the other tests' calls run.
        env=os.environ | {"OFFCORE_MACHINES": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Traceback" not in done.stderr, done.stderr
    expected = [start for part, start in FAILING.items() if part in command]
    assert (done.returncode != 0) == bool(expected), done.stderr
    assert all(start in done.stderr for start in expected), done.stderr


def test_the_documents_show_commands() -> None:
    assert {command.split()[1] for command in shown()} >= {*BARE, "breakdown", "doctor"}
