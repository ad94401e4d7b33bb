"""TTFT and tokens a second of transformers' continuous batching with KV from the host.

    python benchmarks/serving.py --quick            # within two minutes on one GPU
    python benchmarks/serving.py --swap             # preempted requests
    python benchmarks/serving.py                    # all models, prompts, batches and hit rates
    python benchmarks/serving.py --model tiny       # on a CPU, to see that it runs

Random weights of Qwen2.5's configurations; nothing is downloaded. Each arm has an engine of its
own. For a hit rate, the first part of each prompt has been seen before and lies in host memory,
while the GPU's own prefix cache is emptied; the rest is new. Arms:

    recompute   the engine without a host tier
    gpu         the prefix is still in the GPU's cache: no copies, the bound
    engine      a host tier whose copies are the engine's own: gather, slices, staging and scatter
                on the compute stream, as its OffloadingManager does
    ours        offcore's copies by engines only; the cache is one allocation
    separate    the same with the cache as the engine allocates it, a tensor a layer for K and for V
    packed      as `separate`, with SMs that pack, where `offcore.kv` has that

`--swap` has no hits: requests outgrow the cache, are preempted and resumed, by the engine's
OffloadingManager (engine), without host memory (recompute), and by the tier (ours).
TTFT is from the request's creation to its first token. Tokens of `engine`, `ours`, `separate` and
`packed` must be those of `gpu`, whose shapes are the same; for recompute the share of equal ones is
told, as other shapes round otherwise. paged|sdpa builds whole masks, so attention is slow: the
model's time is an upper bound, and gains are lower ones. Rows go to $OUT/serving.jsonl where OUT is
set, else to --json; the table comes last.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from serving_peers import TorchTier
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as engine_logging

import offcore
from offcore import kv
from offcore.serving import transformers as serving
from offcore.serving.host_tier import HostTier

MODELS = {  # layers, hidden, intermediate, heads, KV heads, vocabulary
    "tiny": (2, 64, 128, 4, 2, 512),
    "0.5b": (24, 896, 4864, 14, 2, 151936),
    "1.5b": (28, 1536, 8960, 12, 2, 151936),
    "7b": (28, 3584, 18944, 28, 4, 152064),
}
ARMS = ("recompute", "gpu", "engine", "ours", "separate", "packed")
COPYING = ("engine", "ours", "separate", "packed")
Row = dict[str, Any]


def packing() -> dict[str, Any] | None:
    """The arguments with which this version of `kv.BlockTransfer` packs; None where it cannot."""
    known = inspect.signature(kv.BlockTransfer).parameters
    return (
        {"policy": "auto"}
        if "policy" in known
        else {"pack_sms": 4}
        if "pack_sms" in known
        else None
    )


def tier_of(arm: str, host_bytes: int) -> HostTier | None:
    """The tier of an arm; None for the engine as it is."""
    zero: dict[str, Any] = {}
    if "policy" in inspect.signature(kv.BlockTransfer).parameters:
        zero = {"policy": "zero_sm"}
    if arm == "engine":
        return TorchTier(host_bytes, one_allocation=False)
    if arm == "ours":
        return HostTier(host_bytes, **zero)
    if arm == "separate":
        return HostTier(host_bytes, one_allocation=False, **zero)
    if arm == "packed":
        return HostTier(host_bytes, one_allocation=False, **(packing() or {}))
    return None


def model_of(name: str, device: str) -> Any:
    """A model with random weights."""
    layers, hidden, intermediate, heads, kv_heads, vocabulary = MODELS[name]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=name in ("0.5b", "1.5b"),
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("paged|sdpa")
    return model


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
        self.manager.start()
        self.run([[1, 2, 3]], 2)  # allocates everything
        if self.tier is not None:
            self.tier.wait_ready(120)

    @property
    def cache(self) -> Any:
        return self.manager.batch_processor.cache

    def forget(self) -> None:
        """Empties the GPU's prefix cache; the requests have ended."""
        manager = self.cache._block_manager
        manager.has_enough_free_blocks(manager.num_free_blocks)

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[Any], float]:
        """The outputs in order, and the seconds until the last one."""
        began = time.perf_counter()
        names = self.manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
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


def prompts_of(seed: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def measure(
    engine: Engine, args: argparse.Namespace, case: Case, hit: int
) -> tuple[Row, list[Any]]:
    """Medians of the rounds for one hit rate, and all tokens."""
    vocabulary = engine.model.config.vocab_size
    firsts, lasts, rates, tokens = [], [], [], []
    before = dict(engine.tier.counts) if engine.tier is not None else {}
    kept = case.prompt * hit // 100 // args.block * args.block
    for turn in range(args.rounds):
        # New prompts each round: nobody has seen them. The seeds are those of all arms.
        seed = f"{case.prompt} {case.batch} {hit} {turn}"
        prompts = prompts_of(seed, case.batch, case.prompt, vocabulary)
        if kept and engine.arm != "recompute":
            # Two tokens: the engine shares no block of a request that ends with its prefill.
            engine.run([prompt[:kept] for prompt in prompts], 2)
        if engine.arm != "gpu":
            engine.forget()
        time.sleep(0.05)  # stores end
        outputs, seconds = engine.run(prompts, args.new)
        ttft = [one.timestamps[0] - one.created_time for one in outputs]
        firsts.append(statistics.median(ttft))
        lasts.append(max(ttft))
        rates.append(sum(len(one.generated_tokens) for one in outputs) / seconds)
        tokens.append([one.generated_tokens for one in outputs])
        engine.forget()
    loaded = engine.tier.counts["loaded"] - before.get("loaded", 0) if engine.tier else 0
    row = {
        "ttft_ms": statistics.median(firsts) * 1e3,
        "ttft_last_ms": statistics.median(lasts) * 1e3,
        "tokens_s": statistics.median(rates),
        "loaded_blocks": loaded,
        "expected_blocks": kept // args.block * case.batch * args.rounds,
    }
    return row, tokens


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


def agreement(tokens: list[Any], reference: list[Any]) -> float:
    """The share of requests that have the same tokens."""
    pairs = list(zip(chain(*tokens), chain(*reference), strict=True))
    return sum(one == other for one, other in pairs) / len(pairs)


def arms_of(args: argparse.Namespace, swap: bool) -> list[str]:
    named = args.arms.split(",")
    if unknown := set(named) - set(ARMS):
        sys.exit(f"no such arms: {', '.join(sorted(unknown))}")
    if packing() is None:
        named = [arm for arm in named if arm != "packed"]
    return [arm for arm in named if arm != "gpu"] if swap else named


def run_case(model: Any, args: argparse.Namespace, prompt: int, batch: int) -> list[Row]:
    """All arms and hit rates for one length of prompts and one batch."""
    rows: list[Row] = []
    reference: dict[int, list[Any]] = {}
    case = Case(args, model, prompt, batch)
    for arm in sorted(
        arms_of(args, False), key=lambda one: one != "gpu"
    ):  # whose tokens are compared
        if args.out_of_time():
            print(f"no time left for {arm}, prompt {prompt}, batch {batch}", flush=True)
            break
        engine = Engine(model, arm, args, case)
        try:
            warm = prompts_of("warm", 1, prompt, model.config.vocab_size)
            engine.run(warm, args.new)
            engine.forget()
            for hit in args.hits if arm != "recompute" else args.hits[:1]:
                row, tokens = measure(engine, args, case, hit)
                reference.setdefault(hit, tokens)
                row |= {"arm": arm, "prompt": prompt, "batch": batch, "hit": hit}
                row["same_tokens"] = agreement(tokens, reference[hit])
                rows.append(row)
        finally:
            engine.close()
    return rows


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
        # The engine's own manager, not the tier with its copies.
        engine = Engine(model, "recompute" if arm == "engine" else arm, args, case, arm == "engine")
        try:
            row, tokens = measure_swap(engine, args, case)
            reference = reference or tokens
            row |= {"arm": arm, "prompt": args.swap_prompt, "batch": case.requests, "hit": "swap"}
            rows.append(row | {"same_tokens": agreement(tokens, reference)})
        finally:
            engine.close()
    return rows


def table_of(rows: list[Row]) -> str:
    """A line for each length, batch and hit rate; a column for each arm."""
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines = [
        "TTFT in ms (median of requests) | tokens/s; same: share of requests whose tokens agree"
    ]
    lines.append("model  prompt batch  hit " + "".join(f"{arm:>17}" for arm in arms) + "  same")
    places = dict.fromkeys((r["model"], r["prompt"], r["batch"], r["hit"]) for r in rows)
    for place in places:
        cells, same = "", 1.0
        for arm in arms:
            here = {
                r["arm"]: r
                for r in rows
                if (r["model"], r["prompt"], r["batch"]) == place[:3]
                and (
                    r["hit"] == place[3]
                    or (r["arm"] == "recompute" and r["hit"] != "swap" and place[3] != "swap")
                )
            }
            row = here.get(arm)
            ttft = f"{row['ttft_ms']:8.1f}" if row and "ttft_ms" in row else " " * 8
            cells += f"{ttft} {row['tokens_s']:8.0f}" if row else " " * 17
            if row and arm in COPYING:
                same = min(same, row["same_tokens"])
        lines.append(f"{place[0]:<6} {place[1]:6} {place[2]:5} {place[3]!s:>4} {cells} {same:5.2f}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("--quick", action="store_true", help="two sizes, within 120 s on a GPU")
    parser.add_argument("--model", default=None, help=f"some of {', '.join(MODELS)}, by commas")
    parser.add_argument("--prompts", default=None, help="tokens, by commas")
    parser.add_argument("--batches", default=None)
    parser.add_argument("--hits", default=None, help="percent, by commas")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rounds", type=int, default=None, help="3; 2 with --quick")
    parser.add_argument("--new", type=int, default=16, help="tokens a request")
    parser.add_argument("--swap-new", type=int, default=256, help="tokens a request in swap")
    parser.add_argument("--swap-prompt", type=int, default=512)
    parser.add_argument("--swap-requests", type=int, default=64)
    parser.add_argument("--swap", action="store_true", help="only that, with blocks of 16 tokens")
    parser.add_argument("--block", type=int, default=256, help="tokens a block")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--asynchronous", action="store_true", help="the engine's async batching")
    parser.add_argument("--host-gib", type=float, default=24.0)
    parser.add_argument(
        "--limit", type=float, default=None, help="seconds after which arms are left out"
    )
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    args.device = "cuda" if gpu else "cpu"
    full = ("0.5b,1.5b,7b", "1024,4096,8192", "1,8,32", "0,50,70,100")
    quick = ("0.5b,7b", "8192", "8", "100")
    small = ("tiny", "256", "4", "0,100")
    chosen = quick if args.quick and gpu else full if gpu else small
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.model = (args.model or chosen[0]).split(",")
    for name, text in zip(("prompts", "batches", "hits"), chosen[1:], strict=True):
        given = getattr(args, name) or text
        setattr(args, name, [int(one) for one in given.split(",")])
    if not gpu:
        args.block, args.rounds, args.batch_tokens, args.host_gib = 32, 2, 512, 0.25
        args.swap_prompt, args.swap_requests, args.swap_new = 64, 8, 64
    if args.swap:
        args.block = 16
    limit = args.limit or (100 if args.quick else 540)
    end = time.monotonic() + limit
    args.out_of_time = lambda: time.monotonic() > end
    return args


def main() -> None:
    args = arguments()
    engine_logging.set_verbosity_error()
    rows: list[Row] = []
    for name in args.model:
        model = model_of(name, args.device)
        jobs: list[Callable[[], list[Row]]] = [
            lambda p=p, b=b, m=model: run_case(m, args, p, b)
            for p in args.prompts
            for b in args.batches
        ]
        if args.swap:
            jobs = [lambda m=model: run_swap(m, args)]
        for job in jobs:
            if args.out_of_time():
                continue
            done = [{"model": name, **row} for row in job()]
            rows += done
            for row in done:
                print(json.dumps(row), flush=True)
        del model, jobs
        gc.collect()
    out = Path(os.environ["OUT"]) / "serving.jsonl" if "OUT" in os.environ else args.json
    if out is not None:
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
        out.write_text("".join(json.dumps(row | stamp) + "\n" for row in rows), "utf-8")
    print(table_of(rows))
    wrong = [
        r
        for r in rows
        if r["arm"] in COPYING
        and r["hit"] != "swap"
        and (r["same_tokens"] < 1 or r["loaded_blocks"] < r["expected_blocks"])
    ]
    for row in wrong:
        print(f"not as expected: {json.dumps(row)}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
