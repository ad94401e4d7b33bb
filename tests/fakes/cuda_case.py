"""Runs a test in a process of its own, on the stand-in libcuda or, where asked, on the real one.

The stand-in reads its environment once, and a failed context stays failed: so every test gets a
process. `OFFCORE_TEST_REAL_CUDA=1 pytest tests/fakes` runs the tests that state what any driver
does on the driver of this machine, and skips the others.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cuda_driver import Driver
from cuda_library import fake_cuda_library

LIMIT_S = 60
REAL = os.environ.get("OFFCORE_TEST_REAL_CUDA") == "1"
Test = Callable[[Driver], None]


def isolated(only_fake: bool = False, **environment: object) -> Callable[[Test], Callable]:
    """A test in its own process; `environment` without its prefix OFFCORE_FAKE_CUDA_."""

    def decorate(test: Test) -> Callable:
        @functools.wraps(test)
        def wrapper() -> None:
            if REAL and (only_fake or environment):
                pytest.skip("only the stand-in can be told to be so")
            library = "libcuda.so.1" if REAL else str(fake_cuda_library())
            told = {f"OFFCORE_FAKE_CUDA_{key}": str(value) for key, value in environment.items()}
            file = sys.modules[test.__module__].__file__
            done = subprocess.run(
                [sys.executable, str(file), test.__name__, library],
                env=os.environ | told,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"

        del wrapper.__wrapped__  # pytest would read the test's own signature
        wrapper.body = test
        return wrapper

    return decorate


def start_peer(d: Driver, file: str, function: str, *arguments: object, fds: Sequence[int] = ()):
    """Another process that runs `function(driver, *arguments)` of a test file."""
    command = [sys.executable, file, function, d.path, *map(str, arguments)]
    return subprocess.Popen(command, pass_fds=fds, text=True, stdout=subprocess.PIPE)


def run_case(names: dict) -> None:
    """What a test file does as a program: the body of one test, or a function, on one library."""
    sys.path.insert(0, str(Path(__file__).parent))
    name, library, *arguments = sys.argv[1:]
    case = names[name]
    getattr(case, "body", case)(Driver(library), *arguments)
    print("passed")
    sys.stdout.flush()
    os._exit(0)  # what a test left enqueued does not hold it up
