"""FSDP2's all-gather and reduce-scatter of one group of ranks."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_api

from offcore.comm import Communicator, Result
from offcore.distributed.direct import DirectSide, side_of
from offcore.distributed.hosts import Hosts, open_ends
from offcore.distributed.memory import Ring
from offcore.distributed.sides import Body, Side
from offcore.torch_calls import reducible, reduction_of

_AllGather: Any = _fsdp_api.AllGather
_ReduceScatter: Any = _fsdp_api.ReduceScatter
GATHERS, REDUCES = 0, 1  # lanes


class _Late:
    """Options of a call that the caller's stream does not wait for, by torch's names."""

    asyncOp = True  # noqa: N815


class Ran:
    """What one direction did."""

    def __init__(self) -> None:
        self.handed = 0  # calls that the group's own backend made
        self._lock = threading.Lock()  # of what follows
        self._calls = 0
        self._bytes = 0
        self._staged = 0
        self._sms = 0
        self._variants: collections.Counter[str] = collections.Counter()

    def add(self, told: Result | list[Result]) -> None:
        """A call's result, or those of its parts, one for each host."""
        results = told if isinstance(told, list) else (told,)
        with self._lock:
            self._calls += 1
            self._staged += True in [one.staged for one in results]
            for one in results:
                self._bytes += one.bytes
                self._sms = max(self._sms, one.sms)
            for variant in {one.variant for one in results}:
                self._variants[variant] += 1

    def facts(self) -> dict[str, Any]:
        with self._lock:
            return {
                "calls": self._calls,
                "bytes": self._bytes,
                "variants": dict(self._variants),
                "staged": self._staged,
                "sms": self._sms,
                "handed": self.handed,
            }


class Meeting(NamedTuple):
    """Where the ranks of a group find each other: their store, and which are on each host."""

    store: Any
    hosts: list[list[int]]


def tight(device: Any, hosts: Any) -> bool:
    """Whether pieces of a ring are held by their tensors alone, not by calls that are under way."""
    return torch.device(device).type == "cuda" and len(hosts) == 1


class Shards:
    """The ranks of one group, each with a shard, and a lane for each direction. Where they are on
    several hosts, their communicator is that of a host's. Collective: `memory` bytes of window
    memory on each."""

    def __init__(
        self,
        group: Any,
        device: Any,
        timeout: float,
        memory: int,
        arguments: dict[str, Any],
        meeting: Meeting,
    ) -> None:
        name = f"fsdp {dist.get_process_group_ranks(group)}"
        self._rank = dist.get_rank(group)
        self.group = group
        self._ends = open_ends(*meeting, self._rank, timeout, device, arguments, lanes=2)
        self.hosts = [end for end in self._ends if isinstance(end, Hosts)]  # none: there is one
        inside = self.hosts[0].inside if self.hosts else self._ends[0]
        self.ring = Ring(inside, memory, tight(device, meeting.hosts))
        for one in self.hosts:
            one.region_of = self._operand
        self.ran = {"all_gather": Ran(), "reduce_scatter": Ran()}
        self._gathers, self._reduces = self._sides = [
            side_of(end, name, self._rank, timeout, device, ran.add)
            for end, ran in zip(self._ends, self.ran.values(), strict=True)
        ]

    def all_gather(self, out: Any, inp: Any, late: bool) -> Any:
        side, call = self._gathers, ("all_gather", out, inp, None, 0, "auto", "auto", GATHERS)
        if not late and isinstance(side, DirectSide) and side.enqueue(*call):
            return None
        own = out.data_ptr() + self._rank * inp.nbytes == inp.data_ptr()
        target, given = (out if self.hosts else self._operand(out)), (None if own else inp)

        def body(comm: Communicator) -> Any:
            return [comm.all_gather(target, given, lane=GATHERS)], ()

        return self._run(side, "all_gather", body, out, late)

    def _operand(self, tensor: Any) -> Any:
        region = self.ring.region(tensor)
        return tensor if region is None else region

    def reduce_scatter(self, out: Any, inp: Any, op: str, scale: float, late: bool) -> Any:
        side, how = self._reduces, (op, None, scale)
        call = "reduce_scatter", out, inp, None, 0, "auto", "auto", REDUCES, how
        if not late and isinstance(side, DirectSide) and side.enqueue(*call):
            return None

        def body(comm: Communicator) -> Any:
            return [comm.reduce_scatter(out, inp, op, scale=scale, lane=REDUCES)], ()

        return self._run(side, "reduce_scatter", body, out, late)

    def _run(self, side: Side, op: str, body: Body, out: Any, late: bool) -> Any:
        """The work of a call that the caller's stream does not wait for, else None."""
        return side.run(op, body, out, _Late) if late else side.call(op, body)

    def settle(self) -> None:
        """Waits for what is under way."""
        for side in self._sides:
            side.settle()

    def close(self) -> None:
        """Once what is under way has ended, in both lanes."""
        for side in self._sides:
            side.stop()
        for end in self._ends:
            end.close()


class AllGather(_AllGather):  # type: ignore[misc]
    """Of the parameters of one module. Its group is another one while it is resharded to fewer
    ranks after forward; `shards` are those of all groups."""

    def __init__(self, param_group: Any, shards: dict[Any, Shards]) -> None:
        self._param_group = param_group
        self._ran = shards[param_group.mesh_info.shard_process_group].ran["all_gather"]
        self._by_group = shards

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        shards = self._by_group.get(self._param_group._all_gather_process_group)
        taken = None if shards is None else shards.ring.take(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device) if taken is None else taken

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        shards = self._by_group.get(group)
        if shards is None:
            self._ran.handed += 1
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return shards.all_gather(output_tensor, input_tensor, async_op)


class ReduceScatter(_ReduceScatter):  # type: ignore[misc]
    """Of gradients. The output becomes param.grad and lives until it is set to None, so memory is
    torch's own; no peer writes there, data comes by way of slots."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        reduction = reduction_of(op)
        if reduction is None or not reducible(output_tensor.dtype):
            self._shards.ran["reduce_scatter"].handed += 1
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return self._shards.reduce_scatter(output_tensor, input_tensor, *reduction, async_op)
