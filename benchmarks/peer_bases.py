"""Suites of torch's wheel: its distributed_test.py, and tests on the bases that it has for DTensor
and FSDP, whose own tests it lacks.

Run by peer_suites.py, which says with which backend. DTensor: torch's converter shards every
argument of an operation in every way, and compares with the operation on whole tensors. FSDP:
torch's models train sharded and beside DDP, and end with the same losses and weights.

Ranks run one test after the other. They are forked from a server that has imported this module and
nothing else: a process that has made one of torch's test cases may have started CUDA, and a fork of
it could not.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
import traceback
import unittest
from collections.abc import Callable
from typing import Any

import peer_suites
import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.testing._internal import common_distributed, common_fsdp
from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed._tensor import common_dtensor

RANKS = int(os.environ.get("WORLD_SIZE", "2"))
LIMIT_S = 30  # of one test
START_S = 60  # and from the ranks' start: the first tests start CUDA too
SERVER = torch.multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
ERROR = common_distributed.MultiProcessTestCase.TEST_ERROR_EXIT_CODE
# Tests that end a process: torch gives their groups less time, for its watchdog to do so soon.
CRASHING = {
    name
    for name, timeout_s in distributed_test.CUSTOM_PG_TIMEOUT.items()
    if timeout_s < distributed_test.default_pg_timeout
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# Operations, and whole tensors that they are tried with: every ordering of shards of these.
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (torch.add, (drawn(8, 12), drawn(8, 12))),
    "addmm": (torch.addmm, (drawn(12), drawn(8, 16), drawn(16, 12))),
    "bmm": (torch.bmm, (drawn(4, 8, 12), drawn(4, 12, 6))),
    "cat": (lambda a, b: torch.cat([a, b], 1), (drawn(8, 12), drawn(8, 12))),
    "cumsum": (lambda a: a.cumsum(1), (drawn(8, 12),)),
    "embedding": (functional.embedding, (torch.arange(16).view(4, 4) % 8, drawn(8, 12))),
    "gelu": (functional.gelu, (drawn(8, 12),)),
    "layer_norm": (lambda a: functional.layer_norm(a, (12,)), (drawn(8, 4, 12),)),
    "linear": (functional.linear, (drawn(4, 8, 16), drawn(12, 16), drawn(12))),
    "matmul": (torch.matmul, (drawn(8, 16), drawn(16, 12))),
    "max": (lambda a: a.amax(0), (drawn(8, 12),)),
    "mean": (lambda a: a.mean(), (drawn(8, 12),)),
    "prod": (lambda a: a.prod(1), (drawn(8, 12),)),
    "slice": (lambda a: a[2:7, 1:], (drawn(8, 12),)),
    "softmax": (lambda a: a.softmax(-1), (drawn(8, 12),)),
    "sum": (lambda a: a.sum(1), (drawn(8, 12),)),
    "transpose": (lambda a: a.transpose(0, 2), (drawn(4, 8, 12),)),
    "var": (lambda a: a.var(0), (drawn(8, 12),)),
    "where": (torch.where, (drawn(8, 12) > 0, drawn(8, 12), drawn(8, 12))),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)


class Rank:
    """A process that runs tests one after the other; to each test case of torch's, a process of its
    own, whose `exitcode` is None until the test has ended."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._pipe, other_end = torch.multiprocessing.Pipe()
        self._process = SERVER.Process(target=_serve, args=(other_end,))
        self._process.start()
        other_end.close()
        self.call: tuple[Any, ...] = ()
        self._code: int | None = None

    def start(self) -> None:
        self._code = None
        self._pipe.send((dict(os.environ), *self.call))

    @property
    def pid(self) -> Any:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        try:
            if self._code is None and self._pipe.poll():
                self._code = self._pipe.recv()
        except (EOFError, ConnectionError):  # the process has ended
            self._process.join()
            self._code = self._process.exitcode
        return self._code

    def terminate(self) -> None:
        if self.exitcode is None:
            self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


_living: list[Rank] = []


def process(target: Callable[..., None], args: Any, kwargs: Any, **_: Any) -> Rank:
    """The living process of the rank that `args` begin with."""
    if not _living:
        _living.extend(Rank() for _ in range(RANKS))
    rank: Rank = _living[args[0]]
    rank.call = (target, args, kwargs)
    return rank


def end_ranks() -> None:
    """The next test gets fresh ones."""
    for rank in _living:
        rank.end()
    _living.clear()


def limit(left_s: float) -> None:
    """The next test may take so long, or what one may take at most if that is less."""
    age_s = time.monotonic() - _living[0].began if _living else 0
    common_distributed.TIMEOUT_DEFAULT = min(max(LIMIT_S, START_S - age_s), left_s)


def _serve(pipe: Any) -> None:
    peer_suites.begin_with_backend()
    torch.set_num_threads(1)  # not in the server: threads of a fork's autograd would race to do so
    gc.freeze()  # what is imported need not be looked through after each test
    while True:
        environment, *call = pipe.recv()
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()
        pipe.send(_exit_code(*call))
        _reset()  # if it cannot, it is the next test that gets fresh ranks


def _exit_code(target: Callable[..., None], args: Any, kwargs: Any) -> Any:
    """What a process for this call alone would exit with."""
    try:
        target(*args, **kwargs)
    except SystemExit as left:
        return left.code or 0
    except Exception:
        *_, told = args
        if told.closed:  # the test has run, and not failed
            raise
        told.send(traceback.format_exc())
        return ERROR
    return 0


def _reset() -> None:
    """Takes away what a test may have left, except in the environment: each gets its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_test.Barrier.barrier_id = 0
    torch.set_default_dtype(torch.float32)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_device(0)


_BASES: Any = (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase)


class Distributed(*_BASES):  # type: ignore[misc]
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(process)


class DTensor(common_dtensor.DTensorTestBase):  # type: ignore[misc]
    @property
    def world_size(self) -> int:
        return RANKS

    def setUp(self) -> None:
        super(common_dtensor.DTensorTestBase, self).setUp()
        self._start_processes(process)

    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        if self.device_type == "cuda":  # a mesh does so only in a process that has not used CUDA
            torch.cuda.set_device(self.rank)
        dist.init_process_group(
            os.environ["SUITE_BACKEND"],
            world_size=RANKS,
            rank=self.rank,
            init_method=f"file://{self.file_name}",
        )


def _operation(name: str) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        call, tensors = OPERATIONS[name]
        self._test_op(self.build_device_mesh(), call, *tensors)

    return test


def _redistribution(dtype: torch.dtype) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        mesh = self.build_device_mesh()
        whole = (drawn(2 * RANKS + 1, 3 * RANKS) * 8).to(self.device_type, dtype)  # a rest of rows
        kinds = (Shard(0), Shard(1), Replicate())
        for before, after in itertools.product(kinds, kinds):
            shards = distribute_tensor(whole, mesh, [before])
            assert torch.equal(shards.redistribute(mesh, [after]).full_tensor(), whole)
        for op, after in itertools.product(("sum", "max", "min"), kinds):
            local = common_dtensor.DTensor.from_local(whole, mesh, [Partial(op)], run_check=False)
            total = whole * RANKS if op == "sum" else whole
            assert torch.equal(local.redistribute(mesh, [after]).full_tensor(), total)

    return test


class Fsdp(common_fsdp.FSDPTest):  # type: ignore[misc]
    @property
    def world_size(self) -> int:
        return RANKS

    def setUp(self) -> None:
        super(common_fsdp.FSDPTest, self).setUp()
        self._start_processes(process)


def _parity(model: Any, **options: Any) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        mode, where = common_fsdp.FSDPInitMode.RECURSIVE, common_fsdp.DEVICEInitMode.DEVICE_BEFORE
        if common_fsdp.DEVICE_TYPE == "cpu":  # which FSDP takes only where it is told
            options["device_id"] = torch.device("cpu")
        self._test_fsdp_parity(model, mode, where, **options)

    return test


def _fill() -> None:
    for name in OPERATIONS:
        setattr(DTensor, f"test_dtensor_{name}", common_dtensor.with_comms(_operation(name)))
    for dtype in DTYPES:
        name = f"test_dtensor_redistribute_{str(dtype).removeprefix('torch.')}"
        setattr(DTensor, name, common_dtensor.with_comms(_redistribution(dtype)))
    models = (
        common_fsdp.NestedWrappedModule,
        common_fsdp.AlwaysWrapNestedWrappedModule,
        common_fsdp.TransformerWithSharedParams,
    )
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for model, strategy in itertools.product(models, strategies):
        for prefetch, orig in itertools.product((None, *BackwardPrefetch), (False, True)):
            words = ["test_fsdp", model.__name__, strategy.lower()]
            words.append(prefetch.name.lower() if prefetch else "no_prefetch")
            test = _parity(
                model,
                sharding_strategy=ShardingStrategy[strategy],
                backward_prefetch=prefetch,
                use_orig_params=orig,
            )
            setattr(Fsdp, "_".join(words) + ("_orig_params" if orig else ""), test)


_fill()
common_distributed.TIMEOUT_OVERRIDE.clear()  # minutes, for some
common_fsdp.DISTRIBUTED_BACKEND = os.environ.get("SUITE_BACKEND", "gloo")
if common_fsdp.DEVICE_TYPE == "cpu":  # else the base finds too few devices
    torch.accelerator.device_count = lambda: RANKS
SUITES: dict[str, type[unittest.TestCase]] = {
    "distributed": Distributed,
    "dtensor": DTensor,
    "fsdp": Fsdp,
}
