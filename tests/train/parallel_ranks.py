"""The ranks of test_parallel.py: what context parallelism and compiled programs call, by the
backend "offcore" and by gloo."""

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import crew
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as context
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import (
    flex_cp_allgather,
)

import offcore.distributed
from offcore.distributed.group import BACKENDS

# What torch.nn.functional.scaled_dot_product_attention runs on CPUs. `context_parallel` replaces
# those of GPUs by the functions that `rings` calls.
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def both(call: Callable[[Any], list[Any]], exactly: bool = True) -> list[Any]:
    """What a call returns by offcore, as by gloo."""
    gloo = dist.new_group(backend="gloo")
    ours, theirs = call(dist.group.WORLD), call(gloo)
    dist.destroy_process_group(gloo)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) if exactly else torch.allclose(one, other)
    return ours


def carried(*names: str) -> None:
    told = offcore.distributed.report()
    assert {*told["carried"]} >= {*names}
    assert told["handed"] == {}


def rings(rank: int, ranks: int) -> None:
    """torch's ring attention, forwards and backwards, beside attention to the whole sequence."""

    def forward(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return FORWARD(q, k, v, 0.0, is_causal)

    def backward(*, grad_out: Any, is_causal: bool, **saved: Any) -> Any:
        named = ("query", "key", "value", "out", "logsumexp")
        return BACKWARD(grad_out, *(saved[name] for name in named), 0.0, is_causal)

    def own(whole: Any) -> Any:
        parts = whole.detach().chunk(2 * ranks, 2)
        first = rank if context._cp_options.enable_load_balance else 2 * rank
        second = 2 * ranks - 1 - rank if context._cp_options.enable_load_balance else first + 1
        return torch.cat([parts[first], parts[second]], 2)

    torch.manual_seed(2)
    sequences = [torch.randn(1, 2, 16 * ranks, 8, requires_grad=True) for _ in range(3)]
    whole = torch.nn.functional.scaled_dot_product_attention(*sequences, is_causal=True)
    above = torch.randn_like(whole)
    whole.backward(above)
    for method in ("allgather", "alltoall"):
        for balanced in (True, False):
            context.set_rotate_method(method)
            context._cp_options.enable_load_balance = balanced
            inputs = [own(one) for one in sequences]

            def step(group: Any, inputs: Any = inputs) -> list[Any]:
                at = group, 2
                out, sums = context._templated_ring_attention(*at, forward, *inputs, True)
                saved = *inputs, out, sums
                given = *at, backward, own(above), "grad_out", *saved, True
                return [out, *context._templated_ring_attention_backward(*given)]

            expected = [whole, *(one.grad for one in sequences)]
            for ours, one in zip(both(step), expected, strict=True):
                assert torch.allclose(ours, own(one), atol=1e-5)
    carried("all_gather", "all_to_all")


def gathered(rank: int, ranks: int) -> None:
    """What flex attention and Ulysses call, with their gradients."""

    def step(group: Any) -> list[Any]:
        torch.manual_seed(rank)
        keys, values, rows = (torch.randn(2, 3 * ranks, 4, requires_grad=True) for _ in range(3))
        whole = flex_cp_allgather(keys, values, 1, group.group_name)
        (whole[0].sin() * whole[1] * (rank + 1)).sum().backward()
        turned = functional.all_to_all_single_autograd(rows.view(-1, 4), None, None, group)
        (turned * (rank + 1)).sum().backward()
        return [*whole, keys.grad, values.grad, turned + 0, rows.grad]

    both(step, exactly=ranks == 2)
    carried("all_gather", "all_to_all", "reduce_scatter")


def collectives(given: Any, weight: Any, rank: int, ranks: int, group: Any) -> list[Any]:
    """Functional ones, and those that the compiler makes so."""
    whole = functional.all_gather_tensor(given, 0, group) @ weight
    part = functional.reduce_scatter_tensor(whole + 1, "sum", 0, group)
    summed = functional.all_reduce(part * 2, "sum", group)
    several = functional.all_reduce_coalesced([summed, part], "max", group)
    turned = functional.all_to_all_single(summed @ weight, None, None, group)
    sent = [rank + 1] * ranks  # rows to each rank
    taken = [*range(1, ranks + 1)]
    cut = functional.all_to_all_single(whole[: sum(sent)], taken, sent, group)
    into = torch.empty(ranks * part.shape[0], part.shape[1])
    dist.all_gather_into_tensor(into, part, group=group)
    dist.all_reduce(into, group=group)
    return [functional.wait_tensor(turned), *(one + 1 for one in several), cut * 2, into]


def compiled(rank: int, ranks: int, backend: str = "aot_eager") -> None:
    weight = torch.arange(4.0).view(2, 2)
    given = [torch.arange(4.0 * ranks).view(-1, 2) + turn + rank for turn in range(2)]

    def steps(group: Any) -> list[Any]:
        torch._dynamo.reset()
        step = torch.compile(collectives, fullgraph=True, backend=backend)
        made = []
        for one in given:
            own = weight, rank, ranks, group
            made += step(one, *own)
            for ours, plain in zip(made[-5:], collectives(one, *own), strict=True):
                assert torch.equal(ours, plain)
        return made

    both(steps)
    carried("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def compiled_ddp(rank: int, ranks: int) -> None:
    """DDP's reducer calls the group from within what the compiler traces."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 4)
    plain = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    for static in (False, True):
        again = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), static_graph=static)
        step = torch.compile(again, backend="aot_eager")
        for turn in range(3):
            given = torch.full((2, 4), turn + rank + 1.0)
            assert torch.equal(step(given), plain(given))
            step(given).square().sum().backward()
            plain(given).square().sum().backward()
        for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        plain.zero_grad()


def batches(rank: int, ranks: int) -> None:
    """Of sends and receives: one batch where the inner group makes batches."""
    group: Any = dist.group.WORLD
    sent, got = torch.full((3,), float(rank)), torch.zeros(3)
    ring = [
        dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, got, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert (got == (rank - 1) % ranks).all()
    if BACKENDS:  # torch itself asks the backend
        return
    told: list[Any] = []

    @contextlib.contextmanager
    def batch(*given: Any, async_ops: bool) -> Iterator[Any]:
        told.append("begin")
        yield types.SimpleNamespace(works=["all"])
        told.append("end")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_coalescing_manager", batch)
        patch.setattr(group, "send", lambda *given: told.append(given), raising=False)
        patch.setattr(group, "recv", lambda *given: told.append(given), raising=False)
        able = types.SimpleNamespace(supports_coalescing=True)
        patch.setattr(group, "_get_backend", lambda device: able, raising=False)
        assert dist.batch_isend_irecv(ring) == ["all"]
    begin, (_, to, _), (_, come_from, _), end = told
    assert (begin, to, come_from, end) == ("begin", (rank + 1) % ranks, (rank - 1) % ranks, "end")

    def refuse(*given: Any) -> None:
        raise RuntimeError("no")

    with pytest.MonkeyPatch.context() as patch:  # a batch that fails leaves none begun
        told.clear()
        patch.setattr(
            group, "_start_coalescing", lambda device: told.append("begin"), raising=False
        )
        patch.setattr(group, "_end_coalescing", lambda device: told.append("end"), raising=False)
        patch.setattr(group, "_get_backend", lambda device: able, raising=False)
        patch.setattr(group, "send", refuse, raising=False)
        with pytest.raises(RuntimeError, match="no"):
            dist.batch_isend_irecv(ring)
        assert told == ["begin", "end"]
    dist.all_reduce(got)
    assert (got == sum(range(ranks))).all()


class Watched(torch.Tensor):
    """One with memory of its own, which also looks at what is done with it."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def stand_ins(rank: int, ranks: int) -> None:
    """Tensors that stand for others: what is not waited for yet is, others without memory are
    refused."""
    world = dist.group.WORLD

    def summed() -> Any:
        made = functional.all_reduce(torch.full((2,), rank + 1.0), "sum", world)
        assert isinstance(made, functional.AsyncCollectiveTensor)
        return made

    total = ranks * (ranks + 1) / 2
    parts = [torch.zeros(2) for _ in range(ranks)]
    dist.all_gather(parts, summed())
    assert (torch.stack(parts) == total).all()
    again = summed()
    dist.all_reduce(again)
    assert (again == ranks * total).all()
    again = summed()
    if rank == 0:
        dist.send(again, 1)
    elif rank == 1:
        dist.recv(parts[2], 0)
        assert (parts[2] == total).all()
    watched = torch.full((2,), rank + 1.0).as_subclass(Watched)
    dist.all_reduce(watched)
    dist.all_gather(parts, watched)
    assert (torch.stack(parts) == total).all()
    shard = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    with pytest.raises((RuntimeError, NotImplementedError)):  # in 2.14 torch refuses it
        dist.all_reduce(shard)


def all_of_them(rank: int, ranks: int) -> None:
    rings(rank, ranks)
    gathered(rank, ranks)
    compiled(rank, ranks)
    compiled_ddp(rank, ranks)
    batches(rank, ranks)
    stand_ins(rank, ranks)


def by_inductor(rank: int, ranks: int) -> None:
    compiled(rank, ranks, "inductor")


if __name__ == "__main__":
    if "long" in sys.argv:
        crew.LIMIT_S = 200
        crew.run(2, by_inductor, "offcore")
    else:
        crew.run(3, all_of_them, "offcore")
    print("done")
    sys.exit()
