"""vLLM's offloading connector with its copies made by offcore.

    vllm serve MODEL --kv-offloading-size 64 --kv-transfer-config '{
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "OffcoreOffloadingSpec"}}'

vLLM finds the name by the entry point of this package. Without entry points, add
"spec_module_path": "offcore.serving.vllm". The scheduler's side stays vLLM's. The key "offcore" of
the extra configuration has arguments of `kv.BlockTransfer`. With "OffcoreConnector" and
"cpu_bytes_to_use" there, a step loads what it reads, and each layer waits for itself alone.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offcore import kv
from offcore.errors import Error, error
from offcore.serving.engines import fits, known, layers_together, log, pool_for, say_once

VERSIONS = ("0.26", "0.33")
NAME = "OffcoreOffloadingSpec"
CONNECTOR = "OffcoreConnector"
BUDGET = 1 << 30  # bytes that a step loads of what it reads; more is loaded before
_OFFLOAD = "vllm.v1.kv_offload"
_CONNECT = "vllm.distributed.kv_transfer.kv_connector"
_ATTEMPTS = 3  # a failed copy is tried again, as vLLM stops at a job that failed


def register() -> None:
    """vLLM's plugin: makes both names known, in each process and as often as it is called."""
    for module, kind, call, name in (
        (f"{_OFFLOAD}.factory", "OffloadingSpecFactory", "register_spec", NAME),
        (f"{_CONNECT}.factory", "KVConnectorFactory", "register_connector", CONNECTOR),
    ):
        try:
            getattr(getattr(importlib.import_module(module), kind), call)(name, __name__, name)
        except (ImportError, AttributeError, ValueError):  # a vLLM without it, or known already
            continue


def __getattr__(name: str) -> Any:
    """Subclasses of vLLM's classes, which are imported when one is first asked for."""
    if name not in (NAME, CONNECTOR):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = made = _spec() if name == NAME else _connector()
    except (ImportError, AttributeError) as why:
        raise error("unsupported", f"vLLM's CPU offloading cannot be imported: {why}") from None
    return made


def _connector() -> type:
    version = importlib.import_module("vllm").__version__
    own: Any = importlib.import_module(f"{_CONNECT}.v1.offloading_connector").OffloadingConnector
    common = importlib.import_module(f"{_CONNECT}.v1.offloading.common")
    if not known("vLLM", version, VERSIONS):
        return type(CONNECTOR, (own,), {"__module__": __name__})
    made = {"__module__": __name__, "layered": hasattr(common.TransferJob, "sync")}
    return type(CONNECTOR, (Connector, own), made)


def _spec() -> type:
    version = importlib.import_module("vllm").__version__
    own: Any = importlib.import_module(f"{_OFFLOAD}.cpu.spec").CPUOffloadingSpec
    base: Any = importlib.import_module(f"{_OFFLOAD}.base")
    fit = known("vLLM", version, VERSIONS) and fits("vLLM", own.create_worker, ("kv_caches",))

    def create_worker(self: Any, kv_caches: Any) -> Any:
        views = _views(self, kv_caches) if fit else None
        if views is None:
            return own.create_worker(self, kv_caches)
        options = self.extra_config.get("offcore", {})
        made = worker(base.TransferResult, views, *_numbers(self), options)
        log.info("vLLM: offcore copies KV blocks")
        return made

    worker: Any = type("OffcoreOffloadingWorker", (Worker, base.OffloadingWorker), {})
    return type(NAME, (own,), {"create_worker": create_worker, "__module__": __name__})


def _numbers(spec: Any) -> tuple[int, int]:
    """How many chunks the scheduler numbers, and the blocks of each; 0.26 and 0.33 differ."""
    chunks = spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks
    return int(chunks), int(spec.blocks_per_chunk)


def _views(spec: Any, kv_caches: Any) -> list[Any] | None:
    """The bytes of a block in each tensor, (blocks, bytes); None for what stays vLLM's."""
    refs = [
        [(ref.tensor_idx, ref.page_size_bytes) for ref in group]
        for group in kv_caches.group_data_refs
    ]
    kept = ""
    views: list[Any] = []
    if getattr(spec, "replicated_layout", False):
        kept = "host memory that ranks share"
    elif any(group != refs[0] for group in refs):
        kept = "groups of layers whose pages differ"
    elif not _numbers(spec)[0]:
        kept = "host memory for less than a chunk"
    else:
        torch = importlib.import_module("torch")
        try:
            for index, used in refs[0]:
                whole = kv_caches.tensors[index]
                pages = whole.tensor.view(torch.int8).view(-1, whole.page_size_bytes)
                views.append(pages[:, :used])
            kv.Layout(views)
        except (RuntimeError, Error) as why:
            kept = f"a cache that is no table of blocks ({str(why).splitlines()[0]})"
    if kept:
        say_once(f"vLLM keeps its own copies: {kept} is not supported by offcore.serving")
    return None if kept else views


def slots_of(gpu: Any, chunks: NDArray[Any], per_chunk: int) -> NDArray[np.int64]:
    """The row of host memory of each of a job's GPU blocks.

    gpu: vLLM's GPULoadStoreSpec: group_sizes, and the index of each group's first block in its
        request, which begins within a chunk where it is no multiple of `per_chunk`.
    chunks: the numbers of all chunks that these blocks lie in, group after group.
    """
    rows = np.asarray(chunks, np.int64)[:, np.newaxis] * per_chunk + np.arange(per_chunk)
    parts = [np.empty(0, np.int64)]
    at = 0
    for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        skipped = first % per_chunk if size else 0
        count = -(-(skipped + size) // per_chunk)
        parts.append(rows[at : at + count].ravel()[skipped : skipped + size])
        at += count
    slots = np.concatenate(parts)
    if at != len(chunks) or len(slots) != len(gpu.block_ids):
        raise error(
            "invalid",
            f"vLLM names {len(chunks)} chunks of {per_chunk} blocks for {len(gpu.block_ids)} "
            f"blocks in groups of {list(gpu.group_sizes)}: the groups take {at} chunks",
        )
    return slots


@dataclass
class _Job:
    number: int
    start: Any  # starts the copies (again)
    copies: Any
    attempts: int = 1


class Worker:
    """Copies for one worker of vLLM, between its GPU's cache and host memory of its own.

    result: vLLM's TransferResult. views: (blocks, bytes) of each tensor. The host memory has a row
    for each of `chunks * per_chunk` blocks, and is registered in the background from now on; the
    first job waits for the rest of that.
    """

    def __init__(
        self, result: Any, views: list[Any], chunks: int, per_chunk: int, options: dict[str, Any]
    ) -> None:
        layout = kv.Layout(views)
        self._result = result
        self._per_chunk = per_chunk
        self._pool = pool_for(layout, chunks * per_chunk)
        # Adopted memory would stay allocated while the engine sleeps.
        self._transfer = kv.BlockTransfer(layout, self._pool, **{"adopt": False, **options})
        self._jobs: dict[int, _Job] = {}
        self._coming: list[_Job] = []  # of the step under way, which waits for layers
        self.layers: dict[str, int] = {}  # by name; none: the step waits for all of its loads
        self._ready = False
        self._closed = False
        self._process = os.getpid()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Starts to copy GPU blocks to chunks, after what the current stream has been given."""
        return self._submit(job_id, self._transfer.store, src_spec, dst_spec.block_ids)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts to copy chunks to GPU blocks, after what the current stream has been given, which
        may zero them; expedited: ahead of others not enqueued yet."""
        nbytes = len(dst_spec.block_ids) * self._pool.block_bytes
        by_layer = layers_together(len(self.layers), nbytes) if expedited else 0
        start = functools.partial(self._transfer.load, priority=int(expedited), by_layer=by_layer)
        self._submit(job_id, start, dst_spec, src_spec.block_ids)
        if expedited and self.layers:
            self._coming.append(self._jobs[job_id])
        return True

    def _submit(self, number: int, start: Any, gpu: Any, chunks: NDArray[Any]) -> bool:
        if self._closed:
            raise error("cancelled", f"job {number}: the offloading worker is shut down")
        if os.getpid() != self._process:
            raise error("unsupported", "a forked process has no GPU memory: create a worker in it")
        if number in self._jobs:
            raise error("invalid", f"job {number} is under way already")
        if not self._ready:
            self._pool.wait_ready()
            self._pool.allocate(self._pool.blocks)  # the scheduler gives rows out, all of them
            self._ready = True
        blocks, slots = np.asarray(gpu.block_ids, np.int64), slots_of(gpu, chunks, self._per_chunk)
        copies = functools.partial(start, blocks, slots, after=self._stream())
        self._jobs[number] = _Job(number, copies, copies())
        return True

    def _stream(self) -> Any:
        """The stream that the model runs in; None on a CPU."""
        if self._transfer.backend != "cuda":
            return None
        return importlib.import_module("torch").cuda.current_stream(self._transfer.device)

    def wait_layer(self, name: str) -> None:
        """What is enqueued later comes after this layer of the step's loads; "": after all."""
        last = self._transfer.layouts[0].layers - 1
        layer = min(self.layers.get(name, last), last)
        for job in self._coming:
            while True:
                try:
                    job.copies.wait_layer(layer, self._stream())
                    break
                except Error as why:
                    if why.code == "timeout" or self._succeeded(job):
                        raise
        if layer == last:
            self._coming.clear()

    def get_finished(self) -> list[Any]:
        """Results of the jobs that have ended since the last call. Raises `Error` for copies that
        fail again and again."""
        ended = [job for job in self._jobs.values() if job.copies.done()]
        return [self._result_of(job) for job in ended if self._succeeded(job)]

    def _succeeded(self, job: _Job) -> bool:
        """Waits for a job; starts it again where it failed."""
        try:
            job.copies.wait()
        except Error as why:
            if why.code == "timeout" or job.attempts == _ATTEMPTS:
                raise
            log.warning("job %d of vLLM's is tried again: %s", job.number, why)
            job.attempts += 1
            job.copies = job.start()
            return False
        return True

    def _result_of(self, job: _Job) -> Any:
        done = self._jobs.pop(job.number).copies.wait()
        return self._result(job.number, True, done.bytes, done.copy_us / 1e6)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Until these jobs have ended, but for those whose layers the step under way waits for;
        `get_finished` still tells of them."""
        for number in job_ids:
            job = self._jobs.get(number)
            while job is not None and job not in self._coming and not self._succeeded(job):
                pass

    def shutdown(self) -> None:
        """Waits for all jobs and gives the host memory back."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._transfer.close()
        self._jobs.clear()
        self._pool.close()


class Connector:
    """Before vLLM's OffloadingConnector: a step begins with the first layers that it loads."""

    layered: bool  # whether a request runs in the step that loads its blocks
    _ours: Worker | None = None

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "spec_name" not in extra:
            extra |= {"spec_name": NAME, "spec_module_path": __name__}
        extra.setdefault("sync_load_budget_bytes", BUDGET)
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return cls.layered and bool(extra_config.get("sync_load_budget_bytes", BUDGET))

    def register_kv_caches(self: Any, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)  # type: ignore[misc]
        worker = self.connector_worker.worker
        if isinstance(worker, Worker):
            groups = self._kv_cache_config.kv_cache_groups
            worker.layers = {name: at for one in groups for at, name in enumerate(one.layer_names)}
            self._ours = worker

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._ours is not None:
            self._ours.wait_layer(layer_name)

    def wait_for_save(self: Any) -> None:
        self.wait_for_layer_load("")
        super().wait_for_save()  # type: ignore[misc]
