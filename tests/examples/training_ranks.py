"""Runs the examples that train, with two ranks each, which share one import of torch."""

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # what optimizers import

import offcore.distributed
import offcore.fsdp  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
                os.environ |= {key: str(value) for key, value in given.items()}
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                runpy.run_path(str(EXAMPLES / name), run_name="__main__")
                sys.stdout.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{name}: {codes}")


run("ddp.py")
print("---", flush=True)
run("fsdp2.py")
print("---", flush=True)
run("tensor_parallel.py")
