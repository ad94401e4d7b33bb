"""FSDP2 with its own communication and with offcore's: compares step times and losses.

    torchrun --nproc-per-node 2 examples/fsdp2.py    # GPUs with NCCL; without GPUs, CPUs with gloo
    python examples/fsdp2.py                         # starts two processes itself

A small transformer with random weights, trained on random tokens.
"""

import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import offcore.fsdp

LAYERS, STEPS, WORDS, LENGTH, BATCH = 4, 6, 512, 64, 4
GPU = torch.cuda.is_available()
WIDTH = 1024 if GPU else 64


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def train(
    device: torch.device, with_offcore: bool
) -> tuple[list[float], float, dict[str, Any] | None]:
    """The losses, the median step in ms, and what offcore says that ran."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS)).to(device)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    if with_offcore:
        offcore.fsdp.enable(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), device=device)
    losses, times = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        guesses = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(guesses, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the step
        times.append(time.perf_counter() - start)
    report = offcore.fsdp.report(model) if with_offcore else None
    if with_offcore:
        offcore.fsdp.disable(model)
    return losses, sorted(times)[STEPS // 2] * 1e3, report


def run_rank() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    own = "NCCL" if GPU else "gloo"
    expected, own_ms, _ = train(device, with_offcore=False)
    losses, ms, report = train(device, with_offcore=True)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert report is not None
    if dist.get_rank() == 0:
        print(f"losses agree: {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps")
        print(f"median step: {own_ms:.1f} ms with {own}, {ms:.1f} ms with offcore")
        for op in ("all_gather", "reduce_scatter"):
            ran = report[op]
            print(
                f"{op}: {ran['calls']} calls, {ran['bytes'] >> 10} KiB, by {ran['variants']}, "
                f"{ran['staged']} staged, at most {ran['sms']} SMs"
            )
        for ranks, why in report["obstacles"].items():
            print(f"ranks {ranks} stayed with {own}: {why}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*command, "--standalone", __file__]))
