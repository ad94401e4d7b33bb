"""Protocol credits: peers are let in when the output is released, ahead of the next call."""

import pytest
from exchange import Ground
from targets import Target
from test_collectives import IN_PLACE, KINDS, OPS

import offcore
from oracles import equal_case, kinds_of


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("op", OPS)
def test_released_and_called_again(target: Target, op: str, ranks: int) -> None:
    with target.communicator(ranks) as comm:
        ground = Ground(comm, 4096)
        for in_place in (False, True) if op in IN_PLACE else (False,):
            case = equal_case(op, ranks, 64, in_place, root=ranks - 1)
            exchange = ground.prepare(case, "window")
            for turn in range(12):
                for kind in sorted(kinds_of(case, staged=False)):
                    exchange.refill(turn)
                    result = exchange.start(kind, "credits").finish()
                    assert result.protocol == "credits"
                    assert not result.staged
                    if turn % 4 < 3:  # a rank may also come without
                        exchange.handle.release()


def test_the_counts_are_those_of_barrier(target: Target) -> None:
    with target.communicator(4) as comm:
        ground = Ground(comm, 4096)
        case = equal_case("all_gather", 4, 64)
        for kind in KINDS:
            if kind not in kinds_of(case, staged=False):
                continue
            barrier = ground.run(case, "window", kind, "barrier")
            credits = ground.run(case, "window", kind, "credits")
            assert (credits.commands, credits.syncs) == (barrier.commands, barrier.syncs)


def test_many_ahead_and_released_late(target: Target) -> None:
    """None is waited for; a handle that is not the last one's releases nothing."""
    with target.communicator(3) as comm:
        exchange = Ground(comm, 4096).prepare(equal_case("all_gather", 3, 32, True), "window")
        handles = []
        for _ in range(60):
            handles.append(exchange.start("b2b", "credits").handle)
            handles[-1].release()
            handles[-1].release()
            handles[0].release()
        assert {handle.wait().protocol for handle in handles} == {"credits"}
        exchange.check()


@pytest.mark.parametrize("protocol", ["barrier", "promise", "eager"])
def test_other_protocols_cannot_be_released(target: Target, protocol: str) -> None:
    with target.communicator(2) as comm:
        exchange = Ground(comm, 4096).prepare(equal_case("all_gather", 2, 32), "window")
        handle = exchange.start("pcpy", protocol).handle
        with pytest.raises(offcore.Error, match="only an operation of protocol credits") as caught:
            handle.release()
        assert caught.value.code == "invalid"
        handle.wait()


def test_prelaunched_operations_have_none(target: Target) -> None:
    with target.communicator(2) as comm:
        exchange = Ground(comm, 4096).prepare(equal_case("all_gather", 2, 32), "window")
        with pytest.raises(offcore.Error, match="barrier") as caught:
            exchange.start("prelaunch_pcpy", "credits")
        assert caught.value.code == "unsupported"
