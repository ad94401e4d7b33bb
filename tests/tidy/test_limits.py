"""How long a test may take: minutes, and hours where it runs examples by the thousand."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "limit"),
    [([], "120.0s"), (["--long"], "7200.0s"), (["--long", "--timeout=5"], "5.0s")],
)
def test_the_limit_of_a_test(options: list[str], limit: str) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "--collect-only", *options]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "plan" / "test_legalize.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"timeout: {limit}" in done.stdout, done.stdout + done.stderr
