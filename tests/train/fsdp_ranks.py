"""The ranks of test_fsdp.py: FSDP2 on CPUs over gloo, with and without offcore."""

import gc
import os
import random
import signal
import sys
import time
import weakref
from typing import Any

import crew
import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import offcore
import offcore.distributed
import offcore.fsdp
from offcore.distributed import hosts, reach
from offcore.distributed.group import BACKENDS
from offcore.distributed.memory import Ring
from offcore.distributed.report import calls_of
from offcore.fsdp.enable import _param_groups
from offcore.fsdp.shards import Meeting, Shards

WIDTH, LAYERS, STEPS = 32, 3, 4
TOO_LITTLE = 20 << 10  # bytes of window memory


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.down = torch.nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        return given + self.down(torch.nn.functional.silu(self.up(self.norm(given))))


def trained(
    prepare: Any = None, mesh: Any = None, steps: int = STEPS, again: bool = False, **sharding: Any
) -> Any:
    """A model after some steps, its weights, and the report before it was disabled. again: blocks
    are computed again in backward."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Block() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 7))
    for block in model[:-1] if again else ():
        checkpoint(block)
    for layer in model:
        fully_shard(layer, mesh=mesh, **sharding)
    fully_shard(model, mesh=mesh, **sharding)
    told = prepare(model) if prepare else None
    step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + dist.get_rank())
    for turn in range(steps):
        for layer in model.modules():
            if isinstance(layer, FSDPModule):  # gradients are added up every second step
                layer.set_requires_gradient_sync(turn % 2 == 1)
        model(torch.randn(16, WIDTH)).float().square().mean().backward()
        if turn % 2 == 1:
            step.step()
            step.zero_grad()
    if callable(told):
        told = told()
    return [one.full_tensor().detach() for one in model.parameters()], told


def with_offcore(**options: Any) -> Any:
    def prepare(model: Any) -> Any:
        offcore.fsdp.enable(model, **options)

        def end() -> dict[str, Any]:
            told = offcore.fsdp.report(model)
            offcore.fsdp.disable(model)
            return told

        return end

    return prepare


def same(one: Any, other: Any, exactly: bool) -> None:
    for mine, theirs in zip(one, other, strict=True):
        if exactly:
            assert torch.equal(mine, theirs)
        else:
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def both_directions(rank: int, ranks: int) -> None:
    plain, _ = trained()
    gathered, told = trained(with_offcore(reduce_scatter=False, sms=8))
    same(plain, gathered, exactly=True)
    assert told["reduce_scatter"]["calls"] == 0
    assert told["obstacles"] == {}
    reduced, told = trained(with_offcore())
    same(plain, reduced, exactly=ranks == 2)
    gathers, reduces = told["all_gather"], told["reduce_scatter"]
    assert (gathers["staged"], gathers["handed"], told["refused"]) == (0, 0, 0)
    assert told["memory"] > 0
    assert reduces["calls"] == (LAYERS + 1) * STEPS // 2
    assert sum(gathers["variants"].values()) == gathers["calls"] >= reduces["calls"]
    numbers = sum(one.numel() for one in plain)
    assert reduces["bytes"] >= 4 * numbers * STEPS // 2
    staged, told = trained(with_offcore(memory=0))
    same(plain, staged, exactly=ranks == 2)
    assert told["all_gather"]["staged"] == told["refused"] == told["all_gather"]["calls"] > 0


def forms(rank: int, ranks: int) -> None:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    same(trained(mp_policy=mixed)[0], trained(with_offcore(), mp_policy=mixed)[0], ranks == 2)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # gradients too
    plain = trained(mp_policy=half)[0]
    for one, other in zip(plain, trained(with_offcore(), mp_policy=half)[0], strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-2)

    def scaled(enable: Any) -> Any:
        def prepare(model: Any) -> Any:
            for layer in model.modules():
                if isinstance(layer, FSDPModule):
                    layer.set_gradient_divide_factor(5.0)
                    layer.set_force_sum_reduction_for_comms(enable is None)
            return enable(model) if enable else None

        return prepare

    ours, told = trained(scaled(with_offcore()))
    same(trained(scaled(None))[0], ours, exactly=False)
    assert told["reduce_scatter"]["calls"] > 0


def ahead(rank: int, ranks: int) -> None:
    """All layers are gathered at once: more than the ring holds goes by way of slots."""
    plain, _ = trained(reshard_after_forward=False)

    def prepare(model: Any) -> Any:
        end = with_offcore(memory=1 << 14)(model)
        for layer in model:
            layer.unshard(async_op=True)
        return end

    early, told = trained(prepare, reshard_after_forward=False)
    same(plain, early, exactly=True)
    assert told["all_gather"]["staged"] == told["refused"] > 0
    assert told["all_gather"]["staged"] < told["all_gather"]["calls"]


class Taught(torch.nn.Sequential):
    """Every second layer only tells the one before it what to reach."""

    def forward(self, x: Any) -> Any:
        layers = [*self]
        for trained, teacher in zip(layers[::2], layers[1::2], strict=True):
            with torch.no_grad():
                wanted = teacher(x)
            x = trained(x) - wanted
        return x


def without_backward(rank: int, ranks: int) -> None:
    """FSDP2 prefetches modules whose backward does not come, and holds what it gathered of them: a
    ring of two modules is too small, and what does not fit is staged, with the same result."""

    def run(prepare: Any) -> tuple[list[Any], dict[str, Any]]:
        torch.manual_seed(1)
        model = Taught(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4 * LAYERS)))
        for layer in (*model, model):
            fully_shard(layer)
        end = prepare(model) if prepare else None
        step = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.full((8, WIDTH), 1.0 + rank)).sum().backward()
            step.step()
            step.zero_grad()
        told = end() if end else {}
        trained = [one for layer in [*model][::2] for one in layer.parameters()]
        return [one.full_tensor().detach() for one in trained], told

    plain, _ = run(None)
    ours, told = run(with_offcore(memory=2 * 4 * (WIDTH + 1) * WIDTH))
    same(plain, ours, exactly=ranks == 2)
    gathers = told["all_gather"]
    assert 0 < told["refused"] == gathers["staged"] < gathers["calls"]


def replicas(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, _ = trained(mesh=mesh, steps=2)

    def prepare(model: Any) -> Any:
        end = with_offcore(sms=8, timeout=50.0)(model)
        mesh_info = next(_param_groups(model)).mesh_info
        core = calls_of(mesh_info.replicate_process_group).collectives
        assert (core.timeout, core._arguments) == (50, {"all_reduce_from": 0, "sms": 8})
        return end

    ours, told = trained(prepare, mesh=mesh, steps=2)
    same(plain, ours, exactly=False)
    assert told["all_reduce"] == {"carried": told["reduce_scatter"]["calls"], "handed": 0}


def fewer_ranks(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, _ = trained(mesh=mesh, steps=2)
    alone, told = trained(with_offcore(all_reduce=False, reduce_scatter=False), mesh=mesh, steps=2)
    same(plain, alone, exactly=True)
    assert told["all_reduce"] == {"carried": 0, "handed": 0}
    fewer, told = trained(with_offcore(), reshard_after_forward=2, steps=2)
    same(trained(reshard_after_forward=2, steps=2)[0], fewer, exactly=False)
    assert (told["all_gather"]["handed"], told["all_gather"]["staged"], told["refused"]) == (
        0,
        0,
        0,
    )


def across_hosts(rank: int, ranks: int) -> None:
    """As over gloo; each rank gets from other hosts what its rail brings, and no byte twice."""
    os.environ["OFFCORE_HOST"] = str(rank // 2)
    plain, _ = trained(steps=2)
    hosts._SMALL = 0  # as if the model were large
    gathered, told = trained(with_offcore(reduce_scatter=False), steps=2)
    same(plain, gathered, exactly=True)
    everyone = str([*range(ranks)])
    own = told["all_gather"]["bytes"] // ranks
    assert told["hosts"] == {everyone: {"hosts": 2, "ranks": 2, "received": own}}
    assert own > 0
    assert (told["all_gather"]["staged"], told["refused"], told["obstacles"]) == (0, 0, {})
    reduced, told = trained(with_offcore(), steps=2)
    same(plain, reduced, exactly=False)
    both = told["all_gather"]["bytes"] + told["reduce_scatter"]["bytes"]
    assert told["hosts"][everyone]["received"] == both // ranks
    assert told["reduce_scatter"]["calls"] == LAYERS + 1
    hosts._SMALL = 1 << 24
    staged, told = trained(with_offcore(memory=0, reduce_scatter=False), steps=2)
    same(plain, staged, exactly=True)
    assert told["all_gather"]["staged"] == told["all_gather"]["calls"] > 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, _ = trained(mesh=mesh, steps=2)
    ours, told = trained(with_offcore(), mesh=mesh, steps=2)  # each host has a replica
    same(plain, ours, exactly=True)
    assert told["hosts"] == {}
    assert told["reduce_scatter"]["calls"] > 0
    assert told["all_reduce"]["carried"] == 0
    assert "one rank only" in told["obstacles"][str([rank % 2, rank % 2 + 2])]


def four(rank: int, ranks: int) -> None:
    replicas(rank, ranks)
    across_hosts(rank, ranks)


def refusals(rank: int, ranks: int) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(offcore.Error, match="no FSDPModule"):
        offcore.fsdp.enable(model)
    with pytest.raises(offcore.Error, match="not enabled"):
        offcore.fsdp.report(fully_shard(model))
    if rank == 0:  # alone: the other has no such typing error, and waits for nobody
        with pytest.raises(offcore.Error, match="unknown argument smz: give"):
            offcore.fsdp.enable(model, smz=8)
    offcore.fsdp.enable(model)
    with pytest.raises(offcore.Error, match="already"):
        offcore.fsdp.enable(model)
    offcore.fsdp.disable(model)


def apart(rank: int, ranks: int) -> None:
    """A group with one rank on each host, as its ranks say, stays with its own backend."""
    told = reach.facts_of
    reach.facts_of = lambda device: told(device).replace('"place": "', f'"place": "{rank}')
    ours, report = trained(with_offcore(), steps=2)
    reach.facts_of = told
    same(trained(steps=2)[0], ours, exactly=True)
    assert report["memory"] == 0
    assert "different hosts" in report["obstacles"]["[0, 1]"]


def two_models(rank: int, ranks: int) -> None:
    """Steps of two models in turns, inputs from a loader's processes, forked after `enable`."""

    def both(enables: bool) -> list[Any]:
        torch.manual_seed(5)
        models = [fully_shard(torch.nn.Linear(8, 8, bias=bias)) for bias in (False, True)]
        for model in models if enables else ():
            offcore.fsdp.enable(model)
        loader = torch.utils.data.DataLoader(
            [torch.full((8,), 1.0 + turn + rank) for turn in range(4)],
            num_workers=2,
            multiprocessing_context="fork",
        )
        for given in loader:
            losses = [model(given).square().mean() for model in models]
            for loss in losses:
                loss.backward()
        if enables:
            assert all(offcore.fsdp.report(one)["all_gather"]["calls"] for one in models)
            for model in models:
                offcore.fsdp.disable(model)
        return [one.grad.full_tensor() for model in models for one in model.parameters()]

    same(both(False), both(True), exactly=ranks == 2)


def killed_in_a_step(rank: int, ranks: int) -> None:
    model = torch.nn.Sequential(*(fully_shard(torch.nn.Linear(8, 8)) for _ in range(3)))
    offcore.fsdp.enable(fully_shard(model), timeout=5.0)
    model(torch.ones(2, 8)).sum().backward()
    began = time.monotonic()
    loss = model(torch.ones(2, 8)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(offcore.Error, match=r"fsdp \[0, 1\]") as caught:
        loss.backward()
    assert caught.value.code == "peer"
    with pytest.raises(offcore.Error, match="is dead since"):  # so does every later step
        model(torch.ones(2, 8))
    offcore.fsdp.disable(model)
    dist.destroy_process_group()
    assert time.monotonic() - began < 10


def killed_with_the_groups_memory(rank: int, ranks: int) -> None:
    """The same where the backend "offcore" does it all."""
    group = dist.new_group(pg_options=offcore.distributed.Options(memory=1 << 20))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = torch.nn.Sequential(*(fully_shard(torch.nn.Linear(8, 8), mesh=mesh) for _ in range(3)))
    for layer in model:
        layer.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.ones(2, 8)).sum().backward()
    began = time.monotonic()
    loss = model(torch.ones(2, 8)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(offcore.Error, match=r"of rank 0, group \d+\): .*rank 1") as caught:
        loss.backward()
    assert caught.value.code == "peer"
    dist.destroy_process_group()
    assert time.monotonic() - began < 10


def from_the_group(rank: int, ranks: int) -> None:
    """FSDP2's buffers in window memory of a group, which torch's own setting asks for."""
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    plain, _ = trained(mesh=gloo)

    def prepare(model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, FSDPModule):
                layer.set_allocate_memory_from_process_group_for_comm(True)

    for nbytes in (1 << 18, TOO_LITTLE, 0):
        options = offcore.distributed.Options(memory=nbytes)
        group = dist.new_group(pg_options=options)
        results: list[Any] = []
        calls_of(group).collectives._sides["cpu"]._told = results.append
        ours, _ = trained(prepare, mesh=DeviceMesh.from_group(group, "cpu"))
        same(plain, ours, exactly=ranks == 2)
        staged = [one.staged for one in results if one.op == "all_gather"]
        told = offcore.distributed.report(group)["memory"]
        if nbytes == 0:
            assert told == {}
            assert all(staged)
        else:
            assert told["cpu"]["bytes"] == nbytes
            assert (told["cpu"]["refused"] > 0) == (nbytes == TOO_LITTLE)
            assert any(staged) == (nbytes == TOO_LITTLE)
            assert not all(staged)
        cpu = torch.device("cpu")
        backend = group._get_backend(cpu)
        assert backend.supports_tensor_alloc(cpu) == (nbytes > 0)
        assert not backend.supports_tensor_alloc(torch.device("meta"))
        if nbytes == 0:  # up to torch 2.13 gloo answers
            with pytest.raises(RuntimeError if not BACKENDS else offcore.Error):
                backend.allocate_tensor(3, dtype=torch.int8, device=cpu)
        else:
            refused = offcore.distributed.report(group)["memory"]
            assert backend.allocate_tensor(0, dtype=torch.int8, device=cpu).numel() == 0
            assert offcore.distributed.report(group)["memory"] == refused
            with pytest.raises(offcore.Error, match="allocates no tensors on meta"):
                backend.allocate_tensor(3, dtype=torch.int8, device="meta")
        dist.destroy_process_group(group)


def ring(rank: int, ranks: int) -> None:
    with offcore.Communicator(backend="host", store=dist.group.WORLD) as comm:
        memory = Ring(comm, 4096)
        places = []
        held: list[Any] = []
        for turn in range(40):  # two are held at a time, in whatever form
            given = memory.take((1000,), torch.uint8)
            places.append(given.data_ptr())
            given.fill_(turn)
            held.append(given[10:20].view(torch.int16) if turn % 2 else given)
            del given
            assert all(
                (one.view(torch.uint8) == turn - k).all() for k, one in enumerate(held[::-1])
            )
            del held[:-2]
        assert len(set(places)) == 4
        assert memory.take((3072,), torch.uint8) is memory.take((8192,), torch.uint8) is None
        del held[0]
        assert memory.take((3072,), torch.uint8) is not None
        assert memory.refused == 2
        held.clear()
        kept = memory.take((1000,), torch.uint8)  # as gradients are
        for _ in range(20):
            memory.take((1000,), torch.uint8).fill_(1)
        assert memory.take((0, 8), torch.uint8) is None  # it needs no room
        assert memory.refused == 2
        del kept
        memory, sizes = Ring(comm, 4096, tight=True), random.Random(7)
        for turn in range(400):  # whichever of two goes: with the next one they may fill it
            held = [one for one in held if sizes.random() < 0.7][-1:]
            wide = sizes.randint(1, 8 - held[0].numel() // 512 if held else 7)
            held.append(memory.take((wide << 9,), torch.uint8))
            assert held[-1] is not None, turn
            assert held[-1].data_ptr() % 512 == 0


def places_follow_from_sizes(rank: int, ranks: int) -> None:
    """What an operation still holds, as one that is prelaunched does, does not keep a piece."""
    os.environ["OFFCORE_VARIANT"] = "prelaunch_pcpy"
    store = dist.PrefixStore("sizes", _get_process_group_store(dist.group.WORLD))
    meeting = Meeting(store, [[0, 1]])
    shards = Shards(dist.group.WORLD, torch.device("cpu"), 20.0, 2048, {}, meeting)
    for turn in range(6):
        out = shards.ring.take((512 * ranks,), torch.uint8)
        assert out is not None
        out.view(ranks, -1)[rank].fill_(turn + rank)
        work = shards.all_gather(out, out.view(ranks, -1)[rank], turn % 2 == 1)
        assert (work is not None) == (turn % 2 == 1)
        if work is not None:
            work.wait()
        assert all((out.view(ranks, -1)[peer] == turn + peer).all() for peer in range(ranks))
    del os.environ["OFFCORE_VARIANT"]
    assert shards.ran["all_gather"].facts()["variants"] == {"prelaunch_pcpy": 6}
    shards.close()


def behind_a_late_call(rank: int, ranks: int) -> None:
    """A call that waits is over when it returns, also behind one that does not."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    expected = model[1].weight.detach().clone()
    for layer in model:
        fully_shard(layer)
    offcore.fsdp.enable(fully_shard(model))
    if rank == 1:
        time.sleep(0.3)
    late = model[0].unshard(async_op=True)
    model[1].unshard()
    assert torch.equal(model[1].weight, expected)
    late.wait()
    offcore.fsdp.disable(model)


def forgotten(rank: int, ranks: int) -> None:
    """A model that nobody disables goes with its last reference."""
    model = fully_shard(torch.nn.Linear(8, 8))
    offcore.fsdp.enable(model)
    model(torch.ones(2, 8)).sum().backward()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def pair(rank: int, ranks: int) -> None:
    both_directions(rank, ranks)
    forms(rank, ranks)
    ahead(rank, ranks)
    without_backward(rank, ranks)
    refusals(rank, ranks)
    apart(rank, ranks)
    ring(rank, ranks)
    places_follow_from_sizes(rank, ranks)
    behind_a_late_call(rank, ranks)
    two_models(rank, ranks)
    same(trained(again=True)[0], trained(with_offcore(), again=True)[0], exactly=True)
    forgotten(rank, ranks)


if __name__ == "__main__":
    crew.run(2, pair, "gloo")
    crew.run(4, four, "gloo")
    crew.run(2, from_the_group, "offcore")
    crew.run(2, killed_in_a_step, "gloo", killed=1)
    crew.run(2, killed_with_the_groups_memory, "offcore", killed=1)
    if "long" in sys.argv:
        crew.run(4, fewer_ranks, "gloo")
    print("done")
    sys.exit()
