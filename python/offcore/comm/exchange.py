"""All-to-alls with counts in GPU memory (docs/gpu-driven.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offcore import _core
from offcore.comm.handle import Handle
from offcore.comm.requests import Requests, place_of
from offcore.errors import error
from offcore.operands import OperandError, dtype_name, places_of, same_dtype


class AllToAllCalls:
    """A Communicator's all-to-alls."""

    _exchanges: dict[Any, Any]  # engines by their buffers' places; what calls plain tensors'
    _device = -1  # the GPU whose plain tensors the core reads by itself (offcore.torch)
    _start: Callable[..., Handle]

    def all_to_all(
        self,
        out: Any,
        inp: Any = None,
        *,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Copies part q of rank r's input to part r of rank q's output: a transpose.

        Sizes are equal, and a multiple of the number of ranks. inp: None or `out`: in place, with
        swap commands. Raises `Error` as all_gather does.
        """
        return self._start("all_to_all", out, inp, None, 0, variant, protocol, lane)

    def all_to_all_v(
        self,
        out: Any,
        inp: Any,
        counts: Any,
        *,
        counts_on_device: bool = False,
        received: Any = None,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Any:
        """all_to_all with uneven parts: `counts[r][q]` elements (bytes for windows) from r to q.

        counts_on_device: `counts` is in GPU memory: `counts[q]` rows of the input (bytes for
            windows) are sent to rank q, and `received` is set to the rows from each rank. A kernel
            in the current stream pushes the requests (docs/gpu-driven.md). Returns an `Exchange`.
            The first call with a pair of buffers is collective.
        """
        if counts_on_device:
            return _exchange(self, out, inp, counts, received)
        flat = [count for row in counts for count in row]
        return self._start("all_to_all", out, inp, flat, 0, variant, protocol, lane)


def _exchange(comm: Any, *kept: Any) -> _core.Exchange:
    facts, at = _core.plain_exchange(kept, comm._device) or (None, ((), ()))
    calls: _core.Exchanges | None = comm._exchanges.get(facts)
    if calls is None:
        calls, at = _opened(comm, *kept)
        if facts is not None:
            comm._exchanges[facts] = calls
    return calls.start(at, comm._streams(), kept, comm.timeout)


def _opened(comm: Any, out: Any, inp: Any, counts: Any, received: Any) -> tuple[Any, Any]:
    """What calls such exchanges, and the addresses of both counts, one a local rank."""
    places = tuple(place_of(comm, number, side) for number, side in enumerate((out, inp)))
    try:
        sides, dtype = _arrays(comm, counts, writable=False)
        told, kind = (sides, dtype) if received is None else _arrays(comm, received, True)
    except OperandError as refusal:
        raise error("invalid", f"all_to_all_v: an array of counts{refusal}") from None
    width = {"int32": 4, "int64": 8}.get(dtype_name(dtype), -1)
    if {one[1] for one in (*sides, *told)} != {width * comm.ranks} or not same_dtype(dtype, kind):
        raise error("invalid", "all_to_all_v: counts must be int32 or int64, one for each rank")
    requests = comm._exchanges.get(places)
    if requests is None:
        requests = Requests(comm, (out, inp), (), None, 4096, comm.timeout, None, exchanges=True)
        comm._exchanges[places] = requests
    shape = getattr(inp[0] if isinstance(inp, (list, tuple)) else inp, "shape", places[1][2:])
    calls = _core.Exchanges(requests.proxies, width, max(1, places[1][2] // max(1, shape[0])))
    return calls, ([one[0] for one in sides], [one[0] for one in told if received is not None])


def _arrays(comm: Any, given: Any, writable: bool) -> tuple[Any, Any]:
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if comm._gpus[0] >= 0 and not hasattr(one, "__cuda_array_interface__"):
            raise OperandError(" lies in host memory; counts_on_device is for those on the GPU")
    return places_of(given, comm.local_ranks, comm._gpus, writable)
