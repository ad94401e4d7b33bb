"""An all-gather in front of the GEMM that needs it: one after the other, by offcore in chunks, and
by torch's fused form."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offcore.tools.overlap.stage import MEASURED, WARMUP, Shape, Stage

CHUNKS = (1, 2, 4)
_CLOSE = 0.02  # of the largest value, between forms that sum in another order

Calls = dict[str, Callable[[], Any]]


def rows(stage: Stage, shapes: Mapping[str, Shape]) -> Iterator[dict[str, Any]]:
    """m of a shape is the rows of all ranks."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield {"skipped": "a dependent GEMM: needs torch (pip install torch)"}
        return
    if stage.comm is None:
        yield {"skipped": "a dependent GEMM: an all-gather needs two GPUs"}
        return
    for name, shape in shapes.items():
        yield from _of_shape(stage, torch, name, shape)


def _of_shape(stage: Stage, torch: Any, name: str, shape: Shape) -> Iterator[dict[str, Any]]:
    on_gpu = stage.backend == "cuda"
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda" if on_gpu else "cpu"}
    rows = shape.m // stage.ranks
    shard = torch.randn(rows, shape.k, **made)
    weight = torch.randn(shape.k, shape.n, **made)
    whole = torch.empty(shape.m, shape.k, **made)
    out, wanted = (torch.empty(shape.m, shape.n, **made) for _ in range(2))
    calls: Calls = {"gemm alone": lambda: torch.mm(whole, weight, out=wanted)}
    calls["one after the other"] = _plain(stage, torch, shard, weight, whole, wanted)
    calls |= _own(stage, shard, weight, out)
    first_us = 0.0
    if on_gpu:
        fused, reason = _fused(torch, shard, weight)
        if reason:
            yield {"skipped": f"{name}: torch's fused all-gather and GEMM: {reason}"}
        else:
            calls["fused by torch"] = fused
    for form, call in calls.items():
        out.zero_()
        time_us = statistics.median(stage.call_us(call, WARMUP, MEASURED))
        if form == "one after the other":
            first_us = time_us
        yield {
            "measure": "matmul",
            "gemm": name,
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "form": form,
            "time_us": round(time_us, 3),
            "speedup": round(first_us / time_us, 4),
            "close": _is_close(out, wanted) if form.startswith("offcore") else None,
            "ranks": stage.ranks,
            "machine": stage.machine,
            "backend": stage.backend,
            **stage.facts(),
        }


def _is_close(out: Any, wanted: Any) -> bool:
    """Whether all ranks' rows were multiplied."""
    most = float(wanted.abs().max())
    return bool((out - wanted).abs().max() <= _CLOSE * most)


def _plain(
    stage: Stage, torch: Any, shard: Any, weight: Any, whole: Any, out: Any
) -> Callable[[], Any]:
    def call() -> None:
        if stage.backend == "cuda":
            torch.distributed.all_gather_into_tensor(whole, shard)
        else:
            stage.comm.all_gather(whole.view(torch.uint8), shard.view(torch.uint8)).wait()
        torch.mm(whole, weight, out=out)

    return call


def _own(stage: Stage, shard: Any, weight: Any, out: Any) -> Calls:
    module = importlib.import_module("offcore.torch_matmul")
    calls: Calls = {}
    for chunks in CHUNKS:

        def call(chunks: int = chunks) -> None:
            module.all_gather_matmul(stage.comm, shard, weight, out=out, chunks=chunks)

        calls[f"offcore, {chunks} chunks" if chunks > 1 else "offcore, 1 chunk"] = call
    placed = module.matmul_shard(stage.comm, *shard.shape, shard.dtype)
    placed.copy_(shard)
    calls["offcore, placed"] = lambda: module.all_gather_matmul(stage.comm, placed, weight, out=out)
    return calls


def _fused(torch: Any, shard: Any, weight: Any) -> tuple[Callable[[], Any], str]:
    """torch's, and why it cannot be had."""
    group = torch.distributed.group.WORLD.group_name

    def call() -> None:
        torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], 0, group)

    reason = ""
    try:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        symmetric.enable_symm_mem_for_group(group)
        call()
        torch.cuda.synchronize()
    except Exception as cause:  # whatever torch raises
        reason = f"{type(cause).__name__}: {str(cause).splitlines()[0][:200]}"
    told = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, reason)
    return call, next((one for one in told if one), "")
