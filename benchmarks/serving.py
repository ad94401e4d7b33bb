"""TTFT and tokens a second of transformers' continuous batching with KV from the host.

    python benchmarks/serving.py --quick            # within two minutes on one GPU
    python benchmarks/serving.py                    # models, prompts, batches and hit rates: 400 s
    python benchmarks/serving.py --swap             # preempted requests
    python benchmarks/serving.py --model 1.5b,llama8b --prompts 1024,4096 --batches 1,8,32 \\
        --hits 0,50,70,100 --arms recompute,loop,batch,kernel,separate,packed,ours --limit 580
    python benchmarks/serving.py --model tiny       # on a CPU, to see that it runs

Random weights of Qwen2.5's and Llama-3.1-8B's sizes; nothing is downloaded. Each arm has an engine
of its own. For a hit rate, the first part of each prompt has been seen before and lies in host
memory, while the GPU's own prefix cache is emptied; the rest is new. Arms:

    recompute   the engine without a host tier
    gpu         all of the prompt is still in the GPU's cache (hit 100 only): no copies, the bound
    engine      a host tier whose copies are the engine's own: gather, slices, staging and scatter
                on the compute stream, as its OffloadingManager does
    ours        offcore's copies as `enable(model, bytes)` makes them; the cache is one allocation
    separate    by engines only, with the cache as the engine allocates it, a tensor a layer for K
                and for V
    packed      as `separate`, with SMs that pack
    loop        the same cache, a driver's copy call for each page
    batch       the same, one cuMemcpyBatchAsync for all pages of a load
    kernel      the same, by offcore's kernel of 16 blocks; more bring at most 4 % (docs/papers.md)

`loop` and `kernel` are the peers of DMA-Latte's Figures 16 and 17. `packed` and `kernel` need a
GPU; `beside` is a decode step of 8 requests of 4,096 tokens, as a CUDA graph of the model's linear
layers and attention, beside endless loads by some arms (`ours` and `separate` without SMs), and
by one contiguous copy for each load: ms alone, ms beside, GB/s of the loads.
`--swap` has no hits: requests outgrow the cache, are preempted and resumed, by the engine's
OffloadingManager (engine), without host memory (recompute), and by the tier (ours).

TTFT is from the request's creation to its first token; all requests of a batch are scheduled
together. Tokens of all arms that copy must be the same, and at hit 100 those of `gpu`, as their
shapes are; for recompute the share of equal ones is told, as other shapes round otherwise.
Attention is torch's flash attention where that works, else paged|sdpa, which builds whole masks and
is slow; rows say which. An arm that fails is a row with "error", and others go on. Rows go to
$OUT/serving.jsonl where OUT is set, else to --json; the table comes last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from serving_beside import OneCopy, beside
from serving_model import MODELS, attention, model_of
from serving_peers import DriverTier, DriverTransfer, TorchTier, TorchTransfer
from serving_table import ARMS, COPYING, USUAL, Row, agreement, failed, prompts_of, table_of
from serving_times import Times
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as engine_logging

import offcore
from offcore import _core, kv
from offcore.serving import transformers as serving
from offcore.serving.host_tier import HostTier

# Room for four blocks of 256 tokens of the largest model.
PACKED: dict[str, Any] = {"policy": "pack", "pack_bytes": 128 << 20}
ON_GPUS = ("packed", "kernel")  # arms that only a GPU has


def tier_of(arm: str, host_bytes: int) -> HostTier | None:
    """The tier of an arm; None for the engine as it is."""
    if arm == "engine":
        return TorchTier(host_bytes, one_allocation=False)
    if arm == "ours":
        return HostTier(host_bytes)
    if arm == "separate":
        return HostTier(host_bytes, one_allocation=False, policy="zero_sm")
    if arm == "packed":
        return HostTier(host_bytes, one_allocation=False, **PACKED)
    if arm == "kernel":
        return HostTier(host_bytes, one_allocation=False, kernel=True)
    copies = {"loop": _core.copy_by_loop, "batch": _core.copy_by_batch}
    return DriverTier(host_bytes, copies[arm]) if arm in copies else None


class Gate(queue.Queue[Any]):
    """A queue that looks empty while it is closed, so that a batch is scheduled as a whole."""

    closed = False

    def empty(self) -> bool:
        return self.closed or super().empty()


class Engine:
    """An engine of one arm, kept between measurements."""

    def __init__(
        self, model: Any, arm: str, args: argparse.Namespace, case: Case, own: bool = False
    ) -> None:
        self.arm = arm
        self.model = model
        self.tier = tier_of(arm, case.host_bytes)
        serving.disable(model)
        if self.tier is not None:
            serving.enable(model, self.tier)
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=args.new, do_sample=False, eos_token_id=-1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=args.block,
                num_blocks=case.cache_blocks,
                max_batch_tokens=args.batch_tokens,
                max_requests_per_batch=max(64, case.requests),
                safety_margin=0.0 if args.swap else None,
                use_async_batching=args.asynchronous,
                use_cuda_graph=False,
                cpu_offload_space=case.swap_gib if own else 0.0,
                allow_block_sharing=True,
                scheduler_type="fifo",
            ),
        )
        self.gate = self.manager.input_queue = Gate()
        self.manager.start()
        self.run([[1, 2, 3]], 2)  # allocates everything
        if self.tier is not None:
            self.tier.wait_ready(120)

    @property
    def cache(self) -> Any:
        return self.manager.batch_processor.cache

    @property
    def loaded(self) -> int:
        """Blocks that came from the host so far."""
        return int(self.tier.counts["loaded"]) if self.tier is not None else 0

    def forget(self) -> None:
        """Empties the GPU's prefix cache; the requests have ended."""
        manager = self.cache._block_manager
        manager.has_enough_free_blocks(manager.num_free_blocks)

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[Any], float]:
        """The outputs in order, and the seconds until the last one."""
        began = time.perf_counter()
        self.gate.closed = True
        names = self.manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
        self.gate.closed = False
        outputs: dict[str, Any] = {}
        while len(outputs) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is None and not self.manager.is_running():
                raise RuntimeError(
                    f"{self.arm}: {self.manager.background_thread_status.fatal_error}"
                )
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"{self.arm}: {result.error}")
                outputs[result.request_id] = result
        return [outputs[name] for name in names], time.perf_counter() - began

    def close(self) -> None:
        self.manager.stop(block=True, timeout=30)
        self.manager.destroy()
        serving.disable(self.model)
        self.manager = self.tier = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Case:
    """Sizes for some prompts: what the cache and the host must hold."""

    def __init__(self, args: argparse.Namespace, model: Any, prompt: int, batch: int) -> None:
        per_request = -(-(prompt + args.new) // args.block) + 1
        config = model.config
        head = config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * head
        token *= model.dtype.itemsize
        self.prompt, self.batch, self.requests = prompt, batch, batch
        self.cache_blocks = per_request * batch * 5 // 4 + 8
        self.swap_gib = 0.0
        rows = 2 * self.cache_blocks + 64  # of the round under way and of the one before
        self.host_bytes = min(rows * token * args.block, int(args.host_gib * (1 << 30)))

    def swapping(self, args: argparse.Namespace) -> Case:
        """The same with requests of which a part fits once they have grown."""
        self.requests = args.swap_requests
        grown = args.swap_prompt + args.swap_new // 3
        self.cache_blocks = self.requests * -(-grown // args.block)
        self.swap_gib = self.host_bytes / (1 << 30)
        return self


def measure(
    engine: Engine, args: argparse.Namespace, case: Case, hit: int, seen: list[list[int]]
) -> tuple[Row, list[Any]]:
    """Medians of the rounds for one hit rate, and all tokens; `seen`: prompts computed before."""
    firsts, lasts, rates, tokens = [], [], [], []
    parts: list[dict[str, float]] = []
    paths: set[str] = set()
    loaded = engine.loaded
    kept = case.prompt * hit // 100 // args.block * args.block
    for turn in range(args.rounds):
        # What follows the part seen is new in each round. The seeds are those of all arms.
        seed = f"{case.prompt} {case.batch} {hit} {turn}"
        rest = prompts_of(seed, case.batch, case.prompt - kept, engine.model.config.vocab_size)
        prompts = [[*old[:kept], *new] for old, new in zip(seen, rest, strict=True)]
        if engine.arm != "gpu":
            engine.forget()
        time.sleep(0.05)  # stores end
        times = Times()
        with times.of(engine.cache, engine.model) if args.breakdown else nullcontext():
            outputs, seconds = engine.run(prompts, args.new)
        if args.breakdown:
            parts.append(times.row())
            paths |= times.paths
        ttft = [one.timestamps[0] - one.created_time for one in outputs]
        firsts.append(statistics.median(ttft))
        lasts.append(max(ttft))
        rates.append(sum(len(one.generated_tokens) for one in outputs) / seconds)
        tokens.append([one.generated_tokens for one in outputs])
    row = {
        "ttft_ms": statistics.median(firsts) * 1e3,
        "ttft_last_ms": statistics.median(lasts) * 1e3,
        "tokens_s": statistics.median(rates),
        "loaded_blocks": engine.loaded - loaded,
        "expected_blocks": kept // args.block * case.batch * args.rounds if engine.tier else 0,
    }
    for name in parts[0] if parts else ():
        row[name] = statistics.median(one.get(name, 0.0) for one in parts)
    return row | ({"paths": sorted(paths)} if paths else {}), tokens


def measure_swap(engine: Engine, args: argparse.Namespace, case: Case) -> tuple[Row, list[Any]]:
    """Tokens a second where requests do not fit into the cache."""
    rates, tokens = [], []
    for turn in range(args.rounds):
        seed = f"swap {turn}"
        prompts = prompts_of(seed, case.requests, args.swap_prompt, engine.model.config.vocab_size)
        outputs, seconds = engine.run(prompts, args.swap_new)
        rates.append(sum(len(one.generated_tokens) for one in outputs) / seconds)
        tokens.append([one.generated_tokens for one in outputs])
        engine.forget()
    counts = engine.tier.counts if engine.tier is not None else {}
    return {"tokens_s": statistics.median(rates), "swapped": counts.get("swapped_out", 0)}, tokens


def arms_of(args: argparse.Namespace, swap: bool) -> list[str]:
    named = args.arms.split(",")
    if unknown := set(named) - set(ARMS):
        sys.exit(f"no such arms: {', '.join(sorted(unknown))}")
    if args.device == "cpu":
        named = [arm for arm in named if arm not in ON_GPUS]
    return [arm for arm in named if arm != "gpu"] if swap else named


def run_case(
    model: Any, args: argparse.Namespace, prompt: int, batch: int, hits: list[int]
) -> Iterator[Row]:
    """All arms and hit rates for one length of prompts and one batch."""
    reference: dict[int, list[Any]] = {}
    case = Case(args, model, prompt, batch)
    # The highest first: what it needs longest is used last, and stays in host memory.
    hits = sorted(hits, reverse=True)
    seen = prompts_of("seen", batch, prompt, model.config.vocab_size)
    # The engine without copies first, as its tokens are those that others are compared with.
    for arm in sorted(arms_of(args, False), key=lambda one: one not in ("recompute", "gpu")):
        place: Row = {"arm": arm, "prompt": prompt, "batch": batch}
        if args.out_of_time():
            print(f"no time left for {arm}, prompt {prompt}, batch {batch}", flush=True)
            break
        mine = {"recompute": hits[-1:], "gpu": [hit for hit in hits if hit == 100]}.get(arm, hits)
        if not mine:
            continue
        engine = None
        try:
            engine = Engine(model, arm, args, case)
            engine.run(seen, 2)  # two: the engine shares no block that its last step completes
            for hit in mine:
                row, tokens = measure(engine, args, case, hit, seen)
                if arm != "recompute":
                    reference.setdefault(hit, tokens)
                if hit in reference:
                    row["same_tokens"] = agreement(tokens, reference[hit])
                yield place | {"hit": hit} | row
        except Exception as why:  # the other arms go on
            yield place | {"hit": "-"} | failed(why)
        finally:
            if engine is not None:
                engine.close()


def run_beside(model: Any, args: argparse.Namespace) -> list[Row]:
    """A decode step beside loads by each arm that copies."""
    ours = partial(kv.BlockTransfer, policy="zero_sm")
    arms: dict[str, Any] = {"engine": TorchTransfer, "ours": ours, "separate": ours}
    arms["packed"] = partial(kv.BlockTransfer, **PACKED)
    arms["batch"] = partial(DriverTransfer, copy=_core.copy_by_batch)
    arms["kernel"] = partial(kv.BlockTransfer, kernel=True)
    arms["one copy"] = OneCopy
    return beside(model, arms, {"ours", "kernel"})


def run_swap(model: Any, args: argparse.Namespace) -> list[Row]:
    """All arms with more requests than fit."""
    rows: list[Row] = []
    reference: list[Any] = []
    for arm in arms_of(args, True):
        if arm == "engine" and args.device == "cpu":
            continue  # its memory must be pinned
        if args.out_of_time():
            break
        case = Case(args, model, args.swap_prompt + args.swap_new, args.swap_requests)
        case.swapping(args)
        row: Row = {"arm": arm, "prompt": args.swap_prompt, "batch": case.requests, "hit": "swap"}
        # The engine's own manager, not the tier with its copies.
        own = arm == "engine"
        engine = None
        try:
            engine = Engine(model, "recompute" if own else arm, args, case, own)
            told, tokens = measure_swap(engine, args, case)
            reference = reference or tokens
            rows.append(row | told | {"same_tokens": agreement(tokens, reference)})
        except Exception as why:  # the other arms go on
            rows.append(row | failed(why))
        finally:
            if engine is not None:
                engine.close()
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("--quick", action="store_true", help="two sizes, within 120 s on a GPU")
    parser.add_argument("--model", default=None, help=f"some of {', '.join(MODELS)}, by commas")
    parser.add_argument("--prompts", default=None, help="tokens, by commas")
    parser.add_argument("--batches", default=None)
    parser.add_argument("--hits", default=None, help="percent, by commas")
    parser.add_argument("--arms", default=",".join(USUAL), help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--breakdown", action="store_true", help="host time of each part, in rows")
    parser.add_argument("--rounds", type=int, default=None, help="3; 2 with --quick")
    parser.add_argument("--new", type=int, default=8, help="tokens a request")
    parser.add_argument("--swap-new", type=int, default=256, help="tokens a request in swap")
    parser.add_argument("--swap-prompt", type=int, default=512)
    parser.add_argument("--swap-requests", type=int, default=64)
    parser.add_argument("--swap", action="store_true", help="only that, with blocks of 16 tokens")
    parser.add_argument("--no-beside", action="store_true", help="no decode beside loads")
    parser.add_argument("--block", type=int, default=256, help="tokens a block")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--asynchronous", action="store_true", help="the engine's async batching")
    parser.add_argument("--host-gib", type=float, default=24.0)
    parser.add_argument("--limit", type=float, default=None, help="seconds; then arms are left out")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.rounds = args.rounds or (2 if args.quick else 3)
    if args.device == "cpu":
        args.block, args.rounds, args.batch_tokens, args.host_gib = 32, 2, 512, 0.25
        args.swap_prompt, args.swap_requests, args.swap_new = 64, 8, 64
    if args.swap:
        args.block = 16
    end = time.monotonic() + (args.limit or (80 if args.quick else 350))
    args.out_of_time = lambda: time.monotonic() > end
    return args


Plan = list[tuple[str, int, int, list[int]]]


def plan_of(args: argparse.Namespace) -> Plan:
    """Model, prompt, batch and hit rates of each case, the telling ones first."""
    numbers = [
        [int(one) for one in (given or default).split(",")]
        for given, default in (
            (args.prompts, "256" if args.device == "cpu" else "8192"),
            (args.batches, "4" if args.device == "cpu" else "8"),
            (args.hits, "0,100"),
        )
    ]
    models = args.model or ("tiny" if args.device == "cpu" else "0.5b,7b")
    if args.quick or args.model or args.prompts or args.batches or args.device == "cpu":
        prompts, batches, hits = numbers
        return [(m, p, b, hits) for m in models.split(",") for p in prompts for b in batches]
    hits = [int(one) for one in (args.hits or "0,50,70,100").split(",")]
    sizes = [(8192, 8), (4096, 8), (8192, 1), (1024, 8), (1024, 32), (4096, 1), (1024, 1)]
    plan = [("0.5b", 8192, 8, hits), ("7b", 8192, 8, hits)]
    plan += [("llama8b", 8192, 8, [0, 100]), ("1.5b", 8192, 8, [0, 100])]
    plan += [(name, *size, hits) for size in sizes[1:] for name in ("0.5b", "7b")]
    return [
        *plan,
        ("0.5b", 4096, 32, hits),
        ("0.5b", 8192, 32, [0, 100]),
        ("7b", 4096, 32, [0, 100]),
    ]


def measured(args: argparse.Namespace, rows: list[Row], record: Callable[[Row], object]) -> None:
    """Appends the rows of all cases, and records each as soon as it is known."""
    attend = attention()
    models: dict[str, Any] = {}

    def add(name: str, found: Iterable[Row]) -> None:
        for row in found:
            rows.append({"model": name, "attention": attend, **row})
            record(rows[-1])
            print(json.dumps(rows[-1]), flush=True)

    for name, prompt, batch, hits in plan_of(args):
        if args.out_of_time():
            print(f"no time left for {name}, prompt {prompt}, batch {batch}", flush=True)
            continue
        first = name not in models
        if first:
            models[name] = model_of(name, args.device, attend)
        if args.swap:
            add(name, run_swap(models[name], args) if first else [])
            continue
        if first and args.device == "cuda" and not args.no_beside and name == "7b":
            try:
                add(name, run_beside(models[name], args))
            except Exception as why:
                add(name, [{"arm": "-", "prompt": 0, "batch": 0, "hit": "beside"} | failed(why)])
            gc.collect()
            torch.cuda.empty_cache()
        add(name, run_case(models[name], args, prompt, batch, hits))


def main() -> None:
    args = arguments()
    version, known = transformers.__version__, serving.VERSIONS
    if not version.startswith(known):
        sys.exit(f"transformers {version} is not supported: pip install transformers=={known[0]}")
    engine_logging.set_verbosity_error()
    rows: list[Row] = []
    out = Path(os.environ["OUT"]) / "serving.jsonl" if "OUT" in os.environ else args.json
    with out.open("w", encoding="utf-8", buffering=1) if out else nullcontext() as file:
        stamp = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "offcore": offcore.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "block": args.block,
            "new": args.new,
            "rounds": args.rounds,
            "date": time.strftime("%Y-%m-%d"),
        }

        def record(row: Row) -> None:
            if file is not None:
                file.write(json.dumps(row | stamp) + "\n")

        try:
            measured(args, rows, record)
        finally:
            print(table_of(rows))
    wrong = [
        row
        for row in rows
        if row["arm"] in COPYING
        and isinstance(row["hit"], int)
        and (row.get("same_tokens", 1) < 1 or row["loaded_blocks"] < row["expected_blocks"])
    ]
    for row in wrong:
        print(f"not as expected: {json.dumps(row)}")
    sys.exit(1 if wrong or any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
