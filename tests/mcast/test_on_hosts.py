"""Multicast between network namespaces at a switch, with real packets and real losses."""

import pytest
from hosts import dropping, on_hosts

SIZES = [0, 1, 1440, 1441, 100_003, 3_000_000]
PLAIN = {"gso": False, "gro": False}
PATIENT = {"alpha_ns": 1_000_000_000, "settle_ns": 100_000_000}  # what is late is not fetched


@pytest.mark.parametrize("ipv6", [False, True])
@pytest.mark.parametrize("merged", [True, False])
def test_every_byte_arrives(ipv6: bool, merged: bool) -> None:
    operations = [(kind, size) for size in SIZES for kind in ("broadcast", "all_gather")]
    done = on_hosts(
        3, operations, options={"ipv6": ipv6, "gso": merged, "gro": merged}, tools=("ip",)
    )
    assert done.total("wrong") == 0
    for counters in done.counters:
        assert counters["udp_sent_datagrams"] > 3_000_000 / 1440
        assert counters["udp_gso_sockets"] == counters["udp_gro_sockets"] == int(merged)
        merges = counters["udp_received_datagrams"] > 2 * counters["udp_receive_runs"]
        assert merges == merged


def test_addresses_of_the_link_will_do() -> None:
    only = tuple(
        f"ip -n h{host} -6 address flush dev v0; ip -n h{host} address add fe80::{host + 1}/64 "
        "dev v0 nodad"
        for host in range(3)
    )
    done = on_hosts(
        3, [("all_gather", 100_000)], commands=only, options={"ipv6": True}, group=PATIENT
    )
    assert done.total("wrong") == 0
    assert done.total("datagrams") == 3 * 2 * 71


def test_chosen_chunks_that_are_lost_are_fetched() -> None:
    lost = ("0", "7", "69")  # 100,000 bytes are 70 chunks
    rules = tuple(dropping(1, f"udp length > 40 @th,96,32 {psn}") for psn in lost)
    done = on_hosts(
        3,
        [("broadcast", 100_000), ("all_gather", 100_000)],
        commands=rules,
        tools=("nft",),
        options=PLAIN,
        group=PATIENT,
    )
    assert done.total("wrong") == 0
    # The middle host loses them of every other root; its left neighbour has them.
    assert [report["fetched_chunks"] for report in done.reports] == [3, 6]
    assert done.counters[0]["fetched_chunks"] == done.counters[2]["fetched_chunks"] == 0


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("permille", [10, 300])
def test_random_loss_at_every_host(permille: int, merged: bool) -> None:
    rules = tuple(
        dropping(host, f"udp length > 40 numgen random mod 1000 < {permille}") for host in range(3)
    )
    done = on_hosts(
        3,
        [("all_gather", 300_000)] * 5,
        commands=rules,
        tools=("nft",),
        options={"gso": merged, "gro": merged},
    )
    assert done.total("wrong") == 0
    assert done.total("lost_chunks") >= done.total("fetched_chunks")  # some were only late
    assert done.total("fetched_chunks") > 0 or merged  # few packets are large where they merge


def test_a_switch_without_multicast() -> None:
    rules = tuple(dropping(host, "ip daddr 224.0.0.0/4") for host in range(3))
    done = on_hosts(3, [("all_gather", 200_001)], commands=rules, tools=("nft",))
    assert done.total("wrong") == 0
    assert done.total("datagrams") == 0
    assert done.total("fetched_chunks") == 3 * 2 * 139


def test_duplicates_are_dropped() -> None:
    twice = (
        "nft 'add table netdev twice; add chain netdev twice in "
        "{ type filter hook ingress device p0 priority 0; }; "
        "add rule netdev twice in ip daddr 239.0.0.0/8 dup to p1'"
    )
    done = on_hosts(3, [("broadcast", 200_000)], commands=(twice,), tools=("nft",), options=PLAIN)
    assert done.total("wrong") == 0
    assert done.counters[1]["duplicates"] > 0
    # Elsewhere only what was slower than its fetch comes twice.
    assert done.counters[2]["duplicates"] <= done.counters[2]["fetched_chunks"]


def test_lost_credits_slow_but_do_not_stop() -> None:
    rules = tuple(dropping(host, "udp length 40") for host in range(3))
    done = on_hosts(
        3,
        [("broadcast", 2_000_000)],
        commands=rules,
        tools=("nft",),
        options={"buffer_bytes": 1 << 19},
    )
    assert done.total("wrong") == 0
    assert done.counters[0]["udp_credit_give_ups"] > 0


def test_credits_that_come_now_and_then() -> None:
    rules = tuple(dropping(host, "udp length 40 numgen random mod 10 < 8") for host in range(3))
    done = on_hosts(
        3,
        [("all_gather", 1_000_000)] * 3,
        commands=rules,
        tools=("nft",),
        options={"buffer_bytes": 1 << 18},
    )
    assert done.total("wrong") == 0
    assert done.counters[0]["udp_credit_give_ups"] > 0
    assert [counters["malformed"] for counters in done.counters] == [0, 0, 0]


def test_a_small_socket_buffer_is_paced_for() -> None:
    done = on_hosts(
        3, [("all_gather", 4_000_000)] * 2, options={"by_host": {"2": {"buffer_bytes": 1 << 16}}}
    )
    assert done.total("wrong") == 0
    assert done.counters[2]["udp_receive_buffer_bytes"] == 1 << 16
    assert done.counters[0]["udp_receive_buffer_bytes"] > 1 << 16
    assert done.counters[0]["udp_credit_waits"] > 10


def test_a_device_that_cannot_segment_sends_every_packet_by_itself() -> None:
    off = tuple(
        f"ip netns exec h{host} ethtool -K v0 tx-udp-segmentation off gso off" for host in range(2)
    )
    done = on_hosts(
        2,
        [("broadcast", 100_000)],
        commands=(*off, dropping(1, "udp length > 40 @th,96,32 7")),
        tools=("ethtool", "nft"),
        group=PATIENT,
    )
    assert done.total("wrong") == 0
    assert done.total("fetched_chunks") == 1  # not the whole run that it was part of
