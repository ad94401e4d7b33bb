"""The repository keeps its own rules."""

import importlib
import re
from pathlib import Path

import pytest
import rules

from offcore import _core

ROOT = Path(__file__).parents[2]
FOLDERS = (
    ".ci",
    "benchmarks",
    "core",
    "docs",
    "examples",
    "machines",
    "python",
    "shim",
    "studies",
    "tests",
)
PLANTS_VIOLATIONS = Path(__file__).with_name("test_rules.py")
SUFFIXES = {".cpp", ".dma", ".h", ".json", ".jsonl", ".md", ".py", ".pyi", ".toml", ".txt"}


def text_files() -> list[Path]:
    """The text files of the repository, generated ones left out."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = {"Makefile", "LICENSE", "run"}
    return sorted(
        path
        for path in files
        if (path.suffix in SUFFIXES or path.name in named)
        and path.name != "_core.pyi"
        and path != PLANTS_VIOLATIONS
    )


@pytest.mark.parametrize("path", text_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_rules(path: Path) -> None:
    findings = rules.check_file(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    assert findings == []


def test_layers_are_acyclic_and_name_only_layers() -> None:
    done: set[str] = set()
    while ready := {name for name, below in rules.LAYERS.items() if below <= done} - done:
        done |= ready
    assert done == set(rules.LAYERS)
    assert "plan" not in rules.LAYERS["backend"]
    assert "backend" not in rules.LAYERS["plan"]
    assert rules.LAYERS["mcast"] == {"base"}


def test_what_is_installed_is_there() -> None:
    """A build finds that out, but a test runs in one that was made before."""
    text = (ROOT / "CMakeLists.txt").read_text("utf-8")
    calls = re.findall(r"install\((?:FILES|DIRECTORY)\s([^)]*?)\sDESTINATION", text)
    named = [path for call in calls for path in call.split() if not path.startswith("$")]
    assert len(named) > 3
    assert [path for path in named if not (ROOT / path).exists()] == []
    # An sdist has it too.
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    left_out, kept = (
        re.findall(r'"/([^"]+)"', line)
        for line in re.findall(r"^sdist\.(?:exclude|include) = \[(.*)\]$", project, re.M)
    )
    lacking = [path for path in named if any(path.startswith(f"{one}/") for one in left_out)]
    assert lacking
    assert set(lacking) <= set(kept)


def test_no_type_name_stands_twice_in_the_core() -> None:
    """One meaning a word: a name in core/ says which type it is, without its namespace."""
    definition = re.compile(
        r"^\s*(?:template\s*<[^>]*>\s*)?(?:class|struct|enum class|enum|union)\s+"
        r"(?:alignas\([^)]*\)\s+)?(?:\w+::)*(\w+)(?:\s+final)?\s*(?::[^;{]*)?\{"
        r"|^\s*using\s+(\w+)\s*=",
        re.MULTILINE,
    )
    places: dict[str, list[str]] = {}
    for path in sorted(p for p in (ROOT / "core").rglob("*") if p.suffix in (".h", ".cpp")):
        text = re.sub(r"//[^\n]*", "", path.read_text("utf-8"))
        for found in definition.finditer(text):
            name = found[1] or found[2]
            places.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_module_of_tests_has_the_name_of_another() -> None:
    """pytest imports them by name alone: of two one worker may import the wrong one."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)


def test_a_backend_is_a_small_interface() -> None:
    """Nine virtuals; what not every backend has is a capability that one asks for."""
    text = (ROOT / "core/backend/backend.h").read_text("utf-8")
    named = {
        name: re.findall(r"virtual [^;{~]*?(\w+)\(", body)
        for name, body in re.findall(r"^class (\w+)[^;{]*\{(.*?)^\};", text, re.M | re.S)
    }
    assert len(named["Memory"]) + len(named["Backend"]) <= 9, named
    assert "unsupported" not in text.split("class Backend")[1]
    capabilities = re.search(r"struct Capabilities \{(.*?)\};", text, re.S)
    assert capabilities is not None
    optional = set(re.findall(r"(\w+)\* \w+ = nullptr;", capabilities[1]))
    assert len(optional) >= 4
    assert all(named[name] for name in optional)


def test_sources_that_others_name_exist() -> None:
    """What a comment points to, or a program reads, is renamed with the file."""
    files = text_files()
    known = {path.name for path in files} | {"cupti.h"}  # CUDA's
    named = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in files
        if path.suffix in (".cpp", ".h", ".py")
        for line in path.read_text("utf-8").splitlines()
        if not line.startswith("#include <")
        for name in re.findall(r"\b\w+\.(?:cpp|h)\b", line)
    ]
    assert len(named) > 500
    assert [(path, name) for path, name in named if name not in known] == []


def test_every_environment_reader_exists() -> None:
    assert [path for path in rules.ENVIRONMENT_READERS if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "name", ["offcore", "offcore.device", "offcore.kv", "offcore.mcast", "offcore.overlap"]
)
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) > 0
    assert rules.undocumented(module) == []


def test_every_error_code_is_documented() -> None:
    header = (ROOT / "core/base/error.h").read_text("utf-8")
    body = re.search(r"enum class Code[^{]*\{(.*?)\}", header, re.DOTALL)
    assert body is not None
    codes = set(re.findall(r"^\s*(\w+),", body[1], re.MULTILINE))
    page = (ROOT / "docs/errors.md").read_text("utf-8")
    documented = set(re.findall(r"^## `(\w+)`", page, re.MULTILINE))
    assert documented == codes


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    documented = re.findall(r"^\| ([A-Z_]+) \| (.*?) ?\| (.*) \|$", page, re.MULTILINE)
    assert documented == _core.env_variables()
