"""Ranks of torch.distributed as children of one process that has imported torch: a fork each."""

import datetime
import faulthandler
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # what optimizers import, once for all ranks
import torch.distributed as dist

LIMIT_S = 60
warnings.filterwarnings("ignore", category=FutureWarning)  # names of several versions of torch


def run(
    ranks: int,
    main: Callable[[int, int], None],
    backend: str,
    timeout_s: float = 30,
    before: Callable[[int], None] = lambda rank: None,
    killed: int | None = None,
) -> None:
    """Calls main(rank, ranks) in each, in a default group of that backend; all must end well, but
    for the rank that is `killed`. `before` is called in each before it joins the group."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'meeting'}"
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                before(rank)
                be(rank, ranks, main, backend, place, timeout_s)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if killed is not None and codes[killed] == -signal.SIGKILL:
        codes[killed] = 0
    if any(codes):
        sys.exit(f"{main.__name__}: ranks ended with {codes}")


def be(
    rank: int,
    ranks: int,
    main: Callable[[int, int], None],
    backend: str,
    place: str,
    timeout_s: float,
) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # where it hangs
    torch.set_num_threads(1)
    code = 1
    try:
        dist.init_process_group(
            backend,
            init_method=place,
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        main(rank, ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
