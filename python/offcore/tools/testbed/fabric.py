"""A fat-tree of network namespaces on one machine: hosts, leaf bridges and a spine.

Every host is a network namespace with one interface, eth0; leaves and the spine are bridges of the
namespace that builds the tree, so their ports can be counted and made to lose packets there. Who
builds one is root of namespaces of its own (`namespaces.inside`) and needs no other rights; all of
it is gone when that process is.

Bridges learn addresses and flood multicast to every port: no snooping, so no querier and no join
to wait for, and what is counted is a group that every host has joined. Reports of joins (IGMP, MLD)
go no farther than the leaf: switches keep them to themselves, and flooded they would be a storm.

Nobody asks for addresses (ARP): kernels share one table of neighbours between all namespaces, too
small for hundreds of hosts that know each other. Every host sends to one address that is not
there, and its leaf writes the right one, which follows from the host's number, into the frame.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offcore.errors import error
from offcore.tools.mcast.fat_tree import Tree, one_spine
from offcore.tools.testbed import namespaces
from offcore.tools.testbed.namespaces import Link

DEVICE = "eth0"
HOSTS_MAX = 4096
_NETWORK = (10, 77)  # hosts are 10.77.0.1 and on
_MASK, _ONE = "255.255.0.0", "255.255.255.255"
_GATEWAY, _GATEWAY_MAC = "10.77.255.254", "02:4f:43:ff:ff:fe"
_PORTS_MAX = 1023  # of a Linux bridge


@dataclass(frozen=True)
class Port:
    """A switch port's counters since the tree was built."""

    name: str
    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int
    drops: int

    @property
    def bytes(self) -> int:
        return self.rx_bytes + self.tx_bytes

    @property
    def packets(self) -> int:
        return self.rx_packets + self.tx_packets

    def since(self, before: Port) -> Port:
        kept = {
            name: value - getattr(before, name)
            for name, value in vars(self).items()
            if name != "name"
        }
        return Port(self.name, **kept)


class Testbed:
    """Builds the tree; a context that takes it away again. Raises driver, unavailable, invalid.

    hosts_per_leaf: 16 if not given, as the paper's testbed has. mtu: of every link. offloads: True
    leaves super-packets whole, which is what makes namespaces fast; False makes every packet on
    every link one of at most mtu bytes.
    """

    __test__ = False  # for pytest: not a class of tests

    def __init__(
        self,
        hosts: int,
        hosts_per_leaf: int = 16,
        mtu: int = 1500,
        offloads: bool = True,
        ipv6: bool = False,
    ) -> None:
        if not 1 <= hosts <= HOSTS_MAX or hosts_per_leaf < 1:
            raise error("invalid", f"a testbed has 1 to {HOSTS_MAX} hosts, and some on each leaf")
        if not 576 <= mtu <= 65535:
            raise error("invalid", f"a link carries packets of 576 to 65535 bytes, not {mtu}")
        self.tree: Tree = one_spine(hosts_per_leaf, hosts)
        self.hosts, self.mtu, self.offloads, self.ipv6 = hosts, mtu, offloads, ipv6
        self.leaves = -(-hosts // hosts_per_leaf)
        if max(hosts_per_leaf + 1, self.leaves) > _PORTS_MAX:
            raise error("invalid", f"a bridge has at most {_PORTS_MAX} ports: spread the hosts")
        self._hosts_per_leaf = hosts_per_leaf
        self._namespaces: list[int] = []
        self._children: list[int] = []
        started_s = time.monotonic()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        self.built_s = time.monotonic() - started_s

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return "{}.{}.{}.{}".format(*_NETWORK, *divmod(host + 1, 256))

    def mac(self, host: int) -> str:
        """The hardware address of the host's interface."""
        return "02:4f:43:00:{:02x}:{:02x}".format(*divmod(host + 1, 256))

    def address6(self, host: int) -> str:
        return f"fd77::{host + 1:x}"

    def namespace(self, host: int) -> int:
        """A descriptor of the host's network namespace; it belongs to the testbed."""
        return self._namespaces[host]

    def port(self, host: int) -> str:
        """The leaf's port that the host hangs on."""
        return f"h{host}"

    def _build(self) -> None:
        if self.ipv6:
            namespaces.write_sysctl("net.ipv6.conf.default.accept_dad", 0)
        else:
            namespaces.write_sysctl("net.ipv6.conf.all.disable_ipv6", 1)
            namespaces.write_sysctl("net.ipv6.conf.default.disable_ipv6", 1)
        Link("lo").up()
        self._namespaces = [namespaces.create() for _ in range(self.hosts)]
        self._batch(self._lines())
        run_tool(["nft", "-f", "-"], self._switching(), "nftables")
        for host in range(self.hosts):
            with namespaces.within(self.namespace(host)):
                self._configure(host)
        if not self.offloads:
            for name in self._switch_ports():
                self._set_offloads(name)

    def _lines(self) -> Iterable[str]:
        """What `ip` has to do: bridges, and pairs of interfaces between them and hosts."""
        bridge = "type bridge stp_state 0 mcast_snooping 0 forward_delay 0"
        tree = [f"leaf{leaf}" for leaf in range(self.leaves)]
        for name in [*tree, *(["spine"] if self.leaves > 1 else [])]:
            yield f"link add {name} mtu {self.mtu} {bridge}"
            yield f"link set {name} up"
        process = os.getpid()
        for host, namespace in enumerate(self._namespaces):
            place = f"netns /proc/{process}/fd/{namespace}"
            yield (
                f"link add h{host} mtu {self.mtu} type veth "
                f"peer name {DEVICE} address {self.mac(host)} mtu {self.mtu} {place}"
            )
            yield f"link set h{host} master leaf{host // self._hosts_per_leaf} up"
        for leaf in range(self.leaves if self.leaves > 1 else 0):
            yield f"link add up{leaf} mtu {self.mtu} type veth peer name down{leaf} mtu {self.mtu}"
            yield f"link set up{leaf} master leaf{leaf} up"
            yield f"link set down{leaf} master spine up"

    def _switching(self) -> str:
        """What the leaves do with what comes from hosts."""
        pairs = [f"{self.address(host)} : {self.mac(host)}" for host in range(self.hosts)]
        return f"""
            table bridge offcore_switching {{
              map hosts {{ type ipv4_addr : ether_addr; elements = {{ {", ".join(pairs)} }} }}
              chain input {{
                type filter hook prerouting priority -300;
                ip protocol igmp drop
                icmpv6 type {{ mld-listener-report, mld2-listener-report }} drop
                ether daddr {_GATEWAY_MAC} ether daddr set ip daddr map @hosts
              }}
            }}
        """

    def _batch(self, lines: Iterable[str]) -> None:
        run_tool(["ip", "-batch", "-"], "".join(line + "\n" for line in lines), "iproute2")

    def _configure(self, host: int) -> None:
        if self.ipv6:
            namespaces.write_sysctl(f"net.ipv6.conf.{DEVICE}.accept_dad", 0)
        else:
            namespaces.write_sysctl("net.ipv6.conf.all.disable_ipv6", 1)
        device = Link(DEVICE)
        device.address(self.address(host), _ONE)
        Link("lo").up()
        device.up()
        device.neighbour(_GATEWAY, _GATEWAY_MAC)
        device.route(_GATEWAY, _ONE)
        device.route("{}.{}.0.0".format(*_NETWORK), _MASK, _GATEWAY)
        device.route("224.0.0.0", "240.0.0.0")
        if self.ipv6:
            device.address6(self.address6(host), 64)
        if not self.offloads:
            self._set_offloads(DEVICE)

    def _set_offloads(self, name: str) -> None:
        Link(name).set_features(dict.fromkeys(namespaces.OFFLOADS, self.offloads))

    def _switch_ports(self) -> list[str]:
        leaves = range(self.leaves if self.leaves > 1 else 0)
        ports = [self.port(host) for host in range(self.hosts)]
        return [*ports, *(f"{side}{leaf}" for leaf in leaves for side in ("up", "down"))]

    def ports(self) -> dict[str, Port]:
        """The counters of every switch port: h0... of leaves towards hosts, up0... of leaves and
        down0... of the spine between them. A link between two switches has a port at both ends."""
        wanted = set(self._switch_ports())
        found = {}
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if (name := name.strip()) in wanted:
                n = [int(number) for number in numbers.split()]
                found[name] = Port(name, n[0], n[8], n[1], n[9], n[3] + n[11])
        if found.keys() != wanted:
            raise error("driver", "the tree's ports are gone: is this its own namespace?")
        return found

    def switch_bytes(self, before: dict[str, Port] | None = None) -> int:
        """What all switch ports have sent and received, since then."""
        now = self.ports()
        return sum(now[name].bytes - (before[name].bytes if before else 0) for name in now)

    def carried(self, before: dict[str, Port]) -> tuple[int, int]:
        """Bytes and packets that all switch ports have sent and received since then."""
        ports = [now.since(before[name]) for name, now in self.ports().items()]
        return sum(port.bytes for port in ports), sum(port.packets for port in ports)

    def within(self, host: int, make: Callable[[], Any]) -> Any:
        """What `make` returns when it is called in the host's network namespace: sockets that it
        opens stay there."""
        return namespaces.made_within(self.namespace(host), make)

    def spawn(
        self,
        host: int,
        words: Sequence[str],
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host."""
        namespace = self.namespace(host)

        def enter() -> None:
            namespaces.die_with_parent()
            namespaces.switch(namespace)

        return subprocess.Popen(list(words), preexec_fn=enter, **more)

    def fork(self, host: int, body: Callable[[], None]) -> int:
        """Runs `body` on a host in a copy of this process, which then ends; returns its id."""
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            namespaces.die_with_parent()
            namespaces.switch(self.namespace(host))
            body()
            status = 0
        except BaseException as failure:
            os.write(2, f"host {host}: {failure!r}\n".encode())
        finally:
            os._exit(status)

    def close(self) -> None:
        """Takes the tree away. What still runs on a host keeps running, cut off."""
        if not self._namespaces:
            return
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces = []
        names = [*self._switch_ports(), *(f"leaf{leaf}" for leaf in range(self.leaves)), "spine"]
        lines = [f"link del {name}\n" for name in names if not name.startswith("down")]
        command = ["ip", "-force", "-batch", "-"]
        subprocess.run(command, input="".join(lines), text=True, capture_output=True, timeout=120)


def run_tool(words: Sequence[str], text: str, package: str) -> str:
    """Feeds a tool of the system and returns what it says. Raises driver, unavailable."""
    try:
        done = subprocess.run(words, input=text, text=True, capture_output=True, timeout=300)
    except FileNotFoundError:
        raise error("unavailable", f"{words[0]} is not installed: install {package}") from None
    except subprocess.TimeoutExpired:
        raise error("timeout", f"{' '.join(words)} takes more than 300 s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise error("driver", f"{words[0]} refused: {said[0] if said else done.returncode}")
    return done.stdout
