"""The backend OFFCORE in the NIXL that is installed, on the stand-in driver. Its plugin is part of
builds with OFFCORE_NIXL_HEADERS. tests/cuda/test_copy_requests.py tests the rest without NIXL."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import offcore

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from cuda_library import fake_cuda_library
from nixl_agent import PACKAGES

PLUGINS = Path(offcore.__file__).parent / "nixl"

if not any(importlib.util.find_spec(name) for name in PACKAGES):
    pytest.skip(f"needs NIXL: one of {', '.join(PACKAGES)}", allow_module_level=True)
if not (PLUGINS / "libplugin_OFFCORE.so").exists():
    pytest.skip("needs a build with OFFCORE_NIXL_HEADERS", allow_module_level=True)


def run(case: str, **environment: str) -> str:
    """What it told on stderr."""
    given = {"OFFCORE_LIBCUDA": str(fake_cuda_library()), "NIXL_PLUGIN_DIR": str(PLUGINS)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("nixl_agent.py")), case],
        env=os.environ | given | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def test_random_lists_are_posted_again_and_again() -> None:
    assert "OFFCORE:" not in run("random_lists")


def test_ten_thousand_descriptors() -> None:
    assert "OFFCORE:" not in run("long_lists")


def test_refusals_tell_why() -> None:
    told = run("refusals")
    for reason in ("no GPU's engines copy", "is on GPU 0", "has been deregistered", "entry 1"):
        assert reason in told, told


def test_requests_are_released_under_way() -> None:
    told = run("released_under_way", OFFCORE_TIMEOUT_S="0.5")
    assert "did not end within 0.5 s" in told, told


def test_there_is_no_backend_without_a_driver() -> None:
    assert "cannot be opened" in run("no_driver", OFFCORE_LIBCUDA="/nowhere/libcuda.so.1")


def test_a_parameter_that_is_no_gpu_is_refused() -> None:
    assert "parameter gpu is 'first'" in run("wrong_parameter")
