"""Operations in CUDA graphs, on the stand-in driver: captured, replayed many times, and every byte
checked. A process for each test, since a driver is set up once."""

import textwrap
from pathlib import Path

import pytest
from test_cuda import finish, run, start

from stores import free_store

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent), str(HERE.parent / "fakes")]

BEGIN = f"""
sys.path[:0] = {PATHS!r}
from graphs import *
from oracles import Case, equal_case, kinds_of
"""


def code(text: str) -> str:
    """A test's own lines behind what all of them begin with."""
    return BEGIN + textwrap.dedent(text)


@pytest.mark.parametrize("place", ["window", "array"])
@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "broadcast", "scatter", "gather"])
def test_every_replay_is_right(op: str, place: str) -> None:
    """Every variant and size, in place and out of place, with new inputs at each replay."""
    text = """
    op, place = sys.argv[1:]
    with opened(3) as (comm, gpus):
        for in_place in (False, True) if op in ("all_gather", "all_to_all") else (False,):
            for part in (0, 1, 1003, 70000):
                case = equal_case(op, 3, part, in_place, root=2 if op[0] != "a" else 0)
                staged = place == "array" and part > 0
                captured = Captured(comm, case, place)
                kinds = kinds_of(case, staged, True) - (set() if part else {"bcst"})
                for variant in ["auto", *sorted(kinds)]:
                    with gpus.graph(comm.given) as graph:
                        handle = captured.start(variant=variant)
                    result = handle.wait()
                    assert handle.done()
                    assert (result.mode, result.protocol) == ("capture", "barrier"), result
                    assert (result.staged, result.in_place) == (staged, in_place), result
                    if variant != "auto":
                        assert result.variant == variant
                    for turn in range(1, 12):
                        captured.fill(turn)
                        graph.replay()
                        assert gpus.settle(comm.given), (case, variant, turn)
                        captured.check(variant)
    """
    assert run(code(text), op, place) == ""


def test_a_graph_outlives_the_plan_that_was_captured() -> None:
    text = """
    with opened(2) as (comm, gpus):
        captured = Captured(comm, equal_case("all_gather", 2, 1003, True), "window")
        with gpus.graph(comm.given) as graph:
            captured.start()
        most = offcore._core.Communicator.plans_max
        others = comm.window(2 * most)
        for nbytes in range(1, most + 50):
            comm.all_gather_v(others, None, [nbytes, 0]).wait()
        assert comm._core.kept[0] == most
        for turn in range(1, 4):
            captured.fill(turn)
            graph.replay()
            assert gpus.settle(comm.given), turn
            captured.check("auto")
    """
    assert run(code(text)) == ""


def test_uneven_counts_and_ranks_without_bytes() -> None:
    text = """
    with opened(3) as (comm, gpus):
        cases = [
            Case("all_gather", 3, (0, 500, 0)),
            Case("all_gather", 3, (7, 0, 1), in_place=True),
            Case("all_to_all", 3, (0, 5, 0, 9, 0, 100, 0, 0, 0)),
            Case("all_to_all", 3, (1, 0, 0, 0, 0, 3, 0, 0, 64)),
            Case("scatter", 3, (0, 10, 90), root=0),
            Case("gather", 3, (33, 0, 1), root=1),
        ]
        for case in cases:
            captured = Captured(comm, case, "window")
            for variant in sorted(kinds_of(case, False)):
                with gpus.graph(comm.given) as graph:
                    captured.start(variant=variant)
                for turn in range(30):
                    captured.fill(turn)
                    graph.replay()
                    assert gpus.settle(comm.given), (case, variant, turn)
                    captured.check(variant)
    """
    assert run(code(text)) == ""


def test_hundreds_of_replays_with_eager_calls_between() -> None:
    """Eager calls of the same lane, on other words, do not disturb a graph, nor it them."""
    text = """
    with opened(3) as (comm, gpus):
        inside = Captured(comm, equal_case("all_gather", 3, 4096, in_place=True), "window")
        staged = Captured(comm, equal_case("all_to_all", 3, 100), "array")
        between = Captured(comm, equal_case("all_to_all", 3, 700), "window")
        graphs = []
        for captured, variant in ((inside, "pcpy"), (staged, "fan")):
            with gpus.graph(comm.given) as graph:
                captured.start(variant=variant)
            graphs.append((captured, graph))
        protocols = "auto", "eager", "promise", "barrier"
        for turn in range(300):
            captured, graph = graphs[turn % 2]
            captured.fill(turn)
            graph.replay()
            between.fill(turn)
            handle = between.start(protocol=protocols[turn % 4])
            assert gpus.settle(comm.given), turn
            captured.check()
            handle.wait()
            between.check()
    """
    assert run(code(text)) == ""


def test_replays_enqueued_without_looking() -> None:
    """What the host waits for makes tests gentle: here ranks run ahead of each other."""
    text = """
    with opened(4) as (comm, gpus):
        operations = [
            Captured(comm, equal_case("all_gather", 4, 1000, in_place=True), "window"),
            Captured(comm, equal_case("broadcast", 4, 300, root=1), "window"),
            Captured(comm, equal_case("gather", 4, 50, root=3), "array"),
            Captured(comm, equal_case("all_to_all", 4, 64), "array"),
            Captured(comm, equal_case("scatter", 4, 10, root=0), "window"),
        ]
        for operation in operations:
            operation.fill(5)
        with gpus.graph(comm.given) as graph:
            for operation, variant in zip(operations, "pcpy auto fan b2b auto".split()):
                operation.start(variant=variant)
        for rank, (stream, exec_) in enumerate(zip(comm.given, graph.execs)):
            for _ in range(200):  # one rank's all before the next one's first
                gpus.driver("cuGraphLaunch", exec_, stream)
        assert gpus.settle(comm.given)
        for operation in operations:
            operation.check()
    """
    assert run(code(text), OFFCORE_FAKE_CUDA_SEED="3") == ""


def test_a_graph_of_two_streams_and_two_lanes() -> None:
    """Operations of a lane follow each other in a graph whatever streams they come in; those of
    another lane have words of their own."""
    text = """
    with opened(2) as (comm, gpus):
        d, first, second = gpus.driver, comm.given, gpus.streams()
        events = []
        for context in gpus.contexts:
            d("cuCtxSetCurrent", context)
            events.append([d.event(2) for _ in range(2)])
        parts = [Captured(comm, equal_case("all_gather", 2, 100 + i), "window") for i in range(4)]
        with gpus.graph(first) as graph:
            for (forked, _), one, other in zip(events, first, second):
                d("cuEventRecord", forked, one)
                d("cuStreamWaitEvent", other, forked, 0)
            for part, streams, lane in zip(parts, (first, second) * 2, (0, 0, 1, 0)):
                comm.given = streams
                part.start(lane=lane, variant="pcpy")
            for (_, joined), one, other in zip(events, first, second):
                d("cuEventRecord", joined, other)
                d("cuStreamWaitEvent", one, joined, 0)
        for turn in range(50):
            for part in parts:
                part.fill(turn)
            graph.replay()
            assert gpus.settle(first), turn
            for part in parts:
                part.check()
    """
    assert run(code(text)) == ""


def test_branches_that_run_one_after_the_other() -> None:
    """A driver may run a graph's branches in any order, one at a time: none waits for another."""
    text = """
    with opened(4) as (comm, gpus):
        cases = [
            (equal_case("all_gather", 4, 700, in_place=True), "window"),
            (equal_case("all_gather", 4, 700), "array"),
            (equal_case("all_to_all", 4, 90), "window"),
            (equal_case("all_to_all", 4, 90), "array"),
            (equal_case("all_to_all", 4, 90, in_place=True), "window"),
            (equal_case("broadcast", 4, 90, root=2), "window"),
            (equal_case("gather", 4, 90, root=1), "array"),
        ]
        parts = [Captured(comm, case, place) for case, place in cases]
        for part in parts:
            for variant in sorted(kinds_of(part.case, part.place == "array", True)):
                with gpus.graph(comm.given) as graph:
                    part.start(variant=variant)
                    part.start(variant=variant)
                for turn in range(15):
                    part.fill(turn)
                    graph.replay()
                    if part.case.in_place and part.case.op == "all_to_all":
                        graph.replay()  # back and forth is nothing: there are two in the graph
                        assert gpus.settle(comm.given, 5), (part.case, variant, turn)
                        continue
                    assert gpus.settle(comm.given, 5), (part.case, variant, turn)
                    part.check(variant)
        other = gpus.streams()  # lanes in branches of one graph, called in one order by all ranks
        d = gpus.driver
        with gpus.graph(comm.given) as graph:
            for context, one, two in zip(gpus.contexts, comm.given, other):
                d("cuCtxSetCurrent", context)
                d("cuEventRecord", event := d.event(2), one)
                d("cuStreamWaitEvent", two, event, 0)
            first = comm.given
            parts[0].start(variant="pcpy")
            comm.given = other
            parts[2].start(lane=1, variant="pcpy")
            for context, one, two in zip(gpus.contexts, first, other):
                d("cuCtxSetCurrent", context)
                d("cuEventRecord", event := d.event(2), two)
                d("cuStreamWaitEvent", one, event, 0)
        for turn in range(30):
            for part in (parts[0], parts[2]):
                part.fill(turn)
            graph.replay()
            assert gpus.settle(first, 5)
            parts[0].check()
            parts[2].check()
    """
    for seed in ("1", "2"):
        assert run(code(text), OFFCORE_FAKE_CUDA_GRAPHS="serial", OFFCORE_FAKE_CUDA_SEED=seed) == ""


def test_graphs_that_replay_at_once() -> None:
    text = """
    with opened(2) as (comm, gpus):
        sets = [gpus.streams() for _ in range(3)]
        graphs = []
        for streams in sets:  # one plan, three graphs: each has words, slot and scratch of its own
            part = Captured(comm, equal_case("all_to_all", 2, 5000, in_place=True), "window")
            comm.given = streams
            with gpus.graph(streams) as graph:
                part.start(variant="swap")
            graphs.append((part, graph))
        for turn in range(40):
            for part, _ in graphs:
                part.fill(turn)
            for _, graph in graphs:
                graph.replay()
            for streams in sets:
                assert gpus.settle(streams)
            for part, _ in graphs:
                part.check()
    """
    assert run(code(text)) == ""


RANK = """
store, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def joined(**options):
    options = {"timeout": 20, "device": rank, **options}
    comm = Streamed(backend="cuda", store=store, rank=rank, world_size=ranks, **options)
    gpus = Gpus([rank])
    comm.given = gpus.streams()
    return comm, gpus
"""


def test_ranks_as_processes() -> None:
    text = """
    comm, gpus = joined()
    cases = [
        (equal_case("all_gather", ranks, 999, in_place=True), "window", "auto"),
        (equal_case("all_gather", ranks, 999), "array", "pcpy"),
        (equal_case("all_to_all", ranks, 64, in_place=True), "window", "swap"),
        (equal_case("broadcast", ranks, 5, root=1), "window", "bcst"),
        (equal_case("gather", ranks, 40), "array", "b2b"),
    ]
    captured = [(Captured(comm, case, place), variant) for case, place, variant in cases]
    graphs = []
    for operation, variant in captured:
        with gpus.graph(comm.given) as graph:
            operation.start(variant=variant)
        graphs.append(graph)
    for turn in range(60):
        (operation, _), graph = captured[turn % len(cases)], graphs[turn % len(cases)]
        operation.fill(turn)
        for _ in range(5):  # a rank may be several replays ahead of the others
            graph.replay()
        if operation.case.in_place and operation.case.op == "all_to_all":
            assert gpus.settle(comm.given)  # five times back and forth is once
        assert gpus.settle(comm.given), turn
        operation.check()
        comm.barrier()  # eager, between replays; and nobody fills what a peer still reads
    comm.close()
    """
    store = free_store()
    body = code(RANK) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "3") for rank in range(3)]
    assert finish(group, dict.fromkeys(range(3), 0))


def test_ranks_as_threads_capture_in_the_strictest_mode() -> None:
    """A global capture forbids what any thread does; ours goes on, also eager calls and windows."""
    text = """
    ranks, errors = 3, []

    def main(rank, store):
        try:
            body(rank, store)
        except BaseException as error:
            errors.append(f"rank {rank}: {error!r}")

    def body(rank, store):
        comm = Streamed(backend="cuda", store=store, rank=rank, world_size=ranks, device=rank,
                        timeout=20)
        gpus = Gpus([rank])
        comm.given = gpus.streams()
        eager = Captured(comm, equal_case("all_gather", ranks, 200), "array")
        eager.fill(1)
        ring = Captured(comm, equal_case("all_gather", ranks, 200), "window")
        with gpus.graph(comm.given, GLOBAL) as graph:
            ring.start(variant="pcpy")
            comm.given, own = (), comm.given
            eager.start().wait()
            comm.window(100)
            comm.given = own
            ring.start(variant="pcpy")
        eager.check()
        for turn in range(30):
            ring.fill(turn)
            comm.barrier()
            graph.replay()
            while gpus.driver.code("cuStreamQuery", comm.given[0]) != 0:
                time.sleep(0.001)
            ring.check()
            comm.barrier()
        comm.close()

    threads = [threading.Thread(target=main, args=(r, sys.argv[1])) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    """
    assert run(code(text), free_store()) == ""
