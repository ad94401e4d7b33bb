"""A GEMM behind an all-gather of its input or in front of a reduce-scatter of its result: one after
the other, by offcore in chunks, and by torch's fused form."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from offcore.tools.overlap.cases import GEMMS
from offcore.tools.overlap.stage import MEASURED, WARMUP, Shape, Stage

CHUNKS = (1, 2, 4)
_CLOSE = 0.02  # of the largest value, between forms that sum in another order
_TOKENS = 8192  # of all ranks
# LLaMA-70B's GEMMs, n and k of all ranks together, and the collective of tensor parallelism.
_LAYERS = {
    "qkv": ("all_gather", 10240, 8192),
    "o": ("reduce_scatter", 8192, 8192),
    "gate_up": ("all_gather", 57344, 8192),
    "down": ("reduce_scatter", 8192, 28672),
}
NAMES = ("cb1", *_LAYERS)

_REFERENCES = ("gemm alone", "one after the other")  # not compared with themselves

Calls = dict[str, Callable[[], Any]]


def cases_of(names: Sequence[str], ranks: int, shrink: int) -> list[dict[str, Any]]:
    """Each GEMM as a rank has it, and the operation that it depends on or that depends on it."""
    found = []
    unit = ranks * max(CHUNKS)  # rows that all ranks' chunks divide
    for name in names:
        op, n, k = _LAYERS.get(name, ("", 0, 0))
        for one in (op,) if op else ("all_gather", "reduce_scatter"):
            shape = (_TOKENS, n, k) if op else GEMMS[name]
            split = {"all_gather": 1, "reduce_scatter": 2}[one]
            own = [side // ranks if op and at == split else side for at, side in enumerate(shape)]
            m, *rest = (max(1, side // shrink) for side in own)
            found.append({"name": name, "op": one, "shape": [max(1, m // unit) * unit, *rest]})
    return found


def rows(stage: Stage, cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """m of a shape is the rows of all ranks."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield {"skipped": "a dependent GEMM: needs torch (pip install torch)"}
        return
    if stage.comm is None:
        yield {"skipped": "a dependent GEMM: a collective needs two GPUs"}
        return
    for case in cases:
        yield from _of_case(stage, torch, case["name"], case["op"], Shape(*case["shape"]))


def _of_case(
    stage: Stage, torch: Any, name: str, op: str, shape: Shape
) -> Iterator[dict[str, Any]]:
    on_gpu = stage.backend == "cuda"
    made = {"dtype": torch.bfloat16, "device": "cuda" if on_gpu else "cpu"}
    forms = {"all_gather": _gathers, "reduce_scatter": _scatters}[op]
    calls, fused, out, wanted = forms(stage, torch, shape, made)
    stage.call_us(calls["one after the other"], 0, 1)  # so that every operand has values
    if on_gpu:
        if reason := _refusal(torch, fused):
            yield {"skipped": f"{name} {op}: torch's fused form: {reason}"}
        else:
            calls["fused by torch"] = fused
    first_us = 0.0
    for form, call in calls.items():
        out.zero_()
        time_us = statistics.median(stage.call_us(call, WARMUP, MEASURED))
        result = None if form in _REFERENCES else out if form.startswith("offcore") else call()
        if form == "one after the other":
            first_us = time_us
        yield {
            "measure": "matmul",
            "gemm": name,
            "op": op,
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "form": form,
            "time_us": round(time_us, 3),
            "speedup": round(first_us / time_us, 4) if first_us else None,
            "close": None if result is None else _is_close(result, wanted),
            "ranks": stage.ranks,
            "machine": stage.machine,
            "backend": stage.backend,
            **stage.facts(),
        }


def _is_close(out: Any, wanted: Any) -> bool:
    """Whether all ranks' rows were multiplied."""
    most = float(wanted.abs().max())
    return bool((out - wanted).abs().max() <= _CLOSE * most)


def _named(chunks: int) -> str:
    return f"offcore, {chunks} chunks" if chunks > 1 else "offcore, 1 chunk"


# Each kind: calls by form, torch's fused one, which returns its result, and where ours and the
# reference leave theirs.
_Forms = tuple[Calls, Callable[[], Any], Any, Any]


def _gathers(stage: Stage, torch: Any, shape: Shape, made: dict[str, Any]) -> _Forms:
    module = importlib.import_module("offcore.torch_matmul")
    shard = torch.randn(shape.m // stage.ranks, shape.k, **made)
    weight = torch.randn(shape.k, shape.n, **made)
    whole = torch.empty(shape.m, shape.k, **made)
    out, wanted = (torch.empty(shape.m, shape.n, **made) for _ in range(2))

    def plain() -> None:
        if stage.backend == "cuda":
            torch.distributed.all_gather_into_tensor(whole, shard)
        else:
            stage.comm.all_gather(whole.view(torch.uint8), shard.view(torch.uint8)).wait()
        torch.mm(whole, weight, out=wanted)

    def own(chunks: int) -> Callable[[], Any]:
        return lambda: module.all_gather_matmul(stage.comm, shard, weight, out=out, chunks=chunks)

    def fused() -> Any:
        group = torch.distributed.group.WORLD.group_name
        return torch.ops.symm_mem.fused_all_gather_matmul(shard, [weight], 0, group)[1][0]

    calls: Calls = {"gemm alone": lambda: torch.mm(whole, weight, out=wanted)}
    calls["one after the other"] = plain
    calls |= {_named(chunks): own(chunks) for chunks in CHUNKS}
    placed = module.matmul_shard(stage.comm, *shard.shape, shard.dtype)
    placed.copy_(shard)
    calls["offcore, placed"] = lambda: module.all_gather_matmul(stage.comm, placed, weight, out=out)
    return calls, fused, out, wanted


def _scatters(stage: Stage, torch: Any, shape: Shape, made: dict[str, Any]) -> _Forms:
    module = importlib.import_module("offcore.torch_matmul")
    inp, weight = torch.randn(shape.m, shape.k, **made), torch.randn(shape.k, shape.n, **made)
    whole = torch.empty(shape.m, shape.n, **made)
    out, wanted = (torch.empty(shape.m // stage.ranks, shape.n, **made) for _ in range(2))

    def plain() -> None:
        torch.mm(inp, weight, out=whole)
        if stage.backend == "cuda":
            torch.distributed.reduce_scatter_tensor(wanted, whole)
        else:
            stage.comm.reduce_scatter(wanted, whole).wait()

    def own(chunks: int) -> Callable[[], Any]:
        return lambda: module.matmul_reduce_scatter(stage.comm, inp, weight, out=out, chunks=chunks)

    def fused() -> Any:
        group = torch.distributed.group.WORLD.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(inp, weight, "sum", 0, group)

    calls: Calls = {"gemm alone": lambda: torch.mm(inp, weight, out=whole)}
    calls["one after the other"] = plain
    calls |= {_named(chunks): own(chunks) for chunks in CHUNKS}
    return calls, fused, out, wanted


def _refusal(torch: Any, fused: Callable[[], Any]) -> str:
    """Why torch's fused form cannot be had; empty: it can, on all ranks."""
    reason = ""
    try:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        symmetric.enable_symm_mem_for_group(torch.distributed.group.WORLD.group_name)
        fused()
        torch.cuda.synchronize()
    except Exception as cause:  # whatever torch raises
        reason = f"{type(cause).__name__}: {str(cause).splitlines()[0][:200]}"
    told = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, reason)
    return next((one for one in told if one), "")
