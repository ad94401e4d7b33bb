"""NCCL beside offcore, on the stream that is timed: its kernels (`nccl`), the same on at most as
many CTAs as a reduction of offcore's takes SMs (`nccl-sms`), and its copy-engine collectives
(`nccl-ce`); each called eagerly and replayed as a graph.

NVLink multicast is off: ENVIRONMENT stands in the workers' before torch is imported. NCCL's copy
engines want both buffers in symmetric windows and a communicator that may use no CTA, and NCCL
takes its kernels silently where they do not fit. So a row of `nccl-ce` is shown only when a
profiled call has run no kernel.
"""

from __future__ import annotations

import datetime
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offcore.errors import error
from offcore.tools.bench.layout import Layout
from offcore.tools.bench.subjects import (
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

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUDA_MODULE_LOADING": "EAGER",  # a first launch would wait for the gate that it stands behind
}
CHECKED_MAX = 64 << 20

_COPY_ENGINES = ("all_gather", "all_to_all")
_NO_CTA = 2  # ncclConfig's CTA policy ZERO, where torch has no name for it
_LIMIT = datetime.timedelta(seconds=60)
_SEED = 1 << 49


def kernels_of(trace: dict[str, Any], control: int) -> int | None:
    """How many kernels a profiler's trace shows besides the `control` ones that ran for sure.

    None: it does not even show those, so it proves nothing.
    """
    seen = sum(event.get("cat") == "kernel" for event in trace.get("traceEvents", ()))
    return seen - control if seen >= control else None


def profiled(torch: Any, run: Callable[[], None]) -> int | None:
    """How many kernels `run` leads to besides the one that it launches for sure; it ends when they
    have. None: the profiler does not show that one, or cannot be had, and proves nothing."""
    kinds = torch.profiler.ProfilerActivity
    try:
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            run()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return kernels_of(json.loads(path.read_text("utf-8")), control=1)
    except Exception:  # verdict() tells
        return None


def verdict(name: str, kernels: Sequence[int | None]) -> str:
    """Why the rows of copy-engine collectives must not be shown; empty: no rank ran a kernel."""
    if any(count is None for count in kernels):
        return f"{name} is not proven: the profiler did not see this GPU's kernels"
    if any(kernels):
        counts = ", ".join(map(str, kernels))
        return f"NCCL ran kernels instead of copy engines (kernels by rank: {counts})"
    return ""


class _Finished:
    """Waits until the stream has done all that is in it."""

    def __init__(self, stream: Any) -> None:
        self.wait: Callable[[], None] = stream.synchronize


class Nccl:
    def __init__(self, name: str, place: Place) -> None:
        self._name = name
        self._place = place
        self._torch = torch = torch_for(name)
        if not torch.cuda.is_available():
            raise error("unavailable", f"baseline {name}: needs a torch that sees the GPUs")
        join_world(torch, place)
        self._device = torch.device("cuda", place.gpu)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.ExternalStream(place.stream, device=self._device)
        self._engines = name == "nccl-ce"
        self._sms = place.sms if name == "nccl-sms" else None  # None: NCCL's own choice
        # Why this baseline cannot be had, agreed by all ranks; else empty.
        self._refusal = self._agreed(self._open)
        self._calls: dict[Layout, Callable[[], Any]] = {}

    def _open(self) -> None:
        torch, dist = self._torch, self._torch.distributed
        options = dist.ProcessGroupNCCL.Options()
        if self._engines:
            policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", _NO_CTA)
            options.config.cta_policy = policy
        if self._sms:
            options.config.max_ctas = self._sms
        self._group = dist.new_group(
            backend="nccl", timeout=_LIMIT, pg_options=options, device_id=self._device
        )
        word = torch.zeros(1, device=self._device)
        dist.all_reduce(word, group=self._group)  # makes the communicator, if it is not yet
        torch.cuda.synchronize(self._device)
        nbytes = self._place.nbytes_max
        if not self._engines:
            self._buffers = [self._zeros(nbytes) for _ in range(2)]
            return
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        symmetric.set_backend("NCCL")
        self._buffers = [
            symmetric.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        ]
        for buffer in self._buffers:
            symmetric.rendezvous(buffer, self._group.group_name)

    def _zeros(self, nbytes: int) -> Any:
        return self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)

    def _agreed(self, step: Callable[[], Any]) -> str:
        """Takes a step; the first line of what went wrong on some rank. Collective."""
        reason = ""
        try:
            step()
        except Exception as failure:  # whatever NCCL and torch raise
            reason = f"{self._name}: {type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
        told: list[str] = [""] * self._place.ranks
        self._torch.distributed.all_gather_object(told, reason)
        return next((one for one in told if one), "")

    def subjects(self, layout: Layout, machine: str, calls: int, check: bool) -> Sequence[Subject]:
        refuse(self._name, layout)
        if self._engines and layout.op not in _COPY_ENGINES:
            raise error("unsupported", f"NCCL has no {layout.op} by copy engines")
        if self._sms and layout.values is None:
            raise error(
                "unsupported", f"{self._name} is measured beside what takes SMs: reductions"
            )
        if self._refusal:
            raise error("unsupported", self._refusal)
        layout = in_torch(layout)
        found: list[Subject] = []
        if reason := self._agreed(lambda: found.extend(self._prepared(layout, machine, calls))):
            raise error("unsupported", reason)
        if not check or layout.nbytes > CHECKED_MAX or not self._exact(layout):
            return found
        wrong = self._wrong(layout)
        return [Subject(s.facts, s.enqueue, s.alone, wrong) for s in found]

    def _exact(self, layout: Layout) -> bool:
        """Whether its result is known to the bit: averages it makes by a rounded 1 / ranks."""
        ranks = layout.ranks
        return layout.values is None or layout.values.reduction != "avg" or ranks & (ranks - 1) == 0

    def _prepared(self, layout: Layout, machine: str, calls: int) -> list[Subject]:
        torch, stream = self._torch, self._stream
        out, inp = self._buffers[0], self._buffers[0 if layout.in_place else 1]
        library = collective(torch, layout, self._place.rank, out, inp, group=self._group)
        ended = _Finished(stream)

        def call() -> _Finished:
            with torch.cuda.stream(stream):
                library()
            return ended

        self._calls[layout] = call
        for _ in range(2):
            call().wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                library()

        def replay(_: int) -> list[_Finished]:
            with torch.cuda.stream(stream):
                graph.replay()
            return [ended]

        facts: dict[str, Any] = {"nvls": "off", "sms": self._sms}
        return [
            Subject(facts_of(layout, machine, **facts), one_after_the_other(call)),
            Subject(facts_of(layout, machine, "graph", **facts), replay, alone=False),
        ]

    def _wrong(self, layout: Layout) -> int:
        """One more call, on fresh inputs, checked as offcore's are."""
        torch, rank = self._torch, self._place.rank
        seed = _SEED + layout.nbytes
        offset, nbytes = layout.input_of(rank)
        host = np.zeros(offset + nbytes, np.uint8)
        layout.fill(rank, host, seed)
        inp = self._buffers[0 if layout.in_place else 1]
        inp[offset : offset + nbytes].copy_(torch.from_numpy(host[offset:]))
        torch.cuda.synchronize(self._device)
        torch.distributed.barrier()
        self._calls[layout]().wait()
        return layout.wrong(rank, self._buffers[0][: layout.out_bytes].cpu().numpy(), seed)

    def proven(self, layout: Layout, facts: dict[str, Any]) -> dict[str, Any] | str:
        if not self._engines:
            return facts
        counts: list[int | None] = [None] * self._place.ranks
        self._torch.distributed.all_gather_object(counts, self._profiled(layout))
        return verdict(self._name, counts) or facts | {"kernels": 0}

    def _profiled(self, layout: Layout) -> int | None:
        """The kernels of one call. One of our own in the same trace shows that they are seen."""
        torch, call = self._torch, self._calls[layout]
        word = self._zeros(1)
        word.add_(1)  # loads that kernel
        torch.cuda.synchronize(self._device)

        def one() -> None:
            with torch.cuda.stream(self._stream):
                word.add_(1)
            call().wait()

        return profiled(torch, one)

    def close(self) -> None:
        self._calls.clear()
        leave_world(self._torch)
