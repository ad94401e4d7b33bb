"""What can go wrong between a testbed's leaves and its hosts: nftables rules and queueing.

Losses, duplicates and delays are of packets as they are on the link: with offloads on, a rule that
hits one super-packet hits tens of datagrams at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offcore.errors import error
from offcore.tools.testbed import namespaces
from offcore.tools.testbed.fabric import DEVICE, Testbed, run_tool

_PARTS = 1_000_000
_TABLES = ("bridge offcore", "netdev offcore")
_MULTICAST = "ether daddr & 01:00:00:00:00:00 == 01:00:00:00:00:00 meta l4proto udp"
# Where the PSN of a datagram lies, in bits after the start of its UDP header: core/mcast/wire.h.
PSN_BIT = 96


@dataclass(frozen=True)
class Faults:
    """Shares are of the packets that a leaf sends to a host, drawn for each host by itself."""

    loss: float = 0.0  # share that is dropped
    multicast_only: bool = False  # of the loss: else TCP packets are dropped too
    burst_every: int = 0  # of so many packets to all hosts...
    burst_packets: int = 0  # ...so many in a row are dropped
    psns: Sequence[int] = ()  # datagrams with these numbers are dropped...
    psn_hosts: Sequence[int] | None = None  # ...on the way to these hosts (None: to any)
    duplicates: float = 0.0  # share of multicast datagrams that come twice
    reordering: float = 0.0  # share of multicast datagrams that others overtake
    rate_mbit: int = 0  # what a leaf sends to a host at most
    send_mbit: int = 0  # what a host sends at most

    def check(self) -> None:
        """Raises invalid."""
        for share in (self.loss, self.duplicates, self.reordering):
            if not 0 <= share <= 1:
                raise error("invalid", f"a share lies between 0 and 1: {share}")
        if self.burst_packets and self.burst_every <= self.burst_packets:
            raise error("invalid", "bursts of lost packets must be shorter than their distance")
        if self.rate_mbit and self.reordering:
            raise error("invalid", "a port has one queue: either a rate or reordering")


def apply(testbed: Testbed, faults: Faults) -> None:
    """Replaces the testbed's faults. Raises invalid, unavailable, driver."""
    faults.check()
    script = [f"table {table}\ndelete table {table}" for table in _TABLES]
    script += ["table bridge offcore {", "  counter lost { }", "  counter delayed { }"]
    script += ["  chain forward {", "    type filter hook forward priority 0;"]
    script += [f"    {rule}" for rule in _rules(testbed, faults)]
    script += ["  }", "}"]
    if faults.duplicates:
        script.append("table netdev offcore {\n  counter doubled { }")
        for host in range(testbed.hosts):
            port = testbed.port(host)
            script.append(f"  chain of_{port} {{")
            script.append(f"    type filter hook egress device {port} priority 0;")
            chosen = f"{_MULTICAST} {_share(faults.duplicates)}"
            script.append(f"    {chosen} counter name doubled dup to {port}\n  }}")
        script.append("}")
    run_tool(["nft", "-f", "-"], "\n".join(script) + "\n", "nftables")
    run_tool(["tc", "-force", "-batch", "-"], "".join(_queues(testbed, faults)), "iproute2")
    for host in range(testbed.hosts) if faults.send_mbit else ():
        # The sockets' buffers fill before this queue does: a host waits, and loses nothing.
        queue = f"qdisc replace dev {DEVICE} root tbf rate {faults.send_mbit}mbit"
        with namespaces.within(testbed.namespace(host)):
            run_tool(["tc", "-batch", "-"], f"{queue} burst 256k limit 64m\n", "iproute2")


def _share(share: float) -> str:
    return f"numgen random mod {_PARTS} < {round(share * _PARTS)}"


def _rules(testbed: Testbed, faults: Faults) -> Iterator[str]:
    for psn in faults.psns:
        hosts = faults.psn_hosts
        ports = ", ".join(testbed.port(host) for host in hosts or ())
        to = f"oifname {{ {ports} }}" if hosts is not None else 'oifname "h*"'
        yield f"{to} {_MULTICAST} @th,{PSN_BIT},32 {psn} counter name lost drop"
    chosen = _MULTICAST if faults.multicast_only else "meta l4proto { tcp, udp }"
    if faults.loss:
        yield f'oifname "h*" {chosen} {_share(faults.loss)} counter name lost drop'
    if faults.burst_packets:
        every = f"numgen inc mod {faults.burst_every} < {faults.burst_packets}"
        yield f'oifname "h*" {chosen} {every} counter name lost drop'
    if faults.reordering:
        slow = f"counter name delayed meta priority set {_SLOW}"
        yield f'oifname "h*" {_MULTICAST} {_share(faults.reordering)} {slow}'


_FAST, _SLOW = "7:10", "7:20"


def _queues(testbed: Testbed, faults: Faults) -> Iterator[str]:
    """A slow class beside the one that all other packets take, or one slow queue."""
    for host in range(testbed.hosts):
        device = f"dev {testbed.port(host)}"
        if faults.reordering:
            yield f"qdisc replace {device} root handle 7: htb default 10\n"
            yield f"class replace {device} parent 7: classid {_FAST} htb rate 100gbit\n"
            yield (
                f"class replace {device} parent 7: classid {_SLOW} htb rate 20mbit burst 1600 "
                "cburst 1600 quantum 1600\n"
            )
        elif faults.rate_mbit:
            rate = f"rate {faults.rate_mbit}mbit burst 256k latency 50ms"
            yield f"qdisc replace {device} root handle 8: tbf {rate}\n"
        else:
            yield f"qdisc replace {device} root noqueue\n"


def counts() -> dict[str, int]:
    """Packets that have been lost, doubled and delayed since the faults were applied."""
    listed = json.loads(run_tool(["nft", "-j", "list", "counters"], "", "nftables"))
    found = [item["counter"] for item in listed["nftables"] if "counter" in item]
    return {one["name"]: one["packets"] for one in found if one["table"] == "offcore"}
