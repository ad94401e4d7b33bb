"""Tensor parallelism with the backend "offcore": an MLP split over ranks, and the unsplit one.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py    # GPUs, or CPUs without GPUs
    python examples/tensor_parallel.py                         # starts two processes itself

The first product is split by columns and the second by rows, so the ranks exchange one all-reduce
per block and direction. Outputs and gradients are compared with those of the unsplit model.
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import offcore.distributed

BLOCKS, STEPS, BATCH = 3, 5, 32
GPU = torch.cuda.is_available()
WIDTH = 2048 if GPU else 128


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def model_on(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on all ranks
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)


def run_rank() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("offcore")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    whole, split = model_on(device), model_on(device)
    for block in split:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(BATCH, WIDTH, device=device)
    expected = whole(x)
    expected.square().mean().backward()
    times = []
    for _ in range(STEPS):
        split.zero_grad()
        start = time.perf_counter()
        found = split(x)
        found.square().mean().backward()
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    gradient = split[0].up.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, whole[0].up.weight.grad, rtol=1e-3, atol=1e-4)

    carried = offcore.distributed.report(mesh.get_group())
    if dist.get_rank() == 0:
        print(f"outputs and gradients agree on {mesh.size()} ranks")
        print(f"median step: {sorted(times)[STEPS // 2] * 1e3:.1f} ms")
        print("calls:", carried)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*command, "--standalone", __file__]))
