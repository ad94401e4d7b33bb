"""Calls that move nothing: legal with every variant that the operation can have at other sizes."""

import numpy as np
import pytest

import offcore
from offcore.tools.bench.collectives import VARIANTS

OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")


def runs(op: str, ranks: int, in_place: bool, variant: str, protocol: str, chunk: int) -> str:
    """The variant that ran, or the code of the error."""
    whole, part = chunk * ranks, chunk
    sizes = {
        "all_gather": (whole, whole if in_place else part),
        "all_to_all": (whole, whole),
        "broadcast": (whole, whole),
        "scatter": (part, whole),
        "gather": (whole, part),
    }[op]
    with offcore.Communicator(backend="sim", machine="mi300x-8", ranks=ranks) as comm:
        out = comm.window(max(1, sizes[0])).region(0, sizes[0])
        inp = None if in_place else comm.window(max(1, sizes[1])).region(0, sizes[1])
        try:
            handle = getattr(comm, op)(out, inp, variant=variant, protocol=protocol)
        except offcore.Error as failure:
            return str(failure.code)
        return handle.wait().variant


@pytest.mark.parametrize("protocol", ["auto", "eager"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("op", OPS)
def test_no_bytes_have_the_variants_of_some(
    op: str, ranks: int, in_place: bool, protocol: str
) -> None:
    for variant in VARIANTS:
        some = runs(op, ranks, in_place, variant, protocol, 16)
        none = runs(op, ranks, in_place, variant, protocol, 0)
        assert none in (some, variant), variant
        assert some != variant or none == variant, variant


def test_empty_arrays_on_the_host() -> None:
    with offcore.Communicator(backend="host", ranks=3) as comm:
        outs = [np.zeros(0, np.float32) for _ in range(3)]
        inps = [np.zeros(0, np.float32) for _ in range(3)]
        assert comm.all_gather(outs, inps, variant="bcst").wait().variant == "bcst"
        assert comm.all_to_all(outs, variant="swap").wait().variant == "swap"
