"""What offcore is measured beside, in the same processes and on the same sizes.

`memcpy`: every rank copies, with one thread, as many bytes as the operation has to bring to it:
the bandwidth that no exchange through shared memory on these cores can pass.
`gloo`: torch.distributed on tensors in host memory.
`nccl`, `nccl-ce`: NCCL's kernels and its copy-engine collectives, on GPUs (see nccl.py).
torch is optional.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from offcore.errors import Error, error
from offcore.layout import ROOT, Bytes, Layout
from offcore.timers import Enqueue

# The backend that each is measured beside.
BACKENDS = {"gloo": "host", "memcpy": "host", "nccl": "cuda", "nccl-ce": "cuda"}
BASELINES = tuple(BACKENDS)

_NO_TORCH = "needs torch (pip install torch)"
_SEED = 1 << 48  # far from the seeds of offcore's own calls


@dataclass(frozen=True)
class Place:
    """Where a worker process stands."""

    rank: int
    ranks: int
    folder: str  # empty at first, and the same for all ranks
    nbytes_max: int
    gpu: int = -1
    stream: int = 0  # the driver's handle of the stream that is timed


@dataclass(frozen=True)
class Subject:
    """Something to measure: its row's fields, and what enqueues calls of it."""

    facts: dict[str, Any]
    enqueue: Enqueue
    alone: bool = True  # whether it can be timed as one call too
    wrong: int | None = None


class Done:
    """The handle of a call that has ended when it returns."""

    def wait(self) -> None:
        pass


class Baseline(Protocol):
    def subjects(self, layout: Layout, machine: str, calls: int, check: bool) -> Sequence[Subject]:
        """What to measure at this size; collective. Raises unsupported on all ranks alike."""

    def proven(self, layout: Layout, facts: dict[str, Any]) -> dict[str, Any] | str:
        """After all has been timed: the row's fields, or why it must not be shown; collective."""

    def close(self) -> None: ...


def open_baseline(name: str, place: Place) -> Baseline:
    if name == "memcpy":
        return Memcpy(place)
    if name == "gloo":
        return Gloo(place)
    from offcore.nccl import Nccl

    return Nccl(name, place)


def check_baseline(name: str, backend: str) -> None:
    """Raises invalid for an unknown baseline, unsupported for one of another backend."""
    if name not in BACKENDS:
        known = ", ".join(BASELINES)
        raise error("invalid", f"no baseline is called '{name}': there are {known}")
    if backend != BACKENDS[name]:
        raise error(
            "unsupported",
            f"--baseline {name} is measured beside --backend {BACKENDS[name]}, not {backend}",
        )


def absence(name: str) -> str:
    """Why a known baseline cannot be had here; empty where it can."""
    # Not imported here, where nothing needs it: that takes seconds. Its ranks say what it lacks.
    if name != "memcpy" and importlib.util.find_spec("torch") is None:
        return _NO_TORCH
    return ""


def facts_of(layout: Layout, machine: str, mode: str = "eager", **more: Any) -> dict[str, Any]:
    unknown = ("variant", "native", "protocol", "commands", "engines", "syncs", "phases")
    known = {"machine": machine, "in_place": layout.in_place, "mode": mode}
    return known | dict.fromkeys(unknown) | more


def one_after_the_other(call: Callable[[], Any]) -> Enqueue:
    return lambda calls: [call() for _ in range(calls)]


def torch_for(name: str) -> Any:
    """torch, built with what the baseline needs. Raises unavailable."""
    try:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
    except ImportError:
        raise error("unavailable", f"baseline {name}: {_NO_TORCH}") from None
    library = name.partition("-")[0]
    if not distributed.is_available() or not getattr(distributed, f"is_{library}_available")():
        raise error("unavailable", f"baseline {name}: needs a torch that was built with {library}")
    return torch


def join_world(torch: Any, place: Place) -> None:
    """torch.distributed's default group, of gloo: once a process."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{place.folder}/world",
            rank=place.rank,
            world_size=place.ranks,
        )


def leave_world(torch: Any) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def collective(
    torch: Any, layout: Layout, rank: int, out: Any, inp: Any, **options: Any
) -> Callable[[], Any]:
    """torch.distributed's call for this layout. out, inp: whole buffers; the same one in place."""
    group, root = torch.distributed, rank == ROOT
    own = layout.counts[rank]
    at = sum(layout.counts[:rank]) if layout.in_place else 0
    out, inp = out[: layout.out_bytes], inp[at : at + layout.in_bytes]
    if layout.op == "all_gather":
        return lambda: group.all_gather_into_tensor(out, inp[:own], **options)
    if layout.op == "all_to_all":
        return lambda: group.all_to_all_single(out, inp, **options)
    if layout.op == "broadcast":
        return lambda: group.broadcast(out, ROOT, **options)
    if layout.op == "scatter":
        parts = list(inp.split(own)) if root else None
        return lambda: group.scatter(out, parts, ROOT, **options)
    places = list(out.split(own)) if root else None
    return lambda: group.gather(inp, places, ROOT, **options)


def refuse(name: str, layout: Layout) -> None:
    """Raises unsupported for what no library of torch.distributed has."""
    if not layout.even:
        raise error("unsupported", f"{name} has no exact form of a size the ranks do not divide")
    if layout.in_place and layout.op == "all_to_all":
        raise error("unsupported", f"{name} has no all-to-all in place")
    if layout.nbytes == 0:
        raise error("unsupported", f"{name} cannot run a size of 0")


class Absent:
    """Stands for a baseline that could not be opened: every size of it is left out."""

    def __init__(self, failure: Error) -> None:
        self._reason = str(failure)

    def subjects(self, layout: Layout, machine: str, calls: int, check: bool) -> Sequence[Subject]:
        raise error("unsupported", self._reason)

    def proven(self, layout: Layout, facts: dict[str, Any]) -> dict[str, Any] | str:
        return self._reason

    def close(self) -> None:
        pass


class Memcpy:
    def __init__(self, place: Place) -> None:
        self._rank = place.rank
        self._dst: Bytes = np.zeros(place.nbytes_max, np.uint8)
        self._src: Bytes = np.ones(place.nbytes_max, np.uint8)

    def subjects(self, layout: Layout, machine: str, calls: int, check: bool) -> Sequence[Subject]:
        foreign = sum(p.nbytes for p in layout.pieces(self._rank) if p.source != self._rank)
        dst, src, done = self._dst[:foreign], self._src[:foreign], Done()

        def call() -> Done:
            np.copyto(dst, src)
            return done

        return [Subject(facts_of(layout, machine), one_after_the_other(call))]

    def proven(self, layout: Layout, facts: dict[str, Any]) -> dict[str, Any] | str:
        return facts

    def close(self) -> None:
        pass


class Gloo:
    def __init__(self, place: Place) -> None:
        self._torch = torch_for("gloo")
        self._rank = place.rank
        join_world(self._torch, place)
        self._out: Bytes = np.zeros(place.nbytes_max, np.uint8)
        self._inp: Bytes = np.zeros(place.nbytes_max, np.uint8)

    def subjects(self, layout: Layout, machine: str, calls: int, check: bool) -> Sequence[Subject]:
        refuse("gloo", layout)
        inp = self._out if layout.in_place else self._inp
        tensors = (self._torch.from_numpy(self._out), self._torch.from_numpy(inp))
        call = collective(self._torch, layout, self._rank, *tensors, async_op=True)
        wrong = None
        if check:  # a call of its own, on fresh inputs, checked as offcore's are
            layout.fill(self._rank, inp, _SEED + layout.nbytes)
            call().wait()
            wrong = layout.wrong(self._rank, self._out, _SEED + layout.nbytes)
        return [Subject(facts_of(layout, machine), one_after_the_other(call), wrong=wrong)]

    def proven(self, layout: Layout, facts: dict[str, Any]) -> dict[str, Any] | str:
        return facts

    def close(self) -> None:
        leave_world(self._torch)
