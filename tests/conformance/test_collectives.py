"""Every collective, in every way that it can run, on every backend, byte by byte."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from exchange import PLACES, PROTOCOLS, Ground
from targets import Target

import offcore
from oracles import Case, equal_case, kinds_of

OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
IN_PLACE = ("all_gather", "all_to_all", "broadcast")
RANKS = (1, 2, 3, 4, 8)
SIZES = (1, 1000, 4096)
LARGE = (1 << 20) + 3  # of the whole array
KINDS = ("pcpy", "bcst", "swap", "b2b", "fan")
WAYS = (
    "auto",
    *(start + kind for start in ("", "prelaunch_") for kind in KINDS),
    "pipelined",
    "pipelined:256",
)


def uneven_cases(op: str, ranks: int) -> Iterator[Case]:
    """Counts of the _v forms: ordinary ones, with holes, and one rank that has everything."""
    random = np.random.default_rng((ranks, len(op)))
    number = ranks * ranks if op == "all_to_all" else ranks
    for holes in (0.0, 0.5):
        counts = random.integers(1, 700, number) * (random.random(number) >= holes)
        counts[0] += 1  # never nothing at all
        yield Case(op, ranks, tuple(int(c) for c in counts), root=ranks - 1)
    yield Case(op, ranks, (0,) * (number - 1) + (77,), root=0)


def cases(op: str, ranks: int) -> Iterator[Case]:
    for size, in_place in product(SIZES, (False, True) if op in IN_PLACE else (False,)):
        yield equal_case(op, ranks, size, in_place, root=size % ranks)
    if op != "broadcast":
        yield from uneven_cases(op, ranks)
        if op == "all_gather":
            for case in uneven_cases(op, ranks):
                yield Case(op, ranks, case.counts, True)


def chosen(op: str, ranks: int, target: Target, config: pytest.Config) -> list[Case]:
    """Every third case, without --long, where all of them take long."""
    found = list(cases(op, ranks))
    slow = ranks >= (3 if target.backend == "cuda" else 8) or config.getoption("--sanitized")
    return found[1::3] if slow and not config.getoption("--long") else found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", OPS)
def test_every_way_of_running_it(
    target: Target, op: str, ranks: int, pytestconfig: pytest.Config
) -> None:
    for case in chosen(op, ranks, target, pytestconfig):
        with target.communicator(ranks) as comm:  # one for each: prelaunched programs are bounded
            ground = Ground(comm, 4096 * ranks)
            for protocol, place in product(PROTOCOLS, PLACES):
                check_variants(ground, case, place, protocol)


def kind_of(variant: str) -> str:
    return variant.removeprefix("prelaunch_").partition(":")[0]


def check_variants(ground: Ground, case: Case, place: str, protocol: str) -> None:
    """Every variant that the case can have is right, and every other one is refused."""
    # Peers write into an array only by way of a slot.
    staged = protocol == "eager" or (place == "array" and protocol != "promise")
    can = kinds_of(case, staged) if place == "window" or protocol != "promise" else set()
    cannot = {*KINDS, "pipelined"} - can | (set() if can else {"auto"})
    refused = ground.prepare(case, place)
    for variant in WAYS:
        if kind_of(variant) in cannot:
            with pytest.raises(offcore.Error) as refusal:
                refused.start(variant, protocol)
            assert refusal.value.code == "unsupported", (case, place, variant, protocol)
    refused.assert_untouched()
    for variant in WAYS:
        if kind_of(variant) in cannot:
            continue
        result = ground.run(case, place, variant, protocol)
        if variant != "auto":
            assert result.variant.startswith(variant)
        # Where all is left to it the measured table may have slots ahead.
        assert result.staged == staged or variant == protocol == "auto"
        assert result.mode == ("armed" if variant.startswith("prelaunch") else "eager")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", OPS)
def test_nothing_at_all(target: Target, op: str, ranks: int) -> None:
    with target.communicator(ranks) as comm:
        ground = Ground(comm, 4096)
        for in_place, place in product((False, True) if op in IN_PLACE else (False,), PLACES):
            case = equal_case(op, ranks, 0, in_place)
            for protocol in PROTOCOLS:
                assert ground.run(case, place, protocol=protocol).bytes == 0


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("op", OPS)
def test_large(target: Target, op: str, ranks: int) -> None:
    """An odd size beyond what is moved in one piece, in every variant."""
    parts = {"all_to_all": ranks * ranks, "broadcast": 1}.get(op, ranks)
    size = LARGE // parts
    with target.communicator(ranks) as comm:
        ground = Ground(comm, LARGE)
        for in_place, place in product((False, True) if op in IN_PLACE else (False,), PLACES):
            case = equal_case(op, ranks, size, in_place, root=ranks - 1)
            kinds = sorted(kinds_of(case, staged=place == "array"))
            for kind in [*kinds, *(["pipelined:16K"] if "pipelined" in kinds else [])]:
                assert ground.run(case, place, kind).bytes == sum(case.counts) // (
                    ranks if op == "all_to_all" else 1
                )
