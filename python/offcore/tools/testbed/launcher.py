"""What runs on a testbed, in namespaces of its own: `offcore mcast testbed`.

`run` starts this module again as root of those namespaces (`python -m
offcore.tools.testbed.launcher JSON`), which builds the tree and writes what it finds to its
standard output, a JSON object a line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offcore import _core
from offcore.errors import Error, error
from offcore.tools.testbed import faults as testbed_faults
from offcore.tools.testbed import namespaces, plain_exchange
from offcore.tools.testbed.fabric import DEVICE, Testbed
from offcore.tools.testbed.faults import Faults

_STORE_PORT = 29500
_CHECK_BYTES = 1024
_GRACE_S = 5.0


@dataclass(frozen=True)
class Place:
    """The testbed that something runs on."""

    hosts: int
    hosts_per_leaf: int = 16
    mtu: int = 1500
    offloads: bool = True
    ipv6: bool = False
    faults: Faults = field(default_factory=Faults)

    @contextlib.contextmanager
    def built(self) -> Iterator[Testbed]:
        with Testbed(self.hosts, self.hosts_per_leaf, self.mtu, self.offloads, self.ipv6) as made:
            if self.faults != Faults():
                testbed_faults.apply(made, self.faults)
            yield made

    @staticmethod
    def from_json(record: dict[str, Any]) -> Place:
        return Place(**record | {"faults": Faults(**record["faults"])})


def run(task: str, place: Place, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs `module:function(testbed, **arguments)` on a testbed and yields what that yields.

    Raises what it raises, and unavailable where there are no namespaces.
    """
    order = json.dumps({"task": task, "place": asdict(place), "arguments": arguments})
    if missing := namespaces.not_installed():
        raise error("unavailable", f"no testbed: {missing}")
    words = [sys.executable, "-m", "offcore.tools.testbed.launcher", order]
    kept, given = os.pipe()
    with open(kept, encoding="utf-8") as lines:
        with namespaces.inside([*words, str(given)], pass_fds=(given,)) as child:
            os.close(given)
            ended = False
            for line in lines:
                record = json.loads(line)
                if "raised" in record:
                    raise error(*record["raised"])
                ended = "ended" in record
                if not ended:
                    yield record
            status = child.wait()
        if not ended:
            why = namespaces.refused() or f"what ran on the testbed ended with status {status}"
            raise error("unavailable", f"no testbed: {why}")


def check(testbed: Testbed) -> Iterator[dict[str, Any]]:
    """That every host reaches every other one, by multicast and around a ring; what ports count."""
    multicast = plain_exchange.multicast_all_gather(testbed, _CHECK_BYTES)
    ring = plain_exchange.ring_all_gather(testbed, _CHECK_BYTES)
    yield {
        "hosts": testbed.hosts,
        "leaves": testbed.leaves,
        "mtu": testbed.mtu,
        "offloads": testbed.offloads,
        "built_s": round(testbed.built_s, 3),
        "bytes": _CHECK_BYTES * testbed.hosts,
        "multicast": vars(multicast),
        "ring": vars(ring),
    }


def command(testbed: Testbed, words: Sequence[str], timeout_s: float) -> Iterator[dict[str, Any]]:
    """A command on every host, which finds its rank where torch.distributed looks for it. Once one
    has failed the others, which may wait for it, are given a moment to say so."""
    before = testbed.ports()
    started_s = time.monotonic()
    children = []
    for host in range(testbed.hosts):
        variables = {
            "RANK": host,
            "WORLD_SIZE": testbed.hosts,
            "MASTER_ADDR": testbed.address(0),
            "MASTER_PORT": _STORE_PORT,
            "GLOO_SOCKET_IFNAME": DEVICE,
        }
        settings = [f"{name}={value}" for name, value in variables.items()]
        children.append(testbed.spawn(host, ["env", *settings, *words]))
    status, failed = _ended(children, started_s + timeout_s)
    late = [rank for rank, one in enumerate(status) if one is None]
    for child in children:
        child.kill()
    if late and failed is None:
        raise error("timeout", f"{_listed(late)}: the command took more than {timeout_s:g} s")
    yield {
        "hosts": testbed.hosts,
        "seconds": round(time.monotonic() - started_s, 3),
        "status": status,
        "failed": failed,
        "switch_bytes": testbed.switch_bytes(before),
    }


def _ended(
    children: Sequence[subprocess.Popen[bytes]], deadline_s: float
) -> tuple[list[int | None], int | None]:
    """Every rank's status, None: it has not ended; and which rank was the first that failed."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait(rank: int) -> None:
        children[rank].wait()
        told.put(rank)

    for rank in range(len(children)):
        threading.Thread(target=wait, args=(rank,), daemon=True).start()
    status: list[int | None] = [None] * len(children)
    failed = None
    while None in status:
        try:
            rank = told.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            break
        status[rank] = children[rank].returncode
        if status[rank] and failed is None:
            failed = rank
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return status, failed


def obituary(record: dict[str, Any]) -> str | None:
    """Which rank of a command failed first, how, and what became of the others. None: none did."""
    first, status = record["failed"], record["status"]
    if first is None:
        return None
    more = [rank for rank, one in enumerate(status) if one and rank != first]
    late = [rank for rank, one in enumerate(status) if one is None]
    text = f"rank {first} {_end(status[first])}"
    if more:
        text += f"; then {_listed(more)} failed too"
    return text + (f"; {_listed(late)} had not ended {_GRACE_S:g} s later" if late else "")


def _end(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status} ({signal.strsignal(-status)})"
    return f"exited with status {status}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # hundreds of hosts have thousands
    # Hosts are ranks' network namespaces, where the kernel cannot tell whose process comes.
    if not _core.env("OFFCORE_JOB_SECRET"):
        os.environ["OFFCORE_JOB_SECRET"] = secrets.token_hex(16)
    order = json.loads(sys.argv[1])
    with open(int(sys.argv[2]), "w", encoding="utf-8") as lines:
        os.set_inheritable(lines.fileno(), False)

        def tell(record: dict[str, Any]) -> None:
            lines.write(json.dumps(record) + "\n")
            lines.flush()

        try:
            module, _, name = order["task"].partition(":")
            body = getattr(importlib.import_module(module), name)
            with Place.from_json(order["place"]).built() as testbed:
                for record in body(testbed, **order["arguments"]):
                    tell(record)
            tell({"ended": True})
        except Error as failure:
            tell({"raised": [failure.code, str(failure)]})


if __name__ == "__main__":
    main()
