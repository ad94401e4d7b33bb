"""What is measured beside offcore: where a rank stands, what it calls, what cannot be had."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from offcore.errors import error
from offcore.tools.bench.layout import ROOT, Layout
from offcore.tools.bench.timers import Enqueue
from offcore.tools.bench.values import Values

NO_TORCH = "needs torch (pip install torch)"


@dataclass(frozen=True)
class Place:
    """Where a worker process stands."""

    rank: int
    ranks: int
    folder: str  # empty at first, and the same for all ranks
    nbytes_max: int
    gpu: int = -1
    stream: int = 0  # the driver's handle of the stream that is timed
    sms: int = 0  # that a reduction of offcore's may take


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


def facts_of(layout: Layout, machine: str, mode: str = "eager", **more: Any) -> dict[str, Any]:
    unknown = ("variant", "native", "protocol", "commands", "engines", "syncs", "phases")
    known = {"machine": machine, "in_place": layout.in_place, "mode": mode}
    reduced = {} if layout.values is None else layout.values.facts
    return known | dict.fromkeys(unknown) | reduced | more


def one_after_the_other(call: Callable[[], Any]) -> Enqueue:
    return lambda calls: [call() for _ in range(calls)]


def torch_for(name: str) -> Any:
    """torch, built with what the baseline needs. Raises unavailable."""
    try:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
    except ImportError:
        raise error("unavailable", f"baseline {name}: {NO_TORCH}") from None
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


def in_torch(layout: Layout) -> Layout:
    """The layout that torch.distributed has: all_reduce and reduce are in place only."""
    return replace(layout, in_place=True) if layout.op in ("all_reduce", "reduce") else layout


def _reduction(
    torch: Any, layout: Layout, values: Values, rank: int, out: Any, inp: Any, **options: Any
) -> Callable[[], Any]:
    group = torch.distributed
    kind = getattr(torch, values.dtype)
    if values.reduction == "premul_sum":
        options["op"] = group._make_nccl_premul_sum(values.scale)
    else:
        options["op"] = getattr(group.ReduceOp, values.reduction.upper())
    whole = inp[: layout.nbytes].view(kind)
    if layout.op == "all_reduce":
        return lambda: group.all_reduce(whole, **options)
    if layout.op == "reduce":
        return lambda: group.reduce(whole, ROOT, **options)
    begin, nbytes = layout.reduced_by(rank)
    at = begin if layout.in_place else 0
    part = out[at : at + nbytes].view(kind)
    return lambda: group.reduce_scatter_tensor(part, whole, **options)


def collective(
    torch: Any, layout: Layout, rank: int, out: Any, inp: Any, **options: Any
) -> Callable[[], Any]:
    """torch.distributed's call for this layout. out, inp: whole buffers; the same one in place."""
    if layout.values is not None:
        return _reduction(torch, layout, layout.values, rank, out, inp, **options)
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
