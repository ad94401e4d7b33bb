"""What ranks say last reaches their peers, although they close at once and the network loses it."""

import pytest
from hosts import leaving_hosts

FINAL, ABORT = 5, 8  # kinds of messages: core/mcast/wire.h


def losing(host: int, kind: int, operation: int) -> str:
    """The host loses the first packets that begin with such a message (after 32 bytes of TCP)."""
    message = f"@th,256,32 0x4f4301{kind:02x} @th,320,64 {operation}"
    return (
        f"ip netns exec h{host} nft 'table inet words {{}}; delete table inet words; "
        "add table inet words; add chain inet words in { type filter hook input priority 0; }; "
        f"add rule inet words in {message} quota until 250 bytes drop'"
    )


def test_the_last_operation_before_a_close_ends_well_at_all_ranks() -> None:
    rules = tuple(losing(host, FINAL, 2) for host in range(2))
    said = leaving_hosts([["barrier"] * 2] * 2, 8, commands=rules, tools=("nft",))
    assert said == [["fine", "fine"]] * 8


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_ranks_are_told_of_a_mismatch(ranks: int) -> None:
    kinds = [["barrier", "all_gather" if rank == 1 else "broadcast"] for rank in range(ranks)]
    said = leaving_hosts(kinds, 4, tools=("ip",))
    assert said == [["mismatch"] * ranks] * 4


def test_an_abort_gets_through_a_network_that_loses_it() -> None:
    kinds = [["barrier", "all_gather" if rank == 1 else "broadcast"] for rank in range(3)]
    rules = tuple(losing(host, ABORT, 2) for host in range(3))
    said = leaving_hosts(kinds, 4, commands=rules, tools=("nft",))
    assert said == [["mismatch"] * 3] * 4
