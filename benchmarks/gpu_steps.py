"""Steps of the checks on GPUs: each a process of its own that cannot outlive its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


def run_step(
    command: list[str], folder: Path, limit_s: float, env: dict[str, str] | None = None
) -> int | str:
    """The exit status, or what stood in for one. The process's whole session is ended with it."""
    process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
