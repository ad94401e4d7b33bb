"""A decode step beside endless loads from the host, for serving.py."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from serving_peers import DriverJob

from offcore import kv

BATCH, CONTEXT, BLOCK = 8, 4096, 256  # of the decode, and the tokens of a block that is loaded
LOADED = 128  # blocks of a load


def decode_graph(model: Any) -> Step:
    """What a decode step of 8 requests of 4,096 tokens computes, as a CUDA graph: the linear layers
    and attention of all layers, which read all weights and all KV once."""
    config, like = model.config, {"device": "cuda", "dtype": torch.bfloat16}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    hidden = torch.zeros(BATCH, config.hidden_size, **like)
    caches = [
        [torch.zeros(BATCH, kv_heads, CONTEXT, size, **like) for _ in "kv"]
        for _ in model.model.layers
    ]

    def step() -> None:
        x = hidden
        for layer, (keys, values) in zip(model.model.layers, caches, strict=True):
            attend, mlp = layer.self_attn, layer.mlp
            attend.k_proj(x), attend.v_proj(x)
            # Heads that share keys are rows of one product.
            q = attend.q_proj(x).view(BATCH, kv_heads, heads // kv_heads, size)
            out = torch.softmax(q @ keys.transpose(2, 3) * size**-0.5, -1) @ values
            x = x + attend.o_proj(out.reshape(BATCH, -1))
            x = x + mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        model.lm_head(x)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()

    return Step(graph, (hidden, caches))


class Step:
    """A graph, with the memory that it reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, reads: object) -> None:
        self._graph, self._reads = graph, reads

    def __call__(self) -> None:
        self._graph.replay()


class OneCopy:
    """The bytes of each load as one contiguous copy: what is left of a load but its scatter."""

    def __init__(self, layout: kv.Layout, pool: kv.HostPool) -> None:
        nbytes = LOADED * layout.block_bytes
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def load(self, blocks: list[int], slots: list[int], after: torch.cuda.Stream) -> DriverJob:
        with torch.cuda.stream(after):
            self._device.copy_(self._host, non_blocking=True)
            return DriverJob(after)

    def close(self) -> None:
        torch.cuda.synchronize()


class Loads:
    """A thread that keeps two loads under way until it is stopped."""

    def __init__(self, start: Callable[[], Any], size: int) -> None:
        self._start, self._size = start, size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None
        self.bytes, self.began = 0, 0.0

    def _run(self) -> None:
        try:
            under_way = [self._start(), self._start()]
            while not self._stop.is_set():
                under_way.pop(0).wait(60)
                self.bytes += self._size
                under_way.append(self._start())
            for job in under_way:
                job.wait(60)
        except Exception as caught:  # told by the caller
            self.failure = caught

    def __enter__(self) -> Loads:
        self._thread.start()
        time.sleep(0.3)
        self.bytes, self.began = 0, time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.gb_s = self.bytes / (time.perf_counter() - self.began) / 1e9
        self._stop.set()
        self._thread.join(120)
        if self.failure is not None:
            raise self.failure


def step_ms(step: Callable[[], None], seconds: float) -> float:
    """The median time of a step, by events around each."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        for event in events[:-1]:
            event.record()
            step()
        events[-1].record()
        events[-1].synchronize()
        times += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times)


def start_load(transfer: Any, halves: Iterator[tuple[list[int], list[int]]], stream: Any) -> Any:
    blocks, slots = next(halves)
    return transfer.load(blocks, slots, after=stream)


def beside(
    model: Any, arms: dict[str, Callable[[kv.Layout, kv.HostPool], Any]], together: set[str]
) -> list[dict[str, Any]]:
    """A row for each arm: the step alone just before, beside loads, and the rate of those.

    together: the arms whose cache is one allocation.
    """
    config = model.config
    kv_heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    layers, like = config.num_hidden_layers, {"device": "cuda", "dtype": torch.bfloat16}
    shape = (4 * LOADED, BLOCK * kv_heads * size)
    step = decode_graph(model)
    rows: list[dict[str, Any]] = []
    pool = None
    for arm, transfer_of in arms.items():
        row: dict[str, Any] = {"arm": arm, "batch": BATCH, "prompt": CONTEXT, "hit": "beside"}
        transfer = None
        try:
            if arm in together:
                parts = list(torch.zeros((2 * layers, *shape), **like).unbind())
            else:
                parts = [torch.zeros(shape, **like) for _ in range(2 * layers)]
            layout = kv.Layout(list(zip(parts[0::2], parts[1::2], strict=True)))
            if pool is None:
                pool = kv.HostPool(layout.block_bytes, 2 * LOADED, backend="cuda", device=0)
                slots = pool.allocate(2 * LOADED, timeout=120)
            transfer = transfer_of(layout, pool)
            stream = torch.cuda.Stream()  # for copies that need one
            order, rows_of = torch.randperm(2 * LOADED).tolist(), slots.tolist()
            halves = itertools.cycle(
                [(order[part], rows_of[part]) for part in (slice(LOADED), slice(LOADED, None))]
            )
            start = partial(start_load, transfer, halves, stream)
            row["alone_ms"] = step_ms(step, 0.5)
            with Loads(start, LOADED * layout.block_bytes) as loads:
                row["beside_ms"] = step_ms(step, 1.0)
            row["loads_gb_s"] = loads.gb_s
            row["slowdown"] = row["beside_ms"] / row["alone_ms"]
        except Exception as why:  # the other arms go on
            row["error"] = f"{type(why).__name__}: {str(why).splitlines()[0]}"
        finally:
            if transfer is not None:
                transfer.close()
        del parts, layout
        rows.append(row)
    return rows
