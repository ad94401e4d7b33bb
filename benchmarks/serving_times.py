"""Where the time until the first token goes on the host, for serving.py."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Times:
    """Host milliseconds of the parts of one run until the first forward has been enqueued.

    lookup: hashing and search of prompts, with the submission of loads. submit: of that, the calls
    that start loads. join: what the host waits until the stream can wait for the loads. forward:
    the first forward's launches. forward_at: when it begins, counted from the run's beginning.
    load_at: when the first load has been called, and load: from then until the last one was seen to
    end, with load_gbps, all loads' rate; paths: theirs, where the transfer reports it.
    """

    def __init__(self) -> None:
        self._ms: defaultdict[str, float] = defaultdict(float)
        self._jobs: list[Any] = []
        self._called: list[float] = []
        self.paths: set[str] = set()
        self._began = 0.0
        self._over = False

    @contextmanager
    def of(self, cache: Any, model: Any) -> Iterator[Times]:
        """Measures while it is open; nothing of the engine is changed afterwards."""
        owners = [(model, "forward", "forward")]
        if getattr(cache, "tier", None) is not None:
            owners += [(cache, "search_prefix_match", "lookup"), (cache, "join", "join")]
            owners += [(cache.transfer, "load", "submit")]
        for owner, name, part in owners:
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        self._began = time.perf_counter()
        try:
            yield self
        finally:
            for owner, name, _ in owners:
                delattr(owner, name)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._over:
                return call(*args, **kwargs)
            began = time.perf_counter()
            result = call(*args, **kwargs)
            self._ms[part] += (time.perf_counter() - began) * 1e3
            if part == "submit":
                self._jobs.append(result)
                self._called.append(began)
            if part == "forward":
                self._ms["forward_at"] = (began - self._began) * 1e3
                self._over = True
            return result

        return timed

    def row(self) -> dict[str, float]:
        """The parts, as "lookup_ms" and so on."""
        row = {f"{part}_ms": ms for part, ms in self._ms.items()}
        reports = [job.wait() for job in self._jobs]
        if reports and all(reports):
            self.paths = {one.path for one in reports}
            ends = [
                called + (one.submit_us + one.queued_us + one.copy_us) / 1e6
                for called, one in zip(self._called, reports, strict=True)
            ]
            row["load_at_ms"] = (self._called[0] - self._began) * 1e3
            row["load_ms"] = (max(ends) - self._called[0]) * 1e3
            row["load_gbps"] = sum(one.bytes for one in reports) / row["load_ms"] / 1e6
            row["enqueue_ms"] = sum(one.enqueue_us for one in reports) / 1e3
            row["commands"] = sum(one.commands for one in reports)
        return row
