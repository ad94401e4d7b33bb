"""The simulator: bytes, virtual time, phases, fair links, determinism."""

import numpy as np
import pytest

import offcore
from offcore import _core, machines

PROMISE = _core.Protocol(entry=False)
BARRIER = _core.Protocol(entry=True)


def text(*queues: str, ranks: int = 2, mode: str = "eager", bytes_each: int = 1 << 20) -> str:
    """Each queue is "0.1: command; command". Most lack the polls of an exit: run them unchecked."""
    lines = [
        f"program test machine=m ranks={ranks} variant=v mode={mode} protocol=promise "
        "native=yes flags=8 span=4",
        f"buffer out window {bytes_each}",
    ]
    for queue in queues:
        name, _, commands = queue.partition(":")
        lines.append(f"queue {name}")
        lines += ["  " + command.strip() for command in commands.split(";") if command.strip()]
    return "\n".join(lines) + "\n"


def run(program: str, machine: str = "mi300x-8", ranks: int = 2, **options: object) -> object:
    session = _core.Session("sim", machines.load(machine), ranks, phantom=True)
    return session.run(_core.Program.parse(program), checked=False, **options)


def collective(op: str, variant: str, ranks: int, total: int, machine: object) -> _core.Program:
    in_place = variant.endswith("swap")
    if op == "all_gather":
        moves = _core.moves_all_gather([total // ranks] * ranks)
    else:
        counts = [total // ranks] * ranks * ranks
        moves = _core.moves_all_to_all(ranks, counts, in_place)
    return _core.plan(moves, variant, machine, PROMISE)


def run_collective(
    op: str, variant: str, machine: object, ranks: int, total: int, seed: int = 0, repeat: int = 1
) -> tuple[object, int]:
    """A collective on fresh random bytes: its report, and how many bytes came out wrong."""
    program = collective(op, variant, ranks, total, machine)
    random = np.random.default_rng(seed)
    chunk = total // ranks
    rows = chunk if op == "all_gather" else total
    sent = [random.integers(0, 256, rows, dtype=np.uint8) for _ in range(ranks)]
    swaps = variant.endswith("swap")
    out = [data.copy() if swaps else np.zeros(total, np.uint8) for data in sent]
    buffers = {"out": out} if swaps else {"in": sent, "out": out}
    session = _core.Session("sim", machine, ranks, seed=seed)
    report = session.run(program, buffers, repeat=repeat)
    if op == "all_gather":
        want = [np.concatenate(sent)] * ranks
    else:
        blocks = np.stack([data.reshape(ranks, chunk) for data in sent])
        want = [blocks[:, rank].reshape(-1) for rank in range(ranks)]
        if swaps and repeat % 2 == 0:
            want = sent
    wrong = sum(int((got != right).sum()) for got, right in zip(out, want, strict=True))
    return report, wrong


OPS = {
    "all_gather": ["pcpy", "bcst", "b2b", "fan"],
    "all_to_all": ["pcpy", "swap", "b2b", "fan"],
}
CASES = [
    (op, prefix + kind)
    for op, kinds in OPS.items()
    for kind in kinds
    for prefix in ("", "prelaunch_")
]


@pytest.mark.parametrize("machine", ["mi300x-8", "h200-4", "host-3"])
@pytest.mark.parametrize(("op", "variant"), CASES)
def test_collectives_move_the_right_bytes(machine: str, op: str, variant: str) -> None:
    loaded = machines.load(machine)
    for seed, chunk in enumerate([1, 64, 4096 + 64]):
        total = chunk * loaded.ranks
        report, wrong = run_collective(op, variant, loaded, loaded.ranks, total, seed, repeat=3)
        assert wrong == 0
        assert len(report.times_ns) == 3
        assert max(report.times_ns) <= 1.05 * min(report.times_ns), "only the order of ties differs"


def test_same_seed_same_run() -> None:
    machine = machines.load("mi300x-8")
    runs = [run_collective("all_to_all", "pcpy", machine, 8, 65536, seed)[0] for seed in (7, 7)]
    times = [[(c.start_ns, c.end_ns) for c in report.commands] for report in runs]
    assert times[0] == times[1]
    assert runs[0].time_ns == runs[1].time_ns


def test_clock_goes_on_from_launch_to_launch() -> None:
    session = _core.Session("sim", machines.load("mi300x-8"), 2, phantom=True)
    program = _core.Program.parse(text("0.0: copy out[1]+0 <- out[0]+0 bytes=64"))
    first = session.run(program, checked=False).time_ns
    assert session.now_ns == first
    session.run(program, repeat=4, checked=False)
    assert session.now_ns == pytest.approx(5 * first, abs=5)  # each is rounded


SINGLE = "0.0: copy out[1]+0 <- out[0]+0 bytes={}; signal flag[host]:0 = 1"


@pytest.mark.parametrize("bytes_each", [4096 << i for i in range(10)])
def test_phases_of_a_single_copy_are_in_the_papers_order(bytes_each: int) -> None:
    """L1: copy > schedule > sync > control from 4 KB to 2 MB."""
    program = text(
        SINGLE.format(bytes_each), "1.caller: poll flag[host]:0 >= 1", bytes_each=bytes_each
    )
    phases = run(program).phases
    assert phases.copy_ns > phases.schedule_ns > phases.sync_ns > phases.control_ns > 0


def test_share_of_the_phases_that_do_not_copy() -> None:
    """L2, L3: about 60 % at 4 KB and about 20 % at 1 MB."""
    for bytes_each, low, high in ((4096, 0.5, 0.65), (1 << 20, 0.15, 0.25)):
        program = text(SINGLE.format(bytes_each), "1.caller: poll flag[host]:0 >= 1")
        phases = run(program).phases
        assert low < 1 - phases.copy_ns / phases.total_ns < high


def test_phases_add_up_to_the_time() -> None:
    for op, variant in CASES:
        machine = machines.load("mi300x-8")
        report, _ = run_collective(op, variant, machine, 8, 8 * 4096)
        assert report.phases.total_ns == pytest.approx(report.time_ns, abs=1)
        assert report.time_ns == max(command.end_ns for command in report.commands)


def test_commands_run_in_order_and_within_the_run() -> None:
    report, _ = run_collective("all_gather", "b2b", machines.load("mi300x-8"), 8, 65536)
    by_queue: dict[int, list[object]] = {}
    for command in report.commands:
        assert 0 <= command.start_ns <= command.end_ns <= report.time_ns
        by_queue.setdefault(command.queue, []).append(command)
    for commands in by_queue.values():
        starts = [command.start_ns for command in commands]
        assert starts == sorted(starts)


def test_back_to_back_copies_overlap() -> None:
    copies = [f"copy out[1]+{i * 4096} <- out[0]+{i * 4096} bytes=4096" for i in range(7)]
    overlapped = run(text("0.0: " + "; ".join(copies)))
    ordered = run(text("0.0: " + "; fence; ".join(copies)))
    cost = machines.load("mi300x-8").cost
    assert ordered.time_ns - overlapped.time_ns > 5 * cost.setup_ns


def copy_ns(*queues: str, machine: str, ranks: int, bytes_each: int = 1 << 26) -> float:
    report = run(text(*queues, ranks=ranks, bytes_each=bytes_each), machine, ranks)
    return max(command.phases.copy_ns for command in report.commands)


def test_links_are_shared_fairly() -> None:
    """Two copies over one link take twice as long; over two links they do not disturb."""
    half = 1 << 25
    queue = "0.{}: copy out[{}]+{} <- out[0]+{} bytes=" + str(half)
    one = copy_ns(queue.format(0, 1, 0, 0), machine="mi300x-8", ranks=3)
    same = copy_ns(
        queue.format(0, 1, 0, 0), queue.format(1, 1, half, half), machine="mi300x-8", ranks=3
    )
    other = copy_ns(
        queue.format(0, 1, 0, 0), queue.format(1, 2, half, half), machine="mi300x-8", ranks=3
    )
    links = machines.load("mi300x-8").links
    assert one == pytest.approx(half / links.engine_gbps, rel=0.02)
    assert same == pytest.approx(2 * half / links.link_gbps, rel=0.02)
    assert other == pytest.approx(one, rel=0.001)


def test_max_min_gives_the_rest_to_who_can_use_it() -> None:
    """Rank 1's port carries three copies, a third each; so rank 0 has two thirds into rank 2."""
    part = 1 << 26
    queues = [f"0.0: copy out[2]+{3 * part} <- out[0]+0 bytes={2 * part}"]
    queues += [
        f"1.{i}: copy out[{(2 + i) % 4}]+{part * i} <- out[1]+{3 * part} bytes={part}"
        for i in range(3)
    ]
    report = run(text(*queues, ranks=4, bytes_each=5 * part), "h200-4", 4)
    times = [command.phases.copy_ns for command in report.commands]
    assert times == pytest.approx([part / 130] * 4, rel=0.02)


def test_poll_waits_for_every_row_and_flags_stay_between_launches() -> None:
    program = _core.Program.parse(
        text(
            "0.0: poll flag[0]:0 >= 1 rows=2 step=1; copy out[1]+0 <- out[0]+0 bytes=8",
            "1.0: signal flag[0]:0 = 1; copy out[0]+64 <- out[1]+64 bytes=4096; "
            "signal flag[0]:1 = 1",
        )
    )
    session = _core.Session("sim", machines.load("h200-2"), 2)
    for epoch in (0, 2**31 - 6, 2**32 - 6):
        report = session.run(program, repeat=3, epoch=epoch, checked=False)
        commands = {(c.queue, c.command): c for c in report.commands}
        assert commands[0, 1].start_ns > commands[1, 2].end_ns
        assert len(set(report.times_ns)) == 1


def test_timestamps() -> None:
    report = run(
        text(
            "0.0: timestamp 1; copy out[1]+0 <- out[0]+0 bytes=65536; timestamp 3; "
            "poll flag[0]:0 >= 1; timestamp 4",
            "0.caller: signal flag[0]:0 = 1",
        )
    )
    unused, first, unused_too, second, third = report.timestamps_ns
    assert (unused, unused_too) == (-1, -1)
    assert 0 < first < second <= third
    copy = next(c for c in report.commands if c.command == 1 and c.queue == 0)
    assert second == copy.end_ns


def test_a_copy_that_does_not_wait_reads_stale_bytes() -> None:
    """The simulator shows a missing poll; the same program with it passes."""
    early = "1.0: {}copy out[0]+4096 <- out[1]+0 bytes=4096"
    late = "0.0: copy out[1]+0 <- out[0]+0 bytes=4096; signal flag[1]:0 = 1"
    for poll, right in (("poll flag[1]:0 >= 1; ", True), ("", False)):
        program = _core.Program.parse(text(late, early.format(poll), bytes_each=8192))
        data = np.zeros(8192, np.uint8)
        data[:4096] = 7
        session = _core.Session("sim", machines.load("h200-2"), 2)
        session.run(program, {"out": [data, None]}, checked=False)
        assert bool((data[4096:] == 7).all()) == right


def test_phantom_gigabytes_cost_no_memory() -> None:
    machine = machines.load("mi300x-8")
    program = collective("all_gather", "prelaunch_pcpy", 8, 4 << 30, machine)
    report = _core.Session("sim", machine, 8, phantom=True).run(program)
    busbw = (4 << 30) * 7 / 8 / report.time_ns
    rate = 7 * machine.links.engine_gbps
    assert 0.99 * rate < busbw < rate


def test_estimate_agrees_with_the_simulator() -> None:
    for name, tolerance in (("mi300x-8", 0.01), ("h200-4", 0.1), ("h200-8", 0.35)):
        machine = machines.load(name)
        for op, variant in CASES:
            for total in (8192, 1 << 20, 1 << 27):
                program = collective(op, variant, machine.ranks, total, machine)
                if not program.native:
                    continue  # expanded by scratch copies: a guess is enough
                report = _core.Session("sim", machine, machine.ranks, phantom=True).run(program)
                estimate = _core.estimate(program, machine)
                assert estimate.total_ns == pytest.approx(report.time_ns, rel=tolerance)


@pytest.mark.parametrize("name", ["h200-2", "h200-4"])
@pytest.mark.parametrize(
    ("op", "variant"),
    [("reduce_scatter", "pipelined"), ("all_reduce", "pipelined"), ("all_reduce", "one_shot")],
)
def test_signals_amid_data_hold_no_queue_up(name: str, op: str, variant: str) -> None:
    """Streams of their own send them, and one kernel reduces chunk after chunk: as estimated."""
    machine = machines.load(name)
    for nbytes in (4096, 16 << 20, 64 << 20):
        program = offcore.show_program(
            op,
            machine=name,
            ranks=machine.ranks,
            nbytes=nbytes,
            variant=variant,
            dtype="bfloat16",
            reduction="sum",
        )
        report = _core.Session("sim", machine, machine.ranks, phantom=True).run(program)
        assert _core.estimate(program, machine).total_ns == pytest.approx(report.time_ns, rel=0.01)


def best(op: str, total: int) -> str:
    machine = machines.load("mi300x-8")
    times = {}
    for case_op, variant in CASES:
        if case_op != op or variant.endswith("fan"):
            continue
        program = collective(op, variant, 8, total, machine)
        times[variant] = _core.Session("sim", machine, 8, phantom=True).run(program).time_ns
    return min(times, key=lambda variant: times[variant])


@pytest.mark.parametrize(
    ("op", "bytes_total", "variant"),
    [
        ("all_gather", 1 << 10, "prelaunch_b2b"),
        ("all_gather", 1 << 15, "prelaunch_b2b"),
        ("all_gather", 1 << 19, "prelaunch_bcst"),
        ("all_gather", 1 << 20, "prelaunch_pcpy"),
        ("all_gather", 1 << 28, "prelaunch_pcpy"),
        ("all_to_all", 1 << 10, "prelaunch_b2b"),
        ("all_to_all", 1 << 19, "prelaunch_swap"),
        ("all_to_all", 1 << 21, "prelaunch_swap"),
        ("all_to_all", 1 << 22, "prelaunch_pcpy"),
        ("all_to_all", 1 << 28, "prelaunch_pcpy"),
    ],
)
def test_best_variants_are_the_papers(op: str, bytes_total: int, variant: str) -> None:
    """L19, L20."""
    assert best(op, bytes_total) == variant


def test_bad_arguments() -> None:
    machine = machines.load("h200-2")
    program = _core.Program.parse(text("0.0: copy out[0]+0 <- out[0]+32 bytes=32", bytes_each=64))
    session = _core.Session("sim", machine, 2)
    cases = [
        (lambda: _core.Session("sim", machine, 3), "has 1 to 2 ranks"),
        (lambda: _core.Session("none", machine, 2), "unknown backend 'none'"),
        (lambda: session.run(program, {"out": [np.zeros(64, np.uint8)]}), "needs 2 arrays"),
        (lambda: session.run(program, {"out": [np.zeros(65, np.uint8), None]}), "has 64 bytes"),
        (lambda: session.run(program, {"out": [np.zeros(8, np.int64), None]}), "uint8"),
        (lambda: _core.Session("sim", machine, 1).run(program), "a program of 2 ranks"),
    ]
    for call, message in cases:
        with pytest.raises(offcore.Error, match=message) as raised:
            call()
        assert raised.value.code == "invalid"


def test_places_that_do_not_exist_are_refused_unverified_too() -> None:
    session = _core.Session("sim", machines.load("h200-4"), 2)
    for command in (
        "copy out[3]+0 <- out[0]+0 bytes=64",
        "signal flag[1]:8 = 1",
        "poll flag[0]:7 >= 1 rows=2 step=1",
        "signal flag[0]:0 = 1 rows=3 step=-1",
    ):
        program = _core.Program.parse(text(f"0.0: {command}"))
        with pytest.raises(offcore.Error) as raised:
            session.run(program, checked=False)
        assert raised.value.code == "verify"
        with pytest.raises(offcore.Error):
            _core.estimate(program, machines.load("h200-4"))
