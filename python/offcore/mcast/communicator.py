"""The ranks of a multicast group, and their operations."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offcore import _core, defaults
from offcore.bootstrap import bootstrap_of
from offcore.comm.reductions import Reduction, Typed, named, typed
from offcore.errors import error
from offcore.mcast.metrics import prometheus
from offcore.operands import (
    OperandError,
    checked,
    counts_in_bytes,
    keep_alive,
    memory_of,
    same_dtype,
)

__all__ = ["Communicator", "Handle", "Result"]

_TAG_BYTES, _SECRET_BYTES = 8, 16
CHAINS = 2  # while one root starts or ends the other one sends


@dataclass(frozen=True)
class Result:
    """The result of an operation on this rank. The phases are those of the paper's Figure 10."""

    op: str
    ranks: int
    bytes: int  # S, the whole array
    path: str  # how bytes came: "multicast", "ring", "multicast+ring", "shares" or "none"
    datagrams: int
    lost_chunks: int  # missing when the multicast phase was cut off
    fetched_chunks: int
    fetches: int
    shares: int  # pieces of other ranks' inputs, of a reduce-scatter
    cutoffs: int  # how often the cutoff timer fired
    barrier_us: float
    multicast_us: float
    recovery_us: float
    handshake_us: float
    exchange_us: float


class Handle:
    """An operation in progress. It proceeds whether or not `wait` is called."""

    def __init__(
        self, op: str, ranks: int, operation: _core.McastOperation, timeout: float
    ) -> None:
        self._op = op
        self._ranks = ranks
        self._operation = operation
        self._timeout = timeout
        self._result: Result | None = None

    def done(self) -> bool:
        """Returns whether the operation has ended. Only `wait` reports errors."""
        return self._operation.ended

    def wait(self, timeout: float | None = None) -> Result:
        """Waits until this rank's output is complete and its buffers are no longer read.

        timeout: seconds; None: slightly more than the communicator's.
        Raises `Error`: timeout (the operation continues if only this wait was too short), peer,
        cancelled, mismatch. After any other than the first the communicator is dead.
        """
        if self._result is None:
            report = self._operation.wait(self._timeout if timeout is None else timeout)
            self._result = self._result_of(report)
        return self._result

    def _result_of(self, report: dict[str, int]) -> Result:
        ways = [
            name
            for name, count in (
                ("multicast", report["datagrams"]),
                ("ring", report["fetched_chunks"]),
                ("shares", report["shares"]),
            )
            if count > 0
        ]
        return Result(
            op=self._op,
            ranks=self._ranks,
            bytes=report["bytes"],
            path="+".join(ways) or "none",
            datagrams=report["datagrams"],
            lost_chunks=report["lost_chunks"],
            fetched_chunks=report["fetched_chunks"],
            fetches=report["fetches"],
            shares=report["shares"],
            cutoffs=report["cutoffs"],
            barrier_us=report["barrier_ns"] / 1e3,
            multicast_us=report["multicast_ns"] / 1e3,
            recovery_us=report["recovery_ns"] / 1e3,
            handshake_us=report["handshake_ns"] / 1e3,
            exchange_us=report["exchange_ns"] / 1e3,
        )


class Communicator:
    """A group of ranks connected by multicast. Collective: all ranks pass the same options.

    meeting: "host:port", where rank 0 listens (OFFCORE_STORE), a torch.distributed store, or a
    process group; None without OFFCORE_STORE: the default group. With an address, ranks on several
    hosts require OFFCORE_JOB_SECRET (docs/security.md).
    rank, world_size: required unless a group is passed (OFFCORE_RANK, OFFCORE_WORLD_SIZE).
    interface: name or address of the network interface; None: the first with multicast.
    subgroups: number of multicast groups over which a buffer is spread.
    chains: number of concurrent senders in an all-gather. multicast: False: use only the ring.
    sealed: add a MAC to every datagram.
    receive_workers, send_workers: threads besides the control thread; None: depends on cores.
    timeout: limit of an operation, in seconds (OFFCORE_TIMEOUT_S).
    silence: seconds after which a silent peer is considered dead.
    link_gbitps, alpha_us: of the cutoff timer N/B + alpha; Gbit/s and us.

    The other options belong to the UDP transport (docs/mcast.md). Calls are enqueued and run in
    call order, which must be the same on all ranks: broadcasts, all-gathers and barriers in one
    sequence, reduce-scatters concurrently in another. Raises `Error`: invalid, timeout (missing
    ranks), mismatch, driver.
    """

    def __init__(
        self,
        meeting: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        interface: str | None = None,
        subgroups: int = 1,
        chains: int = CHAINS,
        multicast: bool = True,
        sealed: bool = False,
        receive_workers: int | None = None,
        send_workers: int | None = None,
        timeout: float | None = None,
        silence: float = 5.0,
        link_gbitps: float = 10.0,
        alpha_us: float = 10_000.0,
        settle_us: float = 200.0,
        spin_us: float = 100.0,
        ipv6: bool = False,
        hops: int = 1,
        multicast_group: str = "",
        port: int = 0,
        gso: bool = True,
        gro: bool = True,
        datagram_bytes: int = 0,
        buffer_bytes: int = 4 << 20,
    ) -> None:
        self._timeout = defaults.seconds(timeout)
        if meeting is None:
            meeting = _core.env("OFFCORE_STORE") or None
        bootstrap = bootstrap_of(meeting, rank, world_size)
        self._rank, self._ranks = bootstrap.rank, bootstrap.ranks

        options = _core.McastUdpOptions()
        options.interface = interface or ""
        options.ipv6 = ipv6
        options.multicast_group = multicast_group
        options.port = port
        options.hops = hops
        options.gso, options.gro = gso, gro
        options.datagram_bytes = datagram_bytes
        options.buffer_bytes = buffer_bytes
        cores = len(os.sched_getaffinity(0))
        few = cores < 4  # then the control thread does it all
        loops = _core.McastLoops.start(
            _workers(receive_workers, 0 if few else min(subgroups, cores // 2)),
            _workers(send_workers, 0 if few else 1),
            _nanoseconds("spin_us", spin_us, 1e3),
        )
        self._node: _core.McastNode | None = _core.open_udp_node(options, loops)
        self._counters: dict[str, int] = {}  # once it is closed

        group = _core.McastGroup()
        group.rank, group.ranks = self._rank, self._ranks
        group.subgroups, group.chains = subgroups, chains
        group.multicast, group.sealed = multicast, sealed
        group.timeout_ns = _nanoseconds("timeout", self._timeout, 1e9)
        group.silence_ns = _nanoseconds("silence", silence, 1e9)
        group.link_bytes_s = link_gbitps * 1e9 / 8
        group.alpha_ns = _nanoseconds("alpha_us", alpha_us, 1e3)
        group.settle_ns = _nanoseconds("settle_us", settle_us, 1e3)
        group.check()
        addresses = self._meet(bootstrap, group, options, self._node.address)
        group.chunk_bytes = _core.mcast_chunk_bytes_for(addresses, sealed)
        self._node.start(group, addresses)

    def _meet(
        self,
        bootstrap: _core.Bootstrap,
        group: _core.McastGroup,
        options: _core.McastUdpOptions,
        address: bytes,
    ) -> list[bytes]:
        """All ranks' addresses; the group gets its key."""
        agreed = {
            name: getattr(group, name)
            for name in ("ranks", "subgroups", "chains", "multicast", "sealed")
        }
        agreed |= {name: getattr(options, name) for name in ("ipv6", "multicast_group", "port")}
        card = json.dumps({"agreed": agreed, "address": address.hex()}).encode()
        key, said = bootstrap.meet(card, self._timeout)
        cards = [json.loads(one) for one in said]
        for rank, other in enumerate(cards):
            if other["agreed"] != agreed:
                raise error(
                    "mismatch",
                    f"rank {rank} opens its communicator with {other['agreed']}, rank "
                    f"{self._rank} with {agreed}: they must be alike",
                )
        group.tag = int.from_bytes(key[:_TAG_BYTES], "big")
        group.set_secret(key[_TAG_BYTES : _TAG_BYTES + _SECRET_BYTES])
        return [bytes.fromhex(other["address"]) for other in cards]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._ranks

    @property
    def timeout(self) -> float:
        """Limit of an operation, in seconds."""
        return self._timeout

    def broadcast(self, array: Any, root: int = 0) -> Handle:
        """Copies the root's array to all ranks: contiguous, of the same size on every rank."""
        root = checked("root", root, self._ranks - 1)
        place, _ = self._place("broadcast", array, "array", self._rank != root)
        counts = [0] * self._ranks
        counts[root] = place[1]
        return self._submit("broadcast", root, place[0], counts, array)

    def all_gather(self, out: Any, inp: Any = None) -> Handle:
        """Concatenates every rank's `inp`, in rank order, in every rank's `out`. None: this rank's
        part is already in `out`. Do not touch either until the operation has ended: `inp` is read
        when the operation runs."""
        place, dtype = self._place("all_gather", out, "out", True)
        if place[1] % self._ranks:
            raise error(
                "invalid",
                f"all_gather: out has {place[1]} bytes, which {self._ranks} ranks do not divide; "
                "use all_gather_v",
            )
        counts = [place[1] // self._ranks] * self._ranks
        return self._gather("all_gather", place, dtype, counts, out, inp)

    def all_gather_v(self, out: Any, inp: Any, counts: Sequence[int]) -> Handle:
        """all_gather with `counts[r]` elements from rank r."""
        place, dtype = self._place("all_gather_v", out, "out", True)
        if len(counts) != self._ranks:
            raise error("invalid", f"all_gather_v: {len(counts)} counts, but {self._ranks} ranks")
        itemsize: int = memory_of(out, True)[1].itemsize
        in_bytes = [checked("all_gather_v: a count", count) * itemsize for count in counts]
        if sum(in_bytes) != place[1]:
            raise error(
                "invalid",
                f"all_gather_v: the counts make {sum(in_bytes)} bytes, out has {place[1]}",
            )
        return self._gather("all_gather_v", place, dtype, in_bytes, out, inp)

    def reduce_scatter(
        self, out: Any, inp: Any, op: str = "sum", *, scale: float = 1.0, dtype: Any = None
    ) -> Handle:
        """Reduces part r of every rank's `inp` into rank r's `out`.

        out: one part. inp: `ranks` parts; `out` may be this rank's own part of it.
        op: "sum", "avg", "min", "max" or "premul_sum" (each input times `scale`).
        dtype: for arrays of raw bits (uint8 to uint64), such as bfloat16 in numpy.

        Inputs are reduced in rank order; floating-point values are summed in fp32 (fp64 for
        float64) and rounded once: results are bitwise equal in every run, and equal to those of
        offcore.Communicator's reduce_scatter. Runs concurrently with broadcasts and all-gathers of
        this communicator. Raises `Error`: invalid (sizes, dtypes, overlap). The handle raises
        mismatch if ranks pass different sizes, operations or dtypes.
        """
        asked = named("reduce_scatter", op, dtype, scale)
        return self._reduce("reduce_scatter", out, inp, None, asked)

    def reduce_scatter_v(
        self,
        out: Any,
        inp: Any,
        counts: Sequence[int],
        op: str = "sum",
        *,
        scale: float = 1.0,
        dtype: Any = None,
    ) -> Handle:
        """reduce_scatter with `counts[r]` elements in rank r's part."""
        if len(counts) != self._ranks:
            raise error(
                "invalid", f"reduce_scatter_v: {len(counts)} counts, but {self._ranks} ranks"
            )
        asked = named("reduce_scatter_v", op, dtype, scale)
        return self._reduce("reduce_scatter_v", out, inp, counts, asked)

    def barrier(self) -> Handle:
        """Completes when all ranks have called it."""
        return self._submit("barrier", 0, 0, [0] * self._ranks, None)

    def _gather(
        self,
        op: str,
        place: tuple[int, int],
        dtype: Any,
        counts: list[int],
        out: Any,
        inp: Any,
    ) -> Handle:
        start = 0
        if inp is not None:
            source, kind = self._place(op, inp, "inp", False)
            if not same_dtype(dtype, kind):
                raise error("invalid", f"{op}: out has dtype {dtype}, inp {kind}")
            if source[1] != counts[self._rank]:
                raise error(
                    "invalid",
                    f"{op}: inp has {source[1]} bytes, but {counts[self._rank]} of out are this "
                    "rank's",
                )
            start = source[0]
        return self._submit(op, 0, place[0], counts, (out, inp), start)

    def _reduce(
        self, op: str, out: Any, inp: Any, counts: Sequence[int] | None, asked: Reduction
    ) -> Handle:
        (start, size), kind = self._place(op, out, "out", True)
        (source, source_size), source_kind = self._place(op, inp, "inp", False)
        if not same_dtype(kind, source_kind):
            raise error("invalid", f"{op}: out has dtype {kind}, inp {source_kind}")
        parts = [size] * self._ranks
        if counts is not None:
            parts = counts_in_bytes("reduce_scatter", counts, memory_of(out, True)[1])
        if size != parts[self._rank] or source_size != sum(parts):
            raise error(
                "invalid",
                f"{op}: inp has {source_size} bytes and out {size}, but the {self._ranks} parts "
                f"have {sum(parts)} and this rank's {parts[self._rank]}",
            )
        own = source + sum(parts[: self._rank])
        if start != own and start < source + source_size and source < start + size:
            raise error("invalid", f"{op}: out overlaps inp, and is not this rank's part of it")
        reduction = typed(op, asked, kind)
        return self._submit(op, 0, start, parts, (out, inp), source, reduction)

    def _place(self, op: str, array: Any, name: str, writable: bool) -> tuple[tuple[int, int], Any]:
        try:
            place, dtype = memory_of(array, writable)
        except OperandError as refusal:
            raise error("invalid", f"{op}: {name}{refusal}") from None
        return place, dtype

    def _submit(
        self,
        op: str,
        root: int,
        address: int,
        counts: list[int],
        keep: Any,
        inp: int = 0,
        reduction: Typed | None = None,
    ) -> Handle:
        kind = "broadcast" if op == "barrier" else op.removesuffix("_v")
        if self._node is None:
            raise error("cancelled", "the communicator was closed")
        kept = keep_alive(keep)
        operation = self._node.submit(kind, root, address, counts, kept, inp, reduction)
        return Handle(op, self._ranks, operation, self._timeout + 1.0)

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the communicator was opened, by name (docs/mcast.md)."""
        node = self._node
        return dict(self._counters if node is None else node.counters)

    def metrics(self) -> str:
        """The counters as Prometheus text."""
        return prometheus(self.counters, {"rank": str(self._rank)})

    def close(self) -> None:
        """Disconnects from the peers (up to 1.5 s if one does not respond) and releases threads and
        sockets. Unfinished operations fail as cancelled."""
        node = self._node
        if node is not None:
            node.close()
            with contextlib.suppress(_core.Error):  # a forked child has none
                self._counters = dict(node.counters)
            self._node = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nanoseconds(name: str, time: float, unit: float) -> int:
    if not 0 <= time * unit <= 1e18:  # nor is NaN a time
        raise error("invalid", f"{name} is {time}: it must be a time, and at most 30 years")
    return int(time * unit)


def _workers(given: int | None, by_cores: int) -> int:
    return by_cores if given is None else checked("workers", given, 64)
