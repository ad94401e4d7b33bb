"""The two kinds of back end that torch.distributed has: process groups up to torch 2.13, and from
2.14 on `Backend`s, which share their group with those of other devices."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from offcore.comm import Communicator
from offcore.distributed.collectives import Collectives
from offcore.distributed.hosts import OF_GROUPS
from offcore.distributed.sides import log
from offcore.errors import error
from offcore.torch_calls import Arguments, option, untraced

NAME = "offcore"
_TorchBackend: Any = torch._C._distributed_c10d.Backend
# Whether a Backend may be a class in Python.
BACKENDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)

_FROM_GROUP = {"backend", "ranks", "store", "rank", "world_size", "device"}  # what it gives itself
# In shorter all-reduces on GPUs the host needs up to 0.2 ms more than NCCL's, and the GPU saves
# less (2 x H200: benchmarks/results/train-h200-2.txt).
ALL_REDUCE_FROM = 256 << 20
_configured = Arguments()


def configure(**arguments: Any) -> None:
    """Sets arguments of offcore.Communicator for groups that this process creates afterwards;
    `Options` override them. All ranks must pass the same values."""
    _configured.arguments.update(Options(**arguments).arguments)


class Options(Arguments):
    """Options for `pg_options`: arguments of offcore.Communicator, such as sms=8; `between`,
    offcore.mcast.torch.McastOptions for multicast between hosts (docs/hosts.md); `all_reduce_from`:
    all-reduces on GPUs of fewer bytes use NCCL (default 256 MiB; 0: none); and `memory`: bytes of
    window memory for the group's `allocate_tensor` (default 0: none)."""

    known = {*signature(Communicator).parameters, *OF_GROUPS} - _FROM_GROUP

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for name in ("all_reduce_from", "memory"):
            nbytes = arguments.get(name, 0)
            if type(nbytes) is not int or nbytes < 0:
                raise error("invalid", f"{name}={nbytes!r}: pass a number of bytes, or 0")


@untraced
class Together(dist.Work):  # type: ignore[misc]
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Waits for each."""
        return all([work.wait(timeout) for work in self._works])

    def get_future(self) -> Any:
        """Complete when all are."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


# The calls by torch's names, of both generations: which of `Collectives` it is; the options' class;
# what inner groups call it; how its arguments stand for the core's.
def _one(tensors: Any) -> tuple[Any]:
    return ([tensors] if isinstance(tensors, torch.Tensor) else tensors,)


def _both(outputs: Any, inputs: Any) -> tuple[Any, Any]:
    if isinstance(inputs, torch.Tensor):
        return [outputs], [inputs]
    return outputs, inputs


def _turned(lists: Any, inputs: Any) -> tuple[Any, Any]:
    return [list(parts) for parts in zip(*lists, strict=True)], inputs


def _same(*tensors: Any) -> tuple[Any, ...]:
    return tensors


_Row = tuple[str, str, str, Callable[..., tuple[Any, ...]]]
_CALLS: dict[str, _Row] = {
    "broadcast": ("broadcast", "Broadcast", "broadcast", _one),
    "allreduce": ("allreduce", "Allreduce", "allreduce", _one),
    "allreduce_coalesced": ("allreduce", "AllreduceCoalesced", "allreduce_coalesced", _one),
    "reduce": ("reduce", "Reduce", "reduce", _one),
    "allgather": ("allgather", "Allgather", "allgather", _both),
    "allgather_coalesced": ("allgather", "Allgather", "allgather_coalesced", _turned),
    "gather": ("gather", "Gather", "gather", _both),
    "scatter": ("scatter", "Scatter", "scatter", _both),
    "reduce_scatter": ("reduce_scatter", "ReduceScatter", "reduce_scatter", _both),
    "alltoall": ("alltoall", "AllToAll", "alltoall", _same),
    "barrier": ("barrier", "Barrier", "barrier", _same),
}
for _name in ("alltoall_base", "all_to_all_single"):
    _CALLS[_name] = ("all_to_all_single", "AllToAll", "alltoall_base", _same)
for _name in ("_allgather_base", "all_gather_single"):
    _CALLS[_name] = ("all_gather_single", "Allgather", "_allgather_base", _both)
for _name in ("_reduce_scatter_base", "reduce_scatter_single"):
    _CALLS[_name] = ("reduce_scatter_single", "ReduceScatter", "_reduce_scatter_base", _both)
for _name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
    _CALLS[_name] = ("all_gather_single", "Allgather", "_allgather_base", _same)
for _name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
    _CALLS[_name] = ("reduce_scatter_single", "ReduceScatter", "_reduce_scatter_base", _same)
# What inner groups do, by torch's name for it in both.
_HANDED = ("send", "recv", "recv_anysource", "monitored_barrier")
_TENSORS = {"alltoall_base": 4, "all_to_all_single": 4, "broadcast": 1, "reduce": 1, "barrier": 0}
_TENSORS |= {"allreduce": 1, "allreduce_coalesced": 1}


@untraced
class Allocates:
    """What torch asks of a back end for memory, as FSDP2 does once it is told to by
    `set_allocate_memory_from_process_group_for_comm`."""

    collectives: Collectives

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether there is memory for tensors on that device. Collective at the first call."""
        return self.collectives.memory_on(device) is not None

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any) -> Any:
        """A tensor of `size` elements that peers write directly, where it lies at the same place on
        all ranks, as it does if they allocate alike. Where the memory is full it is torch's own,
        and `report` counts it. Raises `Error`: unsupported without memory; memory."""
        memory = self.collectives.memory_on(torch.device(device))
        if memory is None:
            none = f"group {self.collectives.name} allocates no tensors on {device}"
            why = "Options(memory=BYTES) gives it memory on cpu and cuda, unless it spans hosts"
            raise error("unsupported", f"{none}: {why}")
        taken = memory.take((size,), dtype)
        return torch.empty(size, dtype=dtype, device=device) if taken is None else taken


@functools.cache
def _allocating(kind: Any) -> Any:
    """A back end of torch's own that allocates as its group. Up to torch 2.13 it is the one that
    torch asks."""
    return type(kind.__name__, (Allocates, kind), {})


class Calls(Allocates):
    """What both kinds share: which call goes where. `inner` is gloo, and NCCL where there are GPUs;
    they carry what offcore does not."""

    inner: dict[str, Any]
    handed: dict[str, int]
    nccl_below: int  # bytes of an all-reduce on GPUs

    def _open(self, options: Any, given: Any) -> None:
        if given is not None and not isinstance(given, Options):
            raise error("invalid", f"pg_options is a {type(given).__name__}: pass Options(...)")
        store, rank, ranks = options.store, options.group_rank, options.group_size
        self.handed = {}
        arguments = Arguments(**{**_configured.arguments, **(given.arguments if given else {})})
        asked = not BACKENDS and arguments.arguments.get("memory", 0) > 0
        kind_of = _allocating if asked else lambda kind: kind
        self.inner = {
            "cpu": kind_of(dist.ProcessGroupGloo)(
                dist.PrefixStore("gloo/", store), rank, ranks, timeout=options.timeout
            )
        }
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = options.timeout
            nccl.global_ranks_in_group = options.global_ranks_in_group
            nccl.group_name = f"{options.group_id}/{NAME}"
            self.inner["cuda"] = kind_of(dist.ProcessGroupNCCL)(
                dist.PrefixStore("nccl/", store), rank, ranks, nccl
            )
        below = arguments.arguments.get("all_reduce_from", ALL_REDUCE_FROM)
        self.nccl_below = below if "cuda" in self.inner else 0
        self.collectives = Collectives(
            dist.PrefixStore("offcore/", store),
            rank,
            ranks,
            options.timeout.total_seconds(),
            str(options.group_id),
            arguments,
        )
        for one in self.inner.values() if asked else ():
            one.collectives = self.collectives

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        core, kind, inner, arranged = _CALLS[name]
        count = _TENSORS.get(name, 2)
        if len(args) < count:
            raise error("invalid", f"{name}: pass tensors as positional arguments")
        opts = _options(kind, args[count:], kwargs)
        args = tuple([_real(one) for one in args[:count]])
        tensors = arranged(*args)
        work = getattr(self.collectives, core)(*tensors, opts)
        if work is not None:
            return work
        own = self._inner_of(args)
        self._log(name)
        if inner.endswith("_base") and name.endswith("_coalesced"):
            pairs = zip(*tensors, strict=True)
            return Together([getattr(own, inner)(*pair, opts) for pair in pairs])
        lists = arranged in (_one, _both) and not inner.endswith("_base")
        return getattr(own, inner)(*(tensors if lists else args), opts)

    def _hand(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._log(name)
        args = tuple([_real(one) for one in args])
        return getattr(self._inner_of(args), name)(*args, **kwargs)

    def _inner_of(self, args: Any) -> Any:
        found = _first_tensor(args)
        # A barrier of a process that uses a GPU is one of its current stream, too.
        gpu = "cuda" in self.inner and torch.cuda.is_initialized()
        kind = found.device.type if found is not None else "cuda" if gpu else "cpu"
        if kind not in self.inner:
            raise error("unsupported", f"group {self.collectives.name} has no backend for {kind}")
        return self.inner[kind]

    def _log(self, name: str) -> None:
        self.handed[name] = self.handed.get(name, 0) + 1
        if self.handed[name] == 1:
            log.info("group %s: %s goes by torch's own backend", self.collectives.name, name)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """For torch's messages."""
        return NAME

    def shutdown(self) -> None:
        """What dist.destroy_process_group calls, once for a group."""
        self.collectives.close()
        for group in self.inner.values():
            group.shutdown()

    def abort(self) -> None:
        """Every rank's waits and later calls fail."""
        self.collectives.abort()
        for group in self.inner.values():
            group.abort()


def _options(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = option(args, kwargs)
    if given is not None:
        if not isinstance(given, (int, dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return given
        kwargs = {"root" if isinstance(given, int) else "op": given, **kwargs}
    opts = getattr(torch._C._distributed_c10d, f"{kind}Options")()
    for name, field in (("op", "reduceOp"), ("root", "rootRank"), ("timeout", "timeout")):
        if kwargs.get(name) is not None:
            setattr(opts, field, kwargs[name])
    return opts


_OWN = torch.Tensor.__torch_dispatch__  # of tensors with memory of their own


def _real(given: Any) -> Any:
    """The tensors themselves: up to torch 2.13, groups also get what stands for them. Those of
    functional collectives are waited for; others with a `__torch_dispatch__` need memory."""
    if isinstance(given, (list, tuple)):
        return [_real(one) for one in given]
    if not isinstance(given, torch.Tensor) or type(given).__torch_dispatch__ is _OWN:
        return given
    if hasattr(given, "trigger_wait"):
        return given.trigger_wait()
    if not given.data_ptr():
        kind = type(given).__name__
        raise error("unsupported", f"a {kind} has no memory of its own: pass its local tensor")
    return given


def _first_tensor(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, (list, tuple)):
        return next((found for one in given if (found := _first_tensor(one)) is not None), None)
    return None


# Those that training makes, by the core's names: see direct.py.
_DIRECT = {"allreduce": "all_reduce", "_allgather_base": "all_gather"}
_DIRECT |= {"all_gather_single": "all_gather", "_reduce_scatter_base": "reduce_scatter"}
_DIRECT |= {"reduce_scatter_single": "reduce_scatter"}


def _method(name: str, do: str, told: str) -> Callable[..., Any]:
    op = _DIRECT.get(name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        core = self.collectives
        if op is not None and core.direct is not None and not kwargs:
            work = core.direct.start(op, args)
            if work is not None:
                core.carried[op] = core.carried.get(op, 0) + 1
                return work
        return getattr(self, do)(name, args, kwargs)

    method.__name__ = name
    method.__doc__ = told
    return method


def _all_reduces(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    def all_reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        below = self.nccl_below
        if below and args:
            nbytes = 0
            for one in [args[0]] if isinstance(args[0], torch.Tensor) else args[0]:
                if type(one).__torch_dispatch__ is not _OWN and _real(one) is not one:
                    return all_reduce(self, _real(args[0]), *args[1:], **kwargs)
                nbytes += one.nbytes if one.is_cuda and not one.is_sparse else below
            if nbytes < below:
                self._log(name)
                return getattr(self.inner["cuda"], name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    all_reduce.__name__ = name
    all_reduce.__doc__ = method.__doc__
    return all_reduce


for _name in _CALLS:
    setattr(Calls, _name, _method(_name, "_call", "By offcore, or the inner group."))
for _name in ("allreduce", "allreduce_coalesced"):
    setattr(Calls, _name, _all_reduces(getattr(Calls, _name)))
for _name in _HANDED:
    setattr(Calls, _name, _method(_name, "_hand", "By the inner group."))
untraced(Calls)


class Group(Calls, dist.ProcessGroup):  # type: ignore[misc]
    """Up to torch 2.13: a process group of its own, for tensors on CPUs and GPUs."""

    def __init__(self, options: Any, given: Any) -> None:
        dist.ProcessGroup.__init__(self, options.group_rank, options.group_size)
        self._open(options, given)
        # What the C++ base does, which Python cannot override, it does by these.
        kinds = dist.ProcessGroup.BackendType
        self._register_backend(torch.device("cpu"), kinds.GLOO, self.inner["cpu"])
        self._set_default_backend(kinds.GLOO)
        if "cuda" in self.inner:
            self._register_backend(torch.device("cuda"), kinds.NCCL, self.inner["cuda"])
            self._set_default_backend(kinds.NCCL)


class Backend(Calls, _TorchBackend):  # type: ignore[misc]
    """From torch 2.14 on: `cpu:gloo,cuda:offcore` has one beside torch's own."""

    def __init__(self, options: Any, given: Any) -> None:
        _TorchBackend.__init__(self, options.group_rank, options.group_size)
        self._open(options, given)
        self._timeout = options.timeout

    @property
    def options(self) -> Any:
        """torch's options of a backend."""
        return _TorchBackend.Options(NAME, self._timeout)

    @property
    def supports_coalescing(self) -> bool:
        """Of sends and receives, which the inner group coalesces."""
        return "cuda" in self.inner

    def start_coalescing(self) -> None:
        """Of sends and receives."""
        if self.supports_coalescing:
            self.inner["cuda"]._start_coalescing()

    def end_coalescing(self) -> Any:
        """Of sends and receives."""
        return self.inner["cuda"]._end_coalescing() if self.supports_coalescing else None

    def _set_sequence_number_for_group(self) -> None:
        """Counted from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return sum(self.collectives.carried.values()) + sum(self.handed.values())


def create(options: Any, given: Any) -> Any:
    """What torch calls for a group."""
    return Backend(options, given) if BACKENDS else Group(options, given)


def _batching(plain: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """`batch_isend_irecv`, which up to torch 2.13 starts one after the other what is not of torch's
    own class of groups: where ranks all send first, NCCL's would wait for each other for ever."""

    @functools.wraps(plain)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group, device = p2p_op_list[0].group, p2p_op_list[0].tensor.device
        if not isinstance(group, Group) or not group._get_backend(device).supports_coalescing:
            return plain(p2p_op_list)
        try:
            with c10d._coalescing_manager(group, device, async_ops=True) as batch:
                for one in p2p_op_list:
                    one.op(one.tensor, one.peer, group, one.tag)
        except BaseException:  # what torch leaves open would swallow the group's next calls
            c10d._world.pg_coalesce_state.pop(group, None)
            with contextlib.suppress(RuntimeError):
                group._end_coalescing(device)
            raise
        return list(batch.works)

    return batch_isend_irecv


def register() -> None:
    """Makes torch.distributed know the backend "offcore". From 2.14 on, torch finds and calls this
    by itself, as an entry point of torch.distributed.backends."""
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    if not BACKENDS:
        c10d.batch_isend_irecv = dist.batch_isend_irecv = _batching(c10d.batch_isend_irecv)
