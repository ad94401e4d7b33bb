"""Counters as text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Mapping

_PREFIX = "offcore_mcast"
_PHASES = ("barrier", "multicast", "recovery", "handshake", "exchange")

# Of the counters, those that may go down, or that are no sums.
_GAUGES = {"state_bytes", "udp_gso_sockets", "udp_gro_sockets", "udp_receive_buffer_bytes"}

_HELP = {
    "bytes": "Bytes of the arrays of operations that ended well",
    "cutoffs": "Firings of the cutoff timer",
    "datagram_bytes": "Bytes of chunks that datagrams brought",
    "datagrams": "Datagrams that brought a chunk",
    "duplicates": "Datagrams whose chunk was there or on its way",
    "failed": "Operations that ended with an error",
    "fetched_chunks": "Chunks fetched from the left neighbour",
    "fetches": "Requests to the left neighbour",
    "foreign": "Datagrams of another communicator, or of none",
    "forged": "Datagrams with a wrong MAC",
    "lost_chunks": "Chunks missing at a cutoff",
    "malformed": "Datagrams whose numbers do not fit the operation",
    "messages": "Control messages sent",
    "operations": "Operations that ended well",
    "refused_messages": "Control messages that made no sense",
    "sent_bytes": "Bytes of chunks sent by multicast, once however many receive them",
    "sent_datagrams": "Datagrams sent by multicast",
    "shares": "Pieces of other ranks' inputs, of reduce-scatters",
    "served_chunks": "Chunks given to the right neighbour",
    "stale": "Datagrams of an operation that was not running",
    "state_bytes": "Bytes of bitmaps and tables, at most",
}


def prometheus(counters: Mapping[str, int], labels: Mapping[str, str]) -> str:
    """The text format, version 0.0.4. Phase times become seconds with a label."""
    lines = []

    def add(name: str, kind: str, meaning: str, values: list[tuple[dict[str, str], float]]) -> None:
        lines.append(f"# HELP {name} {meaning}")
        lines.append(f"# TYPE {name} {kind}")
        for more, value in values:
            text = ",".join(f'{key}="{one}"' for key, one in {**labels, **more}.items())
            lines.append(f"{name}{{{text}}} {value:.16g}")

    for name in sorted(counters):
        if name.removesuffix("_ns") in _PHASES:
            continue
        meaning = _HELP.get(name, f"The transport's {name.replace('_', ' ')}")
        if name in _GAUGES:
            add(f"{_PREFIX}_{name}", "gauge", meaning, [({}, counters[name])])
        else:
            add(f"{_PREFIX}_{name}_total", "counter", meaning, [({}, counters[name])])
    phases = [({"phase": phase}, counters[f"{phase}_ns"] / 1e9) for phase in _PHASES]
    add(f"{_PREFIX}_phase_seconds_total", "counter", "Time in each phase of operations", phases)
    return "\n".join(lines) + "\n"
