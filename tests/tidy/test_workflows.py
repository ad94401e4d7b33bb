"""What the workflows and .ci/run call is there: make's targets, scripts, and tests."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
# Programs that a runner has, or that a step before has installed.
PROGRAMS = {"apt-get", "cd", "grep", "head", "make", "pip", "python", "python3", "sed", "sysctl"}
PROGRAMS |= {"test", "twine"}


def jobs(text: str) -> list[str]:
    return re.split(r"^  (?=[a-z]+:)", text.split("\njobs:\n")[1], flags=re.M)[1:]


def steps(job: str) -> Iterator[str]:
    """What the shell is given, for each value of the job's matrix."""
    matrix = dict(re.findall(r"^ +(\w+): \[(.*)\]$", job, re.M))
    folded = r"^( +)(?:- |  )run: >-\n((?:\1 {4}.*\n)+)"
    lines = [" ".join(body.split()) for _, body in re.findall(folded, job, re.M)]
    for line in (*lines, *re.findall(r"^ +(?:- )?run: (?!>-)(.+)$", job, re.M)):
        named = re.search(r"\$\{\{ matrix\.(\w+) \}\}", line)
        for value in matrix[named[1]].split(", ") if named else ("",):
            yield line.replace(named[0], value) if named else line


def wrong(line: str) -> list[str]:
    """Targets and files that a step names and that are not there."""
    lacking = []
    for command in re.split(r" && |\$\(| \| ", line):
        words = shlex.split(re.sub(r"  +#.*|\)\"?", "", command).replace('"', ""))
        program, *rest = words[1:] if words[:1] == ["sudo"] else words
        if program == "make":
            lacking += [word for word in rest if "=" not in word and word not in TARGETS]
        elif not program.startswith((".venv/bin/", "/tmp/bare/")) and program not in PROGRAMS:
            lacking.append(program)
        named = (word for word in rest if re.fullmatch(r"[\w./]+\.(?:py|md)", word))
        lacking += [word for word in named if not (ROOT / word).is_file()]
    return lacking


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_steps_call_what_there_is(path: Path) -> None:
    lines = [line for job in jobs(path.read_text("utf-8")) for line in steps(job)]
    assert len(lines) >= 5
    assert {line: bad for line in lines if (bad := wrong(line))} == {}


def test_what_is_not_there_is_found() -> None:
    assert wrong("make build nothing") == ["nothing"]
    assert wrong("cd / && .venv/bin/python tests/none.py") == ["tests/none.py"]
    assert wrong("setarch -R make docs") == ["setarch"]
    assert wrong("make docs CXX=g++  # a comment") == []


def test_every_job_is_read() -> None:
    lines = [
        one for path in WORKFLOWS for job in jobs(path.read_text("utf-8")) for one in steps(job)
    ]
    assert {"make lint", "make docs", "make asan", "make tsan"} <= set(lines)
    assert any("tests/lower_bounds.py build/oldest" in one for one in lines)
    assert any("twine check" in one for one in lines)
    text = "".join(path.read_text("utf-8") for path in WORKFLOWS)
    assert len(lines) >= len(re.findall(r"\brun:", text))


def test_the_script_of_ci_calls_what_there_is() -> None:
    text = (ROOT / ".ci" / "run").read_text("utf-8")
    named = re.findall(r"\btests/[\w/]+\.py\b", text)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).is_file()] == []
    called = re.findall(r"^(?:exec )?make (.+)$", text, re.M)
    assert called
    assert {target for words in called for target in words.split()} <= TARGETS


def test_workflows_watch_and_keep_files_that_there_are() -> None:
    text = "".join(path.read_text("utf-8") for path in WORKFLOWS)
    watched = [one for paths in re.findall(r"paths: \[(.*)\]", text) for one in paths.split(", ")]
    assert watched
    assert [one for one in watched if not (ROOT / one).is_file()] == []
    site = re.search(r"^site_dir: (.+)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert site is not None
    assert f"path: {site[1]}}}" in text
