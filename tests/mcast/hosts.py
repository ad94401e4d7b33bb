"""Hosts of a network that this machine pretends to have: see host_worker.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import needs

UNSHARE = ["unshare", "-Urnm", "--map-root-user"]


@cache
def refused() -> str:
    """Why this kernel has no namespaces with a switch for us; empty where it has."""
    tried = subprocess.run(
        [*UNSHARE, "ip", "link", "add", "b0", "type", "bridge"], capture_output=True, text=True
    )
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Outcome:
    reports: list[dict[str, int]]  # of each operation, added up over the ranks
    counters: list[dict[str, int]]  # of each rank

    def total(self, name: str) -> int:
        return sum(report[name] for report in self.reports)


def on_hosts(
    hosts: int,
    operations: list[tuple[str, int]],
    *,
    commands: tuple[str, ...] = (),
    tools: tuple[str, ...] = (),
    mtu: int = 1500,
    options: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
) -> Outcome:
    """Runs operations (kind, bytes of a block) with a rank on each of so many hosts at a switch.

    commands: of a shell, once the hosts are there: p0, p1... are the switch's ports, h0, h1... the
    hosts' namespaces. Skips where the kernel or this machine refuses.
    """
    task = {
        "hosts": hosts,
        "mtu": mtu,
        "commands": commands,
        "options": options or {},
        "group": group or {},
        "operations": operations,
    }
    told = _told(task, tools)
    return Outcome(told["reports"], told["counters"])


def leaving_hosts(
    kinds: list[list[str]], rounds: int, *, commands: tuple[str, ...] = (), tools: tuple[str, ...]
) -> list[list[str]]:
    """Each rank makes its calls and closes at once, so many times, each after the commands. How the
    last call ended, by round and rank: "fine" or the error's code."""
    task = {
        "hosts": len(kinds),
        "mtu": 1500,
        "commands": commands,
        "options": {},
        "group": {},
        "leave": kinds,
        "rounds": rounds,
    }
    said: list[list[str]] = _told(task, tools)
    return said


def _told(task: dict[str, Any], tools: tuple[str, ...]) -> Any:
    needs.require("unshare", "ip", *tools)
    if reason := refused():
        pytest.skip(reason)
    worker = Path(__file__).with_name("host_worker.py")
    done = subprocess.run(
        [*UNSHARE, sys.executable, str(worker), json.dumps(task)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    if done.returncode != 0 and "subprocess.CalledProcessError" in done.stderr:
        pytest.skip(f"this kernel refuses: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def dropping(host: int, match: str) -> str:
    """A command after which a host loses UDP packets that match (a rule of nft)."""
    rule = f"add rule inet loss in {match} drop"
    make = "add table inet loss; add chain inet loss in { type filter hook input priority 0; }"
    return f"ip netns exec h{host} nft '{make}; {rule}'"
