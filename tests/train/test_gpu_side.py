"""How a group's calls run on a GPU: streams, events, what is late. torch's streams are stand-ins,
and so is the communicator, whose operations end when the test says so."""

import contextlib
import datetime
import gc
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import needs
import offcore
from offcore.errors import error

needs.require("torch")
import torch  # noqa: E402

from offcore.distributed import sides  # noqa: E402


class Stream:
    """One that notes what is ordered in it."""

    here: "Stream"
    device = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.did: list[Any] = []

    def wait_event(self, event: "Event") -> None:
        self.did.append(("after", event.stream))


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.stream.did.append(self)

    def wait(self, stream: Stream) -> None:
        stream.did.append(("after", self))

    def query(self) -> bool:
        return False


class Future:
    def __init__(self, devices: Any) -> None:
        self.stream: Any = None

    def set_result(self, value: Any) -> None:
        self.stream, self.value = Stream.here, value


class Handle:
    def __init__(self) -> None:
        self.stream = Stream.here
        self.ended = threading.Event()
        self.waits = 0
        self.failure: Exception | None = None

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: float) -> Any:
        self.waits += 1
        if not self.ended.wait(timeout):
            raise error("timeout", "not yet")
        if self.failure is not None:
            raise self.failure
        return "result"


class Comm:
    timeout = 0.0
    dead: Exception | None = None

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def check(self) -> None:
        if self.dead is not None:
            raise self.dead

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


class Call:
    timeout = datetime.timedelta(0)

    def __init__(self, late: bool) -> None:
        self.asyncOp = late


@pytest.fixture(name="current")
def _current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, Stream.here = Stream.here, stream
        yield
        Stream.here = before

    def set_stream(stream: Stream) -> None:
        Stream.here, Stream.device = stream, 0

    Stream.here = Stream()
    monkeypatch.setattr(sides, "_LOOK_S", 0.01)
    monkeypatch.setattr(torch.futures, "Future", Future)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: stream.did.append(("uses", tensor))
    )
    for name, value in (
        ("Stream", Stream),
        ("Event", Event),
        ("stream", within),
        ("set_stream", set_stream),
        ("current_stream", lambda _: Stream.here),
        ("is_current_stream_capturing", lambda: False),
        ("current_device", lambda: Stream.device),
        ("set_device", lambda device: setattr(Stream, "device", device)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return Stream.here


def side_of(told: list[Any], timeout: float = 20.0) -> tuple[Any, Any]:
    comm: Any = Comm()
    return sides.GpuSide(comm, "g", 3, timeout, torch.device("cuda", 0), told.append), comm


def body(handles: list[Handle], copies: Any = ()) -> Any:
    def start(comm: Any) -> Any:
        comm.check()  # as every operation does
        handles.append(Handle())
        return handles[-1:], copies

    return start


def test_calls_are_ordered_in_streams(current: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    handles: list[Handle] = []
    side, comm = side_of(told)
    work = side.run("all_gather", body(handles), ["out"], Call(False))
    assert handles[0].stream is current  # and nothing waited for it
    assert comm.timeout == 20
    out = torch.zeros(3)
    monkeypatch.setattr(Stream, "device", 1)  # another one than the group's is current
    late = side.run("all_reduce", body(handles, [(out, torch.ones(3))]), [out], Call(True))
    assert Stream.here is current
    assert Stream.device == 1
    own = handles[1].stream
    assert own is not current
    assert own.did[0] == ("after", current)
    assert late.get_future().stream is own
    assert (out == 1).all()  # copied in the stream
    assert own.did[1][0] == "uses"
    assert own.did[1][1] is out
    assert late.wait()
    (event,) = [one for one in own.did if isinstance(one, Event)]
    assert current.did[-1] == ("after", event)
    assert [handle.waits for handle in handles] == [0, 0]
    with pytest.raises(offcore.Error, match=r"all_reduce \(call 2 of rank 3, group g\): not yet"):
        late.wait(datetime.timedelta(seconds=0.01))
    handles[0].ended.set()
    handles[1].ended.set()
    side.call("all_gather", body(handles))
    assert handles[2].stream is current
    side.run("all_reduce", body(handles), [], Call(True))
    assert told == ["result"] * 2
    for handle in handles:
        handle.ended.set()
    for _ in range(20):  # what has ended is let go of, some calls later
        side.call("all_gather", body(handles))
        handles[-1].ended.set()
    assert len(told) > 10
    side.settle()
    side.close()
    assert told == ["result"] * 24
    assert comm.closed
    assert not work.is_completed()  # says the event, a stand-in


def test_what_is_late_is_aborted(current: Stream) -> None:
    handles: list[Handle] = []
    side, comm = side_of([], timeout=0.05)
    work = side.run("broadcast", body(handles), [], Call(True))
    assert comm.aborted.wait(10)
    for call in (work.wait, lambda: side.run("all_gather", body(handles), [], Call(False))):
        with pytest.raises(offcore.Error, match=r"broadcast \(call 1 of rank 3.*in time") as late:
            call()
        assert late.value.code == "timeout"
    assert not work.is_success()


def test_threads_that_call_at_once_are_each_followed(
    current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's stream comes behind what each caller's own stream has."""
    streams = threading.local()
    handles: list[Handle] = []
    side, _ = side_of([])
    both = threading.Barrier(2)
    record = Event.record

    def recorded(event: Event, stream: Stream) -> None:
        record(event, stream)
        time.sleep(0.05)  # for the other thread to record, if it may

    monkeypatch.setattr(Event, "record", recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.own)
    own = [Stream(), Stream()]

    def call(index: int) -> None:
        streams.own = own[index]
        both.wait()
        side.run("all_gather", body(handles), [], Call(True))

    threads = [threading.Thread(target=call, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    behind = [what[1] for what in side._stream.did if isinstance(what, tuple)]
    assert {*behind} == {*own}
    for handle in handles:
        handle.ended.set()
    side.close()


def test_a_dead_peer_is_told_to_whoever_waits(current: Stream) -> None:
    handles: list[Handle] = []
    side, comm = side_of([])
    work = side.run("all_gather", body(handles), [], Call(True))
    comm.dead = error("peer", "rank 1 died")
    for call in (work.wait, lambda: side.run("all_gather", body(handles), [], Call(False))):
        with pytest.raises(offcore.Error, match="rank 1 died") as lost:
            call()
        assert lost.value.code == "peer"
    assert comm.aborted.is_set()


def test_who_keeps_what(current: Stream) -> None:
    """Neither the communicator keeps tensors, nor the thread that looks a side."""
    comm: Any = object.__new__(sides.OnStreams)
    comm.__dict__.update(_device=0, local_ranks=[0], _gpus=[-1])
    tensor = torch.ones(3)
    places, dtype, kept = comm._side(tensor, "all_gather", writable=True)
    assert ([*places], dtype) == ([(tensor.data_ptr(), 12)], torch.float32)
    assert kept is None
    wrong = types.SimpleNamespace(
        is_cuda=True, is_cpu=False, device="cuda:1", get_device=lambda: 1, data_ptr=lambda: 4096
    )
    comm._gpus = [0]
    with pytest.raises(offcore.Error, match=r"lies on cuda:1; this rank needs memory of cuda:0"):
        comm._side(wrong, "all_gather", writable=True)
    side, _ = side_of([])
    side.run("all_gather", body([]), [], Call(False))
    seen = weakref.ref(side)
    del side
    for _ in range(100):
        gc.collect()
        if seen() is None:
            break
        time.sleep(0.01)
    assert seen() is None


def test_captured_calls_are_not_watched(current: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    handles: list[Handle] = []
    side, comm = side_of([], timeout=0.02)
    side.run("all_gather", body(handles), [], Call(False))
    time.sleep(0.1)
    side.settle()
    assert handles[0].waits == 0
    assert not comm.aborted.is_set()
