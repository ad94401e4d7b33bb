"""Simulated fat-trees: multicast collectives beside point-to-point ones, by studies/fat_tree.

Sizes are the total array, as everywhere. A host holds all of it after a broadcast or an all-gather
and before a reduce-scatter. Times are a model's: they tell how algorithms compare on a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offcore import _core
from offcore.errors import error

MULTICAST = "multicast"
ALGORITHMS = {
    "broadcast": (MULTICAST, "knomial", "binary_tree", "scatter_ring"),
    "all_gather": (MULTICAST, "ring", "linear", "doubling"),
    "reduce_scatter": ("in_network", "ring"),
}
_EVENTS_AIM = 8e6  # a second or two; beyond, packets are simulated several as one


@dataclass(frozen=True)
class Tree:
    """Switches and links as numbers: see TreeShape in studies/fat_tree/topology.h."""

    name: str
    hosts: int
    hosts_per_leaf: int
    leaf_ports: int = 1
    spines: int = 1
    leaves_per_pod: int = 0
    spine_ports: int = 0

    def shape(self) -> Any:
        shape = _core.TreeShape()
        for name in (
            "hosts",
            "hosts_per_leaf",
            "leaf_ports",
            "spines",
            "leaves_per_pod",
            "spine_ports",
        ):
            setattr(shape, name, getattr(self, name))
        return shape


def paper(hosts: int = 188) -> Tree:
    """Paper 004's testbed: 12 leaf and 6 spine switches of 36 ports, three links between two."""
    if not 1 <= hosts <= 192:
        raise error("invalid", f"the paper's 12 leaf switches have 192 ports, not {hosts}")
    return Tree("paper", hosts, 16, 18, 6)


def radix(ports: int, hosts: int) -> Tree:
    """A fat-tree of full bandwidth, of switches with so many ports: two levels, else three."""
    half = ports // 2
    if ports < 2 or ports % 2 or hosts > half**3 * 2:
        raise error("invalid", f"switches of {ports} ports carry at most {half**3 * 2} hosts")
    name = f"radix:{ports}"
    if hosts <= half * ports:
        return Tree(name, hosts, half, half, half)
    return Tree(name, hosts, half, half, half, half, half)


def one_spine(per_leaf: int, hosts: int) -> Tree:
    """The tree of network namespaces: leaf bridges and one spine, a link to each."""
    return Tree(f"leaf:{per_leaf}", hosts, per_leaf)


def tree_of(text: str, hosts: int) -> Tree:
    """`paper`, `radix:32` or `leaf:16`. Raises ValueError."""
    kind, _, number = text.partition(":")
    if text == "paper":
        return paper(hosts)
    if kind in ("radix", "leaf") and number.isdecimal() and int(number) > 0:
        return radix(int(number), hosts) if kind == "radix" else one_spine(int(number), hosts)
    raise ValueError(f"'{text}' is not a tree: write paper, radix:PORTS or leaf:HOSTS")


@dataclass(frozen=True)
class Wire:
    """Links and hosts; the names are those of TreeWire in studies/fat_tree/fabric.h.

    The default is a 56 Gbit/s network whose adapters do the work of point-to-point messages.
    """

    gbitps: float = 56.0
    hop_ns: float = 300.0
    cut_through: bool = True
    packet_bytes: int = 4096
    segment_bytes: int = 0
    datagram_header: int = 0
    stream_header: int = 0
    ack_bytes: int = 0
    ack_packets: int = 2
    datagram_send_ns: float = 0.0
    datagram_recv_ns: float = 0.0
    recv_workers: int = 1
    message_ns: float = 0.0


@dataclass(frozen=True)
class Load:
    """One collective; all loads of a run begin together."""

    op: str
    algorithm: str
    bytes: int
    root: int = 0
    chains: int = 1
    radix: int = 4
    segments: int = 1
    loss: float = 0.0
    seed: int = 1
    alpha_ns: float = 100_000.0


@dataclass(frozen=True)
class Row:
    """What one load came to. Switch bytes are those of the whole run: of all its loads."""

    op: str
    algorithm: str
    hosts: int
    tree: str
    bytes: int
    time_us: float
    chains: int | None
    loss: float
    goodput_gbps: float  # 1e9 bytes a second received per leaf
    fetched_chunks: int
    switch_bytes: int
    link_bytes: int
    queue_bytes_max: int
    segment_bytes: int
    beside: str | None = None
    phases_us: dict[str, float] | None = None  # means over the hosts
    hosts_us: list[float] = field(default_factory=list, repr=False)
    impl: str = "simulated"

    @property
    def name(self) -> str:
        chains = f", {self.chains} chains" if (self.chains or 1) > 1 else ""
        return self.algorithm + chains

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name != "hosts_us"}
        return {"impl": record.pop("impl")} | record


def _set(target: Any, source: object) -> Any:
    for name, value in vars(source).items():
        setattr(target, name, value)
    return target


def run(tree: Tree, wire: Wire, loads: Sequence[Load]) -> Any:
    """The core's TreeSimulated. Raises invalid."""
    made = [_set(_core.TreeLoad(), load) for load in loads]
    return _core.simulate_tree(tree.shape(), _set(_core.TreeWire(), wire), made)


def received_bytes(op: str, nbytes: int, hosts: int) -> float:
    """What a leaf gets from others."""
    if op == "broadcast":
        return nbytes
    return nbytes * (hosts - 1) / hosts if op == "all_gather" else nbytes / hosts


def coarse(tree: Tree, wire: Wire, loads: Iterable[Load]) -> Wire:
    """The wire with segments of several packets, where single ones would take too long."""
    if wire.segment_bytes:
        return wire
    packets = sum(
        load.bytes / wire.packet_bytes * tree.hosts * (1 if load.algorithm != MULTICAST else 0.05)
        for load in loads
    )
    factor = 1
    while packets * 2.2 / factor > _EVENTS_AIM and factor < 64:
        factor *= 2
    return Wire(**vars(wire) | {"segment_bytes": wire.packet_bytes * factor})


def measure(tree: Tree, wire: Wire, loads: Sequence[Load]) -> list[Row]:
    """A row for each load."""
    wire = coarse(tree, wire, loads)
    found = run(tree, wire, loads)
    rows = []
    for load, outcome in zip(loads, found.outcomes, strict=True):
        hosts_us = [ns / 1e3 for ns in outcome.host_ns]
        time_us = max(hosts_us)
        others = [other.op for other in loads if other is not load]
        phases = outcome.phases
        rows.append(
            Row(
                op=load.op,
                algorithm=load.algorithm,
                hosts=tree.hosts,
                tree=tree.name,
                bytes=load.bytes,
                time_us=round(time_us, 4),
                chains=load.chains if load.algorithm == MULTICAST else None,
                loss=load.loss,
                goodput_gbps=_rate(received_bytes(load.op, load.bytes, tree.hosts), time_us),
                fetched_chunks=outcome.fetched,
                switch_bytes=found.switch_bytes,
                link_bytes=found.link_bytes,
                queue_bytes_max=max(port.queue_bytes_max for port in found.ports),
                segment_bytes=wire.segment_bytes,
                beside=others[0] if others else None,
                phases_us={
                    name: round(getattr(phases, f"{name}_ns") / 1e3, 4)
                    for name in ("barrier", "multicast", "fetch", "handshake")
                }
                if load.algorithm == MULTICAST
                else None,
                hosts_us=hosts_us,
            )
        )
    return rows


def _rate(nbytes: float, time_us: float) -> float:
    return round(nbytes / time_us / 1e3, 4) if time_us > 0 else 0.0
