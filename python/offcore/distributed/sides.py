"""How a group's calls run: on the host by a thread that keeps their order, on a GPU in streams.

A call is a *body*: a function that starts operations of a communicator and returns their handles,
and what is to be copied when they have ended.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import logging
import queue
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import offcore
import offcore.torch
from offcore.bootstrap import bootstrap_of
from offcore.comm import Communicator, Handle
from offcore.errors import error
from offcore.torch_calls import Copies, HostWork, copy_all, seconds, untraced

Told = Callable[[Any], None]
Body = Callable[[Any], tuple[Sequence[Handle], Copies]]
_FATAL = ("timeout", "peer", "cancelled", "mismatch")  # after which ranks no longer agree
_OF_GPUS = {"signals", "own_copy", "sms", "near_gpu"}  # arguments that a host has no use for
_LOOK_S = 1.0  # between two looks at what is late on a GPU
KEPT = 8  # calls in the caller's order that may have ended and not been let go of
_NOW = types.SimpleNamespace(asyncOp=False)  # torch's options of a call in the caller's order
log = logging.getLogger("offcore.distributed")


def nobody(_: Any) -> None:
    """Hears nothing."""


class _Label(NamedTuple):
    """A call's name, which is made only where it is told."""

    op: str
    call: int
    rank: int
    group: str

    def __str__(self) -> str:
        return f"{self.op} (call {self.call} of rank {self.rank}, group {self.group})"


class Side:
    """A communicator of a group, or `Hosts`, and how its calls run. `told` hears of each
    operation's result, or all those of a call that spans hosts."""

    def __init__(
        self, comm: Any, name: str, rank: int, timeout: float, device: Any, told: Told = nobody
    ) -> None:
        self.comm = comm
        self.device = device
        self._told = told
        self._name = name
        self._rank = rank
        self._timeout = timeout
        self._calls = 0
        self._failure: Exception | None = None

    def run(self, op: str, body: Body, outputs: Any, opts: Any) -> Any:
        """Starts a call; its work."""
        raise NotImplementedError

    def call(self, op: str, body: Body) -> None:
        """Makes a call in the caller's order: on the host it has ended then, on a GPU it is
        enqueued on the current stream."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits for what is under way."""
        raise NotImplementedError

    def stop(self) -> None:
        """Once what is under way has ended; logs where that has failed."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops, and closes the communicator."""
        self.stop()
        self.comm.close()

    def check(self, label: _Label | str = "a call under way") -> None:
        """Raises where the group is dead, also of a rank that has died since; where it is closed;
        and in a child of this process."""
        self._check()
        try:
            self.comm.check()
        except offcore.Error as failure:
            raise self._failed(label, failure) from None

    def abort(self) -> None:
        """Every rank's waits and later calls fail."""
        if self._failure is None:
            self._failure = error("cancelled", f"rank {self._rank} aborted group {self._name}")
        self.comm.abort()

    def _limit(self, opts: Any) -> float:
        return seconds(getattr(opts, "timeout", None)) or self._timeout

    def _label(self, op: str) -> _Label:
        self._calls += 1
        return tuple.__new__(_Label, (op, self._calls, self._rank, self._name))

    def _failed(self, label: _Label | str, failure: Exception, limit: float = 0) -> Exception:
        """That failure with the call's name; where ranks may no longer agree, also for later calls,
        and told to the peers: they must not wait for this rank."""
        code = getattr(failure, "code", None)
        if code is None:
            return failure
        late = f"timeout of {limit:g} s: " if code == "timeout" and limit else ""
        named = error(code, f"{label}: {late}{failure}")
        if code in _FATAL and self._failure is None:
            self._failure = named
            with contextlib.suppress(offcore.Error):
                self.comm.abort()
        return named

    def _check(self) -> None:
        if self._failure is not None:
            raise error(
                getattr(self._failure, "code", "cancelled"),
                f"group {self._name} is dead since {self._failure}",
            )


class _Job:
    """A call that the thread makes."""

    def __init__(self, label: _Label | str, body: Body, limit: float) -> None:
        self.label = label
        self.body: Body | None = body
        self.limit = limit
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def end(self, failure: Exception | None) -> None:
        self._failure = failure
        self.body = None  # it holds the tensors
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None) -> None:
        if not self._ended.wait(timeout):
            raise error("timeout", f"{self.label}: has not ended within {timeout:g} s")
        if self._failure is not None:
            raise self._failure


class HostSide(Side):
    """Tensors in host memory. One call at a time, in the order in which they were made: at once
    where nothing waits, else by a thread, so that no call blocks whoever makes it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._running = threading.Lock()

    def run(self, op: str, body: Body, outputs: Any, opts: Any) -> Any:
        label = self._label(op)
        self.check(label)
        job = _Job(label, body, self._limit(opts))
        self._begin(job, waits=not getattr(opts, "asyncOp", True))
        return HostWork(job, outputs, (), None)

    def call(self, op: str, body: Body) -> None:
        self.run(op, body, None, _NOW).wait()

    def _begin(self, job: _Job, waits: bool) -> None:
        with self._lock:
            alone = waits and self._waiting == 0
            self._waiting += 1
            if alone:
                self._running.acquire()
            else:
                self._queue.put(job)
                if self._thread is None or not self._thread.is_alive():  # as after a fork
                    self._thread = threading.Thread(target=self._serve, daemon=True)
                    self._thread.start()
        if alone:
            try:
                self._do(job)
            finally:
                self._running.release()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._running:
                self._do(job)
            del job  # and what it holds, until the next comes

    def _do(self, job: _Job) -> None:
        failure: Exception | None = None
        try:
            self._check()
            end = time.monotonic() + job.limit
            self.comm.timeout = job.limit  # of meetings
            assert job.body is not None
            with torch.no_grad():
                handles, copies = job.body(self.comm)
            for handle in handles:
                self._told(handle.wait(max(0.0, end - time.monotonic())))
            copy_all(copies)
        except Exception as caught:
            failure = self._failed(job.label, caught, job.limit)
        except BaseException as caught:  # Ctrl-C, in the caller's thread
            failure = error("cancelled", f"{job.label}: interrupted by {caught!r}")
            raise
        finally:
            with self._lock:
                self._waiting -= 1
            job.end(failure)

    def settle(self) -> None:
        job = _Job("settle", lambda _: ((), ()), self._timeout)
        self._begin(job, waits=False)
        job.wait(None)

    def stop(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout)


@untraced
class GpuWork(dist.Work):  # type: ignore[misc]
    """A call on a GPU. `wait` orders the current stream behind it; the host goes on."""

    def __init__(
        self, side: GpuSide, label: _Label, handles: Sequence[Handle], outputs: Any, stream: Any
    ) -> None:
        super().__init__()
        self._side = side
        self._label = label
        self._handles = handles
        self._outputs = outputs
        self._stream = stream
        self._event: Any = None
        self._future: Any = None

    def end(self) -> Any:
        """The event behind the call, or, where nobody asked before, behind what followed too."""
        if self._event is None:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._event = event
        return self._event

    def is_completed(self) -> bool:
        """Whether the GPU has come to its end."""
        return bool(self.end().query())

    def is_success(self) -> bool:
        """Whether it has ended, and nothing has failed."""
        return self.is_completed() and self._side.failure is None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """With a timeout the host waits too. Raises `offcore.Error` where the group is dead."""
        self._side.check()
        limit = seconds(timeout)
        if limit is not None:
            self._side.wait_for(self._label, self._handles, limit)
        current = torch.cuda.current_stream(self._side.device)
        if current != self._stream:
            self.end().wait(current)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> Any:
        """The outputs, for the current stream."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """A future that is complete; who takes its value waits in a stream for the call."""
        if self._future is None:
            with torch.cuda.stream(self._stream):
                future: Any = torch.futures.Future(devices=[self._side.device])
                future.set_result(self._outputs)
            self._future = future
        return self._future


class GpuSide(Side):
    """Tensors on one GPU: a call is enqueued on the current stream, one with async_op on a stream
    of the group's own, behind what the current stream has. Training makes a call a layer, each on
    the host's way to the next kernel: nothing here is made before it is needed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._stream = torch.cuda.Stream(self.device, priority=-1)
        self._lock = threading.Lock()  # of what follows
        self._begun = torch.cuda.Event()  # a wait takes its state as it is when it is called
        self._late: collections.deque[tuple[float, _Label, Sequence[Handle], Body | None]] = (
            collections.deque()
        )
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def failure(self) -> Exception | None:
        return self._failure

    def run(self, op: str, body: Body, outputs: Any, opts: Any) -> Any:
        current = torch.cuda.current_stream(self.device)
        if not getattr(opts, "asyncOp", True):
            label, handles = self._enqueue(op, body, self._limit(opts))
            return GpuWork(self, label, handles, outputs, current)
        self._check()
        self._collect()
        label, limit = self._label(op), self._limit(opts)
        with self._lock:
            self._begun.record(current)
            self._stream.wait_event(self._begun)
        here = torch.cuda.current_device()
        torch.cuda.set_stream(self._stream)  # and its device
        try:
            handles, copies = self._start(label, limit, body)
            copy_all(copies)
            for to, _ in copies:  # handles do not tell of the copies' end
                to.record_stream(self._stream)
            work = GpuWork(self, label, handles, outputs, self._stream)
            work.end()
            # On a stream of its own a call's tensors are to live until it has ended.
            self._keep(label, limit, handles, body)
        finally:
            torch.cuda.set_stream(current)
            if here != self.device.index:
                torch.cuda.set_device(here)
        return work

    def call(self, op: str, body: Body) -> None:
        self._enqueue(op, body, self._timeout)

    def _enqueue(self, op: str, body: Body, limit: float) -> tuple[_Label, Sequence[Handle]]:
        self._check()
        label = self._label(op)
        handles, copies = self._start(label, limit, body)
        copy_all(copies)
        self._keep(label, limit, handles, None)
        if len(self._late) > KEPT:
            self._collect()
        return label, handles

    def _start(self, label: _Label, limit: float, body: Body) -> tuple[Sequence[Handle], Copies]:
        self.comm.timeout = limit
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return body(self.comm)
            return body(self.comm)
        except offcore.Error as failure:
            raise self._failed(label, failure, limit) from None

    def _keep(
        self, label: _Label, limit: float, handles: Sequence[Handle], body: Body | None
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        self._late.append((time.monotonic() + limit, label, handles, body))
        if self._watch is None:
            self.begin_watch()

    def begin_watch(self) -> None:
        """Sees to what is late from now on."""
        with self._lock:
            if self._watch is None:
                self._watch = threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._closed), daemon=True
                )
                self._watch.start()

    def wait_for(self, label: _Label, handles: Sequence[Handle], limit: float) -> None:
        """Makes the host wait."""
        end = time.monotonic() + limit
        for handle in handles:
            try:
                handle.wait(max(0.0, end - time.monotonic()))
            except offcore.Error as failure:
                if failure.code == "timeout":  # of the caller's own patience: it may wait again
                    raise error("timeout", f"{label}: {failure}") from None
                raise self._failed(label, failure) from None

    def _collect(self) -> None:
        """Lets go of what has ended: until then operands stay alive."""
        with self._lock:
            while self._late and all([handle.done() for handle in self._late[0][2]]):
                _, label, handles, _ = self._late.popleft()
                try:
                    for handle in handles:
                        self._told(handle.wait(0.0))
                except offcore.Error as failure:
                    log.error("%s", self._failed(label, failure))

    def look(self) -> None:
        """Lets go of what has ended, and aborts where something is late."""
        self._collect()
        with self._lock:
            first = self._late[0] if self._late else None
        if first is not None and self._failure is None and time.monotonic() > first[0]:
            late = error("timeout", "has not ended in time; the group is aborted")
            log.error("%s", self._failed(first[1], late))

    def settle(self) -> None:
        with self._lock:
            late = [*self._late]
        for _, label, handles, _ in late:
            self.wait_for(label, handles, self._timeout)
        self._collect()

    def stop(self) -> None:
        self._closed.set()
        try:
            self.settle()
        except offcore.Error as failure:
            log.error("%s", failure)
            with contextlib.suppress(offcore.Error):
                self.comm.abort()


def _watch(side_ref: weakref.ref[GpuSide], closed: threading.Event) -> None:
    """A thread: the driver tells nobody that a stream waits in vain. It keeps no side alive."""
    while not closed.wait(_LOOK_S):
        side = side_ref()
        if side is None:
            return
        side.look()
        del side


class OnStreams(offcore.torch.Communicator):
    """Keeps no tensor: like a kernel's they last by the order of streams, those of late calls by
    GpuSide. A communicator lets go some calls later, which would pin the gradients of as many
    layers as the host is ahead by."""

    _keeps = False


def open_communicator(
    meeting: Any, rank: int, ranks: int, timeout: float, device: Any, arguments: dict[str, Any]
) -> Communicator:
    """For tensors on that device, of ranks that meet at a store or a group. Collective. Groups have
    one set of arguments for tensors of both kinds."""
    given = {"timeout": timeout, **arguments}
    place = bootstrap_of(meeting, rank, ranks)
    if device.type == "cuda":
        return OnStreams(place, device=device.index, **given)
    for name in _OF_GPUS & given.keys():
        del given[name]
    return Communicator(backend="host", store=place, **given)
