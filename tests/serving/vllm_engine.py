"""The parts of vLLM that its adapter meets, in the smallest form, as modules to import."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

OWN = "vLLM's own worker"
_CONNECT = "vllm.distributed.kv_transfer.kv_connector"


class OffloadingWorker:
    pass


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


@dataclass
class Tensor:
    tensor: Any
    page_size_bytes: int


@dataclass
class Ref:
    tensor_idx: int
    page_size_bytes: int


@dataclass
class Caches:
    tensors: list[Tensor]
    group_data_refs: list[list[Ref]]


@dataclass
class Chunks:
    """CPULoadStoreSpec."""

    block_ids: np.ndarray


@dataclass
class Blocks:
    """GPULoadStoreSpec."""

    block_ids: np.ndarray
    group_sizes: list[int]
    block_indices: list[int]


@dataclass
class Config:
    chunks: int = 8
    per_chunk: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    replicated: bool = False


class Spec:
    """CPUOffloadingSpec; the attribute with the number of chunks has another name in each."""

    count = "num_chunks"

    def __init__(self, config: Config) -> None:
        self.extra_config = config.extra
        self.blocks_per_chunk = config.per_chunk
        self.replicated_layout = config.replicated
        setattr(self, self.count, config.chunks)

    def create_worker(self, kv_caches: Any) -> Any:
        return OWN


class Spec026(Spec):
    count = "num_blocks"


OWN_SPEC = Spec


class Factory:
    """OffloadingSpecFactory and KVConnectorFactory."""

    known: dict[str, tuple[str, str]]

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.known:
            raise ValueError(name)
        cls.known[name] = (module_path, class_name)

    register_connector = register_spec


@dataclass
class Job:
    """TransferJob."""

    src_spec: Any
    dst_spec: Any


@dataclass
class SyncJob(Job):
    sync: bool = False


class OffloadingConnector:
    """With its worker's side, for one group of layers."""

    saved = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_cache_config = kv_cache_config
        self.extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.connector_worker: Any = SimpleNamespace(worker=None)

    def register_kv_caches(self, kv_caches: Any) -> None:
        module = importlib.import_module(self.extra["spec_module_path"])
        spec = getattr(module, self.extra["spec_name"])(Config(extra=self.extra))
        self.connector_worker.worker = spec.create_worker(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        worker = self.connector_worker.worker
        for number, job in forward_context.items():
            worker.submit_load(number, job.src_spec, job.dst_spec, **kwargs)
        worker.wait(set(forward_context))  # as 0.33 does

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def wait_for_save(self) -> None:
        self.saved = True


def install(patch: pytest.MonkeyPatch, version: str) -> None:
    """Puts a vLLM of a version where imports find it."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.v1": {},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.cpu": {},
        "vllm.v1.kv_offload.cpu.spec": {
            "CPUOffloadingSpec": Spec026 if version.startswith("0.26") else Spec
        },
        "vllm.v1.kv_offload.base": {
            "OffloadingWorker": OffloadingWorker,
            "TransferResult": TransferResult,
        },
        "vllm.v1.kv_offload.factory": {"OffloadingSpecFactory": Factory},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        _CONNECT: {},
        f"{_CONNECT}.factory": {"KVConnectorFactory": Factory},
        f"{_CONNECT}.v1": {},
        f"{_CONNECT}.v1.offloading": {},
        f"{_CONNECT}.v1.offloading.common": {
            "TransferJob": Job if version.startswith("0.26") else SyncJob
        },
        f"{_CONNECT}.v1.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    }
    Factory.known = {}
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
