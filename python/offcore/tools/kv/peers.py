"""The ways to copy KV blocks that are measured beside each other, in one process.

`offcore`: BlockTransfer, by copy engines. `kernel`: the same with its kernel of 16 blocks.
`loop`: a cuMemcpyAsync a page (on the host backend: a memcpy). `batch`: one cuMemcpyBatchAsync of
all pages; `batch32`, `batch64`: such calls of 32 or 64 pages each. `vllm`, `triton`: vLLM's own
calls, where it is installed: its batch of all pages, and its kernel. What peers are given are the
places of all pages, ready-made.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from offcore import _core, kv
from offcore.errors import error
from offcore.tools.kv.case import Case, Numbers, torch_with_gpu

_CALL_PAGES = {"batch": 2**64 - 1, "batch32": 32, "batch64": 64}
IMPLS = ("offcore", "loop", *_CALL_PAGES, "vllm", "triton", "kernel")
PEERS = IMPLS[1:]
_TRITON_CHUNK_BYTES = 32 << 10  # of a page that a block of vLLM's kernel copies at once, at most


class Way(Protocol):
    """One of them, ready for the requests of a case."""

    streamed: bool  # works in the stream that it is given; else `settle` waits for its end

    def enqueue(self, direction: str, stream: int) -> float:
        """Starts all requests of a direction. Returns the microseconds that it took the caller."""

    def settle(self) -> dict[str, Any]:
        """Waits for what was started; facts about it, for a row."""

    def close(self) -> None: ...


class Transfers:
    """Offcore's own, by engines or by its kernel."""

    streamed = False

    def __init__(self, case: Case, timeout_s: float, **options: Any) -> None:
        self._case = case
        self._timeout_s = timeout_s
        self._transfer = kv.BlockTransfer(case.cache, case.pool, **options)
        self._jobs: list[kv.Job] = []

    def enqueue(self, direction: str, stream: int) -> float:
        start = self._transfer.load if direction == "load" else self._transfer.store
        began_ns = time.perf_counter_ns()
        jobs = [start(blocks, slots) for blocks, slots in self._case.named(direction)]
        took_us = (time.perf_counter_ns() - began_ns) / 1e3
        self._jobs += jobs
        return took_us

    def settle(self) -> dict[str, Any]:
        results = [job.wait(self._timeout_s) for job in self._jobs]
        self._jobs = []
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
        }

    def close(self) -> None:
        self._transfer.close(timeout=self._timeout_s)


Copy = Callable[[Any, Any, int], None]  # of pages to places, from places, in a stream


class Pages:
    """A peer that is given the places of all pages."""

    streamed = True

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

    def settle(self) -> dict[str, Any]:
        return dict.fromkeys(("path", "links", "commands", "calls", "enqueue_us"))

    def close(self) -> None:
        pass


def _absent(name: str, why: str) -> Exception:
    return error("unavailable", f"{name} is absent: {why}")


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
    if case.backend != "cuda":
        raise _absent(name, f"backend {case.backend} has no driver and no kernels")
    if name in _CALL_PAGES:
        return _driver_peer(
            case, functools.partial(_core.copy_by_batch, call_pages=_CALL_PAGES[name])
        )
    if name == "kernel":
        return Transfers(case, timeout_s, kernel=True)
    if name in ("vllm", "triton"):
        return _vllm(case, name)
    raise error("invalid", f"no peer is called '{name}': there are {', '.join(PEERS)}")
