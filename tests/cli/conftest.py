"""Runs the command line in a process of its own, as a user does.

Most of these processes are ready ones. `start_cli` and `cli_without` start Python anew.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import needs
import ready

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from cuda_library import fake_cuda_library

COMMAND = (sys.executable, "-m", "offcore.tools.cli")


def two_gpus():
    """The environment of a machine of two GPUs, which the stand-in driver pretends to be."""
    fake = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "OFFCORE_FAKE_CUDA_DEVICES": "2"}
    return fake | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def records(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def offcore_cli(tmp_path_factory):
    def run(*words, stdin=None, timeout=100, env=None):
        streams = [tmp_path_factory.mktemp("streams") / name for name in ("in", "out", "err")]
        for stream in streams:
            stream.write_text((stream.name == "in" and stdin) or "", "utf-8")
        given = dict(os.environ | (env or {}))
        told = (list(map(str, words)), given, os.getcwd(), streams)
        status = ready.run(timeout, ready.command, *told)
        out, err = (stream.read_text("utf-8") for stream in streams[1:])
        assert status is not None, f"not ended within {timeout} s\n{out}{err}"
        assert "Traceback" not in err, err
        return Ran(status, out, err)

    return run


@pytest.fixture
def cli_without(tmp_path_factory):
    """The command line where packages are not installed, and with GPUs, if asked for."""

    def run(names, *words, gpus=False):
        hidden = needs.hiding(tmp_path_factory.mktemp("hidden"), *names)
        done = subprocess.run(
            (*COMMAND, *map(str, words)),
            env=os.environ | hidden | (two_gpus() if gpus else {}),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def gpu_cli(offcore_cli):
    """The command line on a machine of two GPUs."""

    def run(*words, env=None):
        return offcore_cli(*words, env=two_gpus() | (env or {}))

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
