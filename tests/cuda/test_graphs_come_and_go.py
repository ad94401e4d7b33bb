"""Graphs that are captured, destroyed and captured again, on the stand-in driver: what one had is
another's once nothing of it can run on any rank, and not before."""

import textwrap

import pytest
from test_capture import RANK, code
from test_cuda import finish, run, start

from stores import free_store

MANY = """
def capture(captured, comm, gpus, **how):
    with gpus.graph(comm.given) as graph:
        captured.start(**how)
    return graph

def replay(captured, graph, gpus, turn):
    captured.fill(turn)
    graph.replay()
    assert gpus.settle(graph.streams), turn
    captured.check()

def watched():
    return lib.fakecuda_live(b"user_objects")

def until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, live()
        time.sleep(0.001)
"""


@pytest.mark.not_tsan("it runs out of memory of its own over so many threads")
@pytest.mark.parametrize("place", ["window", "array"])
def test_two_thousand_graphs(place: str) -> None:
    """A server that captures again and again needs no more memory than for the graphs it has."""
    text = """
    with opened(2) as (comm, gpus):
        inside = Captured(comm, equal_case("all_gather", 2, 300), sys.argv[1])
        between = Captured(comm, equal_case("all_to_all", 2, 200), "window")
        lasting = Captured(comm, equal_case("all_gather", 2, 50), sys.argv[1])
        alive = capture(lasting, comm, gpus)
        for turn in range(2000):
            graph = capture(inside, comm, gpus, variant=("pcpy", "fan", "b2b")[turn % 3])
            if turn % 3 == 0:
                graph.forget()
            if turn % 5 == 0:
                replay(inside, graph, gpus, turn)
                replay(inside, graph, gpus, turn + 1)
            if turn % 7 == 0:
                between.fill(turn)
                between.start().wait()
                between.check()
                replay(lasting, alive, gpus, turn)
            if turn == 300:
                before = live()["allocations"]
            graph.destroy()
        assert live()["allocations"] <= before + 2 * 4  # the slots of a few graphs more
        alive.destroy()
        until(lambda: watched() == 0)
    """
    assert run(code(MANY) + textwrap.dedent(text), place) == ""


def test_windows_of_graphs_that_are_gone() -> None:
    """What only a graph kept is unmapped, though nothing is captured any more."""
    text = """
    with opened(2) as (comm, gpus):
        lasting = Captured(comm, equal_case("all_gather", 2, 50), "window")
        graphs = [capture(lasting, comm, gpus) for _ in range(2)]
        before = live()["allocations"]
        for turn in range(3):
            passing = Captured(comm, equal_case("all_gather", 2, 300), "window")
            graphs.append(capture(passing, comm, gpus))
            replay(passing, graphs[-1], gpus, turn)
        del passing
        time.sleep(0.02)
        assert live()["allocations"] == before + 6
        graphs[-1].forget()
        graphs[-2].destroy()
        until(lambda: live()["allocations"] == before + 4)
        graphs[-1].replay()
        assert gpus.settle(comm.given)
        graphs[-1].destroy()
        graphs[-3].destroy()
        until(lambda: live()["allocations"] == before)
        replay(lasting, graphs[0], gpus, 5)
    """
    assert run(code(MANY) + textwrap.dedent(text)) == ""


def test_what_can_still_run_keeps_its_words() -> None:
    """An instance does without its graph, and a launch without its instance."""
    text = """
    with opened(2) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 2, 64, in_place=True), "window")
        graphs = [capture(ring, comm, gpus) for _ in range(256)]

        def full():
            with gpus.graph(comm.given):
                found, told = code_of(ring.start)
            return found == "unsupported" and "256" in told

        for graph in graphs:
            graph.forget()
        assert full()
        for turn, graph in enumerate(graphs):
            replay(ring, graph, gpus, turn)

        held = comm.host_array(1, "uint32")
        waiting, released = graphs[7], held.__array_interface__["data"][0]
        ring.fill(1000)
        gpus.driver("cuStreamWaitValue32", comm.given[1], released, 1, 0)
        waiting.replay()  # rank 0 waits for rank 1, and that one for us
        waiting.destroy()
        other = gpus.streams()
        comm.given, own = other, comm.given
        assert full()
        comm.given = own
        held[0] = 1
        assert gpus.settle(comm.given)
        ring.check()

        new = capture(ring, comm, gpus)
        assert full()
        for turn in range(20):
            replay(ring, new, gpus, turn)
            replay(ring, graphs[turn], gpus, 100 + turn) if turn != 7 else None
        for graph in graphs:
            graph.destroy()
        for turn in range(300):
            capture(ring, comm, gpus).destroy()
            replay(ring, new, gpus, turn) if turn % 50 == 0 else None
    """
    assert run(code(MANY) + textwrap.dedent(text)) == ""


def test_a_graph_lives_until_it_is_gone_on_every_rank() -> None:
    text = """
    comm, gpus = joined()
    ring = Captured(comm, equal_case("all_gather", ranks, 64, in_place=True), "window")
    graphs = [capture(ring, comm, gpus) for _ in range(256)]
    ring.fill(3)
    for graph in graphs[:9]:
        graph.replay()
    assert gpus.settle(comm.given)
    ring.check()
    first, second = graphs[rank::2][:2]  # of rank 0: graphs 0 and 2; of rank 1: 1 and 3
    first.destroy()
    second.destroy()
    time.sleep(0.05)
    with gpus.graph(comm.given):
        found, told = code_of(ring.start)
    assert found == "unsupported" and "on every rank" in told, (found, told)
    graphs[1 - rank].destroy()  # so that 0 and 1 are gone on both
    fresh = [capture(ring, comm, gpus) for _ in range(2)]
    with gpus.graph(comm.given):
        assert code_of(ring.start)[0] == "unsupported"
    for turn in range(30):
        for graph in (*fresh, *graphs[4:9]):
            ring.fill(turn)
            comm.barrier()
            graph.replay()
            assert gpus.settle(comm.given)
            ring.check()
            comm.barrier()
    comm.close()
    """
    store = free_store()
    body = code(RANK) + textwrap.dedent(MANY) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "2") for rank in range(2)]
    assert finish(group, dict.fromkeys(range(2), 0))


def test_ranks_that_destroy_at_other_times() -> None:
    text = """
    comm, gpus = joined()
    ring = Captured(comm, equal_case("all_to_all", ranks, 100), "array")
    kept = []
    for turn in range(600):
        kept.append(capture(ring, comm, gpus, variant="fan"))
        if turn % 3 == rank:
            ring.fill(turn)
        while len(kept) > (2, 5, 20)[rank]:
            kept.pop(0).destroy()
        if turn % 20 == 0:
            ring.fill(turn)
            comm.barrier()
            kept[-1].replay()
            assert gpus.settle(comm.given)
            ring.check()
            comm.barrier()
    comm.close()
    """
    store = free_store()
    body = code(RANK) + textwrap.dedent(MANY) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "3") for rank in range(3)]
    assert finish(group, dict.fromkeys(range(3), 0))


def test_threads_capture_in_any_order() -> None:
    """Each in a lane and a stream of its own; every rank's threads begin in another order."""
    text = """
    class Threaded(Streamed):
        own = threading.local()
        def _streams(self):
            return list(getattr(self.own, "streams", ()))

    Streamed, lanes = Threaded, 3
    comm, gpus = joined()
    places = [("window", "array")[lane % 2] for lane in range(lanes)]
    rings = [Captured(comm, equal_case("all_gather", ranks, 90), place) for place in places]
    failures = []

    def main(lane):
        try:
            gpus.driver("cuCtxSetCurrent", gpus.contexts[0])
            comm.own.streams = gpus.streams()
            time.sleep((lane + rank) % lanes * 0.02)
            kept = []
            for turn in range(60):
                with gpus.graph(comm.own.streams, THREAD_LOCAL) as graph:
                    rings[lane].start(lane=lane + 1)
                kept.append(graph)
                for each in (graph, kept[0]):
                    replay(rings[lane], each, gpus, turn)
                if len(kept) > 3:
                    kept.pop(1).destroy()
        except BaseException as error:
            failures.append(f"lane {lane}: {error!r}")

    threads = [threading.Thread(target=main, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    comm.close()
    """
    store = free_store()
    body = code(RANK) + textwrap.dedent(MANY) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "2") for rank in range(2)]
    assert finish(group, dict.fromkeys(range(2), 0))


def test_a_driver_that_does_not_tell() -> None:
    """All words are used once, and the error says why."""
    text = """
    with opened(2) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 2, 10, in_place=True), "window")
        for turn in range(256):
            graph = capture(ring, comm, gpus)
            replay(ring, graph, gpus, turn) if turn % 50 == 0 else None
            graph.destroy()
        with gpus.graph(comm.given):
            found, told = code_of(ring.start)
        assert found == "unsupported" and "the driver does not report it" in told, (found, told)
    """
    lacks = {"OFFCORE_FAKE_CUDA_LACKS": "cuUserObjectCreate"}
    assert run(code(MANY) + textwrap.dedent(text), **lacks) == ""


@pytest.mark.parametrize("call", ["cuUserObjectCreate:2", "cuGraphRetainUserObject:4"])
def test_a_graph_that_keeps_nothing(call: str) -> None:
    """A capture whose graph cannot be watched is refused, and the next one is whole again."""
    text = """
    with opened(2) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 2, 10, in_place=True), "window")
        codes, graphs = [], []
        for _ in range(4):
            with gpus.graph(comm.given) as graph:
                codes.append(code_of(ring.start)[0])
            graphs.append(graph)
        assert codes == ["", "memory", "", ""], codes
        for turn, graph in enumerate(graphs):
            if codes[turn] == "":
                replay(ring, graph, gpus, turn)
            graph.destroy()
        until(lambda: watched() == 0)
    """
    assert run(code(MANY) + textwrap.dedent(text), OFFCORE_FAKE_CUDA_FAIL=call) == ""
