"""The toy backend is small, and nobody is offered it."""

from pathlib import Path

import pytest
from gpu import add_toy

import offcore

SOURCE = Path(__file__).parent / "toy" / "toy.cpp"
LINES_MAX = 300


def test_a_backend_is_small() -> None:
    """All that it shares with others is core/backend/exec's: what it adds are queues and memory."""
    text = SOURCE.read_text("utf-8")
    assert text.count("\n") <= LINES_MAX
    assert "did not end" not in text
    assert "at command" not in text


def test_it_is_none_of_the_library() -> None:
    add_toy()
    assert [name for name, *_ in offcore.probe_backends()] == ["sim", "host", "cuda", "sdma"]
    with pytest.raises(offcore.Error) as refused:
        offcore.Communicator(backend="tape", ranks=2)
    assert refused.value.code == "invalid"
    assert "known: sim, host, cuda, sdma" in str(refused.value)
