"""DistributedDataParallel with torch's own backend and with "offcore": compares times and losses.

    torchrun --nproc-per-node 2 examples/ddp.py    # GPUs with NCCL; without GPUs, CPUs with gloo
    python examples/ddp.py                         # starts two processes itself

A program with a single backend only needs dist.init_process_group("offcore").
"""

import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offcore.distributed

LAYERS, STEPS, WORDS, LENGTH, BATCH = 3, 6, 512, 64, 4
GPU = torch.cuda.is_available()
WIDTH = 1024 if GPU else 64


def train(device: torch.device, group: Any) -> tuple[list[float], float]:
    """The losses, and the median step in ms."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    whole = nn.Sequential(nn.Embedding(WORDS, WIDTH), layers, nn.Linear(WIDTH, WORDS)).to(device)
    model = DistributedDataParallel(whole, process_group=group)
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
    return losses, sorted(times)[STEPS // 2] * 1e3


def run_rank() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    own = "NCCL" if GPU else "gloo"
    group = dist.new_group(backend="offcore")
    expected, own_ms = train(device, None)
    losses, ms = train(device, group)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    if dist.get_rank() == 0:
        print(f"losses agree: {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps")
        print(f"median step: {own_ms:.1f} ms with {own}, {ms:.1f} ms with offcore")
        print("calls:", offcore.distributed.report(group))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*command, "--standalone", __file__]))
