"""What offcore is measured beside, in the same processes and on the same sizes.

`memcpy`: every rank copies, with one thread, as many bytes as the operation has to bring to it:
the bandwidth that no exchange through shared memory on these cores can pass.
`gloo`: torch.distributed on tensors in host memory.
`nccl`, `nccl-sms`, `nccl-ce`: NCCL's kernels, the same on as many SMs as offcore's reductions may
take, and its copy-engine collectives, on GPUs (see nccl.py).
torch is optional.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offcore.errors import Error, error
from offcore.tools.bench.layout import Bytes, Layout
from offcore.tools.bench.nccl import Nccl
from offcore.tools.bench.subjects import (
    NO_TORCH,
    Baseline,
    Done,
    Place,
    Subject,
    collective,
    facts_of,
    in_torch,
    join_world,
    leave_world,
    one_after_the_other,
    refuse,
    torch_for,
)

# The backend that each is measured beside.
BACKENDS = {
    "gloo": "host",
    "memcpy": "host",
    "nccl": "cuda",
    "nccl-sms": "cuda",
    "nccl-ce": "cuda",
}
BASELINES = tuple(BACKENDS)

_SEED = 1 << 48  # far from the seeds of offcore's own calls
_NCCL_ONLY = ("avg", "premul_sum")  # of torch.distributed's reductions


def open_baseline(name: str, place: Place) -> Baseline:
    if name == "memcpy":
        return Memcpy(place)
    if name == "gloo":
        return Gloo(place)
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
        return NO_TORCH
    return ""


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
        if layout.values is not None:
            raise error("unsupported", f"memcpy is no ceiling of {layout.op}: it does not reduce")
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
        layout = in_torch(layout)
        if layout.values is not None and layout.values.reduction in _NCCL_ONLY:
            raise error("unsupported", f"gloo has no {layout.values.reduction}")
        inp = self._out if layout.in_place else self._inp
        tensors = (self._torch.from_numpy(self._out), self._torch.from_numpy(inp))
        call = collective(self._torch, layout, self._rank, *tensors, async_op=True)
        wrong = None
        if check:  # a call of its own, on fresh inputs, checked as offcore's are
            layout.fill(self._rank, inp, _SEED + layout.nbytes)
            self._first(call)
            wrong = layout.wrong(self._rank, self._out, _SEED + layout.nbytes)
        return [Subject(facts_of(layout, machine), one_after_the_other(call), wrong=wrong)]

    def _first(self, call: Callable[[], Any]) -> None:
        """Refused on all ranks alike, where the operation or its dtype is not gloo's."""
        try:
            call().wait()
        except (RuntimeError, TypeError) as failure:
            raise error("unsupported", f"gloo: {str(failure).splitlines()[0]}") from None

    def proven(self, layout: Layout, facts: dict[str, Any]) -> dict[str, Any] | str:
        return facts

    def close(self) -> None:
        leave_world(self._torch)
