"""The parts of transformers' continuous batching that its adapter meets, in the smallest form, as
modules to import, and an engine that computes each token's keys from the tokens before it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PACKAGE = "transformers.generation.continuous_batching"
LAYERS, HEADS, DIM, SIZE, BLOCKS = 4, 2, 8, 4, 12


@dataclass
class Block:
    hash: int | None = None
    ref_count: int = 1


class Blocks:
    """Blocks are free, idle (no request has them, but their hash may be asked for), or in use."""

    def __init__(self, num_blocks: int, block_size: int, tp_on: bool) -> None:
        self.num_blocks, self.block_size, self.tp_on = num_blocks, block_size, tp_on
        self.free = list(range(num_blocks))
        self.idle: list[int] = []
        self._hash_to_id: dict[int, int] = {}
        self._id_to_block: dict[int, Block] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self.free) + len(self.idle)

    def get_free_blocks(
        self, n_blocks: int, last_block_id: int | None, shareable: bool, group_id: int
    ) -> list[int] | None:
        if n_blocks > self.num_free_blocks:
            return None
        while len(self.free) < n_blocks:
            oldest = self.idle.pop(0)
            self._hash_to_id.pop(self._id_to_block.pop(oldest).hash)  # type: ignore[arg-type]
            self.free.append(oldest)
        taken, self.free = self.free[:n_blocks], self.free[n_blocks:]
        self._id_to_block |= {block: Block() for block in taken}
        return taken

    def increase_ref_count(self, block_id: int) -> None:
        block = self._id_to_block[block_id]
        block.ref_count += 1
        if block.ref_count == 1:
            self.idle.remove(block_id)

    def drop(self, block_id: int) -> None:
        block = self._id_to_block[block_id]
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.hash is None:
            del self._id_to_block[block_id]
        (self.free if block.hash is None else self.idle).append(block_id)

    def compute_hash(self, parent_hash: int | None, tokens: list[int], group_id: int) -> int:
        return hash((parent_hash, tuple(tokens), group_id))


class PagedAttentionCache:
    def __init__(self, config: Any, continuous_batching_config: Any) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.num_blocks, self.block_size = BLOCKS, SIZE
        shape = ((BLOCKS + 2) * SIZE, HEADS, DIM)
        self.key_cache = [torch.zeros(shape) for _ in range(LAYERS)]
        self.value_cache = [torch.zeros(shape) for _ in range(LAYERS)]
        self.allow_block_sharing = self.use_prefix_sharing = True
        self.group_cache_managers = [SimpleNamespace(block_table={})]
        self._block_manager = Blocks(BLOCKS, SIZE, tp_on=False)
        self._total_prefix_length = 0

    @property
    def tables(self) -> dict[str, list[int]]:
        tables: dict[str, list[int]] = self.group_cache_managers[0].block_table
        return tables

    def free_blocks(self, request_id: str) -> None:
        for block in self.tables.pop(request_id):
            self._block_manager.drop(block)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        manager, found, key = self._block_manager, [], None
        for first in range(0, len(prompt_ids) // SIZE * SIZE, SIZE):
            key = manager.compute_hash(key, prompt_ids[first : first + SIZE], 0)
            if key not in manager._hash_to_id:
                break
            found.append(manager._hash_to_id[key])
            manager.increase_ref_count(found[-1])
        if found:
            self.tables[request_id] = found
        self._total_prefix_length += len(found) * SIZE
        return len(found) * SIZE


class Offloading:
    def __init__(
        self,
        cache: Any,
        scheduler: Any,
        cpu_offload_space_gib: float | None,
        safety_threshold: float,
        compute_stream: Any,
        distributed_helper: Any,
    ) -> None:
        self.cache, self.space = cache, cpu_offload_space_gib
        self._request_id_to_cpu_blocks: dict[str, list[int]] = {}
        self._request_id_to_group_block_counts: dict[str, list[int]] = {}

    def _offload_to_cpu(self, victims: list[Any]) -> set[str]:
        return set()

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        pass

    def _return_cpu_blocks(self, request_id: str) -> tuple[list[int], list[int]]:
        return [], []

    def free_all_waiting_cpu_caches(self) -> None:
        pass

    def reset(self) -> None:
        pass


@dataclass
class Batching:
    use_cuda_graph: Any = (False, False)
    varlen_compile_config: Any = None
    decode_compile_config: Any = None
    default_compile_level: int = 0


@dataclass
class Request:
    request_id: str
    tokens: list[int]
    is_cpu_offloaded: bool = False
    allocated_blocks: int = 0
    position_offset: int = 0


class Engine:
    """A cache and its manager, as continuous_api has them, and a model without weights."""

    def __init__(self, model: Any, batching: Batching | None = None) -> None:
        api = sys.modules[f"{PACKAGE}.continuous_api"]
        config = model.config.get_text_config()
        self.cache: Any = api.PagedAttentionCache(
            config=config, continuous_batching_config=batching or Batching()
        )
        self.manager: Any = api.OffloadingManager(
            cache=self.cache,
            scheduler=None,
            cpu_offload_space_gib=1.0,
            safety_threshold=0.5,
            compute_stream=None,
            distributed_helper=None,
        )
        self.order: list[int] = []  # layers, as the model takes them

    def begin(self, request: Request) -> int:
        """Gives a request its blocks; how many of its tokens are there already."""
        found: int = self.cache.search_prefix_match(request.request_id, request.tokens)
        table = self.cache.tables.setdefault(request.request_id, [])
        more = -(-len(request.tokens) // SIZE) - len(table)
        table += self.cache._block_manager.get_free_blocks(
            more, table[-1] if table else None, True, 0
        )
        return found

    def forward(
        self, request: Request, found: int, futures: list[Any] | None = None
    ) -> list[float]:
        """Computes what is not there, and reads all: what it returns depends on every token."""
        self.manager.restore_scheduled_requests(futures or [])
        table = self.cache.tables[request.request_id]
        places = [block * SIZE + at for block in table for at in range(SIZE)][: len(request.tokens)]
        result = []
        for layer in range(LAYERS):
            self.order.append(layer)
            keys, values = self.cache.key_cache[layer], self.cache.value_cache[layer]
            for at in range(min(found, len(request.tokens) - 1), len(request.tokens)):
                seed = hash((layer, *request.tokens[: at + 1])) % 1000003
                keys[places[at]] = seed
                values[places[at]] = -seed
            result.append(float((keys[places] * 3 + values[places]).sum()))
        manager, key = self.cache._block_manager, None
        for number in range(len(request.tokens) // SIZE):
            key = manager.compute_hash(key, request.tokens[number * SIZE : (number + 1) * SIZE], 0)
            manager._id_to_block[table[number]].hash = key
            manager._hash_to_id[key] = table[number]
        return result

    def generate(self, request: Request) -> list[float]:
        result = self.forward(request, self.begin(request))
        self.cache.free_blocks(request.request_id)
        return result


@dataclass
class Model:
    text: Any = field(default_factory=object)

    @property
    def config(self) -> Any:
        return SimpleNamespace(get_text_config=lambda: self.text)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> ModuleType:
    """Puts the modules where importing finds them; returns the one whose names are replaced."""
    parts: dict[str, dict[str, Any]] = {
        "transformers": {"__version__": version},
        "transformers.generation": {},
        PACKAGE: {},
        f"{PACKAGE}.cache": {"PagedAttentionCache": PagedAttentionCache},
        f"{PACKAGE}.cache_manager": {"BlockManager": Blocks},
        f"{PACKAGE}.offloading_manager": {"OffloadingManager": Offloading},
        f"{PACKAGE}.continuous_api": {
            "PagedAttentionCache": PagedAttentionCache,
            "OffloadingManager": Offloading,
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules[f"{PACKAGE}.continuous_api"]
