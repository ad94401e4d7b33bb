"""Each rule of verify: a planted program is rejected, by rule and command; its twin passes."""

import pytest

from offcore import _core, machines


def program(
    *queues: str,
    ranks: int = 2,
    mode: str = "eager",
    protocol: str = "eager",
    flags: int = 8,
    span: int = 4,
) -> str:
    """Each queue is "0.1: command; command"."""
    lines = [
        f"program test machine=m ranks={ranks} variant=v mode={mode} protocol={protocol} "
        f"native=yes flags={flags} span={span}",
        "buffer in local 64",
        "buffer out window 256",
        "buffer pool host 128",
        f"buffer huge window {2**64 - 1}",
    ]
    for queue in queues:
        name, _, commands = queue.partition(":")
        lines.append(f"queue {name}")
        lines += ["  " + command.strip() for command in commands.split(";") if command.strip()]
    return "\n".join(lines) + "\n"


def verdict(text: str, exits: bool = False) -> str:
    """What verify says: nothing when the program is correct.

    exit is the last rule, and most of these programs are too short to keep it: without `exits`
    its breach counts as correct.
    """
    parsed = _core.Program.parse(text)
    try:
        _core.verify(parsed)
    except _core.Error as error:
        code, message = error.code, str(error)
    else:
        return ""
    assert code == "verify"
    return message if exits or not message.startswith("exit: ") else ""


def put(command: str, queue: str = "0.0") -> str:
    """A program of one command."""
    return program(f"{queue}: {command}")


BOUNDS = "bounds: queue 0.0, command 0 ("
SHAPE = "shape: queue 0.0, command 0 ("
WORDS = "words: queue 0.0, command 0 ("
HAZARD = "hazard: queue 0.0, command 0 ("
COPY = "copy out[1]+{} <- in[0]+0 bytes={}"

# (rejected, how the message starts, what it holds, the near-identical correct one)
ONE_COMMAND = [
    (COPY.format(0, 65), BOUNDS, "src leaves in of 64 bytes", COPY.format(0, 64)),
    (COPY.format(193, 64), BOUNDS, "dst leaves out of 256", COPY.format(192, 64)),
    (COPY.format(2**64 - 1, 2), BOUNDS, "dst leaves out", COPY.format(254, 2)),
    (COPY.format(0, 2**64 - 1), BOUNDS, "dst leaves out", COPY.format(0, 1)),
    (
        f"copy huge[1]+{2**64 - 2} <- in[0]+0 bytes=2",
        BOUNDS,
        "dst leaves huge",
        f"copy huge[1]+{2**64 - 3} <- in[0]+0 bytes=2",
    ),
    (
        f"copy huge[1]+16 <- in[0]+0 bytes=8 rows=3 dst_step={2**63 - 1} src_step=8",
        BOUNDS,
        "dst leaves huge",
        f"copy huge[1]+16 <- in[0]+0 bytes=8 rows=2 dst_step={2**63 - 1} src_step=8",
    ),
    (
        f"copy huge[1]+{2**63 - 2} <- in[0]+0 bytes=8 rows=2 dst_step=-{2**63 - 1} src_step=8",
        BOUNDS,
        "dst leaves huge",
        f"copy huge[1]+{2**63 - 1} <- in[0]+0 bytes=8 rows=2 dst_step=-{2**63 - 1} src_step=8",
    ),
    (
        "copy out[1]+0 <- in[0]+0 bytes=16 rows=4 dst_step=81 src_step=16",
        BOUNDS,
        "dst leaves out",
        "copy out[1]+0 <- in[0]+0 bytes=16 rows=4 dst_step=80 src_step=16",
    ),
    (
        "copy out[1]+0 <- in[0]+47 bytes=16 rows=4 dst_step=16 src_step=-16",
        BOUNDS,
        "src leaves in",
        "copy out[1]+0 <- in[0]+48 bytes=16 rows=4 dst_step=16 src_step=-16",
    ),
    (
        "copy out[0]+0 <- in[0]+0 bytes=16 rows=3 dst_step=rank src_step=0",
        BOUNDS,
        "more than 2 ranks",
        "copy out[0]+0 <- in[0]+0 bytes=16 rows=2 dst_step=rank src_step=0",
    ),
    (COPY.format(0, 1).replace("out[1]", "out[2]"), BOUNDS, "beyond 2", COPY.format(0, 1)),
    ("signal flag[0]:8 = 1", BOUNDS, "leaves the flags of 8 words", "signal flag[0]:7 = 1"),
    ("signal flag[2]:0 = 1", BOUNDS, "rank beyond 2", "signal flag[host]:0 = 1"),
    (
        "signal flag[0]:6 = 1 rows=3 step=1",
        BOUNDS,
        "leaves the flags",
        "signal flag[0]:6 = 1 rows=2 step=1",
    ),
    (f"signal flag[0]:{2**64 - 1} = 1", BOUNDS, "leaves the flags", "signal flag[0]:0 = 1"),
    (COPY.format(0, 0), SHAPE, "bytes must be 1 or more", COPY.format(0, 1)),
    (
        "copy out[1]+0 <- in[0]+0 bytes=1 rows=0 dst_step=0 src_step=0",
        SHAPE,
        "rows must be 1 or more",
        COPY.format(0, 1),
    ),
    ("copy out[1]+0 <- in[1]+0 bytes=1", SHAPE, "local to rank 1", COPY.format(0, 1)),
    (
        "copy in[1]+0 <- out[0]+0 bytes=1",
        SHAPE,
        "dst is local to rank 1",
        "copy in[0]+0 <- out[1]+0 bytes=1",
    ),
    (
        "copy out[1]+0 <- in[0]+0 bytes=1 rows=2 dst_step=1 src_step=rank",
        SHAPE,
        "steps over ranks in a local",
        "copy out[1]+0 <- in[0]+0 bytes=1 rows=2 dst_step=1 src_step=1",
    ),
    (
        "copy pool[host]+0 <- in[0]+0 bytes=1 rows=2 dst_step=rank src_step=1",
        SHAPE,
        "steps over ranks from host",
        "copy pool[host]+0 <- in[0]+0 bytes=1 rows=2 dst_step=1 src_step=1",
    ),
    (
        "copy pool[0]+0 <- in[0]+0 bytes=1",
        SHAPE,
        "must name [host]",
        "copy pool[host]+0 <- in[0]+0 bytes=1",
    ),
    ("copy out[host]+0 <- in[0]+0 bytes=1", SHAPE, "a window buffer", COPY.format(0, 1)),
    ("copy flag[1]:0 <- in[0]+0 bytes=1", SHAPE, "not a flag word", COPY.format(0, 1)),
    ("copy out[1]+0 <- flag[0]:0 bytes=1", SHAPE, "src must be data", COPY.format(0, 1)),
    ("signal out[1]+0 = 1", SHAPE, "must be a flag word", "signal flag[1]:0 = 1"),
    (
        "signal flag[host]:0 = 1 rows=2 step=rank",
        SHAPE,
        "steps over ranks from host",
        "signal flag[1]:0 = 1 rows=2 step=rank",
    ),
    ("signal flag[0]:0 = 0", WORDS, "must lie in 1..4", "signal flag[0]:0 = 1"),
    ("signal flag[0]:0 = 5", WORDS, "must lie in 1..4", "signal flag[0]:0 = 4"),
    ("poll flag[0]:0 >= 0", WORDS, "must lie in 1..4", "fence"),
    (
        "signal flag[0]:0 = 1 rows=2 step=0",
        WORDS,
        "two of its rows signal one word",
        "signal flag[0]:0 = 1 rows=2 step=1",
    ),
    ("poll flag[0]:0 >= 1", "unmatched: queue 0.0, command 0 (", "no signal", "timestamp 1"),
    (
        "copy out[1]+0 <- in[0]+0 bytes=9 rows=2 dst_step=8 src_step=9",
        HAZARD,
        "touches bytes 8 to 9 of out[1] twice",
        "copy out[1]+0 <- in[0]+0 bytes=8 rows=2 dst_step=8 src_step=9",
    ),
    (
        "copy out[1]+0 <- in[0]+0 bytes=8 rows=2 dst_step=0 src_step=8",
        HAZARD,
        "bytes 0 to 8 of out[1] twice",
        "copy out[1]+0 <- in[0]+0 bytes=8 rows=2 dst_step=8 src_step=0",
    ),
    (
        "copy out[1]+0 <- out[1]+15 bytes=16",
        HAZARD,
        "bytes 15 to 16 of out[1] twice",
        "copy out[1]+0 <- out[1]+16 bytes=16",
    ),
    (
        "swap out[1]+0 <-> out[0]+0 bytes=16 rows=2 dst_step=16 src_step=0",
        HAZARD,
        "bytes 0 to 16 of out[0] twice",
        "swap out[1]+0 <-> out[0]+0 bytes=16 rows=2 dst_step=16 src_step=16",
    ),
    (
        "swap out[1]+0 <-> out[0]+0 bytes=16 rows=2 dst_step=16 src_step=rank",
        HAZARD,
        "bytes 0 to 16 of out[1] twice",
        "swap out[1]+16 <-> out[0]+0 bytes=16 rows=2 dst_step=16 src_step=rank",
    ),
]


@pytest.mark.parametrize(("command", "start", "reason", "twin"), ONE_COMMAND)
def test_one_command(command: str, start: str, reason: str, twin: str) -> None:
    message = verdict(put(command))
    assert message.startswith(start + command)
    assert reason in message
    assert verdict(put(twin)) == ""


def test_queue_of_a_missing_rank() -> None:
    assert verdict(put("fence", queue="2.0")).startswith("bounds: program: queue 2.0 ")
    assert verdict(put("fence", queue="1.0")) == ""


def test_too_many_rows_are_refused_at_once() -> None:
    rows = "copy huge[1]+0 <- in[0]+0 bytes=1 rows={} dst_step=2 src_step=0"
    assert verdict(put(rows.format(2**32 - 1))).startswith("shape: program: 4294967295 rows")
    assert verdict(put(rows.format(1000))) == ""


# Two signals of one word must have distinct values, the smaller surely first.
def test_signals_of_one_value() -> None:
    bad = program("0.0: signal flag[1]:0 = 1", "1.0: fence; signal flag[1]:0 = 1")
    message = verdict(bad)
    assert message.startswith("words: queue 1.0, command 1 (signal flag[1]:0 = 1): ")
    assert "queue 0.0, command 0 (signal" in message
    assert verdict(bad.replace("fence\n  signal flag[1]:0", "fence\n  signal flag[host]:0")) == ""


def test_signals_of_one_word_must_be_ordered() -> None:
    queues = ["0.0: signal flag[1]:0 = 1; signal flag[1]:1 = 1", "1.0: {} signal flag[1]:0 = 2"]
    good = program(queues[0], queues[1].format("poll flag[1]:1 >= 1;"))
    bad = program(queues[0], queues[1].format(""))
    message = verdict(bad)
    assert message.startswith("words: queue 1.0, command 0 (signal flag[1]:0 = 2): ")
    assert "queue 0.0, command 0 (signal flag[1]:0 = 1)" in message
    assert verdict(good) == ""


def test_signals_of_one_word_must_rise() -> None:
    queue = "0.0: signal flag[1]:0 = {}; signal flag[1]:0 = {}"
    assert verdict(program(queue.format(2, 1))).startswith("words: queue 0.0, command 0 ")
    assert verdict(program(queue.format(1, 2))) == ""


def test_unmatched_row() -> None:
    queues = ["0.0: signal flag[0]:0 = 1; signal flag[0]:2 = {}", "1.0: poll flag[0]:0 >= 1 {}"]
    rows = "rows=2 step=2"
    assert verdict(program(queues[0].format(1), queues[1].format(rows))) == ""
    message = verdict(program(queues[0].format(1), queues[1].format("rows=3 step=2")))
    assert message.startswith("unmatched: queue 1.0, command 0 (poll flag[0]:0 >= 1 rows=3")
    assert "row 2" in message
    too_small = program(queues[0].format(1), "1.0: poll flag[0]:2 >= 2")
    assert verdict(too_small).startswith("unmatched: queue 1.0, command 0 ")
    assert verdict(too_small.replace(">= 2", ">= 1")) == ""


def test_host_words_are_not_a_ranks_words() -> None:
    queues = ["0.0: signal flag[host]:0 = 1", "1.0: poll flag[{}]:0 >= 1"]
    assert verdict(program(queues[0], queues[1].format("0"))).startswith("unmatched: queue 1.0")
    assert verdict(program(queues[0], queues[1].format("host"))) == ""


def test_deadlock_lists_every_stuck_queue() -> None:
    first = ["poll flag[0]:1 >= 1", "signal flag[0]:0 = 1"]
    second = ["fence", "poll flag[0]:0 >= 1", "signal flag[0]:1 = 1"]
    third = "1.caller: poll flag[0]:1 >= 1"
    free = "1.5: fence"
    message = verdict(program("0.0: " + "; ".join(first), "0.1: " + "; ".join(second), free, third))
    assert message.startswith(
        "deadlock: queue 0.0, command 0 (poll flag[0]:1 >= 1): "
        "waits for ever for queue 0.1, command 2 (signal flag[0]:1 = 1); "
        "queue 0.1, command 1 (poll flag[0]:0 >= 1): waits for ever for queue 0.0, command 1 "
    )
    assert "; queue 1.caller, command 0 (poll flag[0]:1 >= 1): waits" in message
    assert "1.5" not in message
    first.reverse()
    assert verdict(program("0.0: " + "; ".join(first), "0.1: " + "; ".join(second), third)) == ""


def test_a_queue_that_waits_for_itself() -> None:
    queue = ["poll flag[0]:0 >= 1", "signal flag[0]:0 = 1"]
    assert verdict(program("0.0: " + "; ".join(queue))).startswith("deadlock: queue 0.0, command 0")
    assert verdict(program("0.0: " + "; ".join(reversed(queue)))) == ""


ARMED = [
    "0.0: poll flag[0]:0 >= 1; copy out[1]+0 <- in[0]+0 bytes=1",
    "0.caller: {}",
    "1.caller: {}",
]


def armed(engine: str, caller: str, other: str) -> str:
    return program(
        engine, ARMED[1].format(caller), ARMED[2].format(other), mode="armed", protocol="eager"
    )


def test_an_armed_queue_is_started_by_its_own_caller() -> None:
    start = "signal flag[0]:0 = 1"
    assert verdict(armed(ARMED[0], start, "fence")) == ""
    message = verdict(armed(ARMED[0], "fence", start))
    assert message.startswith("deadlock: queue 0.0, command 0 (poll flag[0]:0 >= 1): ")
    assert "the caller of rank 0 never starts" in message
    assert verdict(armed(ARMED[0], "fence", "fence")).startswith("unmatched: queue 0.0, command 0")


def test_an_armed_queue_starts_with_a_poll() -> None:
    start = "signal flag[0]:0 = 1"
    message = verdict(armed("0.0: fence; poll flag[0]:0 >= 1", start, "fence"))
    assert message.startswith("shape: queue 0.0: ")
    assert verdict(armed("0.0:", start, "fence")).startswith("shape: queue 0.0: ")


# Hazards between two commands: reads may overlap reads, nothing else without an order.
WRITE = "copy out[1]+0 <- in[0]+0 bytes=16"
OVERLAPS = [
    (WRITE, "copy out[1]+15 <- in[0]+0 bytes=16", "writes bytes 15 to 16 of out[1]"),
    (WRITE, "copy pool[host]+0 <- out[1]+8 bytes=4", "reads as well"),
    ("copy pool[host]+0 <- out[1]+8 bytes=4", WRITE, "reads bytes 8 to 12 of out[1]"),
    (WRITE, "swap out[0]+0 <-> out[1]+8 bytes=4", "writes as well"),
    (WRITE, "copy out[0]+8 <- in[0]+0 bytes=8 rows=2 dst_step=rank src_step=0", "bytes 8 to 16"),
    (WRITE, "copy out[1]+66 <- in[0]+0 bytes=4 rows=4 dst_step=-17 src_step=0", "bytes 15 to 16"),
]


@pytest.mark.parametrize(("first", "second", "reason"), OVERLAPS)
def test_hazard_in_one_group(first: str, second: str, reason: str) -> None:
    message = verdict(program(f"0.0: fence; {first}; {second}"))
    assert message.startswith(f"hazard: queue 0.0, command 1 ({first}): ")
    assert f"queue 0.0, command 2 ({second})" in message
    assert reason in message
    assert verdict(program(f"0.0: fence; {first}; fence; {second}")) == ""
    assert verdict(program(f"0.0: {first}; timestamp 0; {second}")) == ""


@pytest.mark.parametrize(("first", "second", "reason"), OVERLAPS)
def test_hazard_on_two_queues(first: str, second: str, reason: str) -> None:
    signal, poll = "signal flag[host]:0 = 1", "poll flag[host]:0 >= 1"
    message = verdict(program(f"0.0: {first}; {signal}", f"0.1: {second}"))
    assert message.startswith(f"hazard: queue 0.0, command 0 ({first}): ")
    assert f"queue 0.1, command 0 ({second})" in message
    assert reason in message
    assert verdict(program(f"0.0: {first}; {signal}", f"0.1: {poll}; {second}")) == ""
    # A signal sent too early and a poll that comes too late order nothing.
    early = program(f"0.0: {signal}; {first}", f"0.1: {poll}; {second}")
    late = program(f"0.0: {first}; {signal}", f"0.1: {second}; {poll}")
    assert verdict(early).startswith("hazard: queue 0.0, command 1 ")
    assert verdict(late).startswith("hazard: queue 0.0, command 0 ")


def test_readers_of_one_source_are_no_hazard() -> None:
    reads = [f"0.{i}: copy out[1]+{8 * i} <- in[0]+0 bytes=8" for i in range(8)]
    assert verdict(program(*reads)) == ""


def test_order_goes_through_a_third_queue() -> None:
    chain = [
        f"0.0: {WRITE}; signal flag[0]:0 = 1",
        "0.1: poll flag[0]:0 >= 1; signal flag[0]:1 = 3",
        "1.0: poll flag[0]:1 >= 2; copy out[1]+0 <- out[0]+0 bytes=1",
    ]
    assert verdict(program(*chain)) == ""
    broken = [chain[0], chain[1].replace("poll flag[0]:0 >= 1; ", ""), chain[2]]
    assert verdict(program(*broken)).startswith("hazard: queue 0.0, command 0 ")


def test_a_poll_is_released_by_the_smallest_value_that_satisfies_it() -> None:
    sender = f"0.0: signal flag[1]:0 = 1; {WRITE}; signal flag[1]:0 = 3"
    reader = "1.0: poll flag[1]:0 >= {}; copy out[0]+0 <- out[1]+0 bytes=1"
    assert verdict(program(sender, reader.format(2))) == ""
    assert verdict(program(sender, reader.format(1))).startswith("hazard: queue 0.0, command 1 ")


def test_a_poll_waits_for_every_row() -> None:
    senders = [
        f"0.{i}: copy out[1]+{i} <- in[0]+0 bytes=1; signal flag[{i % 2}]:0 = 1" for i in range(2)
    ]
    reader = "1.0: poll flag[0]:0 >= 1{}; copy out[0]+0 <- out[1]+0 bytes=2"
    assert verdict(program(*senders, reader.format(" rows=2 step=rank"))) == ""
    assert verdict(program(*senders, reader.format(""))).startswith("hazard: queue 0.1, command 0 ")


def entry(before_copy: str, command: str, signals: str = "signal flag[0]:0 = 1") -> str:
    return program(f"0.0: {before_copy} {command}", f"1.caller: {signals}", protocol="barrier")


POLL = "poll flag[0]:0 >= 1;"
REMOTE = [
    WRITE,
    "swap out[0]+0 <-> out[1]+0 bytes=16",
    "swap out[1]+0 <-> out[0]+0 bytes=16",
    "copy out[0]+0 <- in[0]+0 bytes=16 rows=2 dst_step=rank src_step=0",
    "copy in[0]+0 <- out[1]+0 bytes=16",
]


@pytest.mark.parametrize("command", REMOTE)
def test_entry(command: str) -> None:
    message = verdict(entry("", command))
    assert message.startswith(f"entry: queue 0.0, command 0 ({command}): ")
    assert "out[1] before the caller of rank 1" in message
    assert verdict(entry(POLL, command)) == ""
    for protocol in ("eager", "promise"):
        assert verdict(entry("", command).replace("barrier", protocol)) == ""


def test_entry_needs_the_owners_caller() -> None:
    assert verdict(entry(POLL, WRITE).replace("1.caller", "1.0")).startswith("entry: queue 0.0")
    assert verdict(entry(POLL, WRITE).replace("1.caller", "0.caller")).startswith("entry: ")
    late = program(f"0.0: {WRITE}; {POLL}", "1.caller: signal flag[0]:0 = 1", protocol="barrier")
    assert verdict(late).startswith("entry: queue 0.0, command 0 ")


LOCAL = [
    "copy out[0]+0 <- in[0]+0 bytes=1",
    "copy pool[host]+0 <- in[0]+0 bytes=1",
    "copy in[0]+0 <- pool[host]+0 bytes=1",
]


@pytest.mark.parametrize("command", LOCAL)
def test_entry_and_exit_are_only_for_remote_windows(command: str) -> None:
    assert verdict(entry("", command), exits=True) == ""


DONE = "signal flag[1]:1 = 1"
AWAIT = "poll flag[1]:1 >= 1"


@pytest.mark.parametrize("command", REMOTE)
@pytest.mark.parametrize("waiter", ["1.caller", "1.0"])
def test_exit(command: str, waiter: str) -> None:
    """The window's owner may wait by any of its queues, and only after the access."""
    assert verdict(program(f"0.0: {command}; {DONE}", f"{waiter}: {AWAIT}"), exits=True) == ""
    verb = "reads" if command.startswith("copy in") else "writes"
    for broken in (
        program(f"0.0: {command}"),
        program(f"0.0: {command}", f"{waiter}: fence"),
        program(f"0.0: {command}; {DONE}", f"{waiter}: fence"),
        program(f"0.0: {DONE}; {command}", f"{waiter}: {AWAIT}"),
        program(f"0.0: {command}; {DONE}", f"0.caller: {AWAIT}"),
    ):
        message = verdict(broken, exits=True)
        assert message.startswith("exit: queue 0.0, command ")
        assert f"({command}): {verb} out[1], and no queue of rank 1 waits" in message


def test_exit_may_go_through_a_third_rank() -> None:
    queues = (
        f"0.0: {WRITE}; signal flag[2]:0 = 1",
        "2.0: poll flag[2]:0 >= 1; signal flag[1]:0 = 1",
    )
    waits = program(*queues[:1], "1.caller: poll flag[1]:0 >= 1", *queues[1:], ranks=3)
    assert verdict(waits, exits=True) == ""
    assert verdict(program(*queues, ranks=3), exits=True).startswith("exit: queue 0.0, command 0 ")


OPS = {
    "all_gather": lambda ranks, in_place: _core.moves_all_gather([96] * ranks, in_place),
    "all_to_all": lambda ranks, in_place: _core.moves_all_to_all(
        ranks, [96] * ranks * ranks, in_place
    ),
    "broadcast": lambda ranks, in_place: _core.moves_broadcast(ranks, 1, 96, in_place),
    "scatter": lambda ranks, _: _core.moves_scatter(1, [96, 0, *[7] * (ranks - 2)]),
    "gather": lambda ranks, _: _core.moves_gather(1, [96, 0, *[7] * (ranks - 2)]),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("machine", ["mi300x-8", "h200-4", "host-5"])
def test_planned_programs_keep_every_rule(op: str, machine: str) -> None:
    loaded = machines.load(machine)
    planned = 0
    for ranks in (2, 3, 4):
        for entry_, staged in ((True, False), (True, True), (False, True), (False, False)):
            protocol = _core.Protocol(entry=entry_, staged=staged)
            for in_place in (False, True):
                moves = OPS[op](ranks, in_place)
                for variant in _core.variants_of(moves, protocol):
                    _core.verify(_core.plan(moves, variant, loaded, protocol))
                    planned += 1
    assert planned >= 50


def test_an_empty_program_is_correct() -> None:
    assert verdict(program()) == ""
