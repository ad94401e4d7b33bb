"""Ranks as processes that tests may kill."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STREAM = Path(__file__).with_name("stream.py")


class Rank:
    """A rank's process."""

    def __init__(self, words: list[str], prefix: list[str]) -> None:
        path = os.pathsep.join([str(STREAM.parents[1]), *sys.path])
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(STREAM), *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def event(self) -> dict[str, Any]:
        """The next line that the rank prints; {} when there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def end(self) -> dict[str, Any]:
        """The last line, once the process has ended by itself."""
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        assert self.process.wait(10) == 0
        return json.loads(lines[-1])


Start = Callable[..., list[Rank]]
