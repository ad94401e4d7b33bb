"""What offcore is measured beside, in the same processes and on the same sizes.

`memcpy`: every rank copies, with one thread, as many bytes as the operation has to bring to it:
the bandwidth that no exchange through shared memory on these cores can pass.
`gloo`: torch.distributed on tensors in host memory. torch is optional.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from offcore.errors import error
from offcore.layout import ROOT, Bytes, Layout

BASELINES = ("gloo", "memcpy")

_GLOO_SEED = 1 << 48  # far from the seeds of offcore's own calls


class Done:
    """The handle of a call that has ended when it returns."""

    def wait(self) -> None:
        pass


class Baseline(Protocol):
    def prepare(self, layout: Layout, machine: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        """The call to measure, and its row's fields. Raises unsupported."""

    def wrong(self, layout: Layout) -> int | None: ...

    def close(self) -> None: ...


def open_baseline(name: str, rank: int, ranks: int, nbytes_max: int, folder: str) -> Baseline:
    if name == "memcpy":
        return Memcpy(rank, nbytes_max)
    if name == "gloo":
        return Gloo(rank, ranks, nbytes_max, folder)
    raise error("invalid", f"no baseline is called '{name}': there are gloo and memcpy")


def check_baseline(name: str) -> None:
    """Raises where the baseline cannot run here: before anything has been started."""
    if name == "gloo":
        _torch()
    elif name != "memcpy":
        raise error("invalid", f"no baseline is called '{name}': there are gloo and memcpy")


def _facts(layout: Layout, machine: str) -> dict[str, Any]:
    unknown = ("variant", "native", "protocol", "commands", "engines", "syncs", "phases")
    known = {"machine": machine, "in_place": layout.in_place, "mode": "eager"}
    return known | dict.fromkeys(unknown)


class Memcpy:
    def __init__(self, rank: int, nbytes_max: int) -> None:
        self._rank = rank
        self._dst: Bytes = np.zeros(nbytes_max, np.uint8)
        self._src: Bytes = np.ones(nbytes_max, np.uint8)

    def prepare(self, layout: Layout, machine: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        foreign = sum(p.nbytes for p in layout.pieces(self._rank) if p.source != self._rank)
        dst, src, done = self._dst[:foreign], self._src[:foreign], Done()

        def call() -> Done:
            np.copyto(dst, src)
            return done

        return call, _facts(layout, machine)

    def wrong(self, layout: Layout) -> int | None:
        return None

    def close(self) -> None:
        pass


def _torch() -> Any:
    try:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
    except ImportError:
        raise error(
            "unavailable",
            "the baseline gloo needs torch: pip install torch "
            "--index-url https://download.pytorch.org/whl/cpu",
        ) from None
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise error("unavailable", "the baseline gloo needs a torch that was built with gloo")
    return torch


class Gloo:
    def __init__(self, rank: int, ranks: int, nbytes_max: int, folder: str) -> None:
        self._torch = _torch()
        self._rank = rank
        self._group = self._torch.distributed
        self._group.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=ranks
        )
        self._out: Bytes = np.zeros(nbytes_max, np.uint8)
        self._inp: Bytes = np.zeros(nbytes_max, np.uint8)
        self._call: Callable[[], Any] = Done

    def prepare(self, layout: Layout, machine: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        if not layout.even:
            raise error("unsupported", "gloo has no exact form of a size the ranks do not divide")
        if layout.in_place and layout.op == "all_to_all":
            raise error("unsupported", "gloo has no all-to-all in place")
        if layout.nbytes == 0:
            raise error("unsupported", "gloo cannot run a size of 0")
        self._call = self._call_of(layout)
        return self._call, _facts(layout, machine)

    def _call_of(self, layout: Layout) -> Callable[[], Any]:
        tensor = self._torch.from_numpy
        own = layout.counts[self._rank]
        at = sum(layout.counts[: self._rank]) if layout.in_place else 0
        inp_at = self._buffer(layout)
        group, root = self._group, self._rank == ROOT
        out, inp = tensor(self._out[: layout.out_bytes]), tensor(inp_at[at : at + layout.in_bytes])
        if layout.op == "all_gather":
            return lambda: group.all_gather_into_tensor(out, inp[:own], async_op=True)
        if layout.op == "all_to_all":
            return lambda: group.all_to_all_single(out, inp, async_op=True)
        if layout.op == "broadcast":
            return lambda: group.broadcast(out, ROOT, async_op=True)
        if layout.op == "scatter":
            parts = list(inp.split(own)) if root else None
            return lambda: group.scatter(out, parts, ROOT, async_op=True)
        places = list(out.split(own)) if root else None
        return lambda: group.gather(inp, places, ROOT, async_op=True)

    def _buffer(self, layout: Layout) -> Bytes:
        return self._out if layout.in_place else self._inp

    def wrong(self, layout: Layout) -> int | None:
        """One more call, on fresh inputs, checked as offcore's are."""
        layout.fill(self._rank, self._buffer(layout), _GLOO_SEED + layout.nbytes)
        self._call().wait()
        return layout.wrong(self._rank, self._out, _GLOO_SEED + layout.nbytes)

    def close(self) -> None:
        self._group.destroy_process_group()
