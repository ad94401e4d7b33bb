"""Fetching KV blocks from host memory before a first token: DMA-Latte's section 5.3, rows K1 to K3.

A request's 4096 or 8192 tokens are blocks of 16, contiguous over layers and scattered. Three ways
bring them to the GPU: a copy and a signal for each block on one engine (`each`, the baseline), one
batch back to back on one engine with one signal (`b2b`), both simulated, and a kernel that reads
host memory as fast as an engine (`kernel`). Then one forward pass makes the first token: all keys
and values are there, so nothing is computed anew. Under load, fetches by engines run beside
computing; a kernel's take a share of the cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offcore import _core
from offcore.tools.kv.models import BLOCK_TOKENS, geometry
from offcore.tools.papers.findings import Finding, percent
from offcore.tools.papers.latte.fit import Parameter, Values, Vector

LENGTHS = (4096, 8192)
WAYS = ("each", "b2b", "kernel")
BOUND = 0.2


@dataclass(frozen=True)
class Model:
    name: str
    weights: float  # 1e9, in bf16

    @property
    def layers(self) -> int:
        return geometry(self.name.lower()).layers

    @property
    def block_bytes(self) -> int:
        return geometry(self.name.lower()).block_bytes


MODELS = (
    Model("Qwen2.5-0.5B", 0.49),
    Model("Llama-3.2-1B", 1.24),
    Model("Qwen2.5-1.5B", 1.54),
    Model("Llama-3.2-3B", 3.21),
    Model("Qwen2.5-7B", 7.62),
    Model("Llama-3.1-8B", 8.03),
    Model("Qwen2.5-14B", 14.8),
    Model("Qwen2.5-32B", 32.8),
)

PARAMETERS = (
    Parameter(
        "layer_us", "us", "a layer's kernels in a forward pass, without its weights", 2, 60, 8
    ),
    Parameter("cpu_ms", "ms", "the engine's own time around one request alone", 1, 20, 3),
    Parameter("request_ms", "ms", "computing and scheduling of one request of many", 0.3, 20, 2.5),
    Parameter("taken", "share", "of a kernel's fetch, what computing loses to it", 0.05, 1, 0.4),
    Parameter("call_us", "us", "the host's time for one copy call", 2, 20, 10),
)
ASSUMED: Values = {
    "hbm_gbps": 3700.0,  # weights streamed, 70 % of 5.3 TB/s
    "entry_us": 2.5,  # the host's time for an entry of a batch call: 0.5 to 2.7 were seen elsewhere
    "kernel_us": 10.0,  # a kernel's launch
    "requests": 32.0,  # that share one pass over the weights under load
}


@dataclass(frozen=True)
class Fetch:
    """Of one request's blocks, on the simulated engine."""

    us: float
    least_us: float  # the bytes alone, at an engine's rate
    copies: int
    engines: int
    syncs: int


def _text(blocks: int, nbytes: int) -> str:
    """A copy and a signal for each block; the caller waits for the last."""
    copies = "\n".join(
        f" copy kv[0]+{i * nbytes} <- pool[host]+{(blocks - 1 - i) * nbytes} bytes={nbytes}\n"
        f" signal flag[host]:0 = {i + 1}"
        for i in range(blocks)
    )
    return (
        f"program kv machine=m ranks=1 variant=each mode=eager protocol=promise native=yes flags=1 "
        f"span={blocks}\nbuffer kv local {blocks * nbytes}\nbuffer pool host {blocks * nbytes}\n"
        f"queue 0.0\n{copies}\nqueue 0.caller\n poll flag[host]:0 >= {blocks}\n"
    )


def _batch(machine: _core.Machine, blocks: int, nbytes: int) -> _core.Program:
    """As a batch call plans them, on one engine; the order of places leaves none to merge."""
    moves = _core.moves_listed(
        1,
        [("kv", "local", blocks * nbytes), ("pool", "host", blocks * nbytes)],
        [((1, 0, i * nbytes), (2, -1, (blocks - 1 - i) * nbytes), nbytes) for i in range(blocks)],
    )
    return _core.plan_batch(moves, [], _core.BatchPolicy(engines=1, timed=False), machine).program


def fetches(machine: _core.Machine) -> dict[tuple[str, str, int], Fetch]:
    """By way (each, b2b), model and length."""
    session = _core.Session("sim", machine, 1, phantom=True)
    found = {}
    for model in MODELS:
        for length in LENGTHS:
            blocks = length // BLOCK_TOKENS
            made = {
                "each": _core.Program.parse(_text(blocks, model.block_bytes)),
                "b2b": _batch(machine, blocks, model.block_bytes),
            }
            gbps = min(machine.links.engine_gbps, machine.links.host_gbps)
            least_us = blocks * model.block_bytes / gbps / 1e3
            for way, program in made.items():
                counts = program.counts()
                found[way, model.name, length] = Fetch(
                    us=session.run(program).time_ns / 1e3,
                    least_us=least_us,
                    copies=counts.copies,
                    engines=counts.engines,
                    syncs=counts.syncs,
                )
    return found


@dataclass(frozen=True)
class Request:
    """One request in us: its first token on the GPU and in all, and its share of a loaded GPU."""

    gpu_us: float
    total_us: float
    loaded_us: float


def request(
    way: str,
    model: Model,
    length: int,
    found: Mapping[tuple[str, str, int], Fetch],
    values: Mapping[str, float],
) -> Request:
    blocks = length // BLOCK_TOKENS
    streamed_us = model.weights * 2e6 / values["hbm_gbps"]
    step_us = streamed_us + model.layers * values["layer_us"]
    compute_us = values["request_ms"] * 1e3 + streamed_us / values["requests"]
    if way == "kernel":
        fetch_us = found["b2b", model.name, length].least_us
        host_us = values["kernel_us"]
        loaded_us = max(fetch_us, compute_us + values["taken"] * fetch_us)
    elif way == "b2b":
        fetch_us = found[way, model.name, length].us
        host_us = blocks * values["entry_us"]  # the engine starts when the call returns
        loaded_us = max(fetch_us, compute_us)
    else:  # the host's calls run beside the copies of those before
        fetch_us = max(found[way, model.name, length].us, blocks * values["call_us"])
        host_us = values["call_us"]
        loaded_us = max(fetch_us, compute_us)
    gpu_us = fetch_us + step_us
    return Request(gpu_us, host_us + gpu_us + values["cpu_ms"] * 1e3, loaded_us)


Requests = dict[tuple[str, str, int], Request]


def requests(found: Mapping[tuple[str, str, int], Fetch], values: Mapping[str, float]) -> Requests:
    return {
        (way, model.name, length): request(way, model, length, found, values)
        for way in WAYS
        for model in MODELS
        for length in LENGTHS
    }


def speedups(all_of: Requests, slow: str, fast: str, field: str) -> list[float]:
    return [
        getattr(all_of[slow, model.name, length], field)
        / getattr(all_of[fast, model.name, length], field)
        for model in MODELS
        for length in LENGTHS
    ]


def ratios(all_of: Requests) -> list[tuple[str, str, float, float, str]]:
    """(row, claim, published, ours, form) of the rows that are numbers."""
    kernel = statistics.fmean(1 - 1 / s for s in speedups(all_of, "b2b", "kernel", "total_us"))
    times = "up to {:.2f}x"
    return [
        (
            "K1",
            "TTFT_GPU, b2b over a copy a block",
            2.29,
            max(speedups(all_of, "each", "b2b", "gpu_us")),
            times,
        ),
        (
            "K1",
            "TTFT_total, b2b over a copy a block",
            1.5,
            max(speedups(all_of, "each", "b2b", "total_us")),
            times,
        ),
        (
            "K1",
            "throughput, b2b over a copy a block",
            1.9,
            max(speedups(all_of, "each", "b2b", "loaded_us")),
            times,
        ),
        (
            "K2",
            "throughput, b2b over a kernel",
            1.3,
            max(speedups(all_of, "kernel", "b2b", "loaded_us")),
            times,
        ),
        ("K2", "TTFT_total, a kernel compared with b2b, on average", 0.11, kernel, "{:.0%} lower"),
    ]


def residuals(all_of: Requests) -> Vector:
    return np.array([ours / published - 1 for _, _, published, ours, _ in ratios(all_of)])


def findings(
    machine: _core.Machine, found: Mapping[tuple[str, str, int], Fetch], values: Mapping[str, float]
) -> list[Finding]:
    lines = [
        Finding(
            key=key,
            claim=f"KV fetch: {claim}",
            published=form.format(published),
            model=form.format(ours),
            difference=percent(ours / published - 1),
            basis="fitted",
            met=abs(ours / published - 1) <= BOUND,
        )
        for key, claim, published, ours, form in ratios(requests(found, values))
    ]
    batch = found["b2b", MODELS[0].name, LENGTHS[0]]
    threshold = machine.batches.b2b_bytes_max
    same = (batch.copies, batch.engines, batch.syncs, threshold) == (256, 1, 1, 4 << 20)
    lines.append(
        Finding(
            key="K3",
            claim="KV fetch: copies back to back on one engine, syncs; "
            "threshold to more engines (taken, not modelled)",
            published="about 256, 1; 4 MB",
            model=f"{batch.copies}, {batch.syncs}; {threshold >> 20} MB",
            difference="none" if same else "other counts",
            basis="by construction",
            met=same,
        )
    )
    return lines
