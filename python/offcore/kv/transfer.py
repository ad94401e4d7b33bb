"""Loads and stores of KV blocks between caches and host pools."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offcore import _core, defaults, machines
from offcore.errors import error
from offcore.kv.layout import Layout
from offcore.kv.pool import HostPool, numbers_of, open_pools
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
    if given is None:
        return "", 0
    if hasattr(given, "cuda_event"):
        if not given.cuda_event:
            raise error("invalid", "after: the event was never recorded; record it in a stream")
        return "event", given.cuda_event
    return "stream", _handle(given)


def _priority(given: Any) -> int:
    if not isinstance(given, (int, np.integer)) or abs(given) > _INT_MAX:
        raise error("invalid", f"priority is {given!r}: pass an integer below 2^31")
    return int(given)


class Job:
    """A load or store under way. It keeps caches and pool alive."""

    def __init__(self, core: _core.KvJob, transfer: BlockTransfer, call: dict[str, Any]) -> None:
        self._core = core
        self._transfer = transfer
        self._call = call  # direction, what it is after, asked, submit_us

    def done(self) -> bool:
        """Whether it has ended: been copied, been cancelled, or failed."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> Transferred:
        """Waits for the end, and says what was copied; also of a cancelled job.

        Raises `Error`: timeout (the job goes on), driver when the GPU or the driver failed.
        """
        self._core.wait(self._transfer.timeout if timeout is None else timeout)
        transfer = self._transfer
        numbers = (max(0, transfer.device), *transfer.links)
        return Transferred(self._core.report, transfer.backend, self._call, numbers)

    def wait_layer(self, layer: int, stream: Any = None, timeout: float | None = None) -> None:
        """Waits until a layer (from 0 on) has arrived for all blocks.

        stream: cuda: a torch.cuda.Stream, or its handle, which then waits instead of the caller:
        what it is given later runs after the copies of the layer. The caller waits only until
        those are enqueued. A job that was not started `by_layer` has one event, for all layers.
        Raises `Error`: timeout; cancelled where the layer will not come.
        """
        wait_s = self._transfer.timeout if timeout is None else timeout
        if stream is None:
            self._core.wait_layer(checked("layer", layer, _INT_MAX), wait_s)
        else:
            self._core.enqueue_wait(checked("layer", layer, _INT_MAX), _handle(stream), wait_s)

    def wait_stream(self, stream: Any, timeout: float | None = None) -> None:
        """Makes a stream wait for all layers, as `wait_layer` does for one."""
        self.wait_layer(self._core.layers - 1, stream, timeout)

    def cancel(self) -> None:
        """What is not enqueued yet is not copied; `wait` tells what was. Returns at once."""
        self._core.cancel()


class BlockTransfer:
    """Loads and stores of KV blocks between caches and host pools.

    caches: a `Layout`, or what makes one with `block_axis` and `layer_axis`; for several groups
        with block numbers of their own, a list of Layouts.
    pool: the `HostPool` whose rows are as large as a block; a list with one for each group.
    device: cuda: the GPU that the caches lie on; by default what the tensors say.
    ahead_bytes, ahead_commands: how much is enqueued ahead in a direction. What is not enqueued
        yet can be cancelled, or overtaken by a higher priority; less than what an engine copies in
        about 100 us leaves it idle. Where both engines copy it is at most three small parts.
    plain_from: pages of so many bytes are copied one by one, rather than several layers by one
        strided copy; a number, or a pair for load and store. None: as many as the thread can
        submit while the engine has something to do; without a driver none.
    links: GPUs that lend their own links to the host, a list, or "all" others that are visible.
        Large jobs then go over several at once: bytes wait in memory of such a GPU, at most
        `link_bytes` of each, and cross NVLink from there. None: no other GPU is touched. Not for
        jobs by layer. On host any numbers: further threads.
    crossing_bytes: cuda: host memory, at most so much, from which copies are addressed that the
        other direction's engine makes: pages of up to 256 KiB use both engines while the other
        direction has none on its way. An eighth of what a block's layers are apart is taken, 8 MiB
        at least, 10 MiB of the GPU's, and four blocks for a trial. Below 8 MiB: none, and one
        engine copies; so it does with `links`, `kernel` or `plain_from`, or where this GPU does not
        do it. Results say path "crossed".
    linger: seconds, up to 60, that the transfer's thread spins for jobs after the last one, on
        a core of its own, before it sleeps. One that has slept is slow over all of the next job:
        small pages take a tenth longer. None: 0.05 with 8 cores, 0.002 with 4, else 0.0002.
    kernel: cuda: a kernel of 16 blocks copies instead of the engines, where pages and addresses are
        whole 16 bytes. It takes SMs; for pages so small that engines are slow, if SMs are free.
        Results say path "kernel".
    policy: cuda: whether SMs may gather pages in the GPU's memory and plain copies take whole
        blocks over the link, or the other way round (path "packed"). "auto": where the machine's
        numbers say that engines alone would be slower; "zero_sm": never; "pack": always.
        Not with `links`, `kernel` or `plain_from`; other backends never pack.
    pack_sms: how many SMs pack in a direction, at most, for `Transferred.sm_ms`; 0: as "zero_sm".
    pack_bytes: the GPU's memory for packed blocks, at most; blocks above a quarter are not packed.
    adopt: cuda: tensors in VMM memory (cuMemCreate) are mapped once more, at equal steps, where a
        block then takes fewer copies, and stay allocated until `close`; `adopted` says so.
    hold: copies are enqueued at once, and engines wait for a job's `after`: a stream can then wait
        for the job soon, but what is enqueued behind it in that direction waits too.
    verify: check every program of commands before it runs. For tests: it is slow.

    Loads and stores run at the same time, in a stream for each engine. Jobs that touch the same
    block or slot, one of them writing, keep the order of their calls. Tensors and pools
    are kept alive by the transfer and its jobs. A transfer that is dropped together with its jobs
    cancels them. Raises `Error`: invalid, unavailable.
    """

    def __init__(
        self,
        caches: Any,
        pool: HostPool | Sequence[HostPool],
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
        pools = [pool] if isinstance(pool, HostPool) else list(pool)
        groups = list(caches) if isinstance(caches, (list, tuple)) else [caches]
        if not groups or not all(isinstance(group, Layout) for group in groups):
            groups = [
                caches
                if isinstance(caches, Layout)
                else Layout(caches, block_axis=block_axis, layer_axis=layer_axis)
            ]
        if len({(one.backend, one.machine) for one in pools}) != 1:
            raise error(
                "invalid", "all host pools of a transfer must have the same backend and machine"
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

        blocks, slots: equally long lists of whole numbers, best int64 arrays; no block twice.
        priority: a higher one goes before what is not enqueued yet.
        by_layer: False: all layers of a block together, which takes the fewest commands. True:
            layer after layer, each with an event of its own (`Job.wait_layer`), so that the first
            one can be computed with before the others have arrived; k: k layers together.
        after: cuda: begins only when what is now in this torch.cuda.Stream, or before this
            torch.cuda.Event, has run: what reads the blocks' old contents.
        group: which of several groups.

        Returns at once; the copies are submitted by a thread. Raises `Error`: invalid for numbers
        out of range, named twice or not allocated (nothing is copied then), unsupported for
        `after` without a GPU, cancelled after `close`.
        """
        return self._start(True, blocks, slots, priority, by_layer, after, group)

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
        """Copies blocks into host rows: blocks[i] into slots[i]; no slot twice. As `load`.

        after: cuda: the stream, or the event, of what writes the blocks.
        """
        return self._start(False, blocks, slots, priority, by_layer, after, group)

    def _start(
        self,
        load: bool,
        blocks: ArrayLike,
        slots: ArrayLike,
        priority: int,
        by_layer: bool | int,
        after: Any,
        group: int,
    ) -> Job:
        began_ns = time.perf_counter_ns()
        kind, handle = _after(after)
        named = numbers_of("blocks", blocks)
        core = self._core.start(
            load,
            checked("group", group, _INT_MAX),
            named,
            numbers_of("slots", slots),
            _priority(priority),
            checked("by_layer", by_layer, _INT_MAX),
            kind,
            handle,
        )
        call = {"direction": "load" if load else "store", "after": after, "asked": len(named)}
        job = Job(core, self, call)
        call["submit_us"] = (time.perf_counter_ns() - began_ns) / 1e3
        return job

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Ends the jobs under way and takes no more.

        cancel: what is not enqueued yet is not copied. Raises `Error`: timeout while jobs go on;
        call it again, or with `cancel`.
        """
        self._core.close(cancel, self.timeout if timeout is None else timeout)

    def __enter__(self) -> BlockTransfer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)
