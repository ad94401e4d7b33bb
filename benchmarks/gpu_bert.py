"""Data-parallel training of an encoder as large as BERT-Large, random weights, bfloat16, sequences
of 384 tokens, by DDP over NCCL and over offcore with all_reduce_from=0: paper 003's section II-C
and figure 5.

    timeout 400 python benchmarks/gpu_bert.py              # a process a GPU, about 3 minutes on two
    python benchmarks/gpu_bert.py --model tiny --device cpu --batch 2 --sequence 16 --steps 2

Rows are JSON, medians of steps whose arms take turns:
step    ms of a training step with buckets of 32 MiB; `alone` without communication, `own`
        NCCL. speed: own's step to this. gap: how much longer than `alone`.
reduce  GB/s of an all-reduce of 32 MiB in pieces of 4 MiB, with nothing beside it.
beside  The same once before each layer's forward and once behind its backward, beside a step that
        has no other communication: GB/s, and the step's time to that of `alone`.
Every all-reduce adds what its sum is known of, and all parameters are compared in the end. The exit
status is 0 where all was right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_reduce import join_ranks, run_ranks
from gpu_train import WARMUP, Trainer, print_row, timed, wait
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import offcore.distributed

MIB = 1 << 20
WHOLE, PIECE = 32 * MIB, 4 * MIB
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 128, "vocab_size": 512},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                   "intermediate_size": 4096, "vocab_size": 30522},
}  # fmt: skip


class Encoder(Trainer):
    """batch: sequences a rank."""

    def __init__(self, model: Any, given: argparse.Namespace, device: torch.device) -> None:
        super().__init__(model, given.batch * given.sequence, device)
        self.shape = given.batch, given.sequence

    def batch(self, number: int) -> torch.Tensor:
        generator = torch.Generator(device=self.device)
        generator.manual_seed(1 + number * 64 + dist.get_rank())
        return torch.randint(self.words, self.shape, device=self.device, generator=generator)


class Alone(Encoder):
    """Its steps exchange nothing."""

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        with self.model.no_sync():
            return super().step(batch)


class Reduction:
    """An all-reduce in pieces, of ones, aside of the current stream."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.data = torch.ones(WHOLE // 2, dtype=torch.bfloat16, device=device)
        self.pieces = self.data.split(PIECE // 2)
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.spans: list[tuple[Any, Any]] = []

    def start(self, *_: Any) -> None:
        if self.side is None:
            began = time.perf_counter()
            self._all()
            self.spans.append((began, time.perf_counter()))
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.side):
            first.record()
            self._all()
            last.record()
        self.spans.append((first, last))

    def _all(self) -> None:
        self.data.fill_(1)
        for work in [dist.all_reduce(one, group=self.group, async_op=True) for one in self.pieces]:
            work.wait()

    def gbps(self) -> float:
        wait(self.device)
        spans, self.spans = self.spans, []
        times = [
            last - first if self.side is None else first.elapsed_time(last) / 1e3
            for first, last in spans
        ]
        return float(WHOLE / statistics.median(times) / 1e9)

    def right(self) -> bool:
        return bool((self.data == dist.get_world_size()).all())


def encoder(given: argparse.Namespace, device: torch.device) -> Any:
    lengths = {"max_position_embeddings": max(given.sequence, 16), "hidden_dropout_prob": 0.0}
    config = BertConfig(**MODELS[given.model], **lengths, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    with device:
        return BertForMaskedLM(config).to(torch.bfloat16)


def wrapped(given: argparse.Namespace, device: torch.device, group: Any) -> Any:
    return DistributedDataParallel(
        encoder(given, device),
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=WHOLE // MIB,
        find_unused_parameters=False,
    )


def equal_everywhere(model: Any) -> bool:
    mine = torch.stack([one.detach().double().sum() for one in model.parameters()]).cpu()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return all(torch.equal(one, mine) for one in every)


def steps_in_turns(trainers: dict[str, Trainer], steps: int) -> dict[str, list[float]]:
    every: dict[str, list[float]] = {arm: [] for arm in trainers}
    for step in range(-WARMUP, steps):
        for arm, trainer in trainers.items():
            took_ms, _ = timed(trainer)
            if step >= 0:
                every[arm].append(took_ms)
    return every


def beside(trainer: Trainer, reduction: Reduction, steps: int) -> tuple[float, float]:
    """ms of a step, GB/s of the all-reduces between its layers."""
    layers = trainer.model.module.bert.encoder.layer
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            for hook in (
                layer.register_forward_pre_hook(reduction.start),
                layer.register_full_backward_hook(reduction.start),
            ):
                hooks.callback(hook.remove)
        took = steps_in_turns({"beside": trainer}, steps)["beside"]
    return statistics.median(took), reduction.gbps()


def rank_main(given: argparse.Namespace) -> int:
    if given.device == "cuda":
        device = join_ranks()
    else:
        device = torch.device("cpu")
        where = {"init_method": f"file://{os.environ['MEETING']}"}
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", **where, rank=rank, world_size=ranks)
    named = {"model": given.model, "ranks": dist.get_world_size()}
    whole = offcore.distributed.Options(all_reduce_from=0)
    groups = {
        "own": dist.group.WORLD,
        "offcore": dist.new_group(backend="offcore", pg_options=whole),
    }
    trainers: dict[str, Trainer] = {"alone": Alone(wrapped(given, device, None), given, device)}
    for arm, group in groups.items():
        trainers[arm] = Encoder(wrapped(given, device, group), given, device)
    every = steps_in_turns(trainers, given.steps)
    alone = statistics.median(every["alone"])
    for arm, took in every.items():
        ratios = [a / b for a, b in zip(every["own"], took, strict=True)]
        ms = statistics.median(took)
        row = {"what": "step", "arm": arm, "ms": ms, "gap": ms / alone - 1}
        print_row(named | row | {"speed": statistics.median(ratios)})
    right = True
    for arm, group in groups.items():
        reduction = Reduction(group, device)
        for _ in range(WARMUP + given.steps):
            reduction.start()
        gbps = reduction.gbps()
        print_row(named | {"what": "reduce", "arm": arm, "gbps": gbps})
        ms, busy = beside(trainers["alone"], reduction, given.steps)
        row = {"what": "beside", "arm": arm, "gbps": busy, "of_alone": busy / gbps}
        print_row(named | row | {"ms": ms, "slowed": ms / alone})
        right = right and reduction.right() and equal_everywhere(trainers[arm].model)
    print_row(named | {"what": "right", "all": right})
    dist.destroy_process_group()
    return 0 if right else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="bert-large")
    parser.add_argument("--batch", type=int, default=10, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=384)
    parser.add_argument("--steps", type=int, default=21, help="of each arm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    given = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(given)
    return run_ranks(given.ranks, {})


if __name__ == "__main__":
    sys.exit(main())
