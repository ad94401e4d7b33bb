"""Whether an installed Offcore is whole: `python tests/wheel.py`, by the Python that has it.

`python tests/wheel.py FOLDER WHEEL` installs a wheel, an sdist or a checkout into an empty virtual
environment in FOLDER first, and prints how long that took.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folders of the package, and which files of the repository they hold.
COPIED = (
    ("", "python/offcore", "**/*.*"),
    ("machines", "machines", "**/*.json"),
    ("include/offcore", "core/proxy", "device.cuh"),
    ("include/offcore", "core/proxy", "ring.h"),
    ("tools/driven", "studies/requests", "soak.h"),
    ("tools/papers/recorded", "benchmarks/results", "gpu-driven-h200-2.txt"),
    ("tools/papers/recorded", "benchmarks/results", "train-h200-2.txt"),
)
BUILT = ["_core.*.so", "_core.pyi"]
IMPORTS = 9


def copies() -> Iterator[tuple[str, Path]]:
    """Each file of the package that is one of the repository, and that one."""
    for folder, source, pattern in COPIED:
        for path in (ROOT / source).glob(pattern):
            if path.suffix not in (".pyc", ".pyi"):
                yield str(Path(folder) / path.relative_to(ROOT / source)), path


def wrong_files(package: Path) -> list[str]:
    """Files that the package lacks, or has otherwise than the repository."""
    shim = ["liboffcore_nccl.so"] if platform.machine() == "x86_64" else []
    lacking = [pattern for pattern in BUILT + shim if not list(package.glob(pattern))]
    for name, path in copies():
        found = package / name
        if not found.is_file() or found.read_bytes() != path.read_bytes():
            lacking.append(name)
    return lacking


def entry_points(project: str) -> set[tuple[str, str]]:
    """The values of pyproject.toml's entry points, each with its group."""
    found = set()
    for group, body in re.findall(r'^\[project\.([\w."-]+)\]\n((?:\w+ = .*\n)+)', project, re.M):
        if group == "scripts" or group.startswith("entry-points."):
            named = group.removeprefix("entry-points.").strip('"')
            named = "console_scripts" if named == "scripts" else named
            found |= {(named, value) for value in re.findall(r'^\w+ = "(.*)"$', body, re.M)}
    return found


def wrong_metadata() -> list[str]:
    import offcore

    told = metadata.distribution("offcore")
    expected = entry_points((ROOT / "pyproject.toml").read_text("utf-8"))
    found = {(one.group, one.value) for one in told.entry_points}
    wrong = [f"entry point {one}" for one in sorted(expected ^ found)]
    if told.version != offcore.__version__:
        wrong.append(f"version {told.version}, and in the package {offcore.__version__}")
    if not any(str(path).endswith("licenses/LICENSE") for path in told.files or ()):
        wrong.append("LICENSE")
    return wrong


def first_collective() -> list[str]:
    """An all-gather between two processes of this host, every byte checked."""
    bench = [str(Path(sys.executable).with_name("offcore")), "bench", "all_gather"]
    bench += ["--backend", "host", "--ranks", "2", "--sizes", "64K", "--json", "-"]
    ran = subprocess.run(bench, capture_output=True, text=True, timeout=60)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    if ran.returncode or not rows:
        return [f"offcore bench: exit code {ran.returncode}: {ran.stderr}"]
    return [f"wrong bytes: {row}" for row in rows if row["wrong"] != 0]


def import_ms() -> float:
    """The median of some processes'."""
    timed = "import time; a = time.perf_counter(); import offcore; print(time.perf_counter() - a)"
    command = (sys.executable, "-c", timed)
    took = [float(subprocess.check_output(command, timeout=60)) for _ in range(IMPORTS)]
    return sorted(took)[IMPORTS // 2] * 1e3


def check() -> int:
    import offcore

    wrong = wrong_files(Path(offcore.__file__).parent) + wrong_metadata() + first_collective()
    for one in wrong:
        print(f"the installed package lacks or has wrong: {one}", file=sys.stderr)
    version = subprocess.check_output((sys.executable, "-m", "offcore", "--version"), text=True)
    print(f"{version.strip()}, Python {platform.python_version()}, import {import_ms():.0f} ms")
    return 1 if wrong else 0


def install(folder: Path, wheel: Path) -> int:
    """Into an empty environment, and the checks there."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    quiet = ("-q", "--disable-pip-version-check")
    subprocess.check_call((python, "-m", "pip", "install", *quiet, wheel))
    installed = time.monotonic()
    bench = (folder / "bin" / "offcore", "bench", "all_gather", "--backend", "host", "--ranks", "2")
    subprocess.check_call((*bench, "--sizes", "64K"), stdout=subprocess.DEVNULL)
    ended = time.monotonic()
    print(
        f"installed in {installed - began:.1f} s, first collective {ended - installed:.1f} s later"
    )
    return subprocess.call((python, __file__))


if __name__ == "__main__":
    sys.exit(install(Path(sys.argv[1]).absolute(), Path(sys.argv[2])) if sys.argv[1:] else check())
