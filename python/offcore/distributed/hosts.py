"""Groups that span hosts evenly: offcore within each host, torch's own backend between them.

Rank l of every host is on rail l, a group of torch's own backend. What must reach another host
crosses the network once, on one rail; the rest moves within hosts. So each rank sends and receives
1/L of what its host must, which is the least that L ranks can.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import offcore
from offcore.comm import Communicator, Handle, Result
from offcore.distributed.sides import log, open_communicator
from offcore.errors import error
from offcore.mcast.torch import McastGroup
from offcore.torch_calls import as_bytes, split_evenly

_OPS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "reduce",
    "scatter",
    "gather",
)
_TORCH = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
OF_GROUPS = ("between", "all_reduce_from", "memory")  # arguments that are no communicator's
_SMALL = 16 << 20  # bytes of a host's part; below, a call for each host costs more than a copy

ByHost = list[list[int]]  # the ranks of each


class Place(NamedTuple):
    """Where a rank is: which of how many hosts, and which of its ranks."""

    host: int
    hosts: int
    local: int
    locals: int


class Spanning:
    """A call's operations within the host, once those between hosts have ended or, on a GPU, are
    enqueued."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def done(self) -> bool:
        return all([handle.done() for handle in self._handles])

    def wait(self, timeout: float) -> list[Result]:
        """Each operation's result."""
        end = time.monotonic() + timeout
        return [handle.wait(max(0.0, end - time.monotonic())) for handle in self._handles]


class Hosts:
    """What a `Side` asks of a communicator. `inside` is that of this host's ranks, `rail` a group
    of torch's own backend, or one that multicasts. On a CPU a call has passed the network when it
    returns."""

    def __init__(self, inside: Communicator, rail: Any, place: Place, on_gpu: bool) -> None:
        self.inside = inside
        self.place = place
        # Where a tensor lies in the caller's own windows, for an operation; else the tensor.
        self.region_of: Callable[[Any], Any] = lambda tensor: tensor
        self.received = 0  # bytes of other hosts that this rank got by its rail, without headers
        self._rail = rail
        self._on_gpu = on_gpu
        self._timeout = inside.timeout
        self._end = 0.0

    @property
    def timeout(self) -> float:
        """Seconds that a call may take, from when they are set."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = self.inside.timeout = seconds
        self._end = time.monotonic() + seconds

    def takes(self, op: str, reduction: str | None, dtype: Any, even: bool) -> bool:
        """Whether it has that operation; torch's own backend has it where it has not."""
        scales = reduction in ("avg", "premul_sum")
        if op not in _OPS or not even or (scales and not dtype.is_floating_point):
            return False  # to scale integers before the sum rounds too early
        return reduction is None or dtype != torch.int16  # torch's own backends have none

    def all_gather(self, out: Any, inp: Any = None, *, lane: int = 0) -> Spanning:
        """Rank l's part goes to rank l of every host, and from there to its host's ranks. inp:
        None where it lies in `out`. lane: of the operations inside."""
        host, hosts, local, ranks = self.place
        wholes = _cut(as_bytes(out), hosts)
        parts = _cut(wholes, hosts, ranks)
        given = parts[host, local] if inp is None else as_bytes(inp)
        far = given.new_empty(hosts, given.numel())
        opts, nbytes = self._options("Allgather"), given.nbytes * (hosts - 1)
        if wholes[0].nbytes < _SMALL:
            self._cross(lambda: self._rail._allgather_base(far.view(-1), given, opts), nbytes)
            near = given.new_empty(ranks, hosts, given.numel())
            moved = self._now(self.inside.all_gather(near, far, lane=lane))
            parts.copy_(near.transpose(0, 1))
            return Spanning([moved])
        handles = []

        def put(origin: int, part: Any) -> None:
            parts[origin, local].copy_(part)
            handles.append(self.inside.all_gather(self.region_of(wholes[origin]), lane=lane))

        def start() -> Any:
            work = self._rail._allgather_base(far.view(-1), given, opts)
            put(host, given)  # meanwhile
            return work

        self._cross(start, nbytes)
        for other in range(hosts):
            if other != host:
                put(other, far[other])
        return Spanning(handles)

    def reduce_scatter(
        self, out: Any, inp: Any, op: str, *, scale: float = 1.0, lane: int = 0
    ) -> Spanning:
        """Each host reduces all parts, in rank order; rails reduce the hosts' sums, in host order
        on CPUs. lane: of the operations inside."""
        _, hosts, _, ranks = self.place
        op, scale = self._inside(op, scale)
        sums = out.new_empty(hosts, out.numel())
        rows, parts = sums, _cut(inp, hosts)
        if parts[0].nbytes < _SMALL:  # one call for all hosts
            rows = _cut(sums, 1)
            parts = _cut(_cut(inp, hosts, ranks).transpose(0, 1).contiguous(), 1)
        started = [
            self.inside.reduce_scatter(one, part, op, scale=scale, lane=lane)
            for one, part in zip(rows, parts, strict=True)
        ]
        handles = [self._now(handle) for handle in started]
        far = out.nbytes * (hosts - 1)
        if self._on_gpu or isinstance(self._rail, McastGroup):
            opts = self._options("ReduceScatter", reduceOp=_TORCH.get(op, dist.ReduceOp.SUM))
            flat, given = out.view(-1), sums.view(-1)
            self._cross(lambda: self._rail._reduce_scatter_base(flat, given, opts), far)
        else:  # gloo reduces whole arrays and sends twice as much
            got, opts = torch.empty_like(sums), self._options("AllToAll")
            self._cross(lambda: self._rail.alltoall_base(got, sums, [], [], opts), far)
            out.view(-1).copy_(_reduced(got, op))
        return Spanning(handles)

    def all_reduce(self, tensor: Any, *, op: str, scale: float = 1.0) -> Spanning:
        """A reduce-scatter inside, an all-reduce on each rail, an all-gather inside."""
        flat = tensor.view(-1)
        part, counts, reduced = self._by_rail(flat, op, scale, None)
        return Spanning([reduced, self.inside.all_gather_v(flat, part, counts)])

    def reduce(self, out: Any, inp: Any, op: str, *, scale: float = 1.0, root: int) -> Spanning:
        """As an all-reduce, but to the root's host, and there to the root."""
        host, _, local, ranks = self.place
        origin, near = divmod(root, ranks)
        part, counts, reduced = self._by_rail(inp.view(-1), op, scale, origin)
        if host != origin:
            return Spanning([reduced])
        whole = out.view(-1) if local == near else None
        return Spanning([reduced, self.inside.gather_v(whole, part, counts, root=near)])

    def _by_rail(
        self, flat: Any, op: str, scale: float, origin: int | None
    ) -> tuple[Any, list[int], Handle]:
        """This rail's part of the reduction: at that host, None: at all; all rails' counts."""
        host, hosts, local, ranks = self.place
        op, scale = self._inside(op, scale)
        counts = split_evenly(flat.numel(), ranks)
        part = flat.new_empty(counts[local])
        reduced = self._now(self.inside.reduce_scatter_v(part, flat, counts, op, scale=scale))
        kind, fields = ("Allreduce", {}) if origin is None else ("Reduce", {"rootRank": origin})
        opts = self._options(kind, reduceOp=_TORCH.get(op, dist.ReduceOp.SUM), **fields)
        far = (2 if origin in (None, host) else 1) * part.nbytes * (hosts - 1) // hosts
        self._cross(lambda: getattr(self._rail, kind.lower())([part], opts), far)
        return part, counts, reduced

    def all_to_all(self, out: Any, inp: Any) -> Spanning:
        """By rail to the host, then inside to the rank."""
        _, hosts, _, ranks = self.place
        given = as_bytes(inp)
        far = torch.empty_like(given)
        opts, nbytes = self._options("AllToAll"), given.nbytes // hosts * (hosts - 1)
        self._cross(lambda: self._rail.alltoall_base(far, given, [], [], opts), nbytes)
        by_rank = _cut(far, hosts, ranks).transpose(0, 1).contiguous()
        near = torch.empty_like(by_rank)
        moved = self._now(self.inside.all_to_all(near, by_rank))
        _cut(as_bytes(out), hosts, ranks).copy_(near.transpose(0, 1))
        return Spanning([moved])

    def scatter(self, out: Any, parts: Any, *, root: int) -> Spanning:
        """The root's host splits the parts by rail, and each rail brings its hosts theirs."""
        host, hosts, _, ranks = self.place
        origin, near = divmod(root, ranks)
        own = as_bytes(out)
        rows = own.new_empty(hosts, own.numel())
        handles = []
        if host == origin:
            if parts is not None:
                parts = _cut(as_bytes(parts), hosts, ranks).transpose(0, 1).contiguous()
            handles.append(self._now(self.inside.scatter(rows, parts, root=near)))
        opts = self._options("Scatter", rootRank=origin)
        given = [[*rows]] if host == origin else []
        far = own.nbytes if host != origin else 0
        self._cross(lambda: self._rail.scatter([own], given, opts), far)
        return Spanning(handles)

    def gather(self, out: Any, inp: Any, *, root: int) -> Spanning:
        """As a scatter, the other way."""
        host, hosts, local, ranks = self.place
        origin, near = divmod(root, ranks)
        given = as_bytes(inp)
        rows = given.new_empty(hosts, given.numel())
        opts = self._options("Gather", rootRank=origin)
        taken = [[*rows]] if host == origin else []
        far = given.nbytes * (hosts - 1) if host == origin else 0
        self._cross(lambda: self._rail.gather(taken, [given], opts), far)
        if host != origin:
            return Spanning(())
        whole = given.new_empty(ranks, hosts, given.numel()) if local == near else None
        moved = self._now(self.inside.gather(whole, rows, root=near))
        if whole is not None:
            _cut(as_bytes(out), hosts, ranks).copy_(whole.transpose(0, 1))
        return Spanning([moved])

    def broadcast(self, tensor: Any, *, root: int) -> Spanning:
        """The root's host splits it, each rail carries a part, each host puts it together."""
        host, _, local, ranks = self.place
        flat = as_bytes(tensor)
        counts = split_evenly(flat.numel(), ranks)
        part = flat.new_empty(counts[local])
        origin, near = divmod(root, ranks)
        handles = []
        if host == origin:
            whole = flat if local == near else None
            handles.append(self._now(self.inside.scatter_v(part, whole, counts, root=near)))
        opts = self._options("Broadcast", rootRank=origin)
        far = part.nbytes if host != origin else 0
        self._cross(lambda: self._rail.broadcast([part], opts), far)
        return Spanning([*handles, self.inside.all_gather_v(flat, part, counts)])

    def barrier(self, timeout: float) -> None:
        """Nobody leaves before all of all hosts have come."""
        self.inside.barrier(timeout)
        self._cross(lambda: self._rail.barrier(self._options("Barrier")), 0)
        self.inside.barrier(timeout)

    def check(self) -> None:
        """As a communicator's: of this host's ranks. Of others a call hears by the network."""
        self.inside.check()

    def abort(self) -> None:
        """Ends the waits of this host's ranks, and of this rank's rail."""
        self.inside.abort()
        with contextlib.suppress(RuntimeError):
            self._rail.abort()

    def facts(self) -> dict[str, int]:
        """How many hosts, of how many ranks each, and what this rank's rail brought."""
        place = self.place
        return {"hosts": place.hosts, "ranks": place.locals, "received": self.received}

    def close(self) -> None:
        """Frees both."""
        self.inside.close()
        self._rail.shutdown()

    def _inside(self, op: str, scale: float) -> tuple[str, float]:
        """The reduction within a host: rails only add, or compare."""
        if op != "avg":
            return op, scale
        return "premul_sum", 1.0 / (self.place.hosts * self.place.locals)

    def _left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def _now(self, handle: Handle) -> Handle:
        """What follows reads its output: on a GPU the stream's order is enough."""
        if not self._on_gpu:
            handle.wait(self._left())
        return handle

    def _options(self, kind: str, **fields: Any) -> Any:
        opts = getattr(torch._C._distributed_c10d, f"{kind}Options")()
        opts.timeout = datetime.timedelta(seconds=self._left())
        if self._on_gpu and hasattr(opts, "asyncOp"):
            opts.asyncOp = False  # in the current stream, where what follows is
        for name, value in fields.items():
            setattr(opts, name, value)
        return opts

    def _cross(self, start: Callable[[], Any], nbytes: int) -> None:
        """A call of the rail, which brings so many bytes."""
        try:
            work = start()
            if not self._on_gpu:
                work.wait(datetime.timedelta(seconds=self._left()))
            elif work is not None:  # NCCL has none for what is in the current stream
                work.wait()
        except RuntimeError as failure:
            if isinstance(failure, offcore.Error):
                raise
            code = "timeout" if re.search("timed out|timeout", str(failure), re.I) else "peer"
            raise error(code, f"between hosts: {str(failure).splitlines()[0]}") from None
        self.received += nbytes


def _cut(tensor: Any, *shape: int) -> Any:
    """Rows of one length, also of no elements."""
    return tensor.view(*shape, tensor.numel() // math.prod(shape))


def _reduced(rows: Any, op: str) -> Any:
    """In row order; sums of short floats in fp32, rounded once."""
    if op in _TORCH:
        return rows.amin(0) if op == "min" else rows.amax(0)
    short = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].to(torch.float32) if short else rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total


def open_ends(
    store: Any, hosts: ByHost, rank: int, timeout: float, device: Any, given: Any, lanes: int = 1
) -> list[Any]:
    """Of ranks by host that meet at a store, for each lane: the communicator, or where there are
    several hosts a `Hosts` with a rail of its own; they share what is inside. Collective."""
    host, local = divmod(rank, len(hosts[0]))
    place = Place(host, len(hosts), local, len(hosts[0]))
    between = given.get("between")
    given = {name: value for name, value in given.items() if name not in OF_GROUPS}
    inside = open_communicator(
        dist.PrefixStore(f"host/{host}/", store), local, place.locals, timeout, device, given
    )
    if place.hosts == 1:
        return [inside] * lanes
    limit = datetime.timedelta(seconds=timeout)
    opened = []
    with contextlib.ExitStack() as failed:
        failed.callback(inside.close)
        for lane in range(lanes):
            at = dist.PrefixStore(f"rail/{local}/{lane}/", store), host, place.hosts
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                rail = dist.ProcessGroupNCCL(*at, options)
            else:
                rail = dist.ProcessGroupGloo(*at, timeout=limit)
            if between is not None:
                rail = McastGroup(*at, limit, between.arguments, rail, device)
            log.info("rail %d of %d hosts is open", local, place.hosts)
            opened.append(Hosts(inside, rail, place, device.type == "cuda"))
        failed.pop_all()
    return opened
