"""Programs without a communicator: what an operation would run, and which variants it can have."""

from __future__ import annotations

from typing import Any, Protocol

from offcore import _core, machines
from offcore.errors import error
from offcore.operands import dtype_name
from offcore.sizes import split_evenly

MOVING = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
REDUCING = ("reduce_scatter", "all_reduce", "reduce")

_ITEM_BYTES = {"16": 2, "32": 4, "64": 8}  # by how a dtype's name ends


def variants(op: str, *, ranks: int, in_place: bool = False) -> list[str]:
    """Returns the variants of an operation on `ranks` ranks whose output is in a window."""
    if op in REDUCING:
        return _reducing_variants(op)
    return _core.variants_of(_moves_of(op, ranks, ranks * 1024, in_place), _core.Protocol())


def show_program(
    op: str,
    *,
    machine: str,
    ranks: int,
    nbytes: int,
    variant: str = "auto",
    in_place: bool = False,
    protocol: str = "auto",
    dtype: Any = None,
    reduction: str | None = None,
) -> _core.Program:
    """Returns the program for a total size of `nbytes` on a machine; str() prints it.

    The root is rank 0. dtype, reduction: of operations that reduce; default float32 and "sum".
    Raises `Error`: invalid (unknown operation, machine or variant), unsupported (a variant that
    the operation does not have).
    """
    loaded = machines.load(machine)
    return program_of(loaded, op, ranks, nbytes, variant, in_place, protocol, dtype, reduction)


class Plans(Protocol):
    """An operation of some size on a machine, before a variant is chosen."""

    def variants(self) -> list[str]: ...

    def choose(self) -> tuple[str, bool]:
        """The variant that `auto` stands for, and whether a measured table chose it."""

    def plan(self, variant: str) -> _core.Program: ...


def plans_of(
    machine: _core.Machine,
    op: str,
    ranks: int,
    nbytes: int,
    in_place: bool,
    protocol: str,
    dtype: Any = None,
    reduction: str | None = None,
) -> Plans:
    if not 1 <= ranks <= machine.ranks:
        raise error("invalid", f"machine {machine.name} has {machine.ranks} ranks, not {ranks}")
    if op in REDUCING:
        kind = "float32" if dtype is None else dtype_name(dtype)
        return _Reducing(machine, op, ranks, nbytes, in_place, protocol, kind, reduction or "sum")
    if dtype is not None or reduction is not None:
        raise error("invalid", f"{op} does not reduce: it has neither dtype nor reduction")
    return _Moving(machine, op, ranks, nbytes, in_place, protocol)


def program_of(
    machine: _core.Machine,
    op: str,
    ranks: int,
    nbytes: int,
    variant: str,
    in_place: bool,
    protocol: str,
    dtype: Any = None,
    reduction: str | None = None,
) -> _core.Program:
    plans = plans_of(machine, op, ranks, nbytes, in_place, protocol, dtype, reduction)
    if variant == "auto" and op not in REDUCING:
        variant = _core.default_variant()
    return plans.plan(plans.choose()[0] if variant == "auto" else variant)


class _Moving:
    def __init__(
        self,
        machine: _core.Machine,
        op: str,
        ranks: int,
        nbytes: int,
        in_place: bool,
        protocol: str,
    ) -> None:
        self._machine = machine
        self._nbytes = nbytes
        self._moves = _moves_of(op, ranks, nbytes, in_place)
        # The leaves of a broadcast cannot tell whether its root is in place.
        self._alike = _moves_of(op, ranks, nbytes, in_place or op == "broadcast")
        staged = _staged(protocol)
        entry = protocol in ("auto", "barrier") or (staged and not self._moves.full_exchange)
        self._entering = _core.Protocol(entry=entry, staged=staged)

    def variants(self) -> list[str]:
        return _core.variants_of(self._moves, self._entering)

    def choose(self) -> tuple[str, bool]:
        return _core.choose(self._alike, self._nbytes, self._machine, self._entering)

    def plan(self, variant: str) -> _core.Program:
        return _core.plan(self._moves, variant, self._machine, self._entering)


class _Reducing:
    """Whoever has everyone's data has seen everyone enter, so no protocol has an entry round."""

    def __init__(
        self,
        machine: _core.Machine,
        op: str,
        ranks: int,
        nbytes: int,
        in_place: bool,
        protocol: str,
        dtype: str,
        reduction: str,
    ) -> None:
        self._op = op
        self._place: dict[str, Any] = {
            "machine": machine,
            "protocol": _core.Protocol(entry=False, staged=_staged(protocol)),
            "in_place": in_place and op == "all_reduce",  # of the others it is one rank's affair
        }
        self._names = (reduction, dtype)
        size = item_bytes(dtype)
        if nbytes % size:
            raise error("invalid", f"{op}: {nbytes} bytes are not a whole number of {dtype}")
        if op == "reduce_scatter":
            self._parts = [size * count for count in split_evenly(nbytes // size, ranks)]
        else:
            self._parts = _core.equal_parts(nbytes, ranks)

    def variants(self) -> list[str]:
        return _reducing_variants(self._op)

    def choose(self) -> tuple[str, bool]:
        tuned = _core.tuned_variant(self._op, self._parts, **self._place)
        return self.plan("auto").variant, bool(tuned)

    def plan(self, variant: str) -> _core.Program:
        return _core.plan_reduction(self._op, self._parts, *self._names, variant, **self._place)


def item_bytes(dtype: str) -> int:
    """Of an element of what can be reduced; 1 for any other name, which the core refuses."""
    return _ITEM_BYTES.get(dtype[-2:], 1)


def _reducing_variants(op: str) -> list[str]:
    return ["pipelined", "one_shot"] if op == "all_reduce" else ["pipelined"]


def _staged(protocol: str) -> bool:
    """auto: what is always safe. Raises invalid for an unknown name."""
    if protocol not in ("auto", "barrier", "promise", "eager"):
        raise error("invalid", f"unknown protocol {protocol!r}: auto, barrier, promise, eager")
    return protocol == "eager"


def _moves_of(op: str, ranks: int, nbytes: int, in_place: bool) -> _core.Moves:
    if op == "all_gather":
        return _core.moves_all_gather(split_evenly(nbytes, ranks), in_place)
    if op == "all_to_all":
        return _core.moves_all_to_all(ranks, split_evenly(nbytes, ranks) * ranks, in_place)
    if op == "broadcast":
        return _core.moves_broadcast(ranks, 0, nbytes, in_place)
    if op == "scatter":
        return _core.moves_scatter(0, split_evenly(nbytes, ranks))
    if op == "gather":
        return _core.moves_gather(0, split_evenly(nbytes, ranks))
    known = ", ".join((*MOVING, *REDUCING))
    raise error("invalid", f"unknown operation {op!r}: known are {known}")
