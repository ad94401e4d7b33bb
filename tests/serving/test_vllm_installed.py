"""vLLM's adapter in the vLLM that is installed, whose factory, manager and connector drive it.

The caches are tensors in host memory, so neither a GPU nor compiled parts of vLLM are needed: an
unpacked source distribution on PYTHONPATH will do, with the packages that its Python imports.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import needs
from offcore.serving import engines, vllm

needs.require("torch", "vllm")
import torch  # noqa: E402

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker")
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # noqa: E402
    base as base_v1,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # noqa: E402
    offloading_connector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (  # noqa: E402
    common,
    worker,
)
from vllm.v1 import kv_cache_interface as caches  # noqa: E402
from vllm.v1.kv_offload import base, config, factory  # noqa: E402

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 16, 4, 2, 8
NAMES = [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]
PAGE = 2 * TOKENS * HEADS * DIM * 2  # K and V in half precision
NEW = hasattr(caches, "KVCacheLayout")  # from where on all layers lie in one allocation


def made(kind: Any, **values: Any) -> Any:
    """An object of vLLM's; values that this version does not have are left out."""
    fields = {one.name for one in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in fields})


def offloading(per_chunk: int, groups: int, chunks: int = 8, **extra: Any) -> Any:
    return made(
        config.OffloadingConfig,
        groups=tuple(
            made(
                config.OffloadingGroupConfig,
                group_id=group,
                tokens_per_block=TOKENS,
                layer_names=tuple(NAMES),
            )
            for group in range(groups)
        ),
        worker_kv_bytes_per_block=LAYERS * PAGE,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": vllm.NAME,
            # Newer versions round a chunk up to pages of memory.
            "cpu_bytes_to_use": chunks * max(4096, per_chunk * LAYERS * PAGE),
            **extra,
        },
        engine_id="engine",
        model=made(config.OffloadingModelConfig, name="model", dtype="float16"),
        cache=made(
            config.OffloadingCacheConfig, tokens_per_hash=TOKENS, blocks_per_chunk=per_chunk
        ),
        parallel=made(
            config.OffloadingParallelConfig,
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


@dataclasses.dataclass
class Engine:
    """A spec and a connector's worker with its caches, as vLLM makes them."""

    spec: Any
    connector: Any
    layers: list[Any]
    number: int = 0

    def run(self, direction: str, source: Any, target: Any) -> None:
        """One job from the scheduler to its end."""
        self.number += 1
        job = common.TransferJob(req_id="request", src_spec=source, dst_spec=target)
        jobs = {direction: {self.number: job}}
        step = common.OffloadingConnectorMetadata(
            load_jobs=jobs.get("load", {}), store_jobs=jobs.get("store", {})
        )
        self.connector.handle_preemptions(step)
        self.connector.start_kv_transfers(step)
        self.connector.prepare_store_kv(step)
        nothing = common.OffloadingConnectorMetadata(load_jobs={}, store_jobs={})
        nothing.jobs_to_flush = {self.number}
        self.connector.handle_preemptions(nothing)
        done, loaded = self.connector.get_finished(set())
        assert (done, loaded) == (set(), {"request"} if direction == "load" else set())
        told = self.connector.build_connector_worker_meta()
        assert told.completed_jobs == {self.number: 1}
        moved = getattr(told.transfer_stats, direction)
        assert moved.bytes == len((source if direction == "store" else target).block_ids) * (
            LAYERS * PAGE
        )


def allocated(kv_config: Any, layout: str) -> dict[str, Any]:
    """The caches as a worker of this version allocates them."""
    if not NEW:
        return {name: torch.zeros(BLOCKS, PAGE // 2, dtype=torch.float16) for name in NAMES}
    from vllm.v1.worker.utils import allocate_kv_cache

    named = caches.KVCacheLayout[layout]
    return dict(allocate_kv_cache(kv_config, torch.device("cpu"), named, [TOKENS]))


def placement(layout: str) -> list[Any]:
    if not NEW:
        return [made(caches.KVCacheTensor, size=BLOCKS * PAGE, shared_by=[name]) for name in NAMES]
    outermost = layout.startswith("L")
    return [
        caches.KVCacheTensor(
            size=LAYERS * BLOCKS * PAGE,
            layers=NAMES,
            layer_stride=BLOCKS * PAGE if outermost else PAGE,
            block_stride=PAGE if outermost else LAYERS * PAGE,
        )
    ]


def worlds(layout: str, groups: int) -> tuple[Any, Any]:
    """vLLM's configuration, and that of its caches."""
    attention = made(
        caches.FullAttentionSpec,
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=DIM,
        dtype=torch.float16,
    )
    assert attention.page_size_bytes == PAGE
    kv_config = made(
        caches.KVCacheConfig,
        num_blocks=BLOCKS,
        kv_cache_tensors=placement(layout),
        kv_cache_groups=[
            made(caches.KVCacheGroupSpec, layer_names=NAMES, kv_cache_spec=attention)
            for _ in range(groups)
        ],
    )
    grid = SimpleNamespace(
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
        world_size=1,
        rank=0,
    )
    vllm_config = SimpleNamespace(
        parallel_config=grid,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )
    return vllm_config, kv_config


def filled(kv_config: Any, layout: str) -> dict[str, Any]:
    """Caches with bytes of which no two blocks have the same."""
    kv_caches = allocated(kv_config, layout)
    generator = torch.Generator().manual_seed(1)
    for layer in kv_caches.values():
        noise = torch.randint(-128, 128, (layer.nbytes,), generator=generator)
        layer.copy_(noise.to(torch.int8).view(layer.dtype).view(layer.shape))
    return kv_caches


def started(layout: str = "LBNHC", per_chunk: int = 1, groups: int = 1, **extra: Any) -> Engine:
    vllm_config, kv_config = worlds(layout, groups)
    spec = factory.OffloadingSpecFactory.create_spec(offloading(per_chunk, groups, **extra))
    given = {"spec": spec, "vllm_config": vllm_config, "kv_cache_config": kv_config}
    wanted = inspect.signature(worker.OffloadingConnectorWorker).parameters
    connector = worker.OffloadingConnectorWorker(
        **{name: value for name, value in given.items() if name in wanted}
    )
    kv_caches = filled(kv_config, layout)
    connector.register_kv_caches(kv_caches)
    return Engine(spec, connector, [kv_caches[name] for name in NAMES])


@pytest.fixture(autouse=True)
def _gpus_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    monkeypatch.setattr(engines, "_said", set())
    vllm.register()


def blocks_of(engine: Engine, ids: list[int]) -> list[Any]:
    return [layer[ids].view(torch.int8) for layer in engine.layers]


def gpu(ids: list[int], sizes: list[int] | None = None, first: list[int] | None = None) -> Any:
    return base.GPULoadStoreSpec(ids, group_sizes=sizes or [len(ids)], block_indices=first or [0])


LAYOUTS = ["LBNHC", "LBHNC", "BLNHC"] if NEW else ["a tensor a layer"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_chunk", [1, 2])
def test_the_managers_chunks_come_back(layout: str, per_chunk: int) -> None:
    """Stored where vLLM's manager says, and loaded into other blocks from where it finds them."""
    engine = started(layout, per_chunk)
    assert isinstance(engine.connector.worker, vllm.Worker)
    manager = engine.spec.get_manager()
    request = base.ReqContext(req_id="request")
    keys = [base.make_offload_key(bytes([key]) * 32, 0) for key in range(3)]
    source = [3, 9, 4, 14, 0, 7][: 3 * per_chunk]
    target = [8, 1, 12, 2, 5, 15][: 3 * per_chunk]

    granted = manager.prepare_store(keys, request)
    engine.run("store", gpu(source), granted.store_spec)
    manager.complete_store(granted.keys_to_store, request)
    assert [manager.lookup(key, request) for key in keys] == [base.LookupResult.HIT] * 3
    wanted = blocks_of(engine, source)
    others = [block for block in range(BLOCKS) if block not in target]
    kept = blocks_of(engine, others)
    engine.run("load", manager.prepare_load(keys, request), gpu(target))
    manager.complete_load(keys, request)
    assert all(map(torch.equal, blocks_of(engine, target), wanted))
    assert all(map(torch.equal, blocks_of(engine, others), kept))
    engine.connector.shutdown()


def test_groups_with_a_part_of_a_chunk() -> None:
    engine = started(LAYOUTS[0], per_chunk=2, groups=2)
    manager = engine.spec.get_manager()
    request = base.ReqContext(req_id="request")
    keys = [base.make_offload_key(bytes([key]) * 32, key // 2) for key in range(3)]
    chunks = manager.prepare_store(keys, request).store_spec
    source, target = [3, 9, 4, 11], [8, 1, 12, 2]
    sizes, first = [3, 1], [1, 0]  # blocks 1 to 3 of one group's request, block 0 of the other's
    wanted = blocks_of(engine, source)
    engine.run("store", gpu(source, sizes, first), chunks)
    manager.complete_store(keys, request)
    engine.run("load", manager.prepare_load(keys, request), gpu(target, sizes, first))
    assert all(map(torch.equal, blocks_of(engine, target), wanted))
    engine.connector.shutdown()


def test_the_module_is_found_without_the_plugin() -> None:
    found = factory.OffloadingSpecFactory.get_spec_cls(
        {"spec_name": vllm.NAME, "spec_module_path": "offcore.serving.vllm"}
    )
    assert issubclass(found, base.OffloadingSpec)
    assert not inspect.isabstract(found)


@pytest.mark.parametrize(
    "name", ["submit_store", "submit_load", "get_finished", "wait", "shutdown"]
)
def test_methods_take_what_vllm_passes(name: str) -> None:
    """In its order, and by its names."""
    theirs = inspect.signature(getattr(base.OffloadingWorker, name)).parameters
    ours = inspect.signature(getattr(vllm.Worker, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for extra in list(ours)[len(theirs) :]:
        assert ours[extra].default is not inspect.Parameter.empty


def test_memory_that_ranks_share_stays_vllms() -> None:
    engine = started(LAYOUTS[0])
    engine.spec.replicated_layout = True
    assert vllm._views(engine.spec, SimpleNamespace(tensors=[], group_data_refs=[[]])) is None
    engine.connector.shutdown()


def connected(monkeypatch: pytest.MonkeyPatch, layout: str) -> tuple[Any, list[Any]]:
    """A worker's connector as vLLM's factory makes it, and its layers."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    vllm_config, kv_config = worlds(layout, 1)
    of_vllm = vllm_config.kv_transfer_config
    of_vllm.kv_connector, of_vllm.kv_connector_module_path = vllm.CONNECTOR, None
    of_vllm.engine_id = "engine"
    vllm_config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    monkeypatch.setattr(
        offloading_connector,
        "build_offloading_config",
        lambda vllm_config, _: offloading(
            1, 1, **vllm_config.kv_transfer_config.kv_connector_extra_config
        ),
    )
    role = base_v1.KVConnectorRole.WORKER
    connector: Any = KVConnectorFactory.create_connector(vllm_config, role, kv_config)
    kv_caches = filled(kv_config, layout)
    connector.register_kv_caches(kv_caches)
    return connector, [kv_caches[name] for name in NAMES]


def step(connector: Any, load: dict[int, Any], store: dict[int, Any]) -> None:
    """What vLLM's runner does around a forward of all layers."""
    metadata = common.OffloadingConnectorMetadata(load_jobs=load, store_jobs=store)
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    for name in NAMES:
        connector.wait_for_layer_load(name)
        connector.save_kv_layer(name, None, None)
    connector.wait_for_save()
    connector.get_finished(set())
    connector.clear_connector_metadata()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_waits_for_itself_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's connector with ours before it: a load of the step is waited for by layer, others as
    ever, and the scheduler hears of each once."""
    monkeypatch.setattr(engines, "STEPPED_FROM", 0)
    connector, layers = connected(monkeypatch, layout)
    ours = connector.connector_worker.worker
    assert isinstance(ours, vllm.Worker)
    waited: list[str] = []
    own = ours.wait_layer
    monkeypatch.setattr(ours, "wait_layer", lambda name: (waited.append(name), own(name)))
    manager = connector.connector_worker.spec.get_manager()
    request = base.ReqContext(req_id="request")
    keys = [base.make_offload_key(bytes([key]) * 32, 0) for key in range(3)]
    source, target = [3, 9, 4], [8, 1, 12]
    granted = manager.prepare_store(keys, request)
    job = made(
        common.TransferJob, req_id="request", src_spec=gpu(source), dst_spec=granted.store_spec
    )
    step(connector, {}, {1: job})
    step(connector, {}, {})  # stores leave with the step after theirs
    ours.wait({1})
    manager.complete_store(granted.keys_to_store, request)
    job = made(
        common.TransferJob,
        req_id="request",
        src_spec=manager.prepare_load(keys, request),
        dst_spec=gpu(target),
        sync=True,
    )
    wanted = [layer[source].view(torch.int8) for layer in layers]
    waited.clear()
    step(connector, {2: job}, {})
    assert waited == [*NAMES, ""]
    if NEW:  # others loads come before a request runs: nothing waits for them
        for layer, bytes_wanted in zip(layers, wanted, strict=True):
            assert torch.equal(layer[target].view(torch.int8), bytes_wanted)
    ours.wait({2})
    assert all(
        torch.equal(layer[target].view(torch.int8), one)
        for layer, one in zip(layers, wanted, strict=True)
    )
    step(connector, {}, {})
    assert connector.build_connector_worker_meta().completed_jobs == {1: 1, 2: 1}
    assert connector.requires_piecewise_for_cudagraph({}) == NEW
    connector.shutdown()
