"""The ways to the engines: which is taken, what it tells, and what each one does of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu import hsa_stand_in

FOLDER = Path(__file__).parent
UNTRIED = "packets and rings tested, never yet run on AMD hardware"
LIMIT_S = 120
# One test of each kind: the whole suite runs on queues.
SHORT = (
    "test_verbs or test_swap or test_timestamps or test_a_wait or (test_results and facts) "
    "or (test_every_way and all_to_all-3) or test_lanes or (test_prelaunched_among and promise)"
)


def started(way: str, *command: str, **environment: str) -> str:
    """What a Python process prints on the stand-ins that have this way."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **hsa_stand_in(way), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def case(name: str, way: str = "queues", **environment: str) -> Any:
    """What the function of sdma_cases.py returns."""
    return json.loads(started(way, str(FOLDER / "sdma_cases.py"), name, **environment))


@pytest.mark.parametrize("way", ["batch_copy", "hip_batch"])
def test_conformance(way: str) -> None:
    tests = (str(FOLDER.parent / "conformance"), "-k", f"sdma and not batches and ({SHORT})")
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rA")
    told = started(way, "-m", "pytest", *tests, *options, OFFCORE_TEST_SDMA_WAY=way)
    assert told.count("PASSED") > 12
    assert "SKIPPED" not in told
    assert "SKIPPED" not in told


def test_doctor_tells_the_way_and_what_it_lacks() -> None:
    no_queues = "this HSA runtime lacks hsa_amd_queue_create"
    for way, environment, words in [
        ("queues", {}, ["8 GPUs (gfx942) by user-mode SDMA queues"]),
        ("batch_copy", {}, ["batch_copy: no prelaunch (" + no_queues]),
        ("hip_batch", {}, ["hipMemcpyBatchAsync: no prelaunch, no swaps", no_queues]),
        ("queues", {"OFFCORE_FAKE_HSA_NAME": "gfx90a"}, ["no packets of gfx90a are known"]),
    ]:
        available, reason = case("told", way, **environment)
        assert available
        assert all(word in reason for word in (*words, UNTRIED)), reason
    available, reason = case("told", "hip_batch", OFFCORE_LIBHIP="/no/such")
    assert not available
    assert all(word in reason for word in (no_queues, "/no/such", "a newer ROCm", UNTRIED))


def test_a_kernel_that_refuses_queues() -> None:
    available, reason = case("told", OFFCORE_FAKE_HSA_NO_QUEUES="1")
    assert available
    assert "batch_copy: no prelaunch (cannot create a queue on SDMA engine 2: the queue" in reason
    assert case("swaps", OFFCORE_FAKE_HSA_NO_QUEUES="1")[0] == ["batch_copy", True]


def test_host_copies_go_to_the_engines_for_them() -> None:
    """Two engines for the host, then fourteen for peers; further queues share them."""
    peers, shared, mixed = case("engines")
    assert peers == [2, 3]
    assert shared == [2, 15]
    assert mixed == [0, 1]  # queue 0.0 has its ring from before


@pytest.mark.parametrize("way", ["queues", "batch_copy", "hip_batch"])
def test_swaps_that_became_copies_are_told(way: str) -> None:
    has = way != "hip_batch"
    assert case("swaps", way) == [[way, has], [way, False], [way, has]]


def test_swaps_of_older_gpus_are_copies() -> None:
    found = case("swaps", "batch_copy", OFFCORE_FAKE_HSA_NAME="gfx90a")
    assert found == [["batch_copy", False]] * 3


@pytest.mark.parametrize("way", ["queues", "batch_copy", "hip_batch"])
def test_memory_that_calls_share(way: str) -> None:
    ways, right, counts = case("outside", way)
    assert (ways, right) == ([way], True)
    if counts:
        registered, unregistered = counts
        assert 0 < registered == unregistered


def test_hip_batches_have_at_most_8192_copies() -> None:
    assert case("many", "hip_batch") == [True, 3, 8192]


def test_hip_tells_which_copy_was_refused() -> None:
    (code, why), right = case("refused", "hip_batch", OFFCORE_FAKE_HIP_REFUSE="321")
    assert code == "driver"
    assert "copy 321 of a batch was refused: invalid argument (1)" in why
    assert right


def test_an_engine_that_stops() -> None:
    first, second, right = case("failed", OFFCORE_FAKE_HSA_FAULT="9")
    for code, why in (first, second):
        assert code == "driver"
        assert "an SDMA queue has failed: a generic error (4096)" in why
    assert right


def test_a_batch_that_is_refused_in_part() -> None:
    """The copies before it count down its signal: the stand-in ends a process that has freed it."""
    (code, why), right = case("refused", "batch_copy", OFFCORE_FAKE_HSA_REFUSE="321")
    assert code == "memory"
    assert "a batch of 500 copies was refused: out of resources" in why
    assert right
