"""The text form of a program: round trips, canonical order, errors with line and column."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcore import _core

EXAMPLE = """\
program all_gather machine=h200-4 ranks=4 variant=fan mode=eager protocol=barrier \
native=yes flags=12 span=2
buffer in local 1024
buffer out window 4096
buffer pool host 8192
queue 0.0
  poll flag[0]:1 >= 1 rows=3 step=1
  copy out[1]+0 <- in[0]+0 bytes=1024 rows=3 dst_step=rank src_step=0
  swap out[1]+64 <-> out[0]+0 bytes=64
  copy pool[host]+512 <- out[0]+4032 bytes=64 rows=2 dst_step=64 src_step=-64
  signal flag[1]:5 = 2 rows=3 step=rank
  timestamp 3
  fence
queue 0.7
queue 0.caller
  poll flag[host]:6 >= 2
queue 3.caller
  signal flag[0]:0 = 1
"""
HEADER = (
    "program a machine=m ranks=4 variant=v mode=eager protocol=promise native=no flags=8 span=4\n"
    "buffer in local 64\nbuffer out window 256\n"
)
LINES = HEADER.count("\n")


def invalid(text: str | bytes) -> str:
    with pytest.raises(_core.Error) as caught:
        _core.Program.parse(text)
    assert caught.value.code == "invalid"
    return str(caught.value)


def test_example_round_trips() -> None:
    program = _core.Program.parse(EXAMPLE)
    assert str(program) == EXAMPLE
    assert program.text == EXAMPLE
    assert program == _core.Program.parse(EXAMPLE.encode())


def test_contents() -> None:
    program = _core.Program.parse(EXAMPLE)
    assert (program.op, program.machine, program.variant) == ("all_gather", "h200-4", "fan")
    assert (program.protocol, program.mode, program.ranks) == ("barrier", "eager", 4)
    assert (program.native, program.flag_words, program.flag_span) == (True, 12, 2)
    assert program.buffers == [
        ("in", "local", 1024),
        ("out", "window", 4096),
        ("pool", "host", 8192),
    ]
    assert [(rank, index, len(commands)) for rank, index, commands in program.queues] == [
        (0, 0, 7),
        (0, 7, 0),
        (0, "caller", 1),
        (3, "caller", 1),
    ]
    assert program.queues[0][2][1] == (
        "copy out[1]+0 <- in[0]+0 bytes=1024 rows=3 dst_step=rank src_step=0"
    )


def test_counts_engine_queues_only() -> None:
    counts = _core.Program.parse(EXAMPLE).counts()
    assert (counts.commands, counts.copies, counts.engines) == (7, 3, 2)
    assert (counts.syncs, counts.bytes) == (3, 3 * 1024 + 2 * 64 + 2 * 64)


def test_comments_blanks_and_hexadecimal_mean_the_same() -> None:
    loose = (
        "# a comment\r\n\n"
        + HEADER.replace("\n", " # so\r\n")
        .replace(" machine", "\t machine")
        .replace("256", "0x100")
        + "queue\t0.0\n\n   copy  out[1]+0x40   <-  in[0]+0   bytes=0x20#tail\n \t\r\n"
        + "fence"
    )
    strict = HEADER + "queue 0.0\n  copy out[1]+64 <- in[0]+0 bytes=32\n  fence\n"
    assert str(_core.Program.parse(loose)) == strict
    assert _core.Program.parse(loose) == _core.Program.parse(strict)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("all_gather", "all_to_all"),
        ("h200-4", "h200-8"),
        ("ranks=4", "ranks=5"),
        ("mode=eager", "mode=armed"),
        ("native=yes", "native=no"),
        ("flags=12", "flags=13"),
        ("span=2", "span=3"),
        ("in local 1024", "in window 1024"),
        ("step=1", "step=-1"),
        ("src_step=0", "src_step=rank"),
        ("out[1]+0", "out[2]+0"),
        ("= 2 rows", "= 1 rows"),
        ("queue 0.7", "queue 0.8"),
        ("  fence\n", ""),
    ],
)
def test_different_texts_are_different_programs(old: str, new: str) -> None:
    assert EXAMPLE.replace(old, new, 1) != EXAMPLE
    changed = _core.Program.parse(EXAMPLE.replace(old, new, 1))
    assert changed != _core.Program.parse(EXAMPLE)
    assert changed != EXAMPLE


def test_limits_are_reached() -> None:
    buffers = "".join(f"buffer b{i} window {2**64 - 1}\n" for i in range(255))
    text = (
        "program a machine=m ranks=1024 variant=v mode=capture protocol=promise native=yes "
        f"flags={2**32 - 1} span=65535\n{buffers}queue 1023.65534\n"
        f"  copy b254[1023]+{2**64 - 1} <- b0[host]+0 bytes={2**64 - 1} rows={2**32 - 1} "
        f"dst_step={2**63 - 1} src_step=-{2**63 - 1}\n  timestamp 65535\n"
    )
    assert str(_core.Program.parse(text)) == text
    with pytest.raises(_core.Error, match="line 257, column 8: expected at most 255 buffers"):
        _core.Program.parse(text.replace("queue", "buffer b255 host 1\nqueue"))


HEAD = "program a machine=m ranks=4 variant=v mode=eager protocol=promise native=no flags=8 span=4"
# (text, line, column, what the message says)
MALFORMED_HEADERS = [
    ("", 1, 1, "expected 'program"),
    ("\n\n# only a comment", 3, 1, "expected 'program"),
    ("buffer in local 1", 1, 1, "'program' as the first"),
    ("  programme a", 1, 3, "'program' as the first"),
    ("program", 1, 8, "space before the operation"),
    ("program ?", 1, 9, "the operation's name"),
    (HEAD.replace("machine=m ", ""), 1, 11, "'machine='"),
    (HEAD.replace("=m", "="), 1, 19, "machine's name"),
    (HEAD.replace("ranks=4", "ranks=0"), 1, 27, "ranks from 1 to 1024"),
    (HEAD.replace("ranks=4", "ranks=1025"), 1, 27, "ranks from 1 to 1024"),
    (HEAD.replace("ranks=4", "ranks=-1"), 1, 27, "ranks, a number"),
    (HEAD.replace("ranks=4", "ranks=4x"), 1, 28, "a space before 'variant='"),
    (HEAD.replace("eager", "lazy"), 1, 44, "one of eager, capture, armed"),
    (HEAD.replace("promise", "p"), 1, 59, "one of barrier, credits, eager, promise"),
    (HEAD.replace("=no", "=maybe"), 1, 74, "yes or no"),
    (HEAD.replace("flags=8", f"flags={2**32}"), 1, 83, f"flags from 0 to {2**32 - 1}"),
    (HEAD.replace("span=4", "span=65536"), 1, 90, "span from 0 to 65535"),
    (HEAD.replace("span=4", "span=99999999999999999999999"), 1, 90, "span from 0 to 65535"),
    (HEAD + " more", 1, len(HEAD) + 2, "end of the line"),
    (HEAD + "\n" + HEAD, 2, 1, "one program only"),
]
# (line after the header, column, what the message says)
MALFORMED_LINES = [
    ("bufer in local 1", 1, "instead of 'bufer'"),
    ("buffer x remote 1", 10, "one of window, local, host"),
    ("buffer x local", 15, "space before the size"),
    ("buffer x local -1", 16, "size in bytes, a number"),
    (f"buffer x local {2**64}", 16, "size in bytes from 0"),
    ("buffer in local 1", 8, "other than 'in'"),
    ("buffer flag window 1", 8, "other than 'flag'"),
    ("buffer a/b local 1", 9, "space before the kind"),
    ("queue 0", 8, "'.'"),
    ("queue 0.", 9, "index (or caller)"),
    ("queue 0.65535", 9, "index (or caller) from 0 to 65534"),
    ("queue host.0", 7, "queue's rank"),
    ("queue 0.callers", 15, "end of the line"),
    ("fence", 1, "queue before its commands"),
]
# (command, column, what the message says)
MALFORMED_COMMANDS = [
    ("copy", 7, "space before the operand"),
    ("copy nowhere[0]+0 <- in[0]+0 bytes=1", 8, "instead of 'nowhere'"),
    ("copy out(0)+0 <- in[0]+0 bytes=1", 11, "'['"),
    ("copy out[x]+0 <- in[0]+0 bytes=1", 12, "a rank (or host)"),
    ("copy out[65535]+0 <- in[0]+0 bytes=1", 12, "from 0 to 65534"),
    ("copy out[0+0 <- in[0]+0 bytes=1", 13, "']'"),
    ("copy out[0]:0 <- in[0]+0 bytes=1", 14, "'+'"),
    ("copy out[0]+ <- in[0]+0 bytes=1", 15, "an offset"),
    ("copy out[0]+0x <- in[0]+0 bytes=1", 15, "an offset"),
    ("copy out[0]+0 in[0]+0 bytes=1", 17, "'<-'"),
    ("copy out[0]+0 <-> in[0]+0 bytes=1", 19, "space before the source"),
    ("swap out[0]+0 <- in[0]+0 bytes=1", 17, "'<->'"),
    ("copy out[0]+0 <- in[0]+0", 27, "space before 'bytes='"),
    ("copy out[0]+0 <- in[0]+0 bytes=1.5", 35, "rows= or the end"),
    ("copy out[0]+0 <- in[0]+0 bytes=64rows=2 dst_step=0 src_step=0", 36, "rows= or the end"),
    ("copy out[0]+0 <- in[0]+0 bytes=1 rows=2", 42, "space before 'dst_step='"),
    ("copy out[0]+0 <- in[0]+0 bytes=1 rows=2 dst_step=1", 53, "space before 'src_step='"),
    ("copy out[0]+0 <- in[0]+0 bytes=1 rows=1 dst_step=1 src_step=1", 41, "other than 1"),
    (f"copy out[0]+0 <- in[0]+0 bytes=1 rows={2**32} dst_step=1 src_step=1", 41, "rows from"),
    ("copy out[0]+0 <- in[0]+0 bytes=1 rows=2 dst_step=ring src_step=1", 52, "step (or rank)"),
    (f"copy out[0]+0 <- in[0]+0 bytes=1 rows=2 dst_step=-{2**63} src_step=1", 53, "step (or rank)"),
    ("poll flag[0]+1 >= 1", 15, "':'"),
    ("poll flag[0]:1 > 1", 18, "'>='"),
    ("poll flag[0]:1 >= 65536", 21, "value from 0 to 65535"),
    ("poll flag[0]:1 >= 1 rows=2 dst_step=1", 30, "'step='"),
    ("signal flag[0]:1 >= 1", 20, "'='"),
    ("signal flag[0]:1 = 1 rows=2 step=", 36, "step (or rank)"),
    ("timestamp", 12, "space before the operand"),
    ("timestamp -1", 13, "timestamp's number"),
    ("fence 1", 9, "end of the line"),
    ("FENCE", 3, "instead of 'FENCE'"),
]


@pytest.mark.parametrize(("text", "line", "column", "what"), MALFORMED_HEADERS)
def test_malformed_header(text: str, line: int, column: int, what: str) -> None:
    message = invalid(text)
    assert message.startswith(f"line {line}, column {column}: ")
    assert what in message


@pytest.mark.parametrize(("text", "column", "what"), MALFORMED_LINES)
def test_malformed_line(text: str, column: int, what: str) -> None:
    message = invalid(HEADER + text + "\n")
    assert message.startswith(f"line {LINES + 1}, column {column}: ")
    assert what in message


@pytest.mark.parametrize(("text", "column", "what"), MALFORMED_COMMANDS)
def test_malformed_command(text: str, column: int, what: str) -> None:
    message = invalid(HEADER + "queue 0.0\n  fence\n  " + text + "\n  fence\n")
    assert message.startswith(f"line {LINES + 3}, column {column}: ")
    assert what in message


@pytest.mark.parametrize(
    ("first", "second"),
    [("0.1", "0.0"), ("1.0", "0.0"), ("0.caller", "0.5"), ("0.0", "0.0"), ("0.caller",) * 2],
)
def test_queues_must_be_in_order(first: str, second: str) -> None:
    message = invalid(HEADER + f"queue {first}\nqueue {second}\n")
    assert message.startswith(f"line {LINES + 2}, column 7: ")
    assert f"{second} follows {first}" in message


def test_buffers_come_before_queues() -> None:
    message = invalid(HEADER + "queue 0.0\nbuffer late local 1\n")
    assert message.startswith(f"line {LINES + 2}, column 1: expected buffers before")


# Random programs as text, of every representable field.
names = st.from_regex(r"[A-Za-z0-9_.:-]{1,12}", fullmatch=True)
u16 = st.integers(0, 2**16 - 1)
u64 = st.integers(0, 2**64 - 1)
steps = st.just("rank") | st.integers(-(2**63) + 1, 2**63 - 1).map(str)
row_counts = st.integers(0, 2**32 - 1).filter(lambda rows: rows != 1)
ranks = st.just("host") | st.integers(0, 2**16 - 2).map(str)
words = st.builds("flag[{}]:{}".format, ranks, u64)


def commands(buffers: list[str]) -> st.SearchStrategy[str]:
    slices = words
    if buffers:
        slices |= st.builds("{}[{}]+{}".format, st.sampled_from(buffers), ranks, u64)
    data_rows = st.just("") | st.builds(
        " rows={} dst_step={} src_step={}".format, row_counts, steps, steps
    )
    flag_rows = st.just("") | st.builds(" rows={} step={}".format, row_counts, steps)
    return st.one_of(
        st.just("fence"),
        st.builds("timestamp {}".format, u16),
        st.builds("copy {} <- {} bytes={}{}".format, slices, slices, u64, data_rows),
        st.builds("swap {} <-> {} bytes={}{}".format, slices, slices, u64, data_rows),
        st.builds("poll {} >= {}{}".format, words | slices, u16, flag_rows),
        st.builds("signal {} = {}{}".format, words | slices, u16, flag_rows),
    )


PROTOCOLS = ["barrier", "credits", "eager", "promise"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    lines = [
        f"program {draw(names)} machine={draw(names)} ranks={draw(st.integers(1, 1024))} "
        f"variant={draw(names)} mode={draw(st.sampled_from(['eager', 'capture', 'armed']))} "
        f"protocol={draw(st.sampled_from(PROTOCOLS))} "
        f"native={draw(st.sampled_from(['yes', 'no']))} "
        f"flags={draw(st.integers(0, 2**32 - 1))} span={draw(u16)}"
    ]
    buffers = draw(st.lists(names.filter(lambda name: name != "flag"), unique=True, max_size=3))
    for name in buffers:
        kind = draw(st.sampled_from(["window", "local", "host"]))
        lines.append(f"buffer {name} {kind} {draw(u64)}")
    indices = st.integers(0, 65534) | st.just(65535)
    for rank, index in sorted(draw(st.sets(st.tuples(st.integers(0, 65534), indices), max_size=3))):
        lines.append(f"queue {rank}.{'caller' if index == 65535 else index}")
        lines += ["  " + command for command in draw(st.lists(commands(buffers), max_size=4))]
    return "\n".join(lines) + "\n"


@given(programs())
def test_random_programs_round_trip(text: str) -> None:
    program = _core.Program.parse(text)
    assert str(program) == text
    assert _core.Program.parse(str(program)) == program


def check_total(text: bytes) -> None:
    """Any bytes either parse to a program that prints back, or say where they are wrong."""
    try:
        program = _core.Program.parse(text)
    except _core.Error as error:
        code, message = error.code, str(error)
    else:
        assert _core.Program.parse(str(program)) == program
        return
    place = re.match(r"line (\d+), column (\d+): expected ", message)
    assert code == "invalid"
    assert place is not None
    lines = text.split(b"\n")
    assert 1 <= int(place[1]) <= len(lines)
    assert 1 <= int(place[2]) <= len(lines[int(place[1]) - 1]) + 1


@given(st.binary(max_size=200))
def test_any_bytes_are_answered(text: bytes) -> None:
    check_total(text)


@given(programs(), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4), st.binary(max_size=3))))
def test_damaged_programs_are_answered(text: str, edits: list[tuple[float, int, bytes]]) -> None:
    damaged = text.encode()
    for where, cut, put in edits:
        at = int(where * len(damaged))
        damaged = damaged[:at] + put + damaged[at + cut :]
    check_total(damaged)


def test_nul_bytes_and_long_lines_are_answered() -> None:
    check_total(b"\0" * 1000)
    check_total(b"program " + b"x" * 1_000_000)
    check_total(HEADER.encode() + b"\0")
    check_total(b"\n" * 100_000)
