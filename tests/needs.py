"""What a test needs of the machine, and the reason to skip it where that is missing.

A test names it in a mark, `@pytest.mark.needs("nft", "torch")`, a file or a fixture by `require`.
tests/bare.py runs tests on a machine that has none of it.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from offcore.tools.testbed import namespaces

# Programs, and what they are a part of.
TOOLS = {
    "ethtool": "ethtool",
    "ip": "iproute2",
    "nft": "nftables",
    "ptxas": "CUDA's toolkit",
    "setpriv": "util-linux",
    "tc": "iproute2",
    "unshare": "util-linux",
}
COMPILER = os.environ.get("CXX", "c++")
PACKAGES = ("matplotlib", "scipy", "torch", "transformers", "triton", "vllm", "sglang")


def _has_tsan() -> bool:
    """A compiler names a file that it has by its whole path."""
    if shutil.which(COMPILER) is None:
        return False
    asked = [COMPILER, "-print-file-name=libtsan.so"]
    return Path(subprocess.run(asked, capture_output=True, text=True).stdout).is_absolute()


# What it takes more than a name to know: why it cannot be had here, or nothing.
OTHERS: dict[str, Callable[[], str | None]] = {
    "c++": lambda: None if shutil.which("c++") else "install g++",
    "tsan": lambda: None if _has_tsan() else f"{COMPILER} has no thread sanitizer: install libtsan",
    "namespaces": namespaces.refused,
}


@functools.cache
def missing(*names: str) -> str:
    """Why a test that needs these cannot run here; empty where it can."""
    for name in names:
        if name in TOOLS:
            if shutil.which(name) is None:
                return f"needs {name}: install {TOOLS[name]}"
        elif name in PACKAGES:
            if importlib.util.find_spec(name) is None:
                return f"needs {name}: pip install {name}"
        elif why := OTHERS[name]():
            return f"needs {name}: {why}"
    return ""


def hiding(folder: Path, *names: str) -> dict[str, str]:
    """The environment of a Python that finds none of these packages, nor do processes of it."""
    lines = [f"import sys\nsys.modules[{name!r}] = None\n" for name in names]
    (folder / "sitecustomize.py").write_text("".join(lines), "utf-8")
    path = (str(folder), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def require(*names: str) -> None:
    """Skips the test, or the whole file, that calls it where something is missing."""
    if reason := missing(*names):
        pytest.skip(reason, allow_module_level=True)
