"""What the options of `offcore bench` and `offcore tune` ask for."""

from __future__ import annotations

from typing import Any

import offcore
from offcore.comm.programs import REDUCING
from offcore.errors import error
from offcore.sizes import parse_sizes
from offcore.tools.bench import collectives
from offcore.tools.bench.values import DTYPES
from offcore.tools.cli.options import (
    REAL_SIZES,
    SIM_SIZES,
    ProtocolName,
    Reduction,
    known_names,
    names_of,
    parsed,
)

SIM_MACHINE = "mi300x-8"
REAL_RANKS = 2


def _default_ranks(backend: str, machine: str | None) -> int:
    if machine:
        return offcore.machines.load(machine).ranks
    return offcore._core.gpus() if backend == "cuda" else REAL_RANKS


def request_of(
    op: str,
    backend: str,
    machine: str | None,
    ranks: int | None,
    sizes: str | None,
    variants: str,
    protocol: str,
    signals: str | None,
    timing: str,
    own_copy: str = collectives.OWN_COPIES[0],
    dtype: str | None = None,
    reduction: Reduction | None = None,
    sms: int | None = None,
    **rest: Any,
) -> collectives.Request:
    """Fills in what depends on the backend: machine, ranks, sizes, protocols, forms."""
    backend = collectives.resolve_backend(backend, machine)
    protocols = known_names(protocol, "--protocol", [one.value for one in ProtocolName])
    if backend == "sim":
        machine = machine or SIM_MACHINE
        # The paper's set-up: an operation may write at once, its buffers are known to be free.
        protocols = ["promise" if one == "auto" else one for one in protocols]
    ranks = ranks or _default_ranks(backend, machine)
    forms = known_names(signals, "--signals", collectives.SIGNALS) if signals else None
    own = known_names(own_copy, "--own-copy", collectives.OWN_COPIES)
    others = [one for one in own if one != collectives.OWN_COPIES[0]]
    if backend != "cuda" and (forms or others):
        option = "--signals" if forms else f"--own-copy {others[0]}"
        raise error("unsupported", f"{option} is for GPUs: {backend} has only one form")
    named = variants not in ("all", "auto")
    names = (
        collectives.variants_known(op) if variants == "all" else names_of(variants, "--variants")
    )
    default_sizes = SIM_SIZES if backend == "sim" else REAL_SIZES
    request = collectives.Request(
        op=op,
        backend=backend,
        machine=machine,
        ranks=ranks,
        sizes=parsed(parse_sizes, sizes or default_sizes, "--sizes"),
        variants=names,
        named=named,
        protocols=list(dict.fromkeys(protocols)),
        signals=[*forms] if forms else ["fenced"] if backend == "cuda" else [None],
        own_copies=own,
        timings=known_names(timing, "--timing", collectives.TIMINGS),
        **_arithmetic(op, backend, dtype, reduction, sms),
        **rest,
    )
    if request.values is not None:
        for nbytes in request.sizes:
            request.values.check_bytes(nbytes)
    return request


def _arithmetic(
    op: str, backend: str, dtype: str | None, reduction: Reduction | None, sms: int | None
) -> dict[str, Any]:
    """What was named of it, as fields of a request."""
    named = {"dtype": dtype, "reduction": reduction and reduction.value, "sms": sms}
    given = {name: value for name, value in named.items() if value is not None}
    if given and op not in REDUCING:
        raise error("unsupported", f"--{next(iter(given))} is for operations that reduce, not {op}")
    if sms is not None and backend != "cuda":
        raise error("unsupported", f"--sms is for GPUs: {backend} has none")
    if dtype is not None:
        known_names(dtype, "--dtype", DTYPES)
    return given
