"""Collectives of torch tensors on the current CUDA stream, without a kernel.

    comm = offcore.torch.Communicator()            # of torch.distributed's default group
    out = comm.empty((8, 1024), torch.bfloat16)    # window memory: peers write it directly
    comm.all_gather(out, inp)                      # ordered like any other work of the stream

The process group is used only for the rendezvous; it carries no data. All ranks are processes on
one host with one GPU each. Operations are enqueued on torch.cuda.current_stream() of the device,
and their tensors are kept alive until they have ended. `wait` blocks the host; call it to access a
result from the host or to check for errors.

Under torch.cuda.graph an operation is captured, and every replay runs it (docs/cuda.md, Graphs).
Its tensors must then outlive the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offcore import _core
from offcore.bootstrap import bootstrap_of
from offcore.comm import Handle, communicator, nvtx
from offcore.errors import error
from offcore.operands import Side
from offcore.torch_matmul import all_gather_matmul, matmul_reduce_scatter, matmul_shard

__all__ = ["Communicator", "all_gather_matmul", "matmul_reduce_scatter", "matmul_shard"]

_core.tensor_class(torch.Tensor, torch.strided)
LEGACY_STREAM = 1  # the driver's other name for the default stream, whose handle is 0


def _current_stream(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


# What torch's compiler has its generated code ask, which makes no object of the stream. It is no
# documented name, so it may be missing.
stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


class Communicator(communicator.Communicator):
    """An offcore.Communicator of the ranks of a torch.distributed group. Collective.

    group: None: the default one, initialised. device: default: torch.cuda.current_device().
    options: of offcore.Communicator.
    Raises `Error`: unavailable if torch finds no GPU.
    """

    _keeps = True  # tensors, until what uses them has ended

    def __init__(self, group: Any = None, *, device: int | None = None, **options: Any) -> None:
        try:
            self._device = torch.cuda.current_device() if device is None else device
        except (AssertionError, RuntimeError) as cause:  # no CUDA build, no driver, no GPU
            why = f"torch has no GPU ({cause}); on CPUs use offcore.Communicator"
            raise error("unavailable", why) from None
        meeting = bootstrap_of(group, None, None)
        super().__init__(backend="cuda", store=meeting, device=self._device, **options)
        self._start_plain = nvtx.annotated(_core.start_plain)

    def memory_pool(self, nbytes: int) -> Any:
        """Creates a torch.cuda.MemPool of `nbytes` of window memory on every rank. Collective.

            pool = comm.memory_pool(1 << 30)
            with torch.cuda.use_mem_pool(pool):
                weights = torch.empty(...)     # peers write it directly

        torch allocates segments of at least 2 MiB from it, and raises out of memory when it is
        full. Ranks that allocate in the same order get the same offsets; otherwise operations are
        `staged` through a slot. The memory is freed with the pool and its tensors. Raises `Error`:
        memory; unsupported with more than 8 pools.
        """
        window = self.window(nbytes)
        return _core.mem_pool(_core.open_pool(window._core, self.local_ranks[0]))

    def _start(self, op: str, *call: Any) -> Handle:
        # What is passed nearly always the core reads by itself.
        stream = stream_of(self._device) or LEGACY_STREAM
        pending = self._start_plain(
            op, self._core, call, self._device, stream, self._keeps, self.timeout
        )
        return super()._start(op, *call) if pending is None else Handle(self, pending)

    def _side(self, given: Any, op: str, writable: bool) -> Side:
        dtype = _core.plain_dtype(given, self._device)
        side = super()._side(given, op, writable) if dtype is None else (given, dtype, given)
        return side if self._keeps else (*side[:2], None)

    def _streams(self) -> list[int]:
        return [stream_of(self._device) or LEGACY_STREAM]
