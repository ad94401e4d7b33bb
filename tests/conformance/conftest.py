"""Every test that takes a `target` runs once on each backend."""

import pytest
from targets import TARGETS, Target


@pytest.fixture(params=TARGETS, scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]
