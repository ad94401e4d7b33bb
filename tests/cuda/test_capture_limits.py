"""Captured operations where something is amiss: ranks that disagree or die, what no graph can hold,
and what a capture takes and leaves."""

import signal
import textwrap
import time

import pytest
from test_capture import RANK, code
from test_cuda import finish, run, start

from stores import free_store


@pytest.mark.parametrize("kind", ["first call", "known call", "other graphs"])
def test_ranks_that_disagree(kind: str) -> None:
    """One captures and the other does not; or they put their operations into other graphs."""
    text = """
    kind = sys.argv[4]
    comm, gpus = joined()
    operation = Captured(comm, equal_case("all_gather", ranks, 100), "window")
    operation.fill(0)
    if kind == "known call":
        operation.start().wait()
    def call():
        if kind == "other graphs":
            with gpus.graph(comm.given):
                operation.start()
                if rank == 0:
                    operation.start()
            with gpus.graph(comm.given):
                operation.start()
        elif rank == 0:
            with gpus.graph(comm.given):
                operation.start()
        else:
            operation.start().wait()
    found, told = code_of(call)
    assert gpus.settle(comm.given, 5)
    comm.close()
    print(found, told)
    """
    store = free_store()
    body = code(RANK) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "2", kind) for rank in range(2)]
    told = [process.communicate(timeout=40)[0] for process in group]
    assert all(process.returncode == 0 for process in group), told
    assert {line.split()[0] for line in told} <= {"mismatch", "peer"}, told
    assert any(line.startswith("mismatch") and "mode=capture graph=" in line for line in told), told


def test_a_killed_peer_in_mid_replay() -> None:
    """Streams that replay run out, and the next call says why; the process can go on."""
    store = free_store()
    text = """
    comm, gpus = joined()
    ring = Captured(comm, equal_case("all_gather", ranks, 100000, in_place=True), "window")
    with gpus.graph(comm.given) as graph:
        for variant in ("pcpy", "fan", "b2b"):
            ring.start(variant=variant)
    ring.fill(0)
    print("ready", flush=True)
    began, told = time.monotonic(), ""
    while not told and time.monotonic() - began < 15:
        for _ in range(20):
            graph.replay()
        assert gpus.settle(comm.given, 10)
        found, told = code_of(comm.check)
    assert found == "peer" and "rank 2" in told, (found, told)
    assert code_of(ring.start)[0] == "peer"
    graph.replay()  # a replay after the end runs out as well
    assert gpus.settle(comm.given, 10)
    for _ in range(30):
        graph.replay()
    comm.close()
    del comm, ring
    assert gpus.settle(graph.streams, 1)  # closing let the rest run out
    left = {kind: n for kind, n in live().items() if kind != "streams"}
    assert not any(left.values()), left
    """
    body = code(RANK) + textwrap.dedent(text)
    group = [start(body, store, str(rank), "3") for rank in range(3)]
    for process in group:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    group[2].send_signal(signal.SIGKILL)
    assert finish(group, {0: 0, 1: 0, 2: -signal.SIGKILL})


def test_abort_lets_replays_go() -> None:
    text = """
    with opened(2) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 2, 100), "window")
        with gpus.graph(comm.given) as graph:
            ring.start()
        gpus.driver("cuGraphLaunch", graph.execs[0], comm.given[0])  # rank 1 never replays
        assert not gpus.settle(comm.given, 0.2)
        comm.abort()
        assert gpus.settle(comm.given, 5)
        assert code_of(comm.check)[0] == "cancelled"
    """
    assert run(code(text)) == ""


def test_what_cannot_be_captured() -> None:
    """Each is an error that says why; the capture goes on and its graph is good."""
    text = """
    with opened(2) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 2, 100), "window")
        handle = ring.start(protocol="credits")
        handle.wait()
        with gpus.graph(comm.given) as graph:
            found, told = code_of(lambda: ring.start(variant="prelaunch_fan"))
            assert found == "unsupported" and "without prelaunch_" in told, told
            found, told = code_of(lambda: ring.start(variant="swap"))
            assert found == "unsupported", told
            found, told = code_of(lambda: comm.all_gather_view(ring.window.region(0, 100)))
            assert found == "unsupported" and "cannot be captured" in told, (found, told)
            found, told = code_of(handle.release)
            assert found == "unsupported" and "captured" in told, (found, told)
            found, told = code_of(lambda: comm.all_gather(np.zeros(200, np.uint8), None))
            assert found == "invalid", (found, told)
            promised = ring.start(protocol="promise").wait()
            assert promised.protocol == "barrier" and not promised.staged
            assert ring.start(protocol="eager").wait().staged
        for turn in range(20):
            ring.fill(turn)
            graph.replay()
            assert gpus.settle(comm.given)
            ring.check()

        one = gpus.graph(comm.given[:1])
        with one:  # one of two streams
            found, told = code_of(ring.start)
            assert found == "invalid" and "capture all of them or none" in told, (found, told)
        spoilt = gpus.graph(comm.given)
        for stream in comm.given:
            gpus.driver("cuStreamBeginCapture", stream, GLOBAL)
            assert gpus.driver.code("cuStreamSynchronize", stream) == 900
        found, told = code_of(ring.start)
        assert found == "invalid" and "already invalidated" in told, (found, told)
        for stream in comm.given:
            assert spoilt.end(stream)[0] == 901
        ring.fill(77)
        ring.start().wait()
        ring.check()
    """
    assert run(code(text)) == ""


def test_a_capture_that_fails_half_way() -> None:
    """The call says what the driver said; the next capture is whole again."""
    text = """
    with opened(3) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 3, 100, in_place=True), "window")
        codes, graphs = [], []
        for _ in range(8):
            graph = gpus.graph(comm.given)
            for stream in comm.given:
                gpus.driver("cuStreamBeginCapture", stream, GLOBAL)
            codes.append(code_of(lambda: ring.start(variant="pcpy"))[0])
            graphs.append([graph.end(stream) for stream in comm.given])
        assert sorted(codes) == [*[""] * 7, "memory"], codes
        failed = codes.index("memory")
        for number, ended in enumerate(graphs):
            assert {code for code, _ in ended} == {901 if number == failed else 0}, graphs
        with gpus.graph(comm.given) as graph:
            ring.start(variant="pcpy")
        for turn in range(10):
            ring.fill(turn)
            graph.replay()
            assert gpus.settle(comm.given)
            ring.check()
    """
    for call in ("cuMemcpyAsync:36", "cuStreamBatchMemOp:40", "cuEventCreate:3"):
        assert run(code(text), OFFCORE_FAKE_CUDA_FAIL=call) == "", call


def test_how_many_graphs() -> None:
    text = """
    with opened(2) as (comm, gpus):
        ring = Captured(comm, equal_case("all_gather", 2, 10, in_place=True), "window")
        before = live()["allocations"]
        for number in range(256):
            with gpus.graph(comm.given) as graph:
                ring.start()
        assert live()["allocations"] - before == 2  # all words in one window
        for turn in range(3):
            ring.fill(turn)
            graph.replay()
            assert gpus.settle(comm.given)
            ring.check()
        with gpus.graph(comm.given):
            found, told = code_of(ring.start)
        assert found == "unsupported" and "256" in told, (found, told)
    """
    assert run(code(text)) == ""


def test_own_slices() -> None:
    """A copy engine makes them, captured or not, unless the caller allows SMs."""
    text = """
    with opened(2, **({"own_copy": "sm"} if sys.argv[1] == "sm" else {})) as (comm, gpus):
        apart = Captured(comm, equal_case("all_gather", 2, 500), "window")
        place = Captured(comm, equal_case("all_gather", 2, 500, in_place=True), "window")
        own = lambda handle: handle.wait().own_copy
        wanted = sys.argv[1]
        for captured in (apart, place):
            captured.fill(1)
        assert own(apart.start(variant="pcpy")) == wanted
        assert own(place.start(variant="pcpy")) == "none"
        assert own(place.start(variant="pcpy", protocol="eager")) == wanted  # out of the slot
        alike = done("same_device")[0]
        with gpus.graph(comm.given) as graph:
            assert own(apart.start(variant="pcpy")) == wanted
            assert own(place.start(variant="pcpy")) == "none"
        graph.replay()
        assert gpus.settle(comm.given)
        assert done("same_device")[0] - alike == (2 if wanted == "sm" else 0)
        apart.check()
        place.check()
    """
    for own in ("engine", "sm"):
        assert run(code(text), own) == ""


def test_nothing_is_left() -> None:
    text = """
    with opened(3) as (comm, gpus):
        captured = Captured(comm, equal_case("all_gather", 3, 3000, in_place=True), "array")
        with gpus.graph(comm.given) as graph:
            for _ in range(3):
                captured.start(variant="pcpy")
        graph.replay()
        assert gpus.settle(comm.given)
        streams = list(comm.given)
    del comm, captured
    for stream in streams:
        gpus.driver("cuStreamDestroy", stream)
    assert not any(live().values()), live()
    """
    assert run(code(text)) == ""
