"""torch.distributed over multicast: the backend "offcore_mcast" for CPU tensors.

    import offcore.mcast.torch                      # registers it
    dist.init_process_group("cpu:offcore_mcast")

broadcast, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor and barrier are
offcore's own; everything else is handed to gloo. Group options: `McastOptions(chains=4, ...)` as
`pg_options`, with the arguments of offcore.mcast.Communicator; `configure` sets them for every
group of this process.

A group of this backend is a process group of its own, so torch makes no other backend beside it:
tensors on GPUs want a group of theirs, dist.new_group(backend="nccl").
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from offcore import mcast
from offcore.errors import error
from offcore.mcast import gpu
from offcore.torch_calls import (
    Arguments,
    HostWork,
    all_on,
    joined,
    option,
    packed,
    reducible,
    reduction_of,
    seconds,
    untraced,
)

__all__ = ["McastGroup", "McastOptions", "configure"]

_configured: dict[str, Any] = {}


class McastOptions(Arguments):
    """Options for `pg_options`: arguments of offcore.mcast.Communicator."""

    known = signature(mcast.Communicator).parameters.keys() - {"meeting", "rank", "world_size"}


def configure(**arguments: Any) -> None:
    """Sets arguments of offcore.mcast.Communicator for groups that this process creates
    afterwards; `McastOptions` override them. All ranks must pass the same values, except
    `interface`."""
    _configured.update(McastOptions(**arguments).arguments)


class McastGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch is not there for mypy
    """A process group whose calls go by multicast, and else to gloo. inner: another group of these
    ranks instead of gloo; then this one is asked for its own calls only. device: of the tensors."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        timeout: datetime.timedelta,
        arguments: dict[str, Any],
        inner: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__(rank, ranks)
        meeting = dist.PrefixStore("gloo/", store)
        self._gloo = inner or dist.ProcessGroupGloo(meeting, rank, ranks, timeout=timeout)
        self._on = "cpu" if device is None else device.type
        kind = dist.ProcessGroup.BackendType.GLOO
        if inner is None:  # what nobody overrides, torch dispatches to the device's backend
            self._register_backend(torch.device("cpu"), kind, self._gloo)
            self._set_default_backend(kind)
        given = {"timeout": timeout.total_seconds(), **_configured, **arguments}
        given |= {"rank": rank, "world_size": ranks}
        meeting = dist.PrefixStore("offcore/", store)
        self.communicator: Any = (
            mcast.Communicator(meeting, **given)
            if self._on == "cpu"
            else gpu.Communicator(meeting, device=device.index, **given)
        )

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """dist.broadcast."""
        if not all_on(self._on, tensors) or len(tensors) != 1:
            return super().broadcast(tensors, *args, **kwargs)
        (tensor,) = tensors
        opts = option(args, kwargs)
        flat, back = packed(tensor, opts.rootRank == self.rank())
        handle = self.communicator.broadcast(flat, opts.rootRank)
        return HostWork(handle, tensors, back, seconds(opts.timeout))

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """dist.all_gather: also of tensors of different sizes, as the outputs say."""
        if not all_on(self._on, inputs) or len(inputs) != 1:
            return super().allgather(outputs, inputs, *args, **kwargs)
        (parts,) = outputs
        if len(parts) != self.size() or any(part.dtype != inputs[0].dtype for part in parts):
            raise error(
                "invalid", f"all_gather: {self.size()} outputs of the input's dtype, please"
            )
        counts = [part.numel() for part in parts]
        whole = torch.empty(sum(counts), dtype=inputs[0].dtype, device=inputs[0].device)
        handle = self.communicator.all_gather_v(whole, inputs[0].contiguous(), counts)
        pieces = [
            (part, piece.view(part.shape))
            for part, piece in zip(parts, whole.split(counts), strict=True)
        ]
        return HostWork(handle, outputs, pieces, _timeout(args, kwargs))

    def _allgather_base(self, output: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        """dist.all_gather_into_tensor."""
        if not all_on(self._on, [output, inp]):
            return super()._allgather_base(output, inp, *args, **kwargs)
        flat, back = packed(output, False)
        handle = self.communicator.all_gather(flat, inp.contiguous())
        return HostWork(handle, output, back, _timeout(args, kwargs))

    def all_gather_single(self, output: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        """What newer versions of torch call `_allgather_base`."""
        return self._allgather_base(output, inp, *args, **kwargs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """dist.reduce_scatter: also into tensors of different sizes, as the inputs say."""
        opts = option(args, kwargs)
        reduction = reduction_of(opts.reduceOp) if len(outputs) == 1 else None
        if reduction is None or not self._reduces([*outputs, *inputs[0]]):
            return self._gloo.reduce_scatter(outputs, inputs, *args, **kwargs)
        flat, back = packed(outputs[0], False)
        counts = [part.numel() for part in inputs[0]]
        op, scale = reduction
        handle = self.communicator.reduce_scatter_v(
            flat, joined(inputs[0]), counts, op, scale=scale
        )
        return HostWork(handle, outputs, back, _timeout(args, kwargs))

    def _reduce_scatter_base(self, output: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        """dist.reduce_scatter_tensor."""
        reduction = reduction_of(option(args, kwargs).reduceOp)
        if reduction is None or not self._reduces([output, inp]):
            return self._gloo._reduce_scatter_base(output, inp, *args, **kwargs)
        flat, back = packed(output, False)
        op, scale = reduction
        handle = self.communicator.reduce_scatter(flat, packed(inp, True)[0], op, scale=scale)
        return HostWork(handle, output, back, _timeout(args, kwargs))

    def reduce_scatter_single(self, output: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
        """What newer versions of torch call `_reduce_scatter_base`."""
        return self._reduce_scatter_base(output, inp, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """dist.barrier."""
        return HostWork(self.communicator.barrier(), None, (), _timeout(args, kwargs))

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """For torch's messages."""
        return "offcore_mcast"

    def _reduces(self, tensors: Sequence[Any]) -> bool:
        """Whether offcore reduces these: numbers of one dtype."""
        dtypes = {tensor.dtype for tensor in tensors}
        return len(dtypes) == 1 and all(map(reducible, dtypes)) and all_on(self._on, tensors)

    def abort(self) -> None:
        """Calls under way fail, on the peers too."""
        self.communicator.close()
        self._gloo.abort()

    def shutdown(self) -> None:
        """What dist.destroy_process_group calls."""
        self.communicator.close()
        self._gloo.shutdown()


# What gloo does, by torch's name for it in a group and in gloo. For these a group that is a Python
# class would go by its C++ base, which torch 2.13 calls with the interpreter locked: where a thread
# of gloo lets go of tensors meanwhile, each waits for the other's lock.
_HANDED = {
    name: name
    for name in (
        "allgather_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "gather",
        "monitored_barrier",
        "recv",
        "recv_anysource",
        "reduce",
        "scatter",
        "send",
    )
} | {"all_to_all_single": "alltoall_base"}


def _hand(name: str, to: str) -> Callable[..., Any]:
    def handed(self: McastGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, to)(*args, **kwargs)

    handed.__name__ = name
    handed.__doc__ = "By gloo."
    return handed


for _name, _to in _HANDED.items():
    if hasattr(dist.ProcessGroup, _name) and hasattr(dist.ProcessGroupGloo, _to):
        setattr(McastGroup, _name, _hand(_name, _to))
untraced(McastGroup)


def _timeout(args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    return seconds(getattr(option(args, kwargs), "timeout", None))


def _create(options: Any, given: Any) -> McastGroup:
    if given is not None and not isinstance(given, McastOptions):
        raise error("invalid", f"pg_options is a {type(given).__name__}: pass McastOptions(...)")
    return McastGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        given.arguments if given else {},
    )


dist.Backend.register_backend("offcore_mcast", _create, extended_api=True, devices=["cpu"])
