"""Loads and stores of KV blocks between caches and host pools."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from offcore import _core, defaults, machines
from offcore.errors import error
from offcore.kv.layout import Layout
from offcore.kv.pool import HostPool, RowsByAddress, numbers_of, open_pools
from offcore.kv.result import Transferred
from offcore.operands import checked

_INT_MAX = (1 << 31) - 1  # what counts and priorities may be
_SMS_MAX = 1 << 10
_EXIT_S = 10.0  # a process that ends waits so long for copies
_open_transfers: weakref.WeakSet[BlockTransfer] = weakref.WeakSet()


def _close_all() -> None:
    """Threads of ours must not outlive the interpreter, nor copies the driver."""
    for transfer in list(_open_transfers):
        with contextlib.suppress(_core.Error):  # a GPU that does not end keeps what it has
            transfer.close(cancel=True, timeout=_EXIT_S)
    for pool in list(open_pools):
        with contextlib.suppress(_core.Error):
            pool.close(timeout=_EXIT_S)


atexit.register(_close_all)


def _handle(stream: Any) -> int:
    """The driver's handle of a torch stream, or the handle itself."""
    return int(getattr(stream, "cuda_stream", stream))


def _after(given: Any) -> tuple[str, int]:
    if hasattr(given, "cuda_event"):
        if not given.cuda_event:
            raise error("invalid", "after: the event was never recorded; record it in a stream")
        return "event", given.cuda_event
    return "stream", _handle(given)


class Job:
    """A load or store in progress. It keeps caches and pool alive."""

    def __init__(self, core: _core.KvJob, transfer: BlockTransfer, after: Any, since: int) -> None:
        self._core = core
        self._transfer = transfer
        self._after = after  # kept with the job
        self._began_ns = since  # of the call, which ends here
        self._ended_ns = time.perf_counter_ns()

    def done(self) -> bool:
        """Returns whether the job has ended: completed, cancelled or failed."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> Transferred:
        """Waits until the job has ended, even if cancelled, and returns what was copied. Raises
        `Error`: timeout (the job continues), driver if the GPU or the driver failed."""
        self._core.wait(self._transfer.timeout if timeout is None else timeout)
        numbers = (max(0, self._transfer.device), *self._transfer.links)
        submit_us = (self._ended_ns - self._began_ns) / 1e3
        call = ("load" if self._core.load else "store", self._core.asked, submit_us)
        return Transferred(self._core.report, self._transfer.backend, call, numbers)

    def wait_layer(
        self, layer: int, stream: Any = None, timeout: float | None = None, gate: bool = False
    ) -> None:
        """Waits until a layer (from 0) has arrived for all blocks.

        stream: cuda: a torch.cuda.Stream, or its handle, which waits instead of the caller; the
            caller waits only until the copies of the layer are enqueued.
        gate: return before that; for at most 4 streams. A stream also continues if the job ends
            without the layer: call `wait` before you use what it computes (docs/tuning.md).

        A job without `by_layer` has one event for all layers. Raises `Error`: timeout; cancelled if
        the layer was cancelled; unsupported for a gate without CUDA_DEVICE_MAX_CONNECTIONS=32.
        """
        number = checked("layer", layer, _INT_MAX)
        wait_s = self._transfer.timeout if timeout is None else timeout
        if stream is not None:
            self._core.enqueue_wait(number, _handle(stream), wait_s, gate)
        elif gate:
            raise error("invalid", "gate needs stream=: the stream that waits")
        else:
            self._core.wait_layer(number, wait_s)

    def wait_stream(self, stream: Any, timeout: float | None = None, gate: bool = False) -> None:
        """Makes a stream wait for all layers, as `wait_layer` does for one."""
        self.wait_layer(self._core.layers - 1, stream, timeout, gate)

    def cancel(self) -> None:
        """Cancels copies that are not enqueued yet; `wait` returns what was copied."""
        self._core.cancel()


class BlockTransfer:
    """Loads and stores of KV blocks between caches and host pools.

    caches: a `Layout`, or its argument, with `block_axis` and `layer_axis`; a list of Layouts for
        several groups with separate block numbers.
    pool: the `HostPool`, with rows of `Layout.row_bytes`; a list with one pool per group.
    device: cuda: the GPU of the caches; default: from the tensors.
    ahead_bytes, ahead_commands: limits of the work enqueued ahead per direction. Work that is not
        enqueued yet can be cancelled, or overtaken by a higher priority. Less than about 100 us of
        copies leaves an engine idle. If both engines copy, at most three small parts are enqueued.
    plain_from: pages of at least this many bytes are copied one by one, instead of several layers
        per strided copy; a number, or a pair for load and store. None: the size at which the thread
        submits as fast as the engine copies; without a driver, none.
    links: a list of GPUs that lend their links to the host, or "all" other visible GPUs. Large jobs
        then use several links: data is buffered in the memory of such a GPU, at most `link_bytes`
        each, and crosses NVLink. None: use no other GPU. Not for jobs by layer. On host any
        numbers: additional threads.
    crossing_bytes: cuda: maximum host memory for copies by the other direction's engine: pages of
        up to 256 KiB use both while that direction is idle (path "crossed"). Takes an eighth of the
        distance between a block's layers (at least 8 MiB), 10 MiB of GPU memory, and four blocks.
        Below 8 MiB, with `links`, `kernel` or `plain_from`, or if unsupported, one engine copies.
    linger: seconds, up to 60, that the transfer's thread spins for further jobs, on its own core,
        before it sleeps. After a sleep the next job is slower: by a tenth with small pages. None:
        0.05 with 8 cores, 0.002 with 4, else 0.0002.
    kernel: cuda: a kernel of 16 blocks copies instead of engines, if pages and addresses are
        multiples of 16 bytes. It uses SMs; for pages so small that engines are slow. Results have
        path "kernel".
    policy: cuda: whether SMs may pack pages in GPU memory, so that plain copies of whole blocks
        cross the link (path "packed"). "auto": if engines alone would be slower according to the
        machine file; "zero_sm": never; "pack": always. Not with `links`, `kernel` or `plain_from`;
        other backends never pack.
    pack_sms: maximum number of SMs that pack per direction (`Transferred.sm_ms`); 0: as "zero_sm".
    pack_bytes: maximum GPU memory for packed blocks; blocks above a quarter of it are not packed.
    adopt: cuda: map tensors in VMM memory (cuMemCreate) a second time at equal steps, if a block
        then requires fewer copies. They stay allocated until `close`. Reported by `adopted`.
    hold: enqueue copies at once and let engines wait for a job's `after`: a stream can then wait
        for the job early, but later jobs in that direction wait too.
    verify: verify every program before it runs. Slow; for tests.

    Loads and stores run concurrently, in a stream per engine. Jobs that use the same block or slot,
    at least one of them writing, run in call order. The transfer and its jobs keep tensors and
    pools alive. Dropping a transfer together with its jobs cancels them. Raises `Error`: invalid,
    unavailable.
    """

    def __init__(
        self,
        caches: Any,
        pool: HostPool | RowsByAddress | Sequence[HostPool],
        *,
        block_axis: int = 0,
        layer_axis: int | None = None,
        device: int | None = None,
        ahead_bytes: int = 32 << 20,
        ahead_commands: int = 1024,
        plain_from: int | tuple[int | None, int | None] | None = None,
        links: Sequence[int] | str | None = None,
        link_bytes: int = 32 << 20,
        crossing_bytes: int = 1 << 30,
        linger: float | None = None,
        kernel: bool = False,
        policy: str = "auto",
        pack_sms: int = 4,
        pack_bytes: int = 32 << 20,
        adopt: bool = True,
        hold: bool = False,
        verify: bool = False,
    ) -> None:
        pools = [pool] if isinstance(pool, (HostPool, RowsByAddress)) else list(pool)
        groups = list(caches) if isinstance(caches, (list, tuple)) else [caches]
        if not groups or not all(isinstance(group, Layout) for group in groups):
            groups = [Layout(caches, block_axis=block_axis, layer_axis=layer_axis)]
        if len({(one.backend, one.machine) for one in pools}) != 1:
            raise error(
                "invalid", "host pools of a transfer must have the same backend and machine"
            )
        self.layouts: list[Layout] = groups
        self.pools = pools
        self.backend = pools[0].backend
        self.timeout = pools[0].timeout
        self._traits = defaults.traits(self.backend)
        self.device = self._gpu(device)
        if kernel and not self._traits.gpus:
            raise error("unsupported", f"kernel=True needs GPUs: backend {self.backend} has none")
        self.links = self._lent(links)
        limits = plain_from if isinstance(plain_from, tuple) else (plain_from, plain_from)
        plain_load, plain_store = (
            None if limit is None else checked("plain_from", limit) for limit in limits
        )
        self._core = _core.open_transfer(
            self.backend,
            machines.load(pools[0].machine),
            self.device,
            [layout._core for layout in groups],
            [pool._core for pool in pools],
            self.links,
            machines.load(defaults.machine(self.backend, 2)),
            checked("link_bytes", link_bytes),
            checked("crossing_bytes", crossing_bytes),
            [layout.tensors for layout in groups],
            checked("ahead_bytes", ahead_bytes),
            checked("ahead_commands", ahead_commands, _INT_MAX),
            (plain_load, plain_store),
            linger,
            kernel,
            (adopt, hold, verify),
            (policy, checked("pack_sms", pack_sms, _SMS_MAX), checked("pack_bytes", pack_bytes)),
        )
        self.adopted: bool = self._core.adopted
        _open_transfers.add(self)

    def _gpu(self, device: int | None) -> int:
        found = {layout.device for layout in self.layouts}
        if not self._traits.gpus:
            if found - {-1} or device is not None:
                raise error(
                    "invalid", f"caches on a GPU need pools of backend cuda, not {self.backend}"
                )
            return -1
        if -1 in found:
            raise error(
                "invalid",
                "the caches lie in host memory: make the pool with "
                'backend="host", or pass tensors on a GPU',
            )
        known = {gpu for gpu in found if gpu is not None}
        device = device if device is not None else next(iter(known), self.pools[0].device)
        if known - {device}:
            raise error(
                "invalid",
                f"the caches are on GPUs {sorted(known)}, but the transfer is for GPU {device}",
            )
        return device

    def _lent(self, links: Sequence[int] | str | None) -> list[int]:
        """The GPUs whose links may be used besides the own one. Raises `Error`."""
        if links is None:
            return []
        if self._traits.virtual:
            raise error("unsupported", "backend sim has one link to the host for each transfer")
        visible = _core.gpus() if self._traits.gpus else None
        if links == "all":
            if visible is None:
                why = "backend host needs explicit links, e.g. links=[1]; 'all' is not defined"
                raise error("invalid", why)
            links = [gpu for gpu in range(visible) if gpu != self.device]
        if isinstance(links, str):
            raise error("invalid", f"links is '{links}': pass 'all', or a list of GPUs")
        lent = [checked("links", link, _INT_MAX) for link in links]
        unseen = [gpu for gpu in lent if visible is not None and gpu >= visible]
        if unseen or not lent:
            raise error(
                "unsupported",
                f"links of GPUs {unseen or 'besides this one'}: {visible} are visible to this "
                "process (CUDA_VISIBLE_DEVICES)",
            )
        if len(set(lent)) < len(lent) or (visible is not None and self.device in lent):
            raise error("invalid", f"links {lent}: name other GPUs than {self.device}, each once")
        return lent

    def load(
        self,
        blocks: ArrayLike,
        slots: ArrayLike,
        *,
        priority: int = 0,
        by_layer: bool | int = False,
        after: Any = None,
        group: int = 0,
    ) -> Job:
        """Copies host rows into blocks: slots[i] into blocks[i].

        blocks, slots: lists of integers, best int64 arrays; no block twice. Slots: `Layout`.
        priority: higher priorities overtake work that is not enqueued yet.
        by_layer: False: all layers of a block together, with the fewest commands. True: layer by
            layer, each with an event (`Job.wait_layer`), so that compute can start on the first
            layers while others arrive. An integer k: k layers together.
        after: cuda: a torch.cuda.Stream or torch.cuda.Event: start after the work now in the
            stream, or before the event, such as reads of the blocks' old contents.
        group: number of the group, if there are several.

        Returns immediately; a thread submits the copies. Raises `Error`: invalid for numbers that
        are out of range, duplicate or not allocated (nothing is copied), unsupported for `after`
        without a GPU, cancelled after `close`.
        """
        return self._start(True, blocks, slots, (group, priority, by_layer), after)

    def store(
        self,
        blocks: ArrayLike,
        slots: ArrayLike,
        *,
        priority: int = 0,
        by_layer: bool | int = False,
        after: Any = None,
        group: int = 0,
    ) -> Job:
        """Copies blocks into host rows: blocks[i] into slots[i]; no slot twice. See `load`.

        after: cuda: the stream or event of the work that writes the blocks.
        """
        return self._start(False, blocks, slots, (group, priority, by_layer), after)

    def _start(
        self, load: bool, blocks: ArrayLike, slots: ArrayLike, how: tuple[Any, Any, Any], after: Any
    ) -> Job:
        began_ns = time.perf_counter_ns()
        mark: tuple[()] | tuple[str, int] = () if after is None else _after(after)
        core = self._core.start(load, blocks, slots, how, mark)
        if core is None:
            how = (
                checked("group", how[0], _INT_MAX),
                checked("priority", how[1], _INT_MAX, -_INT_MAX),
                checked("by_layer", how[2], _INT_MAX),
            )
            named = numbers_of("blocks", blocks), numbers_of("slots", slots)
            core = self._core.start(load, *named, how, mark)
            assert core is not None
        return Job(core, self, after, began_ns)

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Waits for jobs in progress and accepts no more. cancel: cancel copies that are not
        enqueued yet. Raises `Error`: timeout while jobs are in progress; call it again."""
        self._core.close(cancel, self.timeout if timeout is None else timeout)

    def __enter__(self) -> BlockTransfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)
