"""What tests/wheel.py finds, which CI runs on built wheels, and what PyPI shows of them."""

import importlib.util
import sys
from pathlib import Path

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


def test_links_on_pypi_lead_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("pypi", wheel.ROOT / "python" / "pypi.py")
    assert spec is not None
    assert spec.loader is not None
    pypi = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pypi)
    page = "[a](docs/a.md#b) [c](#c) [d](https://d.org) ![e](docs/e.png)"
    told = "[a](U/blob/v1/docs/a.md#b) [c](#c) [d](https://d.org) ![e](U/raw/v1/docs/e.png)"
    assert pypi.absolute(page, "U", "v1") == told
    monkeypatch.chdir(wheel.ROOT)
    monkeypatch.setenv("PROJECT_URL", "https://example.org/offcore/")
    told = pypi.dynamic_metadata({}, {"version": "1.0"})
    assert "](docs/" not in told["readme"]["text"]
    assert told["urls"]["Changelog"] == "https://example.org/offcore/blob/v1.0/CHANGELOG.md"
    monkeypatch.delenv("PROJECT_URL")
    told = pypi.dynamic_metadata({}, {"version": "1.0"})
    assert told["readme"]["text"] == Path("README.md").read_text("utf-8")
    assert told["urls"] == {}
