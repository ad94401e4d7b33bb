"""Runs the command line as a user does: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from cuda_library import fake_cuda_library

COMMAND = (sys.executable, "-m", "offcore.cli")


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def records(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def offcore_cli():
    def run(*words, stdin=None, timeout=100, env=None):
        done = subprocess.run(
            (*COMMAND, *map(str, words)),
            input=stdin,
            env=os.environ | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def gpu_cli(offcore_cli):
    """The command line on a machine of two GPUs, which the stand-in driver pretends to be."""
    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "OFFCORE_FAKE_CUDA_DEVICES": "2"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

    def run(*words, env=None):
        return offcore_cli(*words, env=given | (env or {}))

    return run


@pytest.fixture
def start_cli():
    """Starts the command in a process group of its own, as a shell does."""
    started = []

    def start(*words):
        process = subprocess.Popen(
            (*COMMAND, *map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background jobs ignore Ctrl-C, and so does what a test among them starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
