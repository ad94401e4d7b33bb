"""The process of one rank: `python -m offcore.workers`, a job on stdin, JSON lines on stdout.

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
from collections.abc import Callable
from typing import Any, Protocol, TextIO

import offcore
from offcore.baselines import open_baseline
from offcore.bench import Request, skip_or_raise
from offcore.exercise import Exercise, facts_of

_PR_SET_PDEATHSIG = 1


class Waits(Protocol):
    def wait(self) -> Any: ...


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


class Worker:
    def __init__(self, job: dict[str, Any], say: TextIO) -> None:
        self._say = say
        self._rank: int = job.pop("rank")
        self._folder: str = job.pop("folder")
        store: str = job.pop("store")
        self._request = Request(**job)
        request = self._request
        self._comm = offcore.Communicator(
            backend=request.backend,
            machine=request.machine,
            store=store,
            rank=self._rank,
            world_size=request.ranks,
            timeout=request.timeout_s,
        )
        self._exercise = Exercise(
            self._comm, request.op, request.in_place, max(request.sizes), request.protocol, False
        )
        self._barrier_word = self._comm.window(8 * request.ranks)

    def run(self) -> None:
        request = self._request
        baselines = {
            name: open_baseline(name, self._rank, request.ranks, max(request.sizes), self._folder)
            for name in request.baselines
        }
        for position, nbytes in enumerate(request.sizes):
            layout = self._exercise.layout(nbytes)
            for number, variant in enumerate(request.variants):
                self._measure_variant(variant, nbytes, position * request.steps + number + 1)
            for name, baseline in baselines.items():
                try:
                    launch, facts = baseline.prepare(layout, self._comm.machine)
                except offcore.Error as failure:
                    self._skip(name, nbytes, skip_or_raise(False, failure))
                    continue
                times_us = self._batches(launch)
                wrong = baseline.wrong(layout) if request.check else None
                self._row(name, nbytes, times_us, wrong, facts)
        for baseline in baselines.values():
            baseline.close()
        self._comm.close()

    def _measure_variant(self, variant: str, nbytes: int, case: int) -> None:
        exercise, request = self._exercise, self._request
        layout = exercise.layout(nbytes)
        seed = case << 16
        try:
            result, wrong = exercise.checked_call(layout, variant, seed)
        except offcore.Error as failure:
            self._skip(variant, nbytes, skip_or_raise(request.named, failure))
            return
        launch = exercise.launch_of(layout)
        times_us = self._batches(lambda: launch(variant))
        self._row("offcore", nbytes, times_us, wrong if request.check else None, facts_of(result))

    def _batches(self, launch: Callable[[], Waits]) -> list[float]:
        """Microseconds a call of each batch: all of its calls are enqueued, then all awaited."""
        request = self._request
        for _ in range(request.warmup):
            launch().wait()
        times_us = []
        for _ in range(request.batches):
            self._barrier()
            start_ns = time.perf_counter_ns()
            handles = [launch() for _ in range(request.calls)]
            for handle in handles:
                handle.wait()
            times_us.append((time.perf_counter_ns() - start_ns) / request.calls / 1e3)
            self._emit({"event": "progress", "steps": 1 / request.batches})
        return times_us

    def _barrier(self) -> None:
        """No rank leaves before every rank has come: an exchange of a few bytes."""
        self._comm.all_gather(self._barrier_word).wait()

    def _row(
        self,
        impl: str,
        nbytes: int,
        times_us: list[float],
        wrong: int | None,
        facts: dict[str, Any],
    ) -> None:
        self._emit(
            {
                "event": "row",
                "impl": impl,
                "bytes": nbytes,
                "times_us": times_us,
                "wrong": wrong,
                "facts": facts,
            }
        )

    def _skip(self, name: str, nbytes: int, reason: str) -> None:
        self._emit({"event": "skip", "name": name, "bytes": nbytes, "reason": reason})
        self._emit({"event": "progress", "steps": 1})

    def _emit(self, event: dict[str, Any]) -> None:
        self._say.write(json.dumps(event) + "\n")
        self._say.flush()


def main() -> int:
    job = json.loads(sys.stdin.readline())
    die_with(job.pop("parent"))
    # Libraries print to stdout too; what the parent reads goes through a descriptor of its own.
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        Worker(job, say).run()
        say.write('{"event": "end"}\n')
    except offcore.Error as failure:
        say.write(
            json.dumps({"event": "error", "code": failure.code, "message": str(failure)}) + "\n"
        )
        return 1
    finally:
        say.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
