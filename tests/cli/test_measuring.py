"""What surrounds a measurement: timers, NCCL's proof, figures, tables; on planted rows."""

import io
import threading
from pathlib import Path

import pytest

import offcore
from offcore.tools import plot, report
from offcore.tools.bench import compare
from offcore.tools.bench.baselines import check_baseline
from offcore.tools.bench.collectives import Request
from offcore.tools.bench.layout import Layout
from offcore.tools.bench.nccl import kernels_of, verdict
from offcore.tools.bench.rank_worker import Entry, Worker
from offcore.tools.bench.subjects import Subject
from offcore.tools.bench.timers import HostTimer, StreamTimer
from offcore.tools.records import read_records

ROOT = Path(__file__).parents[2]


class Watch:
    """Keeps what a GPU timer is told; its gate is an event that an enqueuing may wait for."""

    def __init__(self, log, elapsed_us=100.0):
        self.log = log
        self.opened = threading.Event()
        self._elapsed_us = elapsed_us

    def shut(self):
        self.opened.clear()
        self.log.append("shut")

    def open(self):
        self.opened.set()
        self.log.append("open")

    def start(self):
        self.log.append("start")

    def stop(self):
        self.log.append("stop")

    def elapsed_us(self, timeout_s):
        return self._elapsed_us


class Handle:
    def __init__(self, log):
        self._log = log

    def wait(self):
        self._log.append("wait")


def test_a_chain_is_enqueued_behind_the_gate_and_meets_first():
    log = []

    def enqueue(calls):
        log.append(calls)
        return [Handle(log)]

    timer = StreamTimer(Watch(log), lambda: log.append("barrier"), timeout_s=5)
    assert timer.chain(enqueue, 20) == 5.0
    assert log == ["shut", 1, "start", 20, "stop", "barrier", "open", "wait", "wait"]


def test_an_enqueuing_that_waits_for_the_gate_is_released_and_told():
    log = []
    watch = Watch(log)

    def enqueue(calls):
        assert watch.opened.wait(20)  # the stream is full
        return []

    with pytest.raises(offcore.Error, match="take fewer --calls") as failed:
        StreamTimer(watch, lambda: None, timeout_s=0.1).chain(enqueue, 20)
    assert failed.value.code == "timeout"


def test_the_gate_opens_also_when_enqueuing_fails():
    watch = Watch([])

    def enqueue(calls):
        raise ValueError("no such call")

    with pytest.raises(ValueError, match="no such call"):
        StreamTimer(watch, lambda: None, timeout_s=5).chain(enqueue, 2)
    assert watch.opened.is_set()


def test_the_host_meets_before_its_clock_starts():
    log = []
    timer = HostTimer(lambda: log.append("barrier"))
    assert timer.chain(lambda calls: [log.append(calls) or Handle(log)], 20) > 0
    assert timer.call(lambda calls: [log.append(calls) or Handle(log)]) > 0
    assert log == ["barrier", 20, "wait", "barrier", 1, "wait"]


def test_kernels_are_counted_beside_one_that_ran_for_sure():
    copies = [{"cat": "gpu_memcpy"}, {"cat": "cuda_runtime"}, {}]
    kernel = {"cat": "kernel", "name": "add"}
    assert kernels_of({"traceEvents": [*copies, kernel]}, 1) == 0
    assert kernels_of({"traceEvents": [kernel, *copies, kernel, kernel]}, 1) == 2
    assert kernels_of({"traceEvents": copies}, 1) is None
    assert kernels_of({}, 1) is None


def test_what_ran_kernels_or_is_not_proven_is_not_called_a_copy_engine():
    assert verdict("nccl-ce", [0, 0]) == ""
    assert "ran kernels instead of copy engines (kernels by rank: 0, 1)" in verdict("x", [0, 1])
    assert "not proven" in verdict("nccl-ce", [0, None])


@pytest.mark.parametrize(
    ("name", "backend", "code"),
    [
        ("mpi", "host", "invalid"),
        ("gloo", "cuda", "unsupported"),
        ("nccl", "host", "unsupported"),
        ("nccl-ce", "sim", "unsupported"),
        ("memcpy", "sim", "unsupported"),
    ],
)
def test_a_baseline_is_refused_before_anything_starts(name, backend, code):
    with pytest.raises(offcore.Error) as refused:
        check_baseline(name, backend)
    assert refused.value.code == code


def test_a_library_that_fails_is_left_out_and_asked_no_more():
    """Each try may take a timeout; the others go on, and the reason is told."""
    told = []

    class Timer:
        def chain(self, enqueue, calls):
            return enqueue(calls)

    def failing(calls):
        told.append(calls)
        raise RuntimeError("it hangs")

    layout = Layout("all_gather", 2, 4096, True)
    library = Subject({"mode": "eager"}, failing)
    own = Subject({"mode": "eager"}, lambda calls: 7.0)
    worker = object.__new__(Worker)
    worker._timer, worker._broken, worker._say = Timer(), {}, io.StringIO()
    worker._steps = worker._told_s = 0.0
    request = Request("all_gather", "cuda", None, 2, [4096], ["auto"], warmup=0, batches=3)
    for _ in range(2):
        entries = [
            Entry("nccl-ce", layout, "chain", library, baseline=object()),
            Entry("offcore", layout, "chain", own),
        ]
        worker._rounds(request, entries)
        assert entries[0].failure == "nccl-ce eager: it hangs"
        assert entries[1].times_us == [7.0] * 3
    assert told == [20]
    with pytest.raises(RuntimeError, match="it hangs"):  # what is ours has to work
        worker._rounds(request, [Entry("offcore", layout, "chain", library)])


def record(impl, nbytes, time_us, run="a", op="all_gather", in_place=True, **more):
    return {
        "impl": impl, "op": op, "backend": "cuda", "machine": "h200-2", "ranks": 2,
        "bytes": nbytes, "in_place": in_place, "variant": more.pop("variant", None),
        "native": True, "protocol": more.get("asked"), "mode": more.pop("mode", "eager"),
        "time_us": time_us, "time_us_min": time_us, "time_us_max": time_us, "wrong": 0,
        "commands": 4, "engines": 2, "syncs": 2, "phases": None, "timing": "chain", "run": run,
        "date": "2026-11-22", "commit": "abc",
    } | more  # fmt: skip


def run_of(name, factor=1.0, **more):
    own = {"variant": "fan", "asked": "auto", "signals": "fenced", "named": True}
    return [
        one
        for size in (1024, 4096)
        for one in (
            record("nccl", size, 8.0 * factor, name, mode="graph", **more),
            record("nccl", size, 10.0 * factor, name, mode="eager", **more),
            record("offcore", size, 4.0 * factor, name, **own, **more),
            record("offcore", size, 2.0 * factor, name, **own | {"asked": "promise"}, **more),
        )
    ]


def test_a_figure_scales_runs_by_the_library_of_each():
    rows = plot.figure_rows([*run_of("a"), *run_of("b", 2.0), *run_of("c", 3.0)], 13)
    own = {(r.bytes, r.asked): r.time_us for r in rows if r.impl == "offcore"}
    library = {r.bytes: r.time_us for r in rows if r.mode == "graph"}
    assert {size: library[size] / own[size, "auto"] for size in library} == {1024: 2.0, 4096: 2.0}
    assert library[1024] / own[1024, "promise"] == 4.0


def test_a_figure_leaves_out_what_has_no_library_in_its_run():
    alone = [one for one in run_of("b", 0.5) if one["impl"] == "offcore"]
    rows = plot.figure_rows([*run_of("a"), *alone], 13)
    assert {r.time_us for r in rows if r.impl == "offcore"} == {2.0, 4.0}
    with pytest.raises(offcore.Error, match="figure 14 needs rows of all_to_all on one machine"):
        plot.figure_rows(run_of("a"), 14)


def test_what_auto_chose_is_one_line_whatever_it_chose():
    """Of each way to call: slots that an engine drains are no way of their own, SMs are. What was
    measured twice, since no setting changes it, is no choice between variants."""
    own = {"signals": "fenced", "named": False}
    records = [record("nccl", size, 8.0, mode="graph") for size in (1024, 4096)]
    for asked, small, large in (("auto", "b2b", "fan"), ("promise", "fan", "bcst")):
        ways = {"asked": asked, **own}
        records.append(record("offcore", 1024, 4.0, variant=small, own_copy="engine", **ways))
        records += [record("offcore", 4096, 5.0, variant=large, own_copy="none", **ways)] * 2
    records.append(record("offcore", 4096, 3.0, variant="b2b", own_copy="sm", asked="auto", **own))
    lines = plot._lines(plot.figure_rows(records, 13))
    assert {name: [row.bytes for row in rows] for name, rows in lines.items()} == {
        "nccl, graph": [1024, 4096],
        "offcore, safe": [1024, 4096],
        "offcore, promised": [1024, 4096],
        "offcore, safe, sm": [4096],
    }


def test_how_many_engines_copied_is_told_where_it_was_asked_for():
    """By default a variant uses more of them the larger the array is, and another one does not."""
    sizes = (1 << 20, 64 << 20)
    own = {"signals": "fenced", "asked": "auto", "named": True}
    records = [
        record("offcore", size, 8.0, variant=variant, own_copy=copied, **own)
        for variant, both in (("pcpy", ("engine", "engines")), ("fan", ("engine", "engine")))
        for size, copied in zip(sizes, both, strict=True)
    ]
    lines = plot._lines(plot.figure_rows([*records, record("nccl", sizes[0], 9.0)], 13))
    found = {name: [row.bytes for row in rows] for name, rows in lines.items()}
    assert found == {"nccl": [sizes[0]], "pcpy": [*sizes], "fan": [*sizes]}
    asked = record("offcore", sizes[1], 9.0, variant="pcpy", own_copy="engine", **own)
    lines = plot._lines(plot.figure_rows([*records, asked, record("nccl", sizes[0], 9.0)], 13))
    assert [row.bytes for row in lines["pcpy, engine"]] == [*sizes]
    assert [row.bytes for row in lines["pcpy"]] == [sizes[1]]


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(("number", "op"), [(13, "all_gather"), (14, "all_to_all")])
def test_figures_are_drawn_with_a_line_a_variant_and_way(tmp_path, number, op):
    picture = tmp_path / "figure.svg"
    plot.plot_figure(run_of("a", op=op, in_place=op == "all_gather"), number, picture)
    text = picture.read_text()
    for label in ("nccl, graph", "nccl, eager", "fan, safe", "fan, promised", "as fast as nccl"):
        assert f"<!-- {label} -->" in text or label in text


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(("most", "ticks"), [(9000.0, {"10", "100", "1,000"}), (9.0, {"5", "6"})])
def test_times_are_told_as_whole_numbers(most, ticks):
    """Not as powers of ten; within one power each tick is."""
    rows = [record("nccl", 1 << 10, 4.0), record("nccl", 1 << 20, most)]
    figure = plot.rows_figure(report.rows_of(rows), "time")
    [axes] = figure.axes
    figure.canvas.draw()
    labels = [
        one.get_text() for which in ("major", "minor") for one in axes.get_yticklabels(which=which)
    ]
    assert ticks <= set(labels)
    assert not any("$" in label for label in labels)
    plot.pyplot().close(figure)


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("name", ["cuda-h200-2", "cuda-h200-4"])
def test_lines_of_recorded_rows_can_be_told_apart(name):
    """In each panel: few lines, no two alike, and of offcore's no two ways of one colour."""
    records = read_records(ROOT / "benchmarks" / "results" / f"{name}.jsonl")
    figure = plot.rows_figure(report.rows_of(records))
    assert len(figure.axes) == 4  # two operations, two signal forms
    for axes in figure.axes:
        lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
        assert 7 <= len(lines) <= 10
        looks = {
            (one.get_color(), one.get_linestyle(), one.get_marker(), one.get_markerfacecolor())
            for one in lines
        }
        assert len(looks) == len(lines)
        own = [one for one in lines if one.get_label().startswith("offcore")]
        ways = {one.get_label().removesuffix(", sm") for one in own}
        assert len({one.get_color() for one in own}) == len(ways) == 3
    plot.pyplot().close(figure)


@pytest.mark.needs("matplotlib")
def test_plot_reads_files_of_rows(offcore_cli, tmp_path):
    file, picture = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    file.write_text("".join(map(report.dumps, run_of("a"))))
    ran = offcore_cli("plot", file, "--figure", "13", "--out", picture)
    assert ran.status == 0, ran.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    ran = offcore_cli("plot", file, "--out", picture, "--metric", "busbw")
    assert ran.status == 0, ran.err
    assert offcore_cli("plot", file, "--figure", "12").status == 2
    ran = offcore_cli("plot", file, "--figure", "14", "--out", picture)
    assert (ran.status, ran.err[:17]) == (1, "offcore: invalid:")
    ran = offcore_cli("plot", tmp_path / "none.jsonl", "--out", picture)
    assert (ran.status, ran.err[:17]) == (1, "offcore: invalid:")


def test_the_table_beside_the_library():
    records = run_of("a")
    assert compare.lines(records, "all_gather", 2, True) == [
        "     size  promised    safe    nccl  nccl,eager",
        "       1K      2.00    4.00    8.00       10.00",
        "       4K      2.00    4.00    8.00       10.00",
    ]
    # What auto chose counts where it was asked, though something else is faster.
    records.append(record("offcore", 1024, 5.0, asked="auto", signals="fenced", named=False))
    records.append(record("nccl-ce", 4096, 40.0, mode="graph", kernels=0))
    assert compare.lines(records, "all_gather", 2, True, sizes=[1024, 4096])[1:] == [
        "       1K      2.00    5.00    8.00       10.00        -",
        "       4K      2.00    4.00    8.00       10.00    40.00",
    ]
    assert len(compare.lines(records, "all_gather", 4, True)) == 1


def test_copies_by_one_engine_are_no_rows_of_the_default():
    """Though they are faster: 2.0 in place of 3.0. A variant without spare engines is a default."""
    own = {"asked": "auto", "signals": "fenced", "named": False}
    records = [
        record("offcore", size, us, variant="pcpy", own_copy=copied, **own)
        for size, us, copied in (
            (1024, 1.0, "engine"), (4096, 3.0, "engines"), (4096, 2.0, "engine"),
        )
    ]  # fmt: skip
    assert compare.lines(records, "all_gather", 2, True) == [
        "     size    safe  safe,engine",
        "       1K    1.00            -",
        "       4K    3.00         2.00",
    ]
    named = [one | {"named": True} for one in records]
    named.append(record("offcore", 4096, 1.5, variant="fan", own_copy="engine", named=True,
                        asked="auto", signals="fenced"))  # fmt: skip
    assert compare.times_of(named, "all_gather", 2, True) == {
        "safe": {1024: 1.0, 4096: 1.5},
        "safe,engine": {4096: 2.0},
    }


def test_best_is_told_among_what_is_comparable():
    rows = report.rows_of(run_of("a"))
    own = {"variant": "pcpy", "asked": "auto", "signals": "fenced", "named": True}
    rows += report.rows_of([record("offcore", 1024, 3.0, **own)])
    best = report.best_of(rows)
    assert {(row.bytes, row.asked): row.variant for row in best.values()} == {
        (1024, "auto"): "pcpy",
        (4096, "auto"): "fan",
        (1024, "promise"): "fan",
        (4096, "promise"): "fan",
    }
    assert report.best_ranges(rows) == ["pcpy 1K auto", "fan 4K auto", "fan 1K-4K promise"]
