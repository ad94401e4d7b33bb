"""What `offcore bench` measures.

On `sim` a time is virtual, hence exact: one call is enough, and sizes are spread over threads. On a
real machine every rank is a process (rank_worker.py); a batch is at least 20 calls enqueued ahead,
its time is that of the slowest rank, and a row holds the median, least and largest of at least 15
batches, in microseconds a call. Batches of all that is measured at a size take turns, so that what
disturbs the machine disturbs all alike.
"""

from __future__ import annotations

import itertools
import os
import queue
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import offcore
from offcore import _core, defaults
from offcore.comm.programs import REDUCING
from offcore.comm.programs import variants as variants_of
from offcore.errors import error
from offcore.tools.bench import nccl
from offcore.tools.bench.baselines import absence, check_baseline
from offcore.tools.bench.collective_runner import CollectiveRunner
from offcore.tools.bench.layout import Layout
from offcore.tools.bench.rank_processes import RankProcesses
from offcore.tools.bench.values import Values
from offcore.tools.report import Outcome, Row, Skip

VARIANTS = tuple(_core.variants())
KINDS = tuple(name for name in VARIANTS if not name.startswith("prelaunch_"))

SIGNALS = ("fenced", "copy_order")
OWN_COPIES = tuple(_core.own_copies())
TIMINGS = ("chain", "call")

PHANTOM_ABOVE_BYTES = 64 << 20  # on 8 ranks; of more ranks, as much in all
BATCHES = 15
CALLS = 20
WARMUP_CALLS = 5
SMS = 12

_PROCESSES_MAX = 128  # one a rank
_SIM_THREADS_MAX = 4
_GPU_BATCH_BYTES = 4 << 30  # GPUs keep time by events: large sizes need no long batches
_GPU_CALLS_MIN = 2
_SEED_STRIDE = 1 << 16  # above every number of ranks: streams of two calls never meet


Form = tuple[str | None, str]  # a communicator's signals and own_copy


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
    protocols: list[str] = field(default_factory=lambda: ["auto"])
    signals: list[str | None] = field(default_factory=lambda: [None])  # cuda: its signal forms
    own_copies: list[str] = field(default_factory=lambda: [OWN_COPIES[0]])  # cuda
    timings: list[str] = field(default_factory=lambda: ["chain"])
    batches: int = BATCHES
    calls: int = CALLS
    warmup: int = WARMUP_CALLS
    check: bool = True
    baselines: list[str] = field(default_factory=list)
    timeout_s: float = 30.0
    dtype: str = "float32"  # of operations that reduce, as the next two
    reduction: str = "sum"
    sms: int = SMS  # cuda

    @property
    def values(self) -> Values | None:
        return Values(self.dtype, self.reduction) if self.op in REDUCING else None

    def phantom(self, nbytes: int) -> bool:
        """Whether sim leaves the bytes out: they are too many, or are not to be checked."""
        return not self.check or nbytes * max(self.ranks, 8) > 8 * PHANTOM_ABOVE_BYTES

    def layout(self, nbytes: int) -> Layout:
        return Layout(self.op, self.ranks, nbytes, self.in_place, self.values)

    @property
    def forms(self) -> list[Form]:
        """The communicators that it takes."""
        return list(itertools.product(self.signals, self.own_copies))

    @property
    def steps(self) -> int:
        """How many rows are asked for."""
        rows = len(self.variants) * len(self.protocols) * len(self.forms) * len(self.timings)
        for name in self.baselines:
            rows += len(self.timings) + (name.startswith("nccl") and "chain" in self.timings)
        return len(self.sizes) * rows

    def calls_of(self, nbytes: int) -> int:
        """Calls a batch."""
        if self.backend != "cuda" or nbytes == 0:
            return self.calls
        return min(self.calls, max(_GPU_CALLS_MIN, _GPU_BATCH_BYTES // nbytes))


Progress = Callable[[float], None]  # told the steps done since the last time


def resolve_backend(backend: str, machine: str | None) -> str:
    """The backend of that name, which must be available, or what `auto` stands for."""
    if backend == "auto":
        return defaults.backend(machine)
    check_backend(backend)
    return backend


def check_backend(name: str) -> None:
    """Raises unavailable, and says why."""
    for known, usable, reason in offcore.probe_backends():
        if known == name and not usable:
            raise error("unavailable", f"backend {name}: {reason}; see: offcore doctor")


def run(request: Request, progress: Progress = lambda steps: None) -> Iterator[Outcome]:
    """Rows and skips, each as soon as it is known."""
    if request.backend == "sim":
        return _run_sim(request, progress)
    return run_processes([request], progress)


def variants_known(op: str) -> list[str]:
    """What `all` stands for."""
    return variants_of(op, ranks=2) if op in REDUCING else [*VARIANTS]


def check_baselines(request: Request) -> dict[str, str]:
    """The baselines that cannot be had here, and why. Raises for those that make no sense beside
    that backend: before anything has been started."""
    for name in request.baselines:
        check_baseline(name, request.backend)
    return {name: why for name in request.baselines if (why := absence(name))}


def skip_or_raise(request_named: bool, failure: offcore.Error) -> str:
    """The reason to skip a variant for, where skipping is allowed."""
    if request_named or failure.code != "unsupported":
        raise failure
    return str(failure)


class _SimRig:
    """Communicators of one thread: one with bytes, one without, made when first needed."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._runners: dict[tuple[bool, str], CollectiveRunner] = {}
        self._real_max = max((s for s in request.sizes if not request.phantom(s)), default=0)

    def runner(self, nbytes: int, protocol: str) -> CollectiveRunner:
        request = self._request
        phantom = request.phantom(nbytes)
        if (phantom, protocol) not in self._runners:
            comm = offcore.Communicator(
                backend="sim",
                machine=request.machine,
                ranks=request.ranks,
                phantom=phantom,
                timeout=request.timeout_s,
            )
            nbytes_max = max(request.sizes) if phantom else self._real_max
            self._runners[phantom, protocol] = CollectiveRunner(
                comm,
                request.op,
                request.in_place,
                nbytes_max,
                protocol,
                phantom,
                values=request.values,
            )
        return self._runners[phantom, protocol]

    def close(self) -> None:
        for runner in self._runners.values():
            runner.comm.close()


def _sim_size(
    request: Request, rig: _SimRig, position: int, stop: threading.Event, progress: Progress
) -> list[Outcome]:
    nbytes = request.sizes[position]
    outcomes: list[Outcome] = []
    cases = [(variant, asked) for asked in request.protocols for variant in request.variants]
    for number, (variant, asked) in enumerate(cases):
        if stop.is_set():
            break
        runner = rig.runner(nbytes, asked)
        seed = (position * len(cases) + number + 1) * _SEED_STRIDE
        try:
            result, wrong = runner.checked_call(runner.layout(nbytes), variant, seed)
        except offcore.Error as failure:
            reason = skip_or_raise(request.named, failure)
            outcomes.append(Skip(variant, nbytes, reason))
        else:
            facts = {"timing": "call", "asked": asked, "named": variant != "auto"}
            facts |= runner.facts_of(result)
            outcomes.append(_row(request, "offcore", nbytes, [result.time_us], wrong, facts))
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


def _check_ranks(request: Request) -> None:
    """Raises invalid for too many ranks: before any process has been started."""
    if request.ranks > _PROCESSES_MAX:
        reason = f"{request.ranks} ranks, a process each; {_PROCESSES_MAX} at most"
        raise error("invalid", reason)
    name = request.machine or defaults.machine(request.backend, request.ranks)
    machine = offcore.machines.load(name)
    if request.ranks > machine.ranks:
        reason = f"machine {machine.name} has {machine.ranks} ranks, not {request.ranks}"
        raise error("invalid", reason)


def run_processes(
    requests: Sequence[Request], progress: Progress = lambda steps: None
) -> Iterator[Outcome]:
    """Several requests in the same processes, one a rank. They share backend, machine, ranks,
    SMs and timeout. Prelaunched variants of GPUs come last, what has to be proven first at the
    end."""
    first = requests[0]
    _check_ranks(first)
    job = {"requests": [asdict(request) for request in requests]}
    environment = nccl.ENVIRONMENT if first.backend == "cuda" else {}
    with RankProcesses(first.ranks, job, first.timeout_s, environment) as processes:
        for parts in processes.outcomes(progress):
            if skips := [part for part in parts if part["event"] == "skip"]:
                yield Skip(skips[0]["name"], skips[0]["bytes"], skips[0]["reason"])
                continue
            told = parts[0]
            # A batch ends when its slowest rank has ended.
            batches = zip(*(part["times_us"] for part in parts), strict=True)
            checked = [part["wrong"] for part in parts if part["wrong"] is not None]
            yield _row(
                requests[told["request"]],
                told["impl"],
                told["bytes"],
                [max(batch) for batch in batches],
                sum(checked) if len(checked) == len(parts) else None,
                told["facts"],
            )
