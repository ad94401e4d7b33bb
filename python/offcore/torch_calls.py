"""Calls of torch.distributed's groups, as whatever carries them sees them: tensors and options."""

from __future__ import annotations

import datetime
import threading
import types
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame as frames

from offcore.errors import error

Copies = Sequence[tuple[Any, Any]]  # (to, what) pairs
Made = TypeVar("Made", bound=type)

REDUCTIONS = {  # by number: torch's own objects are slow to compare
    int(dist.ReduceOp.SUM): ("sum", 1.0),
    int(dist.ReduceOp.AVG): ("avg", 1.0),
    int(dist.ReduceOp.MIN): ("min", 1.0),
    int(dist.ReduceOp.MAX): ("max", 1.0),
}
_PREMUL_SUM = int(dist.ReduceOp.PREMUL_SUM)
_REDUCIBLE = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
_REDUCIBLE |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def untraced(made: Made) -> Made:
    """torch.compile looks into none of the class's methods, nor into what they call: DDP's reducer
    calls groups and works while a module is traced. As torch.compiler.disable, which would import
    the compiler."""
    skip = frames._FrameAction.SKIP
    for method in vars(made).values():
        if isinstance(method, types.FunctionType):
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return made


class Arguments:
    """A backend's `pg_options`: keyword arguments of the communicator of a group."""

    known: Iterable[str] = ()  # all there are; none: the communicator tells

    def __init__(self, **arguments: Any) -> None:
        for name in sorted(arguments.keys() - self.known) if self.known else ():
            raise error("invalid", f"unknown argument {name}: give {', '.join(sorted(self.known))}")
        self.arguments = arguments


def option(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The options of a call: torch passes them by place or by name, or leaves them out."""
    return args[0] if args else kwargs.get("opts")


def seconds(timeout: datetime.timedelta | None) -> float | None:
    """None where there is none: torch says -1 ms or 0 for that."""
    return None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()


def all_on(device: str, tensors: Iterable[Any]) -> bool:
    """Whether all are dense tensors on that type of device, "cpu" or "cuda"."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return False
        if not (tensor.is_cuda if device == "cuda" else tensor.is_cpu):
            return False
    return True


def packed(tensor: Any, only_read: bool) -> tuple[Any, Copies]:
    """The tensor, or a contiguous copy of it and what must be copied back."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor, ()
    copy = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return copy, () if only_read else ((tensor, copy),)


def joined(parts: Sequence[Any]) -> Any:
    """The elements of all of them, as one tensor."""
    return torch.cat([packed(part, True)[0].detach().reshape(-1) for part in parts])


def as_bytes(tensor: Any) -> Any:
    """What only moves: torch's own backends do not know every dtype."""
    return tensor.view(-1).view(torch.uint8)


def split_evenly(count: int, ranks: int) -> list[int]:
    """Each rank's part of so many elements."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def reducible(dtype: Any) -> bool:
    """Whether offcore reduces that dtype."""
    return dtype in _REDUCIBLE


def reduction_of(op: Any) -> tuple[str, float] | None:
    """The reduction of that name and its scale; None: offcore has none."""
    plain = isinstance(op, dist.ReduceOp.RedOpType)
    kind = int(op) if plain else int(op.op)
    if kind != _PREMUL_SUM:
        return REDUCTIONS.get(kind)
    factor = None if plain else op.__getstate__()[1]
    return ("premul_sum", float(factor)) if isinstance(factor, (int, float)) else None


class UnderWay(Protocol):
    """A call that goes on by itself."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None) -> Any: ...


@untraced
class HostWork(dist.Work):  # type: ignore[misc]  # torch is not there for mypy
    """A call on host memory. Its outputs are where they belong once it is completed.

    timeout: seconds of a wait that names none; None: what the call itself has.
    """

    def __init__(
        self, handle: UnderWay, outputs: Any, copies: Copies, timeout: float | None
    ) -> None:
        super().__init__()
        self._handle = handle
        self._outputs = outputs
        self._copies = copies
        self._timeout = timeout
        self._lock = threading.Lock()  # of what follows
        self._settled = False
        self._failure: Exception | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, and its outputs are written if it has ended well."""
        if not self._handle.done():
            return False
        self._settle()
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._failure is None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Raises `offcore.Error`. No timeout: the call's, or else the group's."""
        given = seconds(timeout)
        self._handle.wait(self._timeout if given is None else given)
        self._settle()
        if self._failure is not None:
            raise self._failure
        return True

    def synchronize(self) -> None:
        """What wait does: there is no stream to order."""
        self.wait()

    def _settle(self) -> None:
        """Once the call itself has ended: copies, or remembers the error for `wait`."""
        with self._lock:
            if self._settled:
                return
            try:
                self._handle.wait(0.0)
                copy_all(self._copies)
            except Exception as failure:
                self._failure = failure
            self._settled = True

    def result(self) -> Any:
        """The outputs."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """A future that a thread completes, with the outputs or the error."""
        # To C++, an exception that Python sets is a value like others: as gradients, it made DDP
        # crash. One of a callback is a failure.
        source: Any = torch.futures.Future()
        future = source.then(lambda done: done.value())

        def complete() -> None:
            try:
                source.set_result(self.result())
            except Exception as failure:
                source.set_exception(failure)

        if self._handle.done():
            complete()
        else:
            threading.Thread(target=complete, daemon=True).start()
        return future


def copy_all(copies: Copies) -> None:
    if not copies:
        return
    with torch.no_grad():
        for to, what in copies:
            to.copy_(what)
