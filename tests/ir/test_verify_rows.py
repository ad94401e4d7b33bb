"""Rows of a signal are events of their own: which of them a poll has seen matters."""

import pytest
from test_verify import program, verdict


@pytest.mark.parametrize(
    ("seen", "correct"),
    [
        ("0.0: signal flag[0]:0 = 1 rows=3 step=1|0.1: poll flag[0]:0 >= 1", False),
        ("0.0: signal flag[0]:0 = 1 rows=3 step=1|0.1: poll flag[0]:0 >= 1 rows=2 step=1", False),
        ("0.0: signal flag[0]:0 = 1 rows=3 step=1|0.1: poll flag[0]:2 >= 1", True),
        ("0.0: signal flag[0]:0 = 1 rows=3 step=1|0.1: poll flag[0]:1 >= 1 rows=2 step=1", True),
        # a later command of the queue tells of all rows
        (
            "0.0: signal flag[0]:0 = 1 rows=3 step=1; signal flag[0]:5 = 1"
            "|0.1: poll flag[0]:5 >= 1",
            True,
        ),
        # by way of another queue, which saw that row, or one beside it
        (
            "0.0: signal flag[0]:0 = 1 rows=3 step=1"
            "|0.2: poll flag[0]:2 >= 1; signal flag[0]:6 = 1|0.1: poll flag[0]:6 >= 1",
            True,
        ),
        (
            "0.0: signal flag[0]:0 = 1 rows=3 step=1"
            "|0.2: poll flag[0]:0 >= 1; signal flag[0]:6 = 1|0.1: poll flag[0]:6 >= 1",
            False,
        ),
        # over the ranks: the row of another rank
        ("0.0: signal flag[0]:2 = 1 rows=2 step=rank|0.1: poll flag[1]:2 >= 1", False),
        ("0.0: signal flag[0]:2 = 1 rows=2 step=rank|0.1: poll flag[0]:2 >= 1", True),
    ],
)
def test_to_have_seen_a_row_of_a_signal_tells_nothing_of_others(seen: str, correct: bool) -> None:
    queues = dict(queue.split(":", 1) for queue in seen.split("|"))
    queues["0.1"] += "; signal flag[0]:2 = 2"
    verdict_of = verdict(program(*(f"{name}:{rest}" for name, rest in sorted(queues.items()))))
    if correct:
        assert verdict_of == ""
    else:
        assert verdict_of.startswith("words: queue 0.1"), verdict_of
        assert "must happen after the smaller value of queue 0.0, command 0" in verdict_of
