"""Requests: copies requested by running kernels (docs/gpu-driven.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offcore import _core
from offcore.comm.window import Window
from offcore.errors import error
from offcore.operands import OperandError, checked, places_of

SLOTS_MAX = 1 << 20


@dataclass(frozen=True)
class Put:
    """An entry of a schedule: chunks [chunk, chunk + chunks) of `src` are copied to the same offset
    of the peer's `dst`. signal: by `put_signal`, else `put`; a signal alone has no chunks."""

    peer: int
    dst: int
    src: int = 0
    chunk: int = 0
    chunks: int = 0
    signal: bool = True


class RequestStats(NamedTuple):
    """Counts of one rank. `copies` are submitted copies; merged requests count as one."""

    requests: int
    signals: int
    copies: int
    batches: int
    nbytes: int


class Requests:
    """Registered buffers and the engines that serve requests. Also a context manager."""

    def __init__(
        self,
        comm: Any,
        buffers: Sequence[Any],
        schedule: Sequence[Sequence[Put]],
        chunk: int | None,
        slots: int,
        limit: float,
        spin: float | None,
        engine: str = "auto",
        exchanges: bool = False,
    ) -> None:
        self.timeout: float = comm.timeout
        self.local_ranks: list[int] = comm.local_ranks
        self.proxies: list[Any] = _core.open_requests(
            comm._core,
            [place_of(comm, number, buffer) for number, buffer in enumerate(buffers)],
            [[_planned(put) for put in puts] for puts in schedule],
            0 if chunk is None else checked("chunk", chunk),
            checked("slots", slots, SLOTS_MAX),
            limit,
            -1.0 if spin is None else spin,
            exchanges,
            engine,
            comm.timeout,
        )

    def port(self, rank: int | None = None) -> int:
        """Returns the address of a local rank's `offcore::RequestPort`; None: the only rank."""
        return int(self._proxy(rank).address)

    def host_port(self, rank: int | None = None) -> Any:
        """Returns the calls of `device.cuh` as methods: for host threads on backend host, for
        threads of `run` on sim, which yield the calls. Raises `Error`: unsupported elsewhere."""
        return self._proxy(rank).host_port()

    def run(self, *threads: Iterator[Any]) -> int:
        """sim only: runs simulated GPU threads and their requests in virtual time. Returns the ns
        until the last has ended. threads: generators that yield calls of `host_port`, or lists of
        pushes of a warp's lanes, and receive the results that the calls have on host. Raises
        `Error`: invalid for other calls; exceptions of threads, after the engines have ended."""
        return int(self.proxies[0].run(threads))

    def check(self) -> None:
        """Raises `Error` with the reason why an engine ended: invalid (an unregistered buffer or
        range; stopped), timeout (the ring was full), peer (a rank died), driver. Also timeout,
        once, after a kernel's wait exceeded its limit; the engine then continues."""
        for proxy in self.proxies:
            proxy.check()

    def drain(self, timeout: float | None = None) -> None:
        """Waits for all requests pushed so far. Raises `Error` as check does, and timeout."""
        for proxy in self.proxies:
            proxy.drain(self.timeout if timeout is None else timeout)

    def stop(self, timeout: float | None = None) -> None:
        """Serves the requests pushed so far, ends the engines, and wakes their waiters with
        `kStopped`. A second call does nothing. Raises `Error`: timeout."""
        for proxy in self.proxies:
            proxy.stop(self.timeout if timeout is None else timeout)

    def stats(self, rank: int | None = None) -> RequestStats:
        """Returns the counts of a local rank's engine."""
        return RequestStats(*self._proxy(rank).stats)

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _proxy(self, rank: int | None) -> Any:
        if rank is None and len(self.proxies) == 1:
            return self.proxies[0]
        if rank is None or rank not in self.local_ranks:
            raise error("invalid", f"rank {rank} is not local; local ranks: {self.local_ranks}")
        return self.proxies[self.local_ranks.index(rank)]


def _planned(put: Put) -> tuple[int, int, int, int, int, int]:
    """As device.cuh pushes it: put, put_signal, signal are 1, 2, 3."""
    op = 1 if not put.signal else 2 if put.chunks else 3
    named = (put.peer, put.dst, put.src, put.chunk, put.chunks)
    peer, dst, *place = (checked("schedule", one, SLOTS_MAX * 2) for one in named)
    src, chunk, chunks = place if op < 3 else (0, 0, 0)
    return op, peer, dst, src, chunk, chunks


def place_of(comm: Any, number: int, buffer: Any) -> tuple[_core.Window, int, int]:
    """The window, offset and bytes of what is registered: the same on all local ranks."""
    if isinstance(buffer, Window):
        buffer = buffer.whole
    if type(buffer) is _core.Region:
        return buffer.window, buffer.offset, buffer.nbytes
    try:
        sides, _ = places_of(buffer, comm.local_ranks, comm._gpus, writable=True)
    except OperandError as refusal:
        raise error("invalid", f"requests: buffer {number}{refusal}") from None
    found = set()
    for rank, side in zip(comm.local_ranks, sides, strict=True):
        window, offset = _core.place_of(comm._core, rank, *side) if side else (None, 0)
        if side is None or window is None:
            raise error("invalid", f"requests: buffer {number} lies in no window; use empty()")
        found.add((window, offset, side[1]))
    if len(found) != 1:
        raise error("invalid", f"requests: buffer {number}: its place differs between ranks")
    return found.pop()
