"""What a call of torch.distributed's backend "offcore" costs in Python: over a communicator and
streams that do nothing, so that no GPU is needed. `python benchmarks/dispatch.py`

us of the calling thread's CPU time, the least of many rows of calls: torch's own functions, which
check and log, and a group's methods, which they call. `async`: with its wait.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import offcore.distributed  # noqa: F401
from offcore.distributed import sides

CALLS, ROWS = 300, 40


class Stream:
    """Of torch's streams and events, and of a communicator's handles, what calls use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, _: str) -> Callable[..., bool]:
        return lambda *_: True


class Comm:
    timeout = 0.0
    handle = Stream()

    def check(self) -> None:
        """Nothing has failed."""

    def all_gather(self, *_: Any, **__: Any) -> Any:
        return self.handle

    all_reduce = reduce_scatter = all_gather


def least_us(call: Callable[[], Any]) -> float:
    rows = []
    for _ in range(ROWS):
        began = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rows.append((time.thread_time_ns() - began) / CALLS / 1e3)
    return min(rows)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("offcore", init_method=address, rank=0, world_size=1)
    group: Any = dist.group.WORLD
    stream = Stream()
    for name, stand_in in (
        ("Stream", Stream),
        ("Event", Stream),
        ("current_stream", lambda _: stream),
        ("set_stream", lambda _: None),
        ("current_device", lambda: 0),
        ("is_current_stream_capturing", lambda: False),
    ):
        setattr(torch.cuda, name, stand_in)
    comm, device = Comm(), torch.device("cuda", 0)
    side = sides.GpuSide(comm, "stand-in", 0, 60.0, device)
    group.collectives._sides = {"cpu": side, "cuda": side}
    whole, part = torch.zeros(1024), torch.zeros(1024)
    opts = torch._C._distributed_c10d.AllgatherOptions()
    opts.asyncOp = False
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_reduce async": lambda: dist.all_reduce(whole, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_gather async": lambda: dist.all_gather_into_tensor(whole, part, async_op=True).wait(),
        "all_gather, the group's": lambda: group._allgather_base(whole, part, opts),
    }
    with torch.no_grad():  # as in hooks of training
        for name, call in calls.items():
            print(f"{name:24} {least_us(call):6.2f}", flush=True)


if __name__ == "__main__":
    main()
