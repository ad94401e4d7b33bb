"""Sections of `offcore gpu bench`: each is measured on its own, and what one has found stays
where another fails. On cuda each is a process with a limit, since a GPU that hangs is not got back
in the process that made it hang."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offcore import _core
from offcore.errors import Error, error
from offcore.tools.driven import host, simulated

HOST = tuple(host.SECTIONS)
CUDA = (
    "proxy",
    "armed",
    "armed-co",
    "cpu",
    "nccl",
    "push",
    "soak",
    "throughput",
    "contention",
    "forms",
)
WITHOUT_MULTICAST = "NCCL_NVLS_ENABLE=0"  # which no send and no receive has a use for
ENVIRONMENT = ("CUDA_MODULE_LOADING=EAGER", "CUDA_DEVICE_MAX_CONNECTIONS=32")


def check_cuda() -> None:
    """Raises unavailable where it cannot run."""
    gpus = _core.cuda_facts()["gpus"]
    if len(gpus) < 2:
        raise error("unavailable", f"gpu bench: it takes two GPUs; {len(gpus)} here: use host")
    if importlib.util.find_spec("cupy") is None:
        raise error("unavailable", "gpu bench: cupy is missing: pip install cupy-cuda13x (or 12x)")


def run(
    backend: str, names: Sequence[str], rounds: int, limit_s: float, machine: str | None = None
) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Of each section its rows, and what failed. machine: of sim."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = Path(folder) / name
            file.touch()
            failures = (
                _on_cuda(name, rounds, file, limit_s)
                if backend == "cuda"
                else _here(name, rounds, file, machine)
            )
            yield [json.loads(line) for line in file.read_text("utf-8").splitlines()], failures


def _here(name: str, rounds: int, file: Path, machine: str | None) -> list[str]:
    try:
        if machine is None:
            found = host.measure(name, rounds, file)
        else:
            found = simulated.measure(name, machine, rounds, file)
        return [f"{name}: {one}" for one in found]
    except Error as failure:
        return [f"{name}: {failure.code}: {failure}"]


def _on_cuda(name: str, rounds: int, file: Path, limit_s: float) -> list[str]:
    more = [WITHOUT_MULTICAST] if name == "nccl" else []
    command = ["env", *ENVIRONMENT, *more, sys.executable, "-m", "offcore.tools.driven"]
    command += [name, str(rounds), str(file)]
    try:
        done = subprocess.run(command, timeout=limit_s, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return [f"{name}: it did not end within {limit_s:g} s"]
    lines = done.stderr.strip().splitlines()[-8:]
    return [] if done.returncode == 0 else lines or [f"{name}: it crashed ({done.returncode})"]
