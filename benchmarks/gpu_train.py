"""Training steps of transformers' Llama (random weights) with torch's own communication and with
offcore's, one process a GPU.

    python benchmarks/gpu_train.py                         # FSDP2, 1 B and 3 B parameters, and DDP
    python benchmarks/gpu_train.py --models 1b --tokens 1024 --no-ddp
    python benchmarks/gpu_train.py --curves 50             # losses of 50 steps, compared
    python benchmarks/gpu_train.py --models tiny --device cpu --tokens 64   # tries it without GPUs

FSDP2: float32 parameters, bfloat16 all-gathers and computing, float32 reduce-scatters, AdamW
(fused), a layer a group. Steps of the arms take turns in one process: `own` is NCCL at its
defaults, `gather` offcore's all-gathers with NCCL's reduce-scatters, `offcore` both. DDP: bfloat16,
AdamW, arms are process groups: `offcore` at its defaults, which leaves short all-reduces to NCCL,
`engines` with all_reduce_from=0. Rows are JSON: step (ms, the slower rank's, medians), host (ms
until the host has enqueued a step), busy (ms of NCCL's kernels in a step of `own`), speed (own's
step to this, the median of neighbours), torch_gib (peak of torch's tensors), offcore_gib (what else
it takes).

Losses are those of deterministic kernels (slower ones, attention by plain products): what two runs
differ by is then what communication makes of it. `again` is a second run of `own`; it and `gather`,
which only moves bytes, must have own's bits, or the status is 1. carried: calls of offcore's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from gpu_reduce import join_ranks, run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import offcore.distributed
import offcore.fsdp
from offcore.fsdp.enable import _param_groups

SIZES: dict[str, tuple[int, int, int, int]] = {  # width, inner width, layers, heads
    "tiny": (64, 128, 3, 4),
    "1b": (2048, 8192, 18, 32),
    "3b": (3072, 8192, 28, 24),
    "wide": (4096, 14336, 12, 32),  # about 3 B, in fewer layers: less work for the host
}
WORDS = 32000
WARMUP = 3
ARMS = ("own", "gather", "offcore")
GIB = 1 << 30


def print_row(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(row), flush=True)


def llama(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    width, inner, layers, heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=WORDS if size != "tiny" else 512,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config).to(dtype)


class Trainer:
    """One model; `step` trains it on the same random tokens for each number of a step."""

    def __init__(self, model: Any, tokens: int, device: torch.device) -> None:
        self.model, self.tokens, self.device = model, tokens, device
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        plain = getattr(model, "module", model)
        self.words = plain.config.vocab_size

    def batch(self, number: int) -> torch.Tensor:
        generator = torch.Generator(device=self.device)
        generator.manual_seed(1 + number * 64 + dist.get_rank())
        length = min(self.tokens, 1024)
        shape = (self.tokens // length, length)
        return torch.randint(self.words, shape, device=self.device, generator=generator)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(trainer: Trainer) -> tuple[float, float]:
    """Of a step the ms until it has ended, and until it is enqueued, of the slower rank."""
    device = trainer.device
    batch = trainer.batch(0)
    wait(device)
    dist.barrier()
    wait(device)
    begin = time.perf_counter()
    trainer.step(batch)
    enqueued = time.perf_counter()
    wait(device)
    told = torch.tensor([time.perf_counter() - begin, enqueued - begin], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told[0]) * 1e3, float(told[1]) * 1e3


def busy_ms(trainer: Trainer) -> float:
    """Of NCCL's kernels in a step."""
    if trainer.device.type != "cuda":
        return 0.0
    batch = trainer.batch(0)
    trainer.step(batch)
    wait(trainer.device)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        trainer.step(batch)
        wait(trainer.device)
    found = [one for one in profile.events() if "ncclDevKernel" in one.name]
    return float(sum(one.device_time for one in found)) / 1e3


def trace(trainer: Trainer, file: Path) -> None:
    """A step as chrome's tracing shows it, of rank 0."""
    batch = trainer.batch(0)
    with torch.profiler.profile() as profile:
        trainer.step(batch)
        wait(trainer.device)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(file))


def others_gib(device: torch.device) -> float:
    """Of the GPU's memory, what torch's tensors do not have."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved()) / GIB


def peak_gib(device: torch.device) -> float:
    """Of torch's tensors, since the last call."""
    if device.type != "cuda":
        return 0.0
    found = float(torch.cuda.max_memory_allocated()) / GIB
    torch.cuda.reset_peak_memory_stats()
    return found


def in_turns(
    trainer: Trainer, arms: dict[str, Callable[[], None]], steps: int, folder: Path | None
) -> dict[str, dict[str, Any]]:
    """Each arm's medians; a step of each in turn, since a machine changes its speed."""
    every: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in arms}
    rows: dict[str, dict[str, Any]] = {name: {} for name in arms}
    names = [*arms]
    for step in range(-WARMUP, steps):
        names.append(names.pop(0))
        for name in names:
            arms[name]()
            peak_gib(trainer.device)
            for known, new in zip(every[name], timed(trainer), strict=True):
                if step >= 0:
                    known.append(new)
            rows[name]["torch_gib"] = peak_gib(trainer.device)
            if folder is not None and step == steps - 1:
                trace(trainer, folder / f"{trainer.tokens}-{name}.json.gz")
    for name, (all_ms, host_ms) in every.items():
        ratios = [own / ours for own, ours in zip(every["own"][0], all_ms, strict=True)]
        rows[name] |= {"step": statistics.median(all_ms), "host": statistics.median(host_ms)}
        rows[name] |= {"least": min(all_ms), "speed": round(statistics.median(ratios), 3)}
    return rows


def sharded(arguments: argparse.Namespace, size: str, device: torch.device) -> Any:
    model = llama(size, device, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if arguments.compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


Calls = list[tuple[Any, Any, Any]]


def calls_of(model: Any) -> Calls:
    """Where each of FSDP2's parameter groups communicates."""
    return [
        (group, group._all_gather_comm, group._reduce_scatter_comm)
        for group in _param_groups(model)
    ]


def take(calls: Calls, gather: bool, reduce: bool) -> None:
    for group, gathers, reduces in calls:
        if gather:
            group._all_gather_comm = gathers
        if reduce:
            group._reduce_scatter_comm = reduces


def take_apart(gathers_of: Calls, reduces_of: Calls) -> None:
    take(gathers_of, True, False)
    take(reduces_of, False, True)


def measure_fsdp(arguments: argparse.Namespace, size: str, device: torch.device) -> None:
    model = sharded(arguments, size, device)
    count = sum(one.numel() for one in model.parameters())
    own = calls_of(model)
    trainer = Trainer(model, arguments.tokens[0], device)
    timed(trainer)
    before = others_gib(device)
    offcore.fsdp.enable(model, **({"sms": arguments.sms} if arguments.sms else {}))
    ours = calls_of(model)
    for tokens in arguments.tokens:
        trainer.tokens = tokens
        choices: dict[str, Callable[[], None]] = {
            "own": lambda: take(own, True, True),
            "gather": lambda: take_apart(ours, own),
            "offcore": lambda: take(ours, True, True),
        }
        arms = {arm: choices[arm] for arm in arguments.arms}
        choices["own"]()
        busy = busy_ms(trainer)
        rows = in_turns(trainer, arms, arguments.steps, arguments.trace)
        for arm, row in rows.items():
            named = {"what": "fsdp2", "model": size, "parameters": count, "tokens": tokens}
            print_row(named | {"arm": arm, "busy": busy if arm == "own" else None} | row)
    ran = offcore.fsdp.report(model)
    print_row({"what": "fsdp2", "model": size, "offcore_gib": others_gib(device) - before} | ran)
    take(ours, True, True)
    offcore.fsdp.disable(model)


def measure_ddp(arguments: argparse.Namespace, size: str, device: torch.device, mib: int) -> None:
    whole = offcore.distributed.Options(all_reduce_from=0)
    groups = {
        "own": None,
        "offcore": dist.new_group(backend="offcore"),
        "engines": dist.new_group(backend="offcore", pg_options=whole),
    }
    trainers = {}
    for arm, group in groups.items():
        model = DistributedDataParallel(
            llama(size, device, torch.bfloat16),
            process_group=group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=mib,
        )
        trainers[arm] = Trainer(model, arguments.tokens[0], device)
    every: dict[str, list[tuple[float, float]]] = {arm: [] for arm in trainers}
    for step in range(-WARMUP, arguments.steps):
        for arm, trainer in trainers.items():
            found = timed(trainer)
            if step >= 0:
                every[arm].append(found)
    for arm, trainer in trainers.items():
        first = next(iter(trainer.model.parameters())).detach()
        parts = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, first)
        row = {"what": "ddp", "model": size, "tokens": trainer.tokens, "buckets": mib, "arm": arm}
        row |= {"step": statistics.median(one[0] for one in every[arm])}
        row |= {"host": statistics.median(one[1] for one in every[arm])}
        ratios = [own[0] / one[0] for own, one in zip(every["own"], every[arm], strict=True)]
        row |= {"speed": round(statistics.median(ratios), 3)}
        print_row(row | {"equal": all(torch.equal(one, first) for one in parts)})


def make_deterministic() -> None:
    """For the rest of the process. CUDA's libraries read CUBLAS_WORKSPACE_CONFIG, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def losses_of(
    arguments: argparse.Namespace, size: str, device: torch.device, arm: str
) -> tuple[list[float], dict[str, int]]:
    """Of the same steps from the same weights; and how many calls were offcore's."""
    model = sharded(arguments, size, device)
    trainer = Trainer(model, arguments.tokens[0], device)
    if arm != "own":
        offcore.fsdp.enable(model, reduce_scatter=arm == "offcore")
    with sdpa_kernel(SDPBackend.MATH):
        losses = [trainer.step(trainer.batch(number)) for number in range(arguments.curves)]
    wait(device)
    told = torch.stack(losses)
    dist.all_reduce(told)
    carried = {}
    if arm != "own":
        ran = offcore.fsdp.report(model)
        carried = {name: ran[name]["calls"] for name in ("all_gather", "reduce_scatter")}
        offcore.fsdp.disable(model)
    return (told / dist.get_world_size()).tolist(), carried


def curves(arguments: argparse.Namespace, size: str, device: torch.device) -> bool:
    """Losses by arm; false where arms that must have own's do not."""
    make_deterministic()
    found: dict[str, list[float]] = {}
    right = True
    for arm in ("own", *arguments.arms):
        values, carried = losses_of(arguments, size, device, arm)
        name = "again" if arm in found else arm
        found[name] = values
        off = max(abs(a - b) for a, b in zip(values, found["own"], strict=True))
        row = {"what": "losses", "model": size, "arm": name, "steps": len(values)}
        row |= {"first": values[0], "last": values[-1], "off": f"{off:.3g}", "carried": carried}
        print_row(row | {"equal": values == found["own"]})
        right = right and (name == "offcore" or values == found["own"])
    return right


def rank_main(arguments: argparse.Namespace) -> int:
    if arguments.device == "cuda":
        device = join_ranks()
    else:
        device = torch.device("cpu")
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = f"file://{os.environ['MEETING']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    right = True
    for size in arguments.models:
        if arguments.curves:
            right = curves(arguments, size, device) and right
            continue
        measure_fsdp(arguments, size, device)
    if arguments.ddp and not arguments.curves:
        for mib in arguments.buckets:
            measure_ddp(arguments, arguments.models[0], device, mib)
    dist.destroy_process_group()
    return 0 if right else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["1b", "3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096], help="a rank's")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--steps", type=int, default=21, help="of each arm")
    parser.add_argument("--compile", action="store_true", help="each layer, by torch.compile")
    parser.add_argument("--sms", type=int, default=0, help="of our reductions; 0: the default")
    parser.add_argument("--curves", type=int, default=0, metavar="STEPS")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="of a step of each arm")
    parser.add_argument("--buckets", nargs="+", type=int, default=[25], help="DDP's, MiB each")
    parser.add_argument("--no-ddp", dest="ddp", action="store_false")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(arguments)
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if arguments.curves else {}
    return run_ranks(arguments.ranks, settings)


if __name__ == "__main__":
    sys.exit(main())
