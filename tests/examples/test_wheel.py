"""What tests/wheel.py finds, which CI runs on built wheels, and what PyPI shows of them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offcore

sys.path.insert(0, str(Path(__file__).parents[1]))
import wheel


def test_the_package_has_all_its_files() -> None:
    assert wheel.wrong_files(Path(offcore.__file__).parent) == []


def test_what_a_package_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "py.typed").write_text("altered")
    wrong = wheel.wrong_files(tmp_path)
    needed = {"_core.*.so", "_core.pyi", "py.typed", "kv/layout.py", "loop/kernel.cuh"}
    needed |= {"tools/driven/kernels.cu", "include/offcore/device.cuh", "machines/host.json"}
    needed |= {"machines/tuned/h200-2.json", "tools/papers/recorded/gpu-driven-h200-2.txt"}
    needed.add("tools/papers/recorded/train-h200-2.txt")
    assert needed <= set(wrong)


def test_entry_points_are_read() -> None:
    project = (wheel.ROOT / "pyproject.toml").read_text("utf-8")
    found = wheel.entry_points(project)
    assert ("console_scripts", "offcore.tools.cli.main:main") in found
    assert ("torch.distributed.backends", "offcore.distributed:register") in found
    assert len(found) == 5


@pytest.fixture
def pypi() -> Any:
    spec = importlib.util.spec_from_file_location("pypi", wheel.ROOT / "python" / "pypi.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_versions_come_from_tags(pypi: Any, tmp_path: Path) -> None:
    """At a tag, after it, with changes, without a tag, without git, in an archive, in an sdist."""
    tree = tmp_path / "tree"
    (tree / "python").mkdir(parents=True)
    (tree / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.3.1\n\n## 0.3.0\n")
    (tree / "python" / "pypi.py").write_bytes(Path(pypi.__file__).read_bytes())
    (tree / ".gitattributes").write_bytes((wheel.ROOT / ".gitattributes").read_bytes())

    def git(*words: str, folder: Path = tree) -> bytes:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(("git", *who, *words), cwd=folder, timeout=60)

    assert pypi.version(tree) == "0.3.2.dev0"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    assert re.fullmatch(r"0\.3\.2\.dev0\+g[0-9a-f]{8}", pypi.version(tree))
    git("tag", "v0.4.0")
    git("tag", "other")
    assert pypi.version(tree) == "0.4.0"
    git("commit", "-qm", "two", "--allow-empty")
    later = pypi.version(tree)
    assert re.fullmatch(r"0\.4\.1\.dev1\+g[0-9a-f]{8}", later)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    packed = git("archive", "HEAD")
    subprocess.run(("tar", "x"), cwd=unpacked, input=packed, check=True, timeout=60)
    told = (sys.executable, unpacked / "python" / "pypi.py")
    assert subprocess.check_output(told, text=True, timeout=60).startswith("0.4.1.dev1+g")
    git("clone", "-q", "--depth", "1", f"file://{tree}", str(tmp_path / "shallow"))
    shallow = pypi.version(tmp_path / "shallow")
    assert shallow == "0.3.2.dev0" + later[later.index("+") :]
    (tree / "CHANGELOG.md").write_text("## 0.5.0\n")
    assert pypi.version(tree) == f"{later}.dirty"
    git("tag", "v0.5.0rc1")
    with pytest.raises(SystemExit, match=r"v0\.5\.0rc1-dirty"):
        pypi.version(tree)
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: offcore\nVersion: 0.2.7\n")
    assert pypi.version(tree) == "0.2.7"


def test_links_on_pypi_lead_to_the_repository(pypi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "[a](docs/a.md#b) [c](#c) [d](https://d.org) ![e](docs/e.png)"
    told = "[a](U/blob/v1/docs/a.md#b) [c](#c) [d](https://d.org) ![e](U/raw/v1/docs/e.png)"
    assert pypi.absolute(page, "U", "v1") == told
    monkeypatch.chdir(wheel.ROOT)
    monkeypatch.setenv("PROJECT_URL", "https://example.org/offcore/")
    monkeypatch.setattr(pypi, "version", lambda: "1.0")
    told = pypi.dynamic_metadata({}, {})
    assert told["version"] == "1.0"
    assert "](docs/" not in told["readme"]["text"]
    assert told["urls"]["Changelog"] == "https://example.org/offcore/blob/v1.0/CHANGELOG.md"
    monkeypatch.delenv("PROJECT_URL")
    told = pypi.dynamic_metadata({}, {})
    assert told["readme"]["text"] == Path("README.md").read_text("utf-8")
    assert told["urls"] == {}
