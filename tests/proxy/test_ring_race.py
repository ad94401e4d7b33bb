"""The ring of requests under the thread sanitizer, with both of its sides: ring_race.cpp."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from needs import COMPILER

HERE = Path(__file__).parent


@pytest.mark.needs("tsan")
@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_producers_race_for_the_ring(order: str, tmp_path: Path) -> None:
    """Nothing is lost, doubled or seen before it is written. The control: words that release
    nothing, in which the sanitizer must find a race."""
    program = tmp_path / "race"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{HERE.parents[1]}"]
    flags += ["-DUNORDERED"] if order == "unordered" else []
    built = subprocess.run(
        [COMPILER, *flags, str(HERE / "ring_race.cpp"), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    # It cannot live with the address randomisation of some kernels.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    if fixed and subprocess.run([*fixed, "true"], check=False).returncode != 0:
        fixed = []
    done = subprocess.run(
        [*fixed, str(program)],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if order == "unordered":
        assert (done.returncode, "data race" in done.stderr) == (66, True), done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "80000 requests, 0 wrong\n"), done.stderr
