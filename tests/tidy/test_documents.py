"""Every page of docs/ is of one kind, and links between pages lead to a page and a heading."""

import importlib
import re
from pathlib import Path

import pytest
from test_repository import text_files

ROOT = Path(__file__).parents[2]
CONTRACT_WORDS_MAX = 1500
README_WORDS_MAX = 900

# Pages of the site that are not written by hand (docs/site.py).
MADE = {"cli.md"}
# Which kind each page is. A page is contract (what an interface promises), tuning (what to set and
# when) or measurement (numbers, with file, machine and date), not several of these.
KINDS = {
    "contract": {
        "docs/batch.md",
        "docs/cuda.md",
        "docs/environment.md",
        "docs/errors.md",
        "docs/gpu-driven.md",
        "docs/hosts.md",
        "docs/kv.md",
        "docs/loop.md",
        "docs/mcast-testbed.md",
        "docs/mcast.md",
        "docs/model.md",
        "docs/nccl-shim.md",
        "docs/nixl.md",
        "docs/overlap.md",
        "docs/quickstart.md",
        "docs/reductions.md",
        "docs/sdma.md",
        "docs/security.md",
        "docs/serving.md",
        "docs/training.md",
        "docs/verbs.md",
    },
    "tuning": {"docs/tuning.md"},
    "guide": {
        "docs/concepts.md",
        "docs/index.md",
        "docs/questions.md",
        "docs/recipes.md",
        "docs/roadmap.md",
        "docs/scaling.md",
        "docs/upgrading.md",
    },
    "reference": {"docs/api.md"},
    "measurement": {
        "docs/performance.md",
        "docs/measurements/cuda.md",
        "docs/measurements/kv.md",
        "docs/measurements/mcast.md",
        "docs/measurements/model.md",
        "docs/measurements/overlap.md",
    },
    "internals": {
        "docs/ARCHITECTURE.md",
        "docs/internals/cuda.md",
        "docs/internals/kv.md",
        "docs/internals/mcast.md",
        "docs/internals/sdma.md",
    },
    "decision": {
        "docs/decisions/0001-what-a-program-names.md",
        "docs/decisions/0002-captured-programs.md",
        "docs/decisions/0003-batches.md",
        "docs/decisions/0004-kv-transfers.md",
        "docs/decisions/0005-mcast.md",
        "docs/decisions/0006-multicast-udp.md",
        "docs/decisions/0007-the-house.md",
        "docs/decisions/0008-kv-programs.md",
        "docs/decisions/0009-mcast-reduce-scatter.md",
        "docs/decisions/0010-twelve-questions.md",
    },
    "glossary": {"docs/glossary.md"},
    "ledger": {"docs/papers.md"},
}
SHORT = sorted({"README.md", *KINDS["contract"], *KINDS["tuning"], *KINDS["guide"]})
DEFINED = (
    *("pcpy", "bcst", "swap", "b2b", "fan", "prelaunch", "promise", "safe", "view", "copy order"),
    *("lane", "window", "staged", "credits", "epoch", "stand-in", "slot", "chain", "crossed"),
    *("reduction", "pipelined", "one_shot"),
)


def pages() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".md"]


def prose_of(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ +(.*)$", prose_of(text), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one).lower() for one in found)
    return {re.sub(r"[^\w\- ]", "", one.strip()).replace(" ", "-") for one in plain}


def broken_links(path: Path, text: str) -> list[str]:
    """Links to a page or a heading that is not there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        if "://" in target:
            continue
        if not page.exists() or (
            anchor and page.suffix == ".md" and anchor not in headings(page.read_text("utf-8"))
        ):
            broken.append(target)
    return broken


def test_every_page_has_one_kind() -> None:
    listed = sorted(name for names in KINDS.values() for name in names)
    found = sorted(one.relative_to(ROOT).as_posix() for one in (ROOT / "docs").rglob("*.md"))
    assert listed == found
    for kind, folder in (("measurement", "measurements"), ("internals", "internals")):
        within = {name for name in listed if name.startswith(f"docs/{folder}/")}
        assert within
        assert within <= KINDS[kind]


def test_the_site_leads_to_every_page() -> None:
    """By the navigation of mkdocs.yml, whose other pages are made or lie in the root."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    named = re.findall(r": (\S+\.md)$", nav, re.M)
    assert len(named) == len(set(named))
    root = {name for name in named if name.startswith("project/")}
    assert [name for name in root if not (ROOT / name.removeprefix("project/")).is_file()] == []
    found = {one.relative_to(ROOT / "docs").as_posix() for one in (ROOT / "docs").rglob("*.md")}
    assert set(named) - root == found | MADE


def test_everything_public_is_on_the_page_of_the_api() -> None:
    text = (ROOT / "docs/api.md").read_text("utf-8")
    named = set(re.findall(r"^::: (\S+)$", text, re.M))
    modules = {name.rpartition(".")[0] for name in named} - {"offcore"}
    partly = {"offcore.torch", "offcore.distributed", "offcore.serving.transformers"}
    for name in modules - {*partly, "offcore.mcast.torch"}:
        public = importlib.import_module(name)
        ours = {f"{name}.{one}" for one in public.__all__ if callable(getattr(public, one))}
        assert ours <= named, name


def test_twelve_questions_are_two_clicks_away() -> None:
    """One to the page, which answers them, and one to the page that each answer names."""
    for first in ("README.md", "docs/index.md"):
        assert "questions.md)" in (ROOT / first).read_text("utf-8")
    text = (ROOT / "docs/questions.md").read_text("utf-8")
    answers = re.split(r"^## \d+\. .*\?$", text, flags=re.M)[1:]
    assert len(answers) == 12
    assert all(re.search(r"\]\([^)]+\.md", one) for one in answers)


@pytest.mark.parametrize("name", SHORT)
def test_pages_that_users_need_are_short(name: str) -> None:
    limit = README_WORDS_MAX if name == "README.md" else CONTRACT_WORDS_MAX
    assert len((ROOT / name).read_text("utf-8").split()) <= limit


def test_recorded_tables_stand_on_pages_of_measurements() -> None:
    kinds = {name: kind for kind, names in KINDS.items() for name in names}
    shown = {
        kinds[name]
        for name in kinds
        if re.search(r"^<!-- (table|compare) ", (ROOT / name).read_text("utf-8"), re.M)
    }
    assert shown == {"measurement", "ledger"}


def test_links_lead_to_a_page_and_a_heading() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): broken_links(path, path.read_text("utf-8"))
        for path in pages()
    }
    assert len(found) > 20
    assert {name: links for name, links in found.items() if links} == {}


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# Two `words`: here\n```\n# Code\n```\n", "utf-8")
    links = ("a.md", "#two-words-here", "a.md#two-words-here", "https://x.org/b.md#c")
    broken = ("b.md", "#code", "a.md#here")
    text = " ".join(f"[x]({one})" for one in (*links, *broken))
    assert broken_links(page, text) == list(broken)


def test_files_and_tests_that_pages_name_exist() -> None:
    """What a page points to is renamed with the file."""
    folders = "core|python|tests|studies|benchmarks|examples"
    named = rf"\b(?:{folders})/[\w/.-]+\.(?:cpp|h|py|jsonl?|txt|md)\b"
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    files, functions = set(), set()
    for page in pages():
        if page.name == "CHANGELOG.md":
            continue  # it tells of what is gone, too
        text = page.read_text("utf-8")
        files |= set(re.findall(named, text))
        functions |= set(re.findall(r"\btest_\w+(?!\w*\.py)\b", text))
    assert len(files) > 60
    assert sorted(name for name in files if not (ROOT / name).exists()) == []
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(functions) > 20
    assert sorted(name for name in functions - modules if f"def {name}(" not in tests) == []


def test_the_paths_of_calls_are_the_sources() -> None:
    """Each function is in the file beside it; 14 files at most lead from Python to the driver."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text("utf-8")
    paths = text.split("## The path of a call")[1].split("\n## ")[0]
    lists = [one for one in paths.split("\n\n") if one.startswith("    ")]
    assert len(lists) == 2
    for one in lists:
        lines = [re.split(r" {2,}", line.strip()) for line in one.splitlines()]
        assert len(lines) <= 14
        for file, functions, *_ in lines:
            source = (ROOT / file).read_text("utf-8")
            for name in functions.split(", "):
                assert re.search(rf"\b{name}\(|&{name}\b", source), (file, name)


@pytest.mark.parametrize("page", sorted(KINDS["measurement"]))
def test_measurements_name_their_records(page: str) -> None:
    """The files that have the numbers, which exist."""
    text = (ROOT / page).read_text("utf-8")
    targets = re.findall(r"\]\(((?:\.\./)+(?:benchmarks/results|machines)/[^)]+)\)", text)
    assert targets
    assert [one for one in targets if not ((ROOT / page).parent / one).exists()] == []


def test_the_glossary_defines_the_words_of_its_own() -> None:
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    words = " ".join(re.findall(r"^\| ([^|]*) \|", text, re.M)).replace("`", "")
    assert [word for word in DEFINED if not re.search(rf"\b{word}", words)] == []


def test_errors_of_python_have_documented_codes() -> None:
    """The first argument of `error(...)`, where it is written out, is a heading of the page."""
    known = set(re.findall(r"^## `(\w+)`$", (ROOT / "docs/errors.md").read_text("utf-8"), re.M))
    assert len(known) >= 10
    raised: dict[str, str] = {}
    for path in (ROOT / "python/offcore").rglob("*.py"):
        for code in re.findall(r"\berror\(\s*\"(\w+)\",", path.read_text("utf-8")):
            raised.setdefault(code, path.name)
    assert {code: name for code, name in raised.items() if code not in known} == {}
