"""Plans of very large operations: their size and the time to check them stay in proportion."""

import json
from pathlib import Path

import pytest

import offcore
from offcore import _core, machines

GIB = 1 << 30


def test_a_swap_through_scratch_takes_a_bounded_number_of_pieces() -> None:
    program = offcore.show_program(
        "all_to_all", machine="h200-4", ranks=4, nbytes=64 * GIB, variant="swap", in_place=True
    )
    assert not program.native
    assert program.counts().copies <= 6 * 3 * 1024


def test_scratch_that_is_used_again_and_again_is_checked_in_linear_time() -> None:
    """Checked pair by pair, as it was, this takes several minutes."""
    pieces = 100_000
    lines = [
        "program test machine=m ranks=1 variant=v mode=eager protocol=promise native=yes "
        "flags=4 span=1",
        "buffer out window 4096",
        "buffer scratch local 64",
        "queue 0.0",
    ]
    for piece in range(pieces):
        at = 64 * (piece % 64)
        lines += [f"  copy scratch[0]+0 <- out[0]+{at} bytes=64", "  fence"]
        lines += [f"  copy out[0]+{at} <- scratch[0]+0 bytes=64", "  fence"]
    program = _core.Program.parse("\n".join(lines) + "\n")
    _core.verify(program)
    unordered = "\n".join([*lines, "queue 0.1", "  copy out[0]+0 <- scratch[0]+32 bytes=1"])
    with pytest.raises(offcore.Error, match="neither happens before the other"):
        _core.verify(_core.Program.parse(unordered + "\n"))


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_an_access_is_compared_with_all_of_a_run(later: int) -> None:
    """One queue writes a scratch three times; another one reads it after its `later`-th write and
    before the next, or not."""
    lines = [
        "program test machine=m ranks=1 variant=v mode=eager protocol=promise native=yes "
        "flags=8 span=1",
        "buffer out window 4096",
        "buffer scratch local 64",
        "queue 0.0",
    ]
    for write in range(3):
        lines.append(f"  copy scratch[0]+0 <- out[0]+{64 * write} bytes=64")
        lines.append("  fence")
        if write + 1 == later:
            lines.append("  signal flag[0]:0 = 1")
            lines.append("  poll flag[0]:1 >= 1")
    if later == 0:
        lines.append("  signal flag[0]:0 = 1")
    read = ["  poll flag[0]:0 >= 1", "  copy out[0]+1024 <- scratch[0]+0 bytes=64"]
    good = [*lines, "queue 0.1", *read, "  signal flag[0]:1 = 1"]
    _core.verify(_core.Program.parse("\n".join(good) + "\n"))
    bad = [*lines, "queue 0.1", read[0], "  signal flag[0]:1 = 1", read[1]]
    program = _core.Program.parse("\n".join(bad) + "\n")
    if later in (0, 3):  # nothing is written behind the read
        _core.verify(program)
    else:
        with pytest.raises(offcore.Error, match="neither happens before the other"):
            _core.verify(program)


def test_more_commands_than_anybody_could_check_are_refused_before_they_are_made() -> None:
    machine = machines.load("h200-4")
    machine.limits.copy_bytes_max = 64
    moves = _core.moves_all_gather([16 * GIB] * 4, False)
    with pytest.raises(offcore.Error, match="raise its limits, or move less") as failed:
        _core.plan(moves, "pcpy", machine, _core.Protocol())
    assert failed.value.code == "unsupported"


def slow_machine(folder: Path) -> str:
    """One whose plans are large: a copy of it moves 4 KiB."""
    record = json.loads(machines.path_of("mi300x-8").read_text("utf-8"))
    record["name"] = "slow"
    record["limits"]["copy_bytes_max"] = 4096
    path = folder / "slow.json"
    path.write_text(json.dumps(record), "utf-8")
    return str(path)


@pytest.mark.parametrize("variant", ["auto", "pcpy"])
def test_a_first_calls_timeout_covers_planning(tmp_path: Path, variant: str) -> None:
    with offcore.Communicator(
        backend="sim", machine=slow_machine(tmp_path), ranks=4, phantom=True, timeout=0.02
    ) as comm:
        large, small = comm.window(4 * GIB), comm.window(1 << 20)
        with pytest.raises(offcore.Error, match=r"takes more than 0\.02 s") as failed:
            comm.all_gather(large, variant=variant)
        assert failed.value.code == "timeout"
        assert comm.all_gather(small, variant="pcpy").wait().bytes == 1 << 20


def test_an_all_gather_of_1024_ranks_is_planned_verified_and_simulated() -> None:
    machine = machines.load("host-1024")
    moves = _core.moves_all_gather([64] * 1024, False)
    program = _core.plan(moves, "fan", machine, _core.Protocol())
    assert program.counts().bytes == 1024 * 1024 * 64
    session = _core.Session("sim", machine, 1024, phantom=True)
    assert session.run(program, checked=False).time_ns > 0
