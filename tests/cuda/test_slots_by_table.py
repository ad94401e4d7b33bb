"""What a tuned table says of slots decides how calls in windows enter, where callers leave it to
them. On the stand-in driver."""

from pathlib import Path

import pytest
from test_cuda import run

from offcore.tools.bench import tune


def row(
    variant: str,
    time_us: float,
    staged: bool,
    op: str = "all_gather",
    nbytes: int = 4096,
    entry: bool | None = None,
) -> dict[str, object]:
    """As `tune` keeps it, for 4 GPUs at any size, measured at one."""
    found = {"op": op, "ranks": 4, "in_place": op == "all_gather", "bytes_min": 0}
    found |= {"bytes_max": 2**63 - 1, "bytes": nbytes, "variant": variant, "time_us": time_us}
    found |= {"entry": not staged if entry is None else entry, "staged": staged}
    found |= {"signals": "fenced", "date": "2026-11-22", "commit": "abc"}
    return found


@pytest.mark.parametrize(
    ("slots_us", "protocol", "variant"), [(16.0, "eager", "b2b"), (19.5, "barrier", "fan")]
)
def test_slots_where_they_are_faster(
    tmp_path: Path, slots_us: float, protocol: str, variant: str
) -> None:
    table = [
        row(*one, op=op)
        for op in ("all_gather", "all_to_all")
        for one in (("fan", 20.0, False), ("b2b", slots_us, True))
    ]
    # What is promised is no rival of the slots.
    table.append(row("pcpy", 9.0, False, entry=False))
    tune.write(table, tmp_path / "tuned" / "h200-4.json")
    code = """
    protocol, variant = sys.argv[1:]
    comm = opened(4)
    out, inp = comm.window(4096), comm.window(4096)
    sent = np.random.default_rng(1).integers(0, 255, (9, 4, 4, 1024), np.uint8)
    for turn in range(9):
        for rank in range(4):
            inp.write(sent[turn, rank], 0, rank)
            out.write(sent[turn, rank, 0], rank * 1024, rank)
        comm.barrier()
        found = comm.all_gather(out).wait()
        assert (found.protocol, found.variant, found.tuned) == (protocol, variant, True), found
        for rank in range(4):
            assert (look(out, rank).reshape(4, 1024) == sent[turn, :, 0]).all(), (turn, rank)
        comm.barrier()
        found = comm.all_to_all(out, inp).wait()
        assert (found.protocol, found.variant) == (protocol, variant), found
        for rank in range(4):
            assert (look(out, rank).reshape(4, 1024) == sent[turn, :, rank]).all(), (turn, rank)
        comm.barrier()
    # Who says how gets that.
    assert comm.all_gather(out, variant="b2b").wait().protocol == "barrier"
    assert comm.all_gather(out, protocol="barrier").wait().protocol == "barrier"
    found = comm.all_gather(out, protocol="promise").wait()
    assert (found.protocol, found.variant) == ("promise", "pcpy"), found
    """
    assert run(code, protocol, variant, OFFCORE_MACHINES=str(tmp_path)) == ""


def test_times_of_other_sizes_are_not_taken_as_they_are(tmp_path: Path) -> None:
    """A row that was measured at 4 KiB says little of 1 MiB; and slots as large as all memory are
    nobody's wish."""
    table = [row("fan", 20.0, False), row("b2b", 40.0, True, nbytes=1 << 20)]
    tune.write(table, tmp_path / "tuned" / "h200-4.json")
    code = """
    comm = opened(4)
    out = comm.window(80 << 20)
    for nbytes, protocol in ((4096, "barrier"), (1 << 20, "eager"), (80 << 20, "barrier")):
        assert comm.all_gather(out.region(0, nbytes)).wait().protocol == protocol, nbytes
    """
    assert run(code, OFFCORE_MACHINES=str(tmp_path)) == ""
