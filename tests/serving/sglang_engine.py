"""The parts of SGLang that its adapter meets, in the smallest form, as modules to import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

OWN = "SGLang's own copies"


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, tuple[Callable[..., Any], HookType]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls.hooks[target] = (hook, hook_type)


class MHATokenToKVPoolHost:
    """Pages of all layers, K's and V's apart, and the GPU's tensors that they are for."""

    dcp_size = 1
    shared_allocation_domain = None
    device_rows_packed = True

    def __init__(self, layers: int, pages: int, page: int, tokens: int, **changes: Any) -> None:
        self.layout = "page_first_direct"
        self.layer_num = self.target_layer_num = layers
        self.page_num, self.page_size = pages, page
        heads, dim = 2, 6
        self.kv_buffer = torch.zeros(2, pages, layers, page, heads, dim, dtype=torch.float16)
        values = torch.arange(2 * layers * tokens * heads * dim) % 1999
        device = values.to(torch.float16).view(2, layers, tokens, heads, dim).clone()
        self.device_k_buffers, self.device_v_buffers = map(tuple, device)
        self.device = device
        vars(self).update(changes)


class Transfer(NamedTuple):
    """L2Transfer."""

    host_pool: Any
    device_pool: Any
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    layer_mapper: Any = None


class Engine:
    """L2TransferEngine."""

    def __init__(self, io_backend: str = "direct") -> None:
        self.io_backend = io_backend
        self.device_to_host_stream = "to the host"
        self.host_to_device_stream = "to the device"
        self.events: list[Any] = []

    @contextmanager
    def _submission(
        self, transfers: list[Any], stream: str, key: str, start_event: Any = None
    ) -> Iterator[tuple[list[Any], str]]:
        self.events.append(("begin", stream, start_event))
        yield transfers, f"completion {key}"
        self.events.append("end")

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        return OWN

    def submit_host_to_device(
        self,
        transfers: list[Any],
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Any = None,
    ) -> Any:
        return OWN


def install(patch: pytest.MonkeyPatch, version: str) -> None:
    """Puts an SGLang of a version where imports find it."""
    HookRegistry.hooks = {}
    parts: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)


def hooked(engine: Engine, name: str) -> Callable[..., Any]:
    """A method of an engine's as it is once hooks are applied."""
    target = f"sglang.srt.mem_cache.l2_transfer.L2TransferEngine.{name}"
    original = getattr(type(engine), name)
    if target not in HookRegistry.hooks:
        return lambda *args, **more: original(engine, *args, **more)
    hook, kind = HookRegistry.hooks[target]
    assert kind is HookType.AROUND
    return lambda *args, **more: hook(original, engine, *args, **more)
