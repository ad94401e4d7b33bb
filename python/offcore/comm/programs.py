"""Programs without a communicator: what an operation would run, and which variants it can have."""

from __future__ import annotations

from offcore import _core, machines
from offcore.errors import error
from offcore.sizes import split_evenly


def variants(op: str, *, ranks: int, in_place: bool = False) -> list[str]:
    """The variants that an operation of that many ranks can have, its output in a window."""
    return _core.variants_of(moves_of(op, ranks, ranks * 1024, in_place), _core.Protocol())


def show_program(
    op: str,
    *,
    machine: str,
    ranks: int,
    nbytes: int,
    variant: str = "auto",
    in_place: bool = False,
    protocol: str = "auto",
) -> _core.Program:
    """The program for S = `nbytes` on a machine; str() is its text. Root is rank 0.

    Raises `Error`: invalid (unknown operation, machine or variant), unsupported (a variant that
    the operation cannot have).
    """
    return program_of(machines.load(machine), op, ranks, nbytes, variant, in_place, protocol)


def moves_of(op: str, ranks: int, nbytes: int, in_place: bool) -> _core.Moves:
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
    known = "all_gather, all_to_all, broadcast, scatter, gather"
    raise error("invalid", f"unknown operation {op!r}: known are {known}")


def program_of(
    machine: _core.Machine,
    op: str,
    ranks: int,
    nbytes: int,
    variant: str,
    in_place: bool,
    protocol: str,
) -> _core.Program:
    if not 1 <= ranks <= machine.ranks:
        raise error("invalid", f"machine {machine.name} has {machine.ranks} ranks, not {ranks}")
    moves = moves_of(op, ranks, nbytes, in_place)
    entering = protocol_of(moves, protocol)
    if variant == "auto":
        variant = _core.default_variant()
    if variant == "auto":  # the leaves of a broadcast cannot tell whether its root is in place
        alike = moves_of(op, ranks, nbytes, in_place or op == "broadcast")
        variant, _ = _core.choose(alike, nbytes, machine, entering)
    return _core.plan(moves, variant, machine, entering)


def protocol_of(moves: _core.Moves, name: str) -> _core.Protocol:
    """auto: what is always safe. Raises invalid for an unknown name."""
    if name not in ("auto", "barrier", "promise", "eager"):
        raise error("invalid", f"unknown protocol {name!r}: auto, barrier, promise, eager")
    staged = name == "eager"
    entry = name in ("auto", "barrier") or (staged and not moves.full_exchange)
    return _core.Protocol(entry=entry, staged=staged)
