"""The rule `replay` of verify: captured programs leave their words as they found them."""

import pytest
from test_verify import program, verdict

# Rank 0 copies to rank 1: rank 1 enters by word 1 of rank 0, rank 0 delivers by word 5 of rank 1.
ENTER = "signal flag[0]:1 = 1"
AWAIT = "poll flag[0]:1 >= 1"
COPY = "copy out[1]+0 <- in[0]+0 bytes=8"
DONE = "signal flag[1]:5 = 1"
SEEN = "poll flag[1]:5 >= 1"
GOOD = (f"0.0: {AWAIT}; {COPY}; {DONE}", f"1.caller: {ENTER}; {SEEN}")


def captured(*queues: str, protocol: str = "barrier", ranks: int = 2) -> str:
    text = program(*queues, mode="capture", protocol=protocol, ranks=ranks)
    return verdict(text, exits=True)


def test_the_pattern_of_all_captured_programs() -> None:
    assert captured(*GOOD) == ""


@pytest.mark.parametrize(
    ("queues", "where", "why"),
    [
        (
            [f"0.0: {AWAIT}; {COPY}; {DONE}; signal flag[1]:6 = 1", GOOD[1]],
            "queue 0.0, command 3",
            "no queue polls word 6 of rank 1",
        ),
        (
            [f"0.0: {AWAIT}; {AWAIT}; {COPY}; {DONE}", GOOD[1]],
            "queue 0.0, command 1",
            "polls word 1 of rank 0 a second time, after queue 0.0, command 0",
        ),
        (
            [
                f"0.0: {AWAIT}; {COPY}; {DONE}; poll flag[1]:6 >= 1",
                f"1.caller: {ENTER}; {SEEN}; signal flag[1]:6 = 1",
            ],
            "queue 0.0, command 3",
            "they must be its own",
        ),
        (
            [f"0.0: {AWAIT}; {COPY}; signal flag[1]:5 = 2", GOOD[1].replace(">= 1", ">= 2")],
            "queue 0.0, command 2",
            "a captured word is 0 or 1",
        ),
        (  # a rank that only tells another something, and does not wait until it was told last time
            [GOOD[0], f"{GOOD[1]}; poll flag[1]:6 >= 1", "2.0: signal flag[1]:6 = 1"],
            "queue 2.0, command 0",
            "does not wait until rank 1 has entered",
        ),
        (  # a caller that enters somewhere and is done before anybody has seen it
            [GOOD[0].replace("0.0:", "0.0: poll flag[0]:2 >= 1;"), GOOD[1],
             "2.caller: signal flag[0]:2 = 1"],
            "queue 2.caller, command 0",
            "rank 2 can end before that poll",
        ),
    ],
)  # fmt: skip
def test_replay(queues: list[str], where: str, why: str) -> None:
    message = captured(*queues, ranks=3)
    assert message.startswith(f"replay: {where} ("), message
    assert why in message, message


@pytest.mark.parametrize("protocol", ["promise", "eager"])
def test_replays_enter(protocol: str) -> None:
    assert captured(*GOOD, protocol=protocol).startswith(
        f"replay: program: a captured program enters by protocol barrier, not {protocol}"
    )
