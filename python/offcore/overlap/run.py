"""Execution of plans: on streams of a GPU, or in threads without one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from offcore.errors import error
from offcore.overlap.sms import sms_for_gemms


@dataclass(frozen=True)
class Place:
    """Where a kernel runs: on engines, or on this many cores (None: unrestricted)."""

    engines: bool
    cores: int | None


@dataclass(frozen=True)
class Launch:
    """A kernel of a plan. compute: its GEMMs are kept to the cores of its place. urgent: before
    what is launched later."""

    name: str
    place: Place
    compute: bool
    urgent: bool


Calls = Mapping[str, Callable[[Place], Any]]
_streams: dict[tuple[int, int, bool], Any] = {}  # by device, place in the order, priority


def check_calls(launches: list[Launch], calls: Calls) -> None:
    names = {one.name for one in launches}
    if names != calls.keys():
        missing, more = sorted(names - calls.keys()), sorted(calls.keys() - names)
        raise error(
            "invalid", f"calls must name the plan's kernels: missing {missing}, extra {more}"
        )


def run(launches: list[Launch], calls: Calls, *, serial: bool) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        _on_streams(torch, launches, calls, serial)
    elif serial:
        for one in launches:
            _wait(calls[one.name](one.place))
    else:
        _in_threads(launches, calls)


def _on_streams(torch: Any, launches: list[Launch], calls: Calls, serial: bool) -> None:
    """Each kernel in a stream of its own between two points of the current one."""
    current = torch.cuda.current_stream()
    device = current.device.index
    used = []
    for number, one in enumerate(launches):
        stream = current
        if not serial:
            key = (device, number, one.urgent)
            if key not in _streams:
                _streams[key] = torch.cuda.Stream(device, priority=-1 if one.urgent else 0)
            stream = _streams[key]
            stream.wait_stream(current)
            used.append(stream)
        cores = one.place.cores if one.compute else None
        with torch.cuda.stream(stream), sms_for_gemms(torch, cores):
            calls[one.name](one.place)
    for stream in used:
        current.wait_stream(stream)


def _in_threads(launches: list[Launch], calls: Calls) -> None:
    def work(one: Launch) -> None:
        _wait(calls[one.name](one.place))

    with ThreadPoolExecutor(len(launches)) as pool:
        started = [pool.submit(work, one) for one in launches]
    for one in started:
        one.result()


def _wait(result: Any) -> None:
    """A handle is waited for; whatever else a call gives has ended."""
    if hasattr(result, "wait"):
        result.wait()
