"""TTFT and tokens a second of vLLM with KV from the host: its own offloading beside offcore's.

    python benchmarks/serving_vllm.py --quick            # one model and size, on one GPU
    python benchmarks/serving_vllm.py --limit 480        # models, prompts, batches and hit rates
    python benchmarks/serving_vllm.py --model 1.5b,7b --prompts 1024,8192 --batches 1,8 \\
        --hits 0,50,100 --arms recompute,gpu,own,ours,zero_sm --eager

Random weights of Qwen2.5's and Llama-3.1-8B's sizes; nothing is downloaded. Each arm is a process
with an engine of its own, and all arms take turns, round by round. For a hit rate, the first part
of each prompt has been seen before and lies in host memory, while the GPU's prefix cache has been
reset; the rest is new in each round. Arms:

    recompute   the engine without host memory
    gpu         the same engine, all of the prompt still in its cache (hit 100 only): the bound
    own         vLLM's OffloadingConnector with its own copies, CPUOffloadingSpec
    ours        the same with "spec_name": "OffcoreOffloadingSpec"
    zero_sm     the same with "offcore": {"policy": "zero_sm"}
    layered     OffcoreConnector: layers wait for themselves alone (vLLM 0.33)
    simple      vLLM's SimpleCPUOffloadConnector

TTFT is vLLM's own, from a request's arrival to its first token; all requests of a batch arrive
together. Weights are drawn once more after loading, as vLLM's dummy weights are so small that
attention hardly changes a token. Tokens are compared with recompute's at hit 0 and with those of
the first arm that copies at others: with one prompt the shapes are the same, and so must the tokens
be; in a batch requests may go on in other steps, whose shapes round otherwise, and the share of
equal requests is told. `cached` must be what the host holds. A row with "error" is an arm that
failed, and others go on. Rows go to $OUT/serving-vllm.jsonl where OUT is set, else to --json; the
table comes last.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving_table import Row, agreement, failed, prompts_of, table_of

from offcore.serving.engines import known
from offcore.serving.vllm import VERSIONS
from offcore.tools.report import Stamp

_SPEC = {"spec_name": "OffcoreOffloadingSpec", "spec_module_path": "offcore.serving.vllm"}
CONNECTORS: dict[str, dict[str, Any]] = {  # connector, and its extra configuration
    "recompute": {},
    "own": {"OffloadingConnector": {}},
    "ours": {"OffloadingConnector": _SPEC},
    "zero_sm": {"OffloadingConnector": {**_SPEC, "offcore": {"policy": "zero_sm"}}},
    "layered": {"OffcoreConnector": {}},
    "simple": {"SimpleCPUOffloadConnector": {}},
}
ARMS = ("recompute", "gpu", "own", "ours", "zero_sm", "layered", "simple")
USUAL = ARMS[:5]
PEERS = ("own", "simple")
BLOCK = 16  # tokens
START_S = 240.0  # an engine has started or failed by then


def config_of(name: str) -> Any:
    """The model's configuration; transformers is imported when one is asked for."""
    import serving_model

    return serving_model.config_of(name)


def kv_bytes(config: Any) -> int:
    """Of a token, in all layers."""
    head = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head * 2)


def transfer_of(arm: str, host_bytes: int) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config for an arm; None without a connector."""
    for connector, extra in CONNECTORS[arm].items():
        made = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, **extra},
        }
        if connector == "OffcoreConnector":
            made["kv_connector_module_path"] = "offcore.serving.vllm"
        return made
    return None


def sizes_of(args: argparse.Namespace, token: int) -> tuple[int, int]:
    """Bytes of the GPU's cache and of host memory that the largest case needs."""
    most = max(args.prompts) + args.new + BLOCK
    cache = max(args.batches) * most * 5 // 4 + 64 * BLOCK
    # What has been seen stays, beside what is new in the rounds under way and before.
    host = (9 * max(args.batches) * most // 4 + 64 * BLOCK) * token
    return cache * token, min(host, int(args.host_gib * (1 << 30)))


def arguments_of(args: argparse.Namespace, arm: str, config: Any, folder: str) -> dict[str, Any]:
    """Arguments of vLLM's LLM for an arm."""
    cache, host = sizes_of(args, kv_bytes(config))
    made: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "generation_config": "vllm",
        "max_model_len": -(-(max(args.prompts) + args.new + 1) // BLOCK) * BLOCK,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": args.batch_tokens,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": 0.05,  # of no account beside the bytes, but must be free
        "enable_prefix_caching": True,
        "enforce_eager": args.eager,
        "disable_log_stats": False,  # else there are no times
        "seed": 0,
    }
    if args.graphs:  # of decode steps, without torch.compile
        sizes = sorted({1, *args.batches})
        made["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    if args.attention:
        made["attention_config"] = {"backend": args.attention}
    transfer = transfer_of(arm, host)
    return made if transfer is None else made | {"kv_transfer_config": transfer}


def draw_weights(model: Any) -> int:
    """Draws them as a fresh model of transformers has them, the same in all arms; their number."""
    import torch

    draw, count = None, 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = draw or torch.Generator(weight.device).manual_seed(0)
            if weight.dim() > 1 or "norm" not in name:
                weight.normal_(0.0, 0.02, generator=draw)
            else:
                weight.fill_(1.0)
            count += weight.numel()
    return count


def answers(llm: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """One call of the engine: seconds in all, and of each request TTFT, tokens, tokens cached."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(given, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "ttft": [one.metrics.first_token_latency for one in outputs],
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [int(one.num_cached_tokens or 0) for one in outputs],
    }


def forget(llm: Any, wait_s: float) -> dict[str, Any]:
    """Resets the GPU's prefix cache once what is stored has arrived in host memory: the scheduler
    hears of it in a later step, so that a short request makes some."""
    for _ in range(2):
        answers(llm, [[1, 2, 3]], 3)
        time.sleep(wait_s)
    answers(llm, [[1, 2, 3]], 2)
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM could not reset its prefix cache: blocks are in use")
    return {}


def serve(pipe: Any, made: dict[str, Any]) -> None:
    """The process of an arm: an engine that answers calls until the pipe says None."""
    try:
        import torch
        import vllm

        llm = vllm.LLM(**made)
        weights = sum(llm.apply_model(draw_weights))
        told = {"weights": weights, "vllm": vllm.__version__, "device": "cpu"}
        if torch.cuda.is_initialized():
            told["device"] = torch.cuda.get_device_name()
        pipe.send(told)
        while (call := pipe.recv()) is not None:
            prompts, new, wait_s = call
            pipe.send(answers(llm, prompts, new) if prompts else forget(llm, wait_s))
        llm.llm_engine.engine_core.shutdown()
    except Exception as why:
        pipe.send(failed(why))
        raise


class Engine:
    """The process of an arm, from here."""

    def __init__(self, arm: str, made: dict[str, Any]) -> None:
        self.arm = arm
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, made), name=arm)
        self.process.start()
        theirs.close()

    def answer(self, timeout: float) -> Any:
        """Raises RuntimeError where the engine failed or says nothing for so long."""
        try:
            if not self.pipe.poll(timeout):
                raise RuntimeError(f"{self.arm}: no answer within {timeout:.0f} s")
            told = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.arm}: its process has ended") from None
        if told and "error" in told:
            raise RuntimeError(told["error"])
        return told

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        self.pipe.send((prompts, new, 0.0))
        return dict(self.answer(120))

    def forget(self, wait_s: float) -> None:
        self.pipe.send(([], 0, wait_s))
        self.answer(60)

    def close(self) -> None:
        with suppress(OSError):  # it may have ended
            self.pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


Found = dict[str, list[dict[str, Any]]]


def rounds_of(
    engines: dict[str, Engine],
    args: argparse.Namespace,
    place: tuple[int, int, int],
    seen: list[list[int]],
    vocabulary: int,
) -> tuple[Found, list[Row]]:
    """The answers of each arm, round by round in turns, and rows of those that failed."""
    prompt, batch, hit = place
    kept = kept_of(place)
    found: Found = {}
    errors: list[Row] = []
    for turn in range(args.rounds):
        if args.out_of_time() and found:
            break
        # What follows the part seen is new in each round. The seeds are those of all arms.
        rest = prompts_of(f"{prompt} {batch} {hit} {turn}", batch, prompt - kept, vocabulary)
        prompts = [[*old[:kept], *new] for old, new in zip(seen, rest, strict=True)]
        for arm in arms_at(args, hit):
            engine = engines.get("recompute" if arm == "gpu" else arm)
            if engine is None:
                continue
            try:
                if arm != "gpu":
                    engine.forget(0.1)
                elif turn == 0:
                    engine.run(prompts, args.new)
                found.setdefault(arm, []).append(engine.run(prompts, args.new))
            except (RuntimeError, OSError) as why:
                errors.append({"arm": arm, **named(place), "error": str(why)})
                engines.pop(engine.arm).close()
                found.pop(arm, None)
    return found, errors


def arms_at(args: argparse.Namespace, hit: int) -> list[str]:
    """The arms of a hit rate: hits change nothing for `recompute`, and `gpu` has all or none."""
    only = {"recompute": hit == min(args.hits), "gpu": hit == 100}
    return [arm for arm in args.arms if only.get(arm, True)]


def kept_of(place: tuple[int, int, int]) -> int:
    """Tokens of a prompt that the host holds, in whole blocks."""
    return place[0] * place[2] // 100 // BLOCK * BLOCK


def named(place: tuple[int, int, int]) -> Row:
    return dict(zip(("prompt", "batch", "hit"), place, strict=True))


def rows_of(found: Found, place: tuple[int, int, int]) -> Iterator[Row]:
    """Medians of the rounds of each arm."""
    kept = kept_of(place)
    copying = [arm for arm in found if arm not in ("recompute", "gpu")]
    first = "recompute" if place[2] == 0 and "recompute" in found else next(iter(copying), None)
    for arm, rounds in found.items():
        row: Row = {
            "arm": arm,
            **named(place),
            "ttft_ms": statistics.median(statistics.median(one["ttft"]) for one in rounds) * 1e3,
            "ttft_mean_ms": statistics.median(statistics.mean(one["ttft"]) for one in rounds) * 1e3,
            "ttft_last_ms": statistics.median(max(one["ttft"]) for one in rounds) * 1e3,
            "tokens_s": statistics.median(
                sum(map(len, one["tokens"])) / one["seconds"] for one in rounds
            ),
            "cached": min(min(one["cached"]) for one in rounds),
            "expected": kept if arm in copying else 0,
            "rounds": len(rounds),
        }
        both = list(zip(rounds, found[first] if first else (), strict=False))
        if both and (arm in copying or place[2] == 0):
            pairs = [[one["tokens"] for one in side] for side in zip(*both, strict=True)]
            row["same_tokens"] = agreement(pairs[0], pairs[1])
        yield row


def unexpected(row: Row) -> bool:
    """Whether the host held less than it should, or a single prompt has other tokens. vLLM computes
    the last token, and so its block, of a prompt that it has whole."""
    if "error" in row:
        return False
    less = row["cached"] < row["expected"] - BLOCK
    return bool(less or (row["batch"] == 1 and row.get("same_tokens", 1.0) < 1))


def started(
    args: argparse.Namespace, name: str, config: Any
) -> tuple[dict[str, Engine], list[Row]]:
    """The engines of a model, which start side by side; what each told is in `args.told`."""
    engines: dict[str, Engine] = {}
    errors: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        wanted = [arm for arm in args.arms if arm != "gpu"]
        began = time.monotonic()
        for arm in wanted:
            engines[arm] = Engine(arm, arguments_of(args, arm, config, folder))
        for arm in wanted:
            try:
                args.told = engines[arm].answer(START_S - (time.monotonic() - began))
            except RuntimeError as why:
                errors.append({"arm": arm, "prompt": 0, "batch": 0, "hit": "-", "error": str(why)})
                engines.pop(arm).close()
        print(f"{name}: {', '.join(engines)} in {time.monotonic() - began:.0f} s", flush=True)
    return engines, errors


def run_model(args: argparse.Namespace, name: str) -> Iterator[Row]:
    """All cases of a model."""
    config = config_of(name)
    engines, errors = started(args, name, config)
    yield from errors
    try:
        for prompt, batch in args.cases:
            if args.out_of_time() or not engines:
                print(f"left out: {name}, {batch} x {prompt}", flush=True)
                continue
            seen = prompts_of("seen", batch, prompt, config.vocab_size)
            for arm, engine in list(engines.items()):
                try:
                    engine.run(seen, args.new)
                    engine.forget(0.5)
                except (RuntimeError, OSError) as why:
                    yield {"arm": arm, **named((prompt, batch, 0)), "error": str(why)}
                    engines.pop(arm).close()
            # The highest first: what it needs longest is used last, and stays in host memory.
            for hit in sorted(args.hits, reverse=True):
                if args.out_of_time():
                    break
                place = (prompt, batch, hit)
                found, errors = rounds_of(engines, args, place, seen, config.vocab_size)
                yield from errors
                yield from rows_of(found, place)
    finally:
        for engine in engines.values():
            engine.close()


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument(
        "--quick", action="store_true", help="1.5b, 1 and 8 prompts of 4,096, two rounds"
    )
    parser.add_argument("--model", default=None, help="0.5b,1.5b,7b,llama8b: some, by commas")
    parser.add_argument("--prompts", default=None, help="tokens, by commas")
    parser.add_argument("--batches", default=None)
    parser.add_argument("--hits", default=None, help="percent, by commas")
    parser.add_argument("--arms", default=",".join(USUAL), help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--rounds", type=int, default=None, help="3; 2 with --quick")
    parser.add_argument("--new", type=int, default=8, help="tokens a request")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--eager", action="store_true", help="no compiler, no CUDA graphs")
    how.add_argument("--graphs", action="store_true", help="no compiler; graphs of decode steps")
    parser.add_argument("--attention", default=None, help="vLLM's backend, as TRITON_ATTN")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--host-gib", type=float, default=24.0, help="of each arm, at most")
    parser.add_argument(
        "--limit", type=float, default=None, help="seconds; then cases are left out"
    )
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(given)
    quick = args.quick
    args.models = (args.model or ("1.5b" if quick else "0.5b,7b,1.5b,llama8b")).split(",")
    args.rounds = args.rounds or (2 if quick else 3)
    for name, usual in (("prompts", "1024,4096,8192"), ("batches", "1,8"), ("hits", "0,50,100")):
        brief = {"prompts": "4096", "batches": "1,8", "hits": "0,100"}[name]
        given_ = getattr(args, name) or (brief if quick else usual)
        setattr(args, name, [int(one) for one in given_.split(",")])
    args.arms = args.arms.split(",")
    if strange := set(args.arms) - set(ARMS):
        parser.error(f"no such arms: {', '.join(sorted(strange))}")
    if "gpu" in args.arms and "recompute" not in args.arms:
        parser.error("gpu is the engine of recompute: name both")
    # One whose tokens must be the same, then the telling ones.
    least, *rest = [
        (prompt, batch) for batch in sorted(args.batches) for prompt in sorted(args.prompts)
    ]
    args.cases = [least, *reversed(rest)]
    usual_s = 150.0 if quick else 900.0
    end = time.monotonic() + (usual_s if args.limit is None else args.limit)
    args.out_of_time = lambda: time.monotonic() > end
    args.told = {}
    return args


def checked() -> None:
    """Ends where vLLM cannot be measured."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"vLLM is not installed: pip install vllm=={VERSIONS[0]}.*")
    if not known("vLLM", version, VERSIONS):
        sys.exit(f"vllm {version} is not supported: pip install vllm=={VERSIONS[0]}.*")
    # In the arm's own process, so that its weights can be drawn; quiet; nothing is fetched.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def main() -> None:
    args = arguments()
    checked()
    rows: list[Row] = []
    out = Path(os.environ["OUT"]) / "serving-vllm.jsonl" if "OUT" in os.environ else args.json
    stamp = asdict(Stamp()) | {"batch_tokens": args.batch_tokens, "new": args.new}
    stamp |= {"mode": "eager" if args.eager else "graphs" if args.graphs else "default"}
    stamp |= {"attention": args.attention or "default"}
    with out.open("w", encoding="utf-8", buffering=1) if out else nullcontext() as file:
        try:
            for name in args.models:
                if args.out_of_time():
                    print(f"left out: {name}", flush=True)
                    continue
                for row in run_model(args, name):
                    rows.append({"model": name, **row})
                    print(json.dumps(rows[-1]), flush=True)
                    if file is not None:
                        file.write(json.dumps(rows[-1] | args.told | stamp) + "\n")
        finally:
            print(table_of(rows, ARMS, PEERS))
    wrong = [row for row in rows if unexpected(row)]
    for row in wrong:
        print(f"not as expected: {json.dumps(row)}")
    single = {row["arm"] for row in rows if row["batch"] == 1 and row["hit"] and "cached" in row}
    if not (compared := len(single - {"recompute", "gpu"}) > 1):
        print("tokens not compared: no single prompt with a hit has run by two arms that copy")
    sys.exit(1 if wrong or not compared or any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
