"""Transfers run on every backend; on GPUs too, stood in for or real (OFFCORE_TEST_REAL_CUDA=1)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("conformance", "fakes", "cuda")]
from kv_caches import Places
from targets import TARGETS


@pytest.fixture(params=("host", "sim", "cuda"), scope="session")
def places(request: pytest.FixtureRequest) -> Iterator[Places]:
    """Where caches lie: memory of the backend's."""
    target = TARGETS["cuda" if request.param == "cuda" else "host"]
    target.need(1)
    with Places(request.param, target) as opened:
        yield opened
