"""The process of one rank, `python -m offcore.tools.bench.rank_worker`: jobs in, JSON lines out.

The ranks run the same job in the same order, so they need no word from the parent once started.
A variant that cannot be had fails on all of them alike, since a plan depends on collective facts
only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import offcore
from offcore import _core
from offcore.tools.bench.baselines import Absent, open_baseline
from offcore.tools.bench.collective_runner import CollectiveRunner
from offcore.tools.bench.collectives import OWN_COPIES, SMS, Form, Request, skip_or_raise
from offcore.tools.bench.layout import Layout
from offcore.tools.bench.subjects import Baseline, Place, Subject
from offcore.tools.bench.timers import HostTimer, StreamTimer, Timer

_PR_SET_PDEATHSIG = 1
_TELL_S = 0.1
_OPEN_S = 60  # what a library may take to start, besides a step's usual time
_AHEAD_MAX = 800  # commands that a GPU's stream surely holds before it runs one


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


class Communicator(offcore.Communicator):
    """Enqueues into the stream that is timed, where there is one."""

    watch: _core.GpuTimer | None = None

    def _streams(self) -> list[int]:
        return [] if self.watch is None else [self.watch.stream]


@dataclass
class Entry:
    """One row in the making."""

    impl: str
    layout: Layout
    timing: str
    subject: Subject
    asked: str | None = None  # the protocol
    baseline: Baseline | None = None
    times_us: list[float] = field(default_factory=list)
    failure: str = ""  # a library's: it is left out from then on

    @property
    def way(self) -> tuple[str, str]:
        return self.impl, self.subject.facts["mode"]


class Worker:
    def __init__(self, job: dict[str, Any], say: TextIO) -> None:
        self._say = say
        self._rank: int = job["rank"]
        self._store: str = job["store"]
        self._requests = [Request(**request) for request in job["requests"]]
        self._first = self._requests[0]
        self._watch: _core.GpuTimer | None = None
        self._comms: dict[Form, Communicator] = {}
        for form in dict.fromkeys(form for request in self._requests for form in request.forms):
            self._comms[form] = self._communicator(form)
        self._comm = self._meeting = next(iter(self._comms.values()))
        if self._first.backend == "cuda":
            self._watch = _core.GpuTimer(self._comm._gpus[0])
            for comm in self._comms.values():
                comm.watch = self._watch
        self._windows = {form: self._window_pair(form) for form in self._comms}
        self._runners: dict[tuple[Any, ...], CollectiveRunner] = {}
        self._timer = self._make_timer()
        self._baselines = self._open_baselines(job["folder"])
        self._broken: dict[tuple[str, str], str] = {}  # by Entry.way
        self._unproven: list[tuple[int, Entry]] = []
        self._case = 0
        self._steps = 0.0  # of the progress, not told yet
        self._told_s = 0.0

    def _communicator(self, form: Form, backend: str | None = None) -> Communicator:
        """Collective. One after the other can meet at the same store."""
        first = self._first
        return Communicator(
            backend=backend or first.backend,
            machine=None if backend else first.machine,
            store=self._store,
            rank=self._rank,
            world_size=first.ranks,
            timeout=first.timeout_s,
            signals=form[0] or "auto",
            own_copy=form[1],
            sms=SMS if backend else first.sms,
        )

    def _window_pair(self, form: Form) -> tuple[Any, Any]:
        layouts = [r.layout(max(r.sizes)) for r in self._requests if form in r.forms]
        comm = self._comms[form]
        inputs = [one.in_bytes for one in layouts if not one.in_place]
        out = comm.window(max(1, *(one.out_bytes for one in layouts)))
        return out, comm.window(max(1, *inputs)) if inputs else None

    def _make_timer(self) -> Timer:
        # Ranks meet in an exchange of a few bytes: none leaves before every one has come. Not on
        # the GPUs, where it would stand behind what waits to be timed.
        if self._watch is not None:
            self._meeting = self._communicator((None, OWN_COPIES[0]), "host")
        word = self._meeting.window(8 * self._first.ranks)

        def meet() -> None:
            self._meeting.all_gather(word).wait()

        self._meet = meet
        if self._watch is None:
            return HostTimer(meet)
        return StreamTimer(self._watch, meet, self._first.timeout_s)

    def _open_baselines(self, folder: str) -> dict[str, Baseline]:
        names = dict.fromkeys(name for request in self._requests for name in request.baselines)
        place = Place(
            rank=self._rank,
            ranks=self._first.ranks,
            folder=folder,
            nbytes_max=max(max(request.sizes) for request in self._requests),
            gpu=self._comm._gpus[0],
            stream=self._watch.stream if self._watch else 0,
            sms=self._first.sms,
        )
        opened: dict[str, Baseline] = {}
        for name in names:
            self._step(f"opening {name}", _OPEN_S)
            try:
                opened[name] = open_baseline(name, place)
            except offcore.Error as failure:
                if failure.code != "unavailable":
                    raise
                opened[name] = Absent(failure)  # on all ranks alike: they run the same packages
        return opened

    def run(self) -> None:
        for number, request in enumerate(self._requests):
            for nbytes in request.sizes:
                entries = list(self._entries(request, nbytes))
                self._rounds(request, entries)
                for entry in entries:
                    if entry.failure:
                        self._skip(entry.impl, nbytes, entry.failure)
                    elif entry.impl == "nccl-ce":
                        self._unproven.append((number, entry))
                    else:
                        self._row(number, entry, entry.subject.facts)
        self._prove()
        # Last, because a library may wait for the whole device, which is to wait for no parked one.
        for number, request in enumerate(self._requests):
            if request.backend == "cuda":
                self._prelaunched(number, request)

    def close(self) -> None:
        for baseline in self._baselines.values():
            baseline.close()
        for comm in self._comms.values():
            comm.close()

    def _entries(self, request: Request, nbytes: int) -> Iterator[Entry]:
        """What can be had of what was asked for, each called and checked once."""
        for form in request.forms:
            for asked in request.protocols:
                runner = self._runner(request, form, asked)
                for variant in request.variants:
                    if request.backend == "cuda" and variant.startswith("prelaunch_"):
                        continue
                    yield from self._own(request, runner, variant, nbytes)
        for name in request.baselines:
            yield from self._library(request, name, runner.layout(nbytes))

    def _runner(self, request: Request, form: Form, asked: str) -> CollectiveRunner:
        key = (request.op, request.in_place, form, asked, request.check, request.values)
        if key not in self._runners:
            comm, windows, phantom = self._comms[form], self._windows[form], not request.check
            self._runners[key] = CollectiveRunner(
                comm,
                request.op,
                request.in_place,
                0,
                asked,
                phantom,
                windows,
                self._meet,
                request.values,
            )
        return self._runners[key]

    def _own(
        self, request: Request, runner: CollectiveRunner, variant: str, nbytes: int
    ) -> Iterator[Entry]:
        layout = runner.layout(nbytes)
        self._case += 1
        self._step(f"{variant} at {nbytes} bytes")
        try:
            result, wrong = runner.checked_call(layout, variant, self._case << 16)
        except offcore.Error as failure:
            self._skip(variant, nbytes, skip_or_raise(request.named, failure))
            return
        launch = runner.launch_of(layout)

        def enqueue(calls: int) -> list[Any]:
            return [launch(variant) for _ in range(calls)]

        facts = runner.facts_of(result) | {"named": variant != "auto"}
        subject = Subject(facts, enqueue, wrong=wrong)
        for timing in request.timings:
            entry = Entry("offcore", layout, timing, subject, runner.protocol)
            if timing == "chain" and self._ahead(entry) < 2:
                reason = f"a call has {result.commands} commands: streams do not hold two ahead"
                self._skip(variant, nbytes, reason)
            else:
                yield entry

    def _ahead(self, entry: Entry) -> int:
        """How many calls can be enqueued before the first one runs."""
        commands = entry.subject.facts.get("commands")  # of offcore's own
        if not commands or self._watch is None:
            return sys.maxsize
        return int(_AHEAD_MAX * entry.layout.ranks // commands) - 1  # one that makes ranks meet

    def _library(self, request: Request, name: str, layout: Layout) -> Iterator[Entry]:
        baseline = self._baselines[name]
        calls = request.calls_of(layout.nbytes)
        self._step(f"{name} at {layout.nbytes} bytes")
        try:
            subjects = baseline.subjects(layout, self._comm.machine, calls, request.check)
        except offcore.Error as failure:
            self._skip(name, layout.nbytes, skip_or_raise(False, failure))
            return
        for subject in subjects:
            for timing in request.timings:
                if subject.alone or timing == "chain":
                    yield Entry(name, layout, timing, subject, None, baseline)

    def _rounds(self, request: Request, entries: list[Entry]) -> None:
        """Batches take turns."""
        for entry in entries:
            entry.failure = self._broken.get(entry.way, "")
            for _ in range(0 if entry.failure else request.warmup):
                for handle in entry.subject.enqueue(1):
                    handle.wait()
        for _ in range(request.batches):
            for entry in entries:
                if not entry.failure:
                    self._batch(request, entry)
                self._stepped(1 / request.batches)
        self._stepped(0, at_once=True)

    def _batch(self, request: Request, entry: Entry) -> None:
        try:
            entry.times_us.append(self._time(request, entry))
        except Exception as failure:
            if entry.baseline is None:
                raise
            # What a library cannot do once it is not asked again: each try may take a timeout.
            entry.failure = f"{' '.join(entry.way)}: {failure}"
            self._broken[entry.way] = entry.failure

    def _time(self, request: Request, entry: Entry) -> float:
        if entry.timing == "call":
            return self._timer.call(entry.subject.enqueue)
        calls = min(request.calls_of(entry.layout.nbytes), self._ahead(entry))
        return self._timer.chain(entry.subject.enqueue, calls)

    def _prove(self) -> None:
        """What has to be proven is profiled once all has been timed: that may slow a process."""
        proofs: dict[tuple[str, Layout], dict[str, Any] | str] = {}
        for number, entry in self._unproven:
            key = (entry.impl, entry.layout)
            assert entry.baseline is not None
            if key not in proofs:
                self._step(f"profiling {entry.impl} at {entry.layout.nbytes} bytes", _OPEN_S)
                proofs[key] = entry.baseline.proven(entry.layout, {})
            proof = proofs[key]
            if isinstance(proof, str):
                self._skip(entry.impl, entry.layout.nbytes, proof)
            else:
                self._row(number, entry, entry.subject.facts | proof)

    def _prelaunched(self, number: int, request: Request) -> None:
        """Each on a communicator of its own: few programs can be parked on a GPU at once, and
        closing takes them back."""
        names = [name for name in request.variants if name.startswith("prelaunch_")]
        cases = [
            (nbytes, form, asked, name)
            for nbytes in request.sizes
            for form in request.forms
            for asked in request.protocols
            for name in names
        ]
        for nbytes, form, asked, name in cases:
            comm = self._communicator(form)
            comm.watch = self._watch
            place = (request.op, request.in_place, nbytes)
            runner = CollectiveRunner(comm, *place, asked, not request.check, meet=self._meet)
            entries = list(self._own(request, runner, name, nbytes))
            self._rounds(request, entries)
            for entry in entries:
                self._row(number, entry, entry.subject.facts)
            self._meet()
            comm.close()

    def _row(self, number: int, entry: Entry, facts: dict[str, Any]) -> None:
        self._emit(
            {
                "event": "row",
                "request": number,
                "impl": entry.impl,
                "bytes": entry.layout.nbytes,
                "times_us": entry.times_us,
                "wrong": entry.subject.wrong,
                "facts": {"timing": entry.timing, "asked": entry.asked} | facts,
            }
        )

    def _skip(self, name: str, nbytes: int, reason: str) -> None:
        self._emit({"event": "skip", "name": name, "bytes": nbytes, "reason": reason})
        self._stepped(1)

    def _step(self, name: str, more_s: float = 0) -> None:
        self._emit({"event": "step", "name": name, "more_s": more_s})

    def _stepped(self, steps: float, at_once: bool = False) -> None:
        """Tells of progress now and then: who shows it needs a core that calls are timed on."""
        self._steps += steps
        if at_once or time.monotonic() - self._told_s > _TELL_S:
            self._emit({"event": "progress", "steps": self._steps})
            self._steps = 0.0
            self._told_s = time.monotonic()

    def _emit(self, event: dict[str, Any]) -> None:
        emit(self._say, event)


def emit(say: TextIO, event: dict[str, Any]) -> None:
    say.write(json.dumps(event) + "\n")
    say.flush()


def serve(run: Callable[[dict[str, Any], TextIO], Callable[[], None]]) -> int:
    """The process of one rank: takes a job from stdin and writes events to stdout, the last of them
    `end` or `error`. run: does the job, and returns what closes all that it opened."""
    job = json.loads(sys.stdin.readline())
    die_with(job.pop("parent"))
    # Libraries print to stdout too; what the parent reads goes through a descriptor of its own.
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        close = run(job, say)
        emit(say, {"event": "end"})
        close()
    except offcore.Error as failure:
        emit(say, {"event": "error", "code": failure.code, "message": str(failure)})
        return 1
    finally:
        say.flush()
    return 0


def _measure(job: dict[str, Any], say: TextIO) -> Callable[[], None]:
    worker = Worker(job, say)
    worker.run()
    return worker.close


if __name__ == "__main__":
    sys.exit(serve(_measure))
