"""Groups that span hosts evenly: offcore within each host, torch's own backend between them.

Rank l of every host is on rail l, a group of torch's own backend. What must reach another host
crosses the network once, on one rail; the rest moves within hosts. So each rank sends and receives
1/L of what its host must, which is the least that L ranks can.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import offcore
from offcore.comm import Communicator, Handle, Result
from offcore.distributed.sides import Side, log, open_communicator, side_of
from offcore.errors import error

_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")
_TORCH = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_ORDERED = {"min": torch.minimum, "max": torch.maximum}


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

    def wait(self, timeout: float) -> Result | None:
        """The last operation's result."""
        end = time.monotonic() + timeout
        result = None
        for handle in self._handles:
            result = handle.wait(max(0.0, end - time.monotonic()))
        return result


class Hosts:
    """What a `Side` asks of a communicator. `inside` is that of this host's ranks, `rail` a group
    of torch's own backend. On a CPU a call has passed the network when it returns."""

    def __init__(self, inside: Communicator, rail: Any, place: Place, on_gpu: bool) -> None:
        self.inside = inside
        self.place = place
        self.received = 0  # bytes of other hosts that this rank got by its rail, without headers
        self._rail = rail
        self._on_gpu = on_gpu
        self._timeout = inside.timeout
        self._end = 0.0

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = self.inside.timeout = seconds

    def takes(self, op: str, reduction: str | None, dtype: Any, even: bool) -> bool:
        """Whether it has that operation; torch's own backend has it where it has not."""
        if op not in _OPS or not even:
            return False
        if reduction in ("avg", "premul_sum") and not dtype.is_floating_point:
            return False  # to scale before the sum rounds too early
        return reduction is None or dtype != torch.int16  # torch's own backends have none

    def all_gather(self, out: Any, inp: Any) -> Spanning:
        """Rank l's part goes to rank l of every host, and from there to its host's ranks."""
        host, hosts, local, ranks = self.place
        given = _raw(inp)
        if not given.numel():
            return Spanning(())
        wholes = _raw(out).view(hosts, -1)
        parts = wholes.view(hosts, ranks, -1)
        self._begin()
        far = given.new_empty(hosts * given.numel())
        opts = self._options("Allgather")
        work = self._across(lambda: self._rail._allgather_base(far, given, opts))
        parts[host, local].copy_(given)
        handles = [self.inside.all_gather(wholes[host])]
        self._arrive(work, given.nbytes * (hosts - 1))
        for other, part in enumerate(far.view(hosts, -1)):
            if other != host:
                parts[other, local].copy_(part)
                handles.append(self.inside.all_gather(wholes[other]))
        return Spanning(handles)

    def reduce_scatter(self, out: Any, inp: Any, op: str, *, scale: float = 1.0) -> Spanning:
        """Each host reduces all parts, in rank order; rails reduce the hosts' sums, in host order
        on CPUs."""
        hosts = self.place.hosts
        op, scale = self._inside(op, scale)
        if not out.numel():
            return Spanning(())
        self._begin()
        sums = out.new_empty(hosts, out.numel())
        parts = inp.view(-1).view(hosts, -1)
        handles = [
            self.inside.reduce_scatter(one, part, op, scale=scale)
            for one, part in zip(sums, parts, strict=True)
        ]
        self._settle(handles)
        kind = _TORCH.get(op, dist.ReduceOp.SUM)
        if self._on_gpu:
            opts = self._options("ReduceScatter", kind)
            work = self._across(lambda: self._rail._reduce_scatter_base(out.view(-1), sums, opts))
            self._arrive(work, out.nbytes * (hosts - 1))
            return Spanning(handles)
        # gloo reduces whole arrays and sends twice as much.
        got = torch.empty_like(sums)
        opts = self._options("AllToAll")
        work = self._across(lambda: self._rail.alltoall_base(got, sums, [], [], opts))
        self._arrive(work, out.nbytes * (hosts - 1))
        out.view(-1).copy_(_reduced(got, op))
        return Spanning(())

    def all_reduce(self, tensor: Any, *, op: str, scale: float = 1.0) -> Spanning:
        """A reduce-scatter inside, an all-reduce on each rail, an all-gather inside."""
        _, hosts, local, ranks = self.place
        op, scale = self._inside(op, scale)
        flat = tensor.view(-1)
        if not flat.numel():
            return Spanning(())
        self._begin()
        counts = _split(flat.numel(), ranks)
        part = flat.new_empty(counts[local])
        reduced = self.inside.reduce_scatter_v(part, flat, counts, op, scale=scale)
        self._settle([reduced])
        if counts[local]:
            opts = self._options("Allreduce", _TORCH.get(op, dist.ReduceOp.SUM))
            work = self._across(lambda: self._rail.allreduce([part], opts))
            self._arrive(work, 2 * part.nbytes * (hosts - 1) // hosts)
        return Spanning([reduced, self.inside.all_gather_v(flat, part, counts)])

    def all_to_all(self, out: Any, inp: Any) -> Spanning:
        """By rail to the host, then inside to the rank."""
        _, hosts, _, ranks = self.place
        given = _raw(inp)
        if not given.numel():
            return Spanning(())
        self._begin()
        far = torch.empty_like(given)
        opts = self._options("AllToAll")
        work = self._across(lambda: self._rail.alltoall_base(far, given, [], [], opts))
        self._arrive(work, given.nbytes // hosts * (hosts - 1))
        by_rank = far.view(hosts, ranks, -1).transpose(0, 1).contiguous()
        near = torch.empty_like(by_rank)
        moved = self.inside.all_to_all(near, by_rank)
        self._settle([moved])
        _raw(out).view(hosts, ranks, -1).copy_(near.transpose(0, 1))
        return Spanning([moved])

    def broadcast(self, tensor: Any, *, root: int) -> Spanning:
        """The root's host splits it, each rail carries a part, each host puts it together."""
        host, _, local, ranks = self.place
        flat = _raw(tensor)
        if not flat.numel():
            return Spanning(())
        counts = _split(flat.numel(), ranks)
        part = flat.new_empty(counts[local])
        origin, near = divmod(root, ranks)
        self._begin()
        handles = []
        if host == origin:
            whole = flat if local == near else None
            handles.append(self.inside.scatter_v(part, whole, counts, root=near))
            self._settle(handles)
        if counts[local]:
            opts = self._options("Broadcast")
            opts.rootRank = origin
            work = self._across(lambda: self._rail.broadcast([part], opts))
            self._arrive(work, part.nbytes if host != origin else 0)
        return Spanning([*handles, self.inside.all_gather_v(flat, part, counts)])

    def barrier(self, timeout: float) -> None:
        """Nobody leaves before all of all hosts have come."""
        self._begin()
        self.inside.barrier(timeout)
        work = self._across(lambda: self._rail.barrier(self._options("Barrier")))
        self._arrive(work, 0)
        self.inside.barrier(timeout)

    def check(self) -> None:
        """As a communicator's: of this host's ranks. Of others a call hears by the network."""
        self.inside.check()

    def abort(self) -> None:
        """Ends the waits of this host's ranks, and of this rank's rail."""
        self.inside.abort()
        with contextlib.suppress(RuntimeError):
            self._rail.abort()

    def close(self) -> None:
        """Frees both."""
        self.inside.close()
        self._rail.shutdown()

    def _inside(self, op: str, scale: float) -> tuple[str, float]:
        """The reduction within a host: rails only add, or compare."""
        if op != "avg":
            return op, scale
        return "premul_sum", 1.0 / (self.place.hosts * self.place.locals)

    def _begin(self) -> None:
        self._end = time.monotonic() + self._timeout

    def _left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def _options(self, kind: str, reduction: Any = None) -> Any:
        opts = getattr(torch._C._distributed_c10d, f"{kind}Options")()
        opts.timeout = datetime.timedelta(seconds=self._left())
        if reduction is not None:
            opts.reduceOp = reduction
        return opts

    def _settle(self, handles: Sequence[Handle]) -> None:
        """What follows reads their outputs: on a GPU the stream's order is enough."""
        if not self._on_gpu:
            for handle in handles:
                handle.wait(self._left())

    def _across(self, start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as failure:
            raise _named(failure) from None

    def _arrive(self, work: Any, nbytes: int) -> None:
        try:
            work.wait() if self._on_gpu else work.wait(datetime.timedelta(seconds=self._left()))
        except RuntimeError as failure:
            raise _named(failure) from None
        self.received += nbytes


def _raw(tensor: Any) -> Any:
    """What only moves, as bytes: torch's own backends do not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _split(count: int, ranks: int) -> list[int]:
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def _reduced(rows: Any, op: str) -> Any:
    """In row order; sums of short floats in fp32, rounded once."""
    short = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].to(torch.float32) if short else rows[0].clone()
    for row in rows[1:]:
        total = _ORDERED[op](total, row.to(total.dtype)) if op in _ORDERED else total.add_(row)
    return total


def _named(failure: RuntimeError) -> Exception:
    if isinstance(failure, offcore.Error):
        return failure
    text = str(failure)
    code = "timeout" if "imed out" in text or "timeout" in text.lower() else "peer"
    return error(code, f"between hosts: {text.splitlines()[0]}")


def open_side(
    store: Any,
    rank: int,
    hosts: list[list[int]],
    name: str,
    timeout: float,
    device: Any,
    arguments: Any,
) -> Side:
    """Of a group that meets at a store, its ranks by host. Collective."""
    comm: Any
    if len(hosts) == 1:
        comm = open_communicator(store, rank, len(hosts[0]), timeout, device, arguments)
    else:
        comm = _open_hosts(store, rank, hosts, timeout, device, arguments)
        log.info("group %s spans %d hosts: offcore inside, torch's between", name, len(hosts))
    return side_of(comm, name, rank, timeout, device)


def _open_hosts(
    store: Any, rank: int, hosts: list[list[int]], timeout: float, device: Any, arguments: Any
) -> Hosts:
    host, local = divmod(rank, len(hosts[0]))
    place = Place(host, len(hosts), local, len(hosts[0]))
    inside = open_communicator(
        dist.PrefixStore(f"host/{host}/", store), local, place.locals, timeout, device, arguments
    )
    meeting = dist.PrefixStore(f"rail/{local}/", store)
    limit = datetime.timedelta(seconds=timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        rail = dist.ProcessGroupNCCL(meeting, host, place.hosts, options)
    else:
        rail = dist.ProcessGroupGloo(meeting, host, place.hosts, timeout=limit)
    return Hosts(inside, rail, place, device.type == "cuda")
