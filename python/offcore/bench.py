"""What `offcore bench` measures.

On `sim` a time is virtual, hence exact: one call is enough, and sizes are spread over threads. On a
real machine every rank is a process (workers.py); a batch is at least 20 calls enqueued ahead, its
time is that of the slowest rank, and a row holds the median, least and largest of at least 15
batches, in microseconds a call.
"""

from __future__ import annotations

import os
import queue
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import offcore
from offcore import machines
from offcore.baselines import check_baseline
from offcore.crew import Crew, free_port
from offcore.errors import error
from offcore.exercise import Exercise, facts_of
from offcore.report import Outcome, Row, Skip

KINDS = ("pcpy", "bcst", "swap", "b2b", "fan")
VARIANTS = (*KINDS, *(f"prelaunch_{kind}" for kind in KINDS))

PHANTOM_ABOVE_BYTES = 64 << 20
BATCHES = 15
CALLS = 20
WARMUP_CALLS = 5

_SIM_THREADS_MAX = 4
_SEED_STRIDE = 1 << 16  # above every number of ranks: streams of two calls never meet


@dataclass(frozen=True)
class Request:
    """One invocation of the benchmark."""

    op: str
    backend: str  # resolved: never auto
    machine: str | None
    ranks: int
    sizes: list[int]
    variants: list[str]
    named: bool = False  # the user named these variants: one that cannot be had is an error
    in_place: bool = False
    protocol: str = "auto"
    batches: int = BATCHES
    calls: int = CALLS
    warmup: int = WARMUP_CALLS
    check: bool = True
    baselines: list[str] = field(default_factory=list)
    timeout_s: float = 30.0

    @property
    def steps(self) -> int:
        """How many rows are asked for."""
        return len(self.sizes) * (len(self.variants) + len(self.baselines))


Progress = Callable[[float], None]  # told the steps done since the last time


def resolve_backend(backend: str, machine: str | None) -> str:
    """The backend of that name, which must be available, or what `auto` stands for."""
    if backend == "auto":
        return machines.best_backend(machine)
    check_backend(backend)
    return backend


def check_backend(name: str) -> None:
    """Raises unavailable, and says why."""
    for known, usable, reason in offcore.probe_backends():
        if known == name and not usable:
            raise error("unavailable", f"backend {name}: {reason}; see: offcore doctor")


def run(request: Request, progress: Progress = lambda steps: None) -> Iterator[Outcome]:
    """Rows and skips, sizes in the order asked for, each as soon as it is known."""
    if request.backend == "sim":
        return _run_sim(request, progress)
    return _run_processes(request, progress)


def check_baselines(request: Request) -> None:
    """Raises where a baseline cannot run here: before anything has been started."""
    if request.baselines and request.backend == "sim":
        raise error(
            "unsupported",
            f"--baseline {','.join(request.baselines)} needs real time: use --backend host",
        )
    for name in request.baselines:
        check_baseline(name)


def skip_or_raise(request_named: bool, failure: offcore.Error) -> str:
    """The reason to skip a variant for, where skipping is allowed."""
    if request_named or failure.code != "unsupported":
        raise failure
    return str(failure)


class _SimRig:
    """Communicators of one thread: one with bytes, one without, made when first needed."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._exercises: dict[bool, Exercise] = {}
        self._real_max = max((s for s in request.sizes if s <= PHANTOM_ABOVE_BYTES), default=0)

    def exercise(self, nbytes: int) -> Exercise:
        request = self._request
        phantom = nbytes > PHANTOM_ABOVE_BYTES or not request.check
        if phantom not in self._exercises:
            comm = offcore.Communicator(
                backend="sim",
                machine=request.machine,
                ranks=request.ranks,
                phantom=phantom,
                timeout=request.timeout_s,
            )
            nbytes_max = max(request.sizes) if phantom else self._real_max
            self._exercises[phantom] = Exercise(
                comm, request.op, request.in_place, nbytes_max, request.protocol, phantom
            )
        return self._exercises[phantom]

    def close(self) -> None:
        for exercise in self._exercises.values():
            exercise.comm.close()


def _sim_size(
    request: Request, rig: _SimRig, position: int, stop: threading.Event, progress: Progress
) -> list[Outcome]:
    exercise = rig.exercise(request.sizes[position])
    layout = exercise.layout(request.sizes[position])
    outcomes: list[Outcome] = []
    for number, variant in enumerate(request.variants):
        if stop.is_set():
            break
        seed = (position * len(request.variants) + number + 1) * _SEED_STRIDE
        try:
            result, wrong = exercise.checked_call(layout, variant, seed)
        except offcore.Error as failure:
            reason = skip_or_raise(request.named, failure)
            outcomes.append(Skip(variant, layout.nbytes, reason))
        else:
            facts = facts_of(result)
            outcomes.append(_row(request, "offcore", layout.nbytes, [result.time_us], wrong, facts))
        progress(1)
    return outcomes


def _run_sim(request: Request, progress: Progress) -> Iterator[Outcome]:
    threads = min(os.cpu_count() or 1, _SIM_THREADS_MAX, len(request.sizes))
    rigs: queue.SimpleQueue[_SimRig] = queue.SimpleQueue()
    for _ in range(threads):
        rigs.put(_SimRig(request))
    stop = threading.Event()

    def task(position: int) -> list[Outcome]:
        rig = rigs.get()
        try:
            return _sim_size(request, rig, position, stop, progress)
        finally:
            rigs.put(rig)

    # The largest sizes first, so that no thread is left with one of them at the end.
    order = sorted(range(len(request.sizes)), key=lambda position: -request.sizes[position])
    pool = ThreadPoolExecutor(threads)
    try:
        futures: dict[int, Future[list[Outcome]]] = {p: pool.submit(task, p) for p in order}
        for position in range(len(request.sizes)):
            yield from futures[position].result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        while not rigs.empty():
            rigs.get().close()


def _row(
    request: Request,
    impl: str,
    nbytes: int,
    times_us: list[float],
    wrong: int | None,
    facts: dict[str, Any],
) -> Row:
    return Row(
        impl=impl,
        op=request.op,
        backend=request.backend,
        ranks=request.ranks,
        bytes=nbytes,
        time_us=round(statistics.median(times_us), 4),
        time_us_min=round(min(times_us), 4),
        time_us_max=round(max(times_us), 4),
        wrong=wrong,
        **facts,
    )


def _run_processes(request: Request, progress: Progress) -> Iterator[Outcome]:
    job = asdict(request) | {"store": f"127.0.0.1:{free_port()}"}
    with Crew(request.ranks, job, request.timeout_s) as crew:
        for parts in crew.outcomes(progress):
            first = parts[0]
            if first["event"] == "skip":
                yield Skip(first["name"], first["bytes"], first["reason"])
                continue
            # A batch ends when its slowest rank has ended.
            batches = zip(*(part["times_us"] for part in parts), strict=True)
            checked = [part["wrong"] for part in parts if part["wrong"] is not None]
            yield _row(
                request,
                first["impl"],
                first["bytes"],
                [max(batch) for batch in batches],
                sum(checked) if len(checked) == len(parts) else None,
                first["facts"],
            )
