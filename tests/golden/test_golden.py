"""Programs pinned as text: a change of planning must be seen, and meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import offcore

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, FOLDER, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_program_is_the_pinned_one(case: Case) -> None:
    pinned = case.path.read_text("utf-8")
    assert str(case.program()) == pinned, "if meant: python tests/golden/cases.py"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.stem)
def test_pinned_text_parses_to_the_program(case: Case) -> None:
    program = offcore.Program.parse(case.path.read_text("utf-8"))
    offcore.verify(program)
    assert program == case.program()


def test_no_pinned_file_is_left_over() -> None:
    assert {path.name for path in FOLDER.glob("*.dma")} == {case.path.name for case in CASES}
