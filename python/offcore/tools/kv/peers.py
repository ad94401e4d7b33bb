"""The ways to copy KV blocks that are measured beside each other, in one process.

`offcore`: BlockTransfer as it is; `zero-sm`: by copy engines alone; `packed`, `packed-8`: all of it
packed by 4 SMs, or 8; `kernel`: by its kernel of 16 blocks.
`lmcache`: what the adapter of LMCache does with such objects, of the layout `chunks` alone.
`batch-copy`: `offcore.batch_copy` of all pages.
`loop`: a cuMemcpyAsync a page (on the host backend: a memcpy). `batch`: one cuMemcpyBatchAsync of
all pages; `batch32`, `batch64`, `batch256`: such calls of so many pages each. `vllm`, `triton`:
vLLM's own calls, where it is installed: its batch of all pages, and its kernel. What these are
given are the places of all pages, ready-made. `torch`: what anybody writes, index_select into
memory of the GPU and a copy of that for each tensor, and back by index_copy_; its rows lie apart
from the pool's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offcore import _core, batch_copy, kv
from offcore.errors import error
from offcore.serving import lmcache
from offcore.tools.kv.case import Case, Numbers, torch_with_gpu

_CALL_PAGES = {"batch": 2**64 - 1, "batch32": 32, "batch64": 64, "batch256": 256}
_OWN: dict[str, dict[str, Any]] = {
    "zero-sm": {"policy": "zero_sm"},
    "packed": {"policy": "pack"},
    "packed-2": {"policy": "pack", "pack_sms": 2},
    "packed-8": {"policy": "pack", "pack_sms": 8},
    "kernel": {"kernel": True},
}
IMPLS = ("offcore", "loop", *_CALL_PAGES, "torch", "vllm", "triton", *_OWN, "lmcache", "batch-copy")
PEERS = IMPLS[1:]
_FACTS = ("path", "links", "commands", "calls", "enqueue_us", "sms", "sm_ms", "adopted")
_REGISTERED_BYTES = 64 << 20  # at a time, by LMCache
_TRITON_CHUNK_BYTES = 32 << 10  # of a page that a block of vLLM's kernel copies at once, at most


class Way(Protocol):
    """One of them, ready for the requests of a case."""

    streamed: bool  # works in the stream that it is given; else `settle` waits for its end

    def enqueue(self, direction: str, stream: int) -> float:
        """Starts all requests of a direction. Returns the microseconds that it took the caller."""

    def settle(self) -> None:
        """Waits for what was started."""

    def facts(self) -> dict[str, Any]:
        """Of what was waited for, for a row."""

    def leave(self) -> None:
        """Takes what the rows of loads hold, where its own lie elsewhere."""

    def fetch(self) -> None:
        """Puts what it has stored elsewhere into the rows of stores."""

    def close(self) -> None: ...


class Transfers:
    """Offcore's own, by engines or by its kernel."""

    streamed = False

    def __init__(self, case: Case, timeout_s: float, **options: Any) -> None:
        self._case = case
        self._timeout_s = timeout_s
        self._transfer = kv.BlockTransfer(case.caches, case.pools, **options)
        self._jobs: list[kv.Job] = []
        self._results: list[kv.Transferred] = []

    def enqueue(self, direction: str, stream: int) -> float:
        start = self._transfer.load if direction == "load" else self._transfer.store
        began_ns = time.perf_counter_ns()
        groups = range(len(self._case.pools))
        named = self._case.named(direction)
        jobs = [start(*request, group=group) for request in named for group in groups]
        took_us = (time.perf_counter_ns() - began_ns) / 1e3
        self._jobs += jobs
        return took_us

    def settle(self) -> None:
        self._results = [job.wait(self._timeout_s) for job in self._jobs]
        self._jobs = []

    def facts(self) -> dict[str, Any]:
        results = self._results
        calls: dict[str, int] = {}
        for result in results:
            for name, count in result.calls.items():
                calls[name] = calls.get(name, 0) + count
        carried = [result.links for result in results]
        return {
            "path": results[0].path,
            "links": {gpu: sum(one[gpu] for one in carried) for gpu in carried[0]},
            "commands": sum(result.commands for result in results),
            "calls": calls,
            "enqueue_us": round(sum(result.enqueue_us for result in results), 2),
            "sms": max(result.sms for result in results),
            "sm_ms": round(sum(result.sm_ms for result in results), 4),
            "adopted": self._transfer.adopted,
        }

    def leave(self) -> None:
        pass

    def fetch(self) -> None:
        pass

    def close(self) -> None:
        self._transfer.close(timeout=self._timeout_s)


class InStream:
    """A peer that works in the given stream; by default on the rows of the case."""

    streamed = True

    def settle(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return dict.fromkeys(_FACTS)

    def leave(self) -> None:
        pass

    def fetch(self) -> None:
        pass

    def close(self) -> None:
        pass


Copy = Callable[[Any, Any, int], None]  # of pages to places, from places, in a stream


class Pages(InStream):
    """A peer that is given the places of all pages."""

    def __init__(self, case: Case, copy: Copy, prepare: Callable[[Any], Any]) -> None:
        self._copy = copy
        self._requests = {
            load: [self._places(case, named, load, prepare) for named in case.named(direction)]
            for load, direction in ((True, "load"), (False, "store"))
        }

    def _places(
        self, case: Case, named: tuple[Numbers, Numbers], load: bool, prepare: Any
    ) -> tuple[Any, Any]:
        cache, host = (prepare(column) for column in case.pages(*named))
        return (cache, host) if load else (host, cache)

    def enqueue(self, direction: str, stream: int) -> float:
        began_ns = time.perf_counter_ns()
        for dsts, srcs in self._requests[direction == "load"]:
            self._copy(dsts, srcs, stream)
        return (time.perf_counter_ns() - began_ns) / 1e3


class Batched(Pages):
    """Offcore's batches of the same places."""

    def __init__(self, case: Case, timeout_s: float) -> None:
        self._handles: list[Any] = []
        self._timeout_s = timeout_s
        self._on_gpu = case.backend == "cuda"
        super().__init__(case, self._start, lambda column: column.astype(np.int64))
        self._nbytes = case.piece_bytes
        self._hosts = {id(srcs) for _, srcs in self._requests[True]}

    def _start(self, dsts: Any, srcs: Any, stream: int) -> None:
        sizes = np.full(len(dsts), self._nbytes, np.int64)
        kind = "h2d" if id(srcs) in self._hosts else "d2h"
        where: dict[str, Any] = {"backend": "host"}
        if self._on_gpu:
            where = {"backend": "cuda", "stream": stream}
        self._handles.append(batch_copy(dsts, srcs, sizes, kind=kind, **where))

    def settle(self) -> None:
        for handle in self._handles:
            handle.wait(self._timeout_s)
        self._handles.clear()


class Adapted(InStream):
    """Objects of LMCache's, in the rows of a case whose blocks share rows."""

    def __init__(self, case: Case) -> None:
        tokens = case.row_blocks
        if case.layout != "chunks" or case.blocks % tokens:
            raise _absent("lmcache", "its objects are whole rows of the layout chunks")
        self._place: lmcache.Place = ("cuda", 0) if case.backend == "cuda" else ("host", None)
        shape = SimpleNamespace(
            kv_size=2,
            nl=len(case.tensors),
            nb=case.tensors[0].shape[1],
            bs=tokens,
            nh=1,
            hs=case.piece_bytes // tokens,
            element_size=1,
            block_stride_elems=0,
        )
        form = SimpleNamespace(name="NL_X_TWO_NB_BS_NH_HS")
        row = case.pools[0].block_bytes

        def request(blocks: Numbers, slots: Numbers) -> tuple[lmcache.Group, list[lmcache.Object]]:
            at = [case.pools[0].row(slot // tokens).ctypes.data for slot in slots[::tokens]]
            named = [int(block) for block in blocks]
            return lmcache.Group(case.addresses, shape, form, tokens * tokens, 0, named), [
                lmcache.Object(place, place, row, number, [0]) for number, place in enumerate(at)
            ]

        self._requests = {
            direction: [request(*named) for named in case.named(direction)]
            for direction in ("load", "store")
        }

    def enqueue(self, direction: str, stream: int) -> float:
        began_ns = time.perf_counter_ns()
        into = stream if self._place[0] == "cuda" else None
        for group, objects in self._requests[direction]:
            kept = lmcache.copy(
                direction == "load", self._place, into, _REGISTERED_BYTES, [group], objects
            )
            if kept:
                raise _absent("lmcache", f"its adapter leaves {kept} to it")
        return (time.perf_counter_ns() - began_ns) / 1e3

    def close(self) -> None:
        lmcache.forget()


class Selected(InStream):
    """The peer that selects blocks tensor by tensor."""

    def __init__(self, case: Case) -> None:
        self._torch = torch = _torch_of(case)
        self._case = case
        self._axis = case.block_axis
        self._tensors = [torch.as_tensor(tensor) for tensor in case.tensors]
        self._requests = {
            direction: [self._place(blocks) for blocks, _ in case.named(direction)]
            for direction in ("load", "store")
        }

    def _place(self, blocks: Numbers) -> tuple[Any, list[Any]]:
        on_gpu = self._case.backend == "cuda"
        index = self._torch.from_numpy(blocks).to(self._tensors[0].device)
        shapes = [list(tensor.shape) for tensor in self._tensors]
        for shape in shapes:
            shape[self._axis] = len(blocks)
        return index, [
            self._torch.empty(shape, dtype=self._torch.uint8, pin_memory=on_gpu) for shape in shapes
        ]

    def enqueue(self, direction: str, stream: int) -> float:
        torch = self._torch
        began_ns = time.perf_counter_ns()
        into = torch.cuda.ExternalStream(stream) if self._case.backend == "cuda" else None
        with contextlib.nullcontext() if into is None else torch.cuda.stream(into):
            for index, rows in self._requests[direction]:
                for tensor, part in zip(self._tensors, rows, strict=True):
                    if direction == "store":
                        part.copy_(tensor.index_select(self._axis, index), non_blocking=True)
                    else:
                        moved = part.to(tensor.device, non_blocking=True)
                        tensor.index_copy_(self._axis, index, moved)
        return (time.perf_counter_ns() - began_ns) / 1e3

    def _each(self, direction: str) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """A row of the pool, and each piece of it here."""
        case = self._case
        requests = zip(case.named(direction), self._requests[direction], strict=True)
        for (_, slots), (_, parts) in requests:
            views = case.views([part.numpy().reshape(-1) for part in parts], len(slots))
            for number, slot in enumerate(slots):
                for place, view in zip(case.places(slot), views, strict=True):
                    yield place, view[number]

    def leave(self) -> None:
        for row, own in self._each("load"):
            own[:] = row

    def fetch(self) -> None:
        for row, own in self._each("store"):
            row[:] = own

    def close(self) -> None:
        self._requests.clear()


def _absent(name: str, why: str) -> Exception:
    return error("unavailable", f"{name} is absent: {why}")


def _torch_of(case: Case) -> Any:
    try:
        import torch
    except ImportError:
        raise _absent("torch", "it is not installed") from None
    if case.backend == "cuda" and torch_with_gpu() is None:
        raise _absent("torch", "it has no GPU")
    return torch


def _driver_peer(case: Case, copy: Any) -> Way:
    nbytes = case.piece_bytes
    if case.backend == "cuda":
        return Pages(case, lambda d, s, stream: copy(d, s, nbytes, 0, stream), np.asarray)
    return Pages(case, lambda d, s, _: _core.copy_by_hand(d, s, nbytes), np.asarray)


def _vllm(case: Case, name: str) -> Way:
    torch = torch_with_gpu()
    if torch is None:
        raise _absent(name, "it needs torch with a GPU")
    try:
        ops = importlib.import_module("vllm._custom_ops")
        by_batch = ops.swap_blocks_batch
        if name == "triton":
            module = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
            kernel, sms = module._swap_blocks_kernel, module.NUM_SMS
    except (ImportError, AttributeError) as failure:
        raise _absent(name, f"{failure}") from None
    count = len(case.pages(*case.loads[0])[0])
    sizes = torch.full((count,), case.piece_bytes, dtype=torch.int64)
    chunk = min(case.piece_bytes, _TRITON_CHUNK_BYTES)
    chunk = 1 << (chunk.bit_length() - 1)  # a power of two, as a range of triton's has to be

    def copy(dsts: Any, srcs: Any, stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            if name == "vllm":
                by_batch(srcs, dsts, sizes)
            else:
                on_gpu = [column.to("cuda", non_blocking=True) for column in (srcs, dsts, sizes)]
                kernel[(min(sms, count),)](*on_gpu, count, BYTES_PER_CHUNK=chunk)

    return Pages(case, copy, lambda column: torch.from_numpy(column.astype(np.int64)))


def open_way(name: str, case: Case, timeout_s: float, links: Any = None) -> Way:
    """links: as BlockTransfer takes them, for offcore. Raises `Error`: unavailable or unsupported,
    and why this peer cannot run here."""
    if name == "offcore":
        return Transfers(case, timeout_s, links=links)
    if name == "loop":
        return _driver_peer(case, _core.copy_by_loop)
    if name == "torch":
        return Selected(case)
    if name == "batch-copy":
        return Batched(case, timeout_s)
    if name == "lmcache":
        return Adapted(case)
    if case.backend != "cuda":
        raise _absent(name, f"backend {case.backend} has no driver and no kernels")
    if name in _CALL_PAGES:
        return _driver_peer(
            case, functools.partial(_core.copy_by_batch, call_pages=_CALL_PAGES[name])
        )
    if name in _OWN:
        return Transfers(case, timeout_s, **_OWN[name])
    if name in ("vllm", "triton"):
        return _vllm(case, name)
    raise error("invalid", f"no peer is called '{name}': there are {', '.join(PEERS)}")
