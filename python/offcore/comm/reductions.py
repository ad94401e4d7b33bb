"""Operations that reduce: engines carry the data, a few cores add them up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from offcore.comm.handle import Handle
from offcore.errors import error
from offcore.operands import dtype_name

Reduction = tuple[str, str | None, float]  # the operation, the dtype if it is known, the scale
Typed = tuple[str, str, float]


def named(call: str, op: str, dtype: Any, scale: float) -> Reduction:
    """What a call's arguments say. Raises `Error`: invalid for an op that is no name, and for a
    scale that nothing uses."""
    if not isinstance(op, str):
        raise error("invalid", f"{call}: op is {op!r}; pass its name, such as 'sum'")
    if scale != 1.0 and op != "premul_sum":
        raise error("invalid", f"{call}: scale is for premul_sum only, not for {op}")
    return op, None if dtype is None else dtype_name(dtype), float(scale)


def typed(op: str, reduction: Reduction, dtype: Any) -> Typed:
    """With the dtype that was named, or else the arrays'. Raises `Error`: invalid where they differ
    and the arrays do not hold raw bits."""
    name, wanted, scale = reduction
    given = None if dtype is None else dtype_name(dtype)
    if wanted is None and given is None:
        raise error("invalid", f"{op}: windows have no dtype: pass dtype=")
    if None not in (wanted, given) and wanted != given and not str(given).startswith("uint"):
        raise error("invalid", f"{op}: dtype is {wanted}, the arrays' {given}")
    return name, wanted or str(given), scale


class ReductionCalls(ABC):
    """What a Communicator can reduce."""

    @abstractmethod
    def _start(
        self,
        op: str,
        out: Any,
        inp: Any,
        counts: Sequence[int] | None,
        root: int,
        variant: str,
        protocol: str,
        lane: int,
        reduction: Reduction | None = None,
    ) -> Handle:
        """Starts an operation; a reduction's dtype is the arrays', or the one that is named."""

    def reduce_scatter(
        self,
        out: Any,
        inp: Any,
        op: str = "sum",
        *,
        scale: float = 1.0,
        dtype: Any = None,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Reduces part r of all inputs into rank r's output.

        out: one part. inp: `ranks` parts; `out` may be the rank's own part of it.
        op: "sum", "avg", "min", "max" or "premul_sum" (each input times `scale`).
        dtype: required for windows, and for arrays of raw bits (uint8 to uint64).

        Inputs are reduced in rank order; floating-point values are summed in fp32 (fp64 for
        float64) and rounded once: the result is bitwise equal on all ranks and in every run.

        Engines move the data into slots; the caller's cores reduce it (on cuda a kernel on up to
        `Communicator(sms=)` SMs in the caller's stream, see Result.sms). Raises `Error`: invalid
        (sizes, overlap, dtypes), unsupported (backend sdma has no cores), timeout and mismatch (at
        the first call with these sizes).
        """
        return self._reduce(
            "reduce_scatter", out, inp, None, op, scale, dtype, 0, variant, protocol, lane
        )

    def reduce_scatter_v(
        self,
        out: Any,
        inp: Any,
        counts: Sequence[int],
        op: str = "sum",
        *,
        scale: float = 1.0,
        dtype: Any = None,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """reduce_scatter with uneven parts: counts[r] elements (bytes for windows) to rank r."""
        return self._reduce(
            "reduce_scatter", out, inp, counts, op, scale, dtype, 0, variant, protocol, lane
        )

    def all_reduce(
        self,
        out: Any,
        inp: Any = None,
        op: str = "sum",
        *,
        scale: float = 1.0,
        dtype: Any = None,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Reduces all inputs into every rank's output, as reduce_scatter does. Any element count.

        inp: None or `out` itself: in place.
        variant: "pipelined" (in chunks; each rank reduces and distributes its part), "one_shot"
            (each rank reduces the whole array in one step) or "auto" (the faster one).
        """
        return self._reduce(
            "all_reduce", out, inp, None, op, scale, dtype, 0, variant, protocol, lane
        )

    def reduce(
        self,
        out: Any,
        inp: Any,
        op: str = "sum",
        *,
        root: int = 0,
        scale: float = 1.0,
        dtype: Any = None,
        variant: str = "auto",
        protocol: str = "auto",
        lane: int = 0,
    ) -> Handle:
        """Reduces all inputs into the root's output, which may be its input. Other ranks may pass
        None as `out`."""
        return self._reduce(
            "reduce", out, inp, None, op, scale, dtype, root, variant, protocol, lane
        )

    def _reduce(
        self,
        name: str,
        out: Any,
        inp: Any,
        counts: Sequence[int] | None,
        op: str,
        scale: float,
        dtype: Any,
        root: int,
        variant: str,
        protocol: str,
        lane: int,
    ) -> Handle:
        reduction = named(name, op, dtype, scale)
        return self._start(name, out, inp, counts, root, variant, protocol, lane, reduction)
