"""Pinned host memory for KV blocks."""

from __future__ import annotations

import weakref
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offcore import _core, defaults, machines
from offcore.errors import Error, error
from offcore.operands import OperandError, checked, keep_alive, memory_of

Slots = NDArray[np.int64]
open_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


def numbers_of(name: str, given: ArrayLike) -> Slots:
    numbers = np.asarray(given)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise error(
            "invalid",
            f"{name} must be a list of whole numbers, not {numbers.dtype} of "
            f"{numbers.ndim} dimensions",
        )
    return np.ascontiguousarray(numbers, np.int64)


class HostPool:
    """Pinned host memory for KV blocks: a row holds one block (all layers), or `Layout.row_blocks`.

    block_bytes: bytes per row: `Layout.row_bytes`.
    blocks: number of rows. They are registered with the driver in the background, about 0.1 s/GB,
        in chunks of `chunk_bytes`. No row and no copy crosses chunks. See `progress`.
    backend: "cuda", "host", "sim" or "auto": cuda if available, else host.
    device: cuda: the GPU near which memory is allocated; all GPUs of the process can use it.
    machine: sim: the simulated machine.
    memory: existing host memory for the rows: a writable, contiguous numpy array, mmap, torch CPU
        tensor or buffer. It is registered in place, in chunks that start at a page (in one chunk if
        it does not), and kept until the pool has released it. Several processes may register the
        same shared memory. Or a list of these, or of pairs (memory, stride), with rows numbered in
        this order; entries that share a page must have been registered by their owner.
    row_stride: bytes between the starts of rows in `memory`; default `block_bytes`. Gaps between
        rows are never touched.
    timeout: default timeout of a wait, in seconds.

    Methods, all thread-safe, name rows by number: slots, unless blocks share rows. Raises `Error`:
    invalid, unavailable; `wait_ready` reports failed allocations.
    """

    def __init__(
        self,
        block_bytes: int,
        blocks: int,
        *,
        backend: str = "auto",
        machine: str | None = None,
        device: int | None = None,
        chunk_bytes: int = 1 << 30,
        memory: Any = None,
        row_stride: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.timeout = defaults.seconds(timeout)
        self.backend = defaults.backend(None) if backend == "auto" else backend
        traits = defaults.traits(self.backend)
        if device is not None and not traits.gpus:
            raise error("unsupported", f"device= is for GPUs: backend {backend} has none")
        self.device = (device or 0) if traits.gpus else -1
        self.machine = traits.machine_of_pages(1) if machine is None else machine
        self.block_bytes = checked("block_bytes", block_bytes)
        self._core = _core.open_host_pool(
            self.backend,
            machines.load(self.machine),
            self.device,
            self.block_bytes,
            checked("blocks", blocks),
            checked("chunk_bytes", chunk_bytes),
            *self._places(memory, row_stride),
        )
        open_pools.add(self)

    def _places(
        self, memory: Any, row_stride: int | None
    ) -> tuple[list[tuple[int, int, int]], Any]:
        """(address, bytes, row stride) of each part of given memory, and what keeps them."""
        if memory is None:
            if row_stride is not None:
                raise error("invalid", "row_stride needs memory=: a pool's own rows are adjacent")
            return [], None
        places = []
        for number, entry in enumerate(memory if isinstance(memory, list) else [memory]):
            part, stride = entry if isinstance(entry, tuple) else (entry, row_stride)
            try:
                (address, nbytes), _ = memory_of(part, True)
            except OperandError as refusal:
                where = f"memory[{number}]" if isinstance(memory, list) else "memory"
                raise error("invalid", f"{where}{refusal}") from None
            step = self.block_bytes if stride is None else checked("row_stride", stride)
            places.append((address, nbytes, step))
        return places, keep_alive(memory)

    @property
    def blocks(self) -> int:
        """Number of rows, including those not registered yet."""
        return self._core.counts[0]

    @property
    def progress(self) -> tuple[int, int]:
        """(registered rows, all rows)."""
        rows, ready, _, _ = self._core.counts
        return ready, rows

    @property
    def free_blocks(self) -> int:
        """Number of rows available to `allocate`."""
        return self._core.counts[2]

    @property
    def leaving_blocks(self) -> int:
        """Number of rows freed while jobs use them; available when these jobs have ended."""
        return self._core.counts[3]

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until all rows are registered. Raises `Error`: timeout; memory or driver, with the
        limits, if no chunk of 16 MiB could be registered either: the pool keeps the rows before."""
        self._core.wait_ready(self.timeout if timeout is None else timeout)

    def allocate(self, count: int, *, timeout: float | None = None) -> Slots:
        """Allocates slots for `count` blocks, sorted, in as few consecutive runs as possible.

        timeout: seconds to wait for rows to be registered or freed; 0: do not wait; None: the
            pool's, counted from the last registration.
        Raises `Error`: memory, with the numbers of rows that are free, not registered yet, and
        about to be free; immediately if the pool has fewer rows.
        """
        wanted = checked("count", count)
        while True:
            ready, _ = self.progress
            try:
                wait = self.timeout if timeout is None else timeout
                return cast(Slots, self._core.allocate(wanted, wait))
            except Error as failure:
                over = timeout is not None or self.progress[0] == ready or wanted > self.blocks
                if failure.code != "memory" or over:
                    raise

    def free(self, slots: ArrayLike) -> None:
        """Frees slots: all, or none if it raises.

        Slots in use by jobs become available when the last such job has ended. Raises `Error`:
        invalid for slots that are not allocated (freed twice, another pool's) or passed twice.
        """
        self._core.free(numbers_of("slots", slots))

    def row(self, slot: int) -> NDArray[np.uint8]:
        """Returns an allocated slot's memory, uint8 of `block_bytes`, without a copy. The array
        keeps it allocated, but another block may use it once the slot is freed."""
        return cast(NDArray[np.uint8], self._core.row(checked("slot", slot)))

    def grow(self, blocks: int) -> None:
        """Adds rows at the end, available once they are registered."""
        self._core.grow(checked("blocks", blocks))

    def shrink(self, blocks: int = 0) -> int:
        """Frees whole chunks at the end without slots in use, while at least `blocks` rows remain.
        Returns the number of remaining rows."""
        return self._core.shrink(checked("blocks", blocks))

    def close(self, timeout: float | None = None) -> None:
        """Frees the memory, except what arrays of `row` still reference. Raises `Error`: timeout
        while jobs use slots; close their `BlockTransfer` first."""
        self._core.close(self.timeout if timeout is None else timeout)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowsByAddress:
    """Rows at any address of memory that others register, in pieces that meet at each multiple of
    `step` bytes from `first` on: core/kv/rows.h. Slots are address * `Layout.row_blocks` + place.
    """

    def __init__(self, row_bytes: int, backend: str, first: int, step: int) -> None:
        traits = defaults.traits(backend)
        self.backend, self.timeout = backend, defaults.seconds(None)
        self.machine, self.device = traits.machine_of_pages(1), 0 if traits.gpus else -1
        self._core = _core.rows_by_address(row_bytes, first, step)
