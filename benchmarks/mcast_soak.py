"""Runs multicast collectives under faults and looks at every byte.

    python benchmarks/mcast_soak.py --calls 10000

Broadcasts and all-gathers of random sizes, from a byte to a few hundred KiB, between hosts of a
testbed (network namespaces), an equal share of the calls under each fault: losses, bursts of them,
duplicates, reordering, small socket buffers. A row for each fault goes to
$OUT/mcast-soak-HOSTS.jsonl where OUT is set, else to benchmarks/results. Ends with status 1 where a
byte was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from offcore.mcast.communicator import CHAINS
from offcore.tools.mcast.nodes import Nodes
from offcore.tools.report import JsonLines, Stamp
from offcore.tools.testbed import launcher
from offcore.tools.testbed.fabric import Testbed
from offcore.tools.testbed.faults import Faults

RESULTS = Path(__file__).resolve().parent / "results"
BUFFER_BYTES = 4 << 20
FAULTS: dict[str, tuple[Faults, int]] = {  # what is done to packets; bytes of a socket's buffer
    "loss 0.1 %": (Faults(loss=0.001), BUFFER_BYTES),
    "loss 1 %": (Faults(loss=0.01), BUFFER_BYTES),
    "loss 5 %": (Faults(loss=0.05), BUFFER_BYTES),
    "bursts of 10 in 1000": (Faults(burst_every=1000, burst_packets=10), BUFFER_BYTES),
    "1 % duplicates": (Faults(duplicates=0.01), BUFFER_BYTES),
    "10 % reordered": (Faults(reordering=0.1), BUFFER_BYTES),
    "loss 1 %, 1 % duplicates, buffers of 64 KiB": (Faults(loss=0.01, duplicates=0.01), 64 << 10),
    "buffers of 64 KiB": (Faults(), 64 << 10),
}


def soak(testbed: Testbed, calls: int, buffer_bytes: int, seed: int) -> Iterator[dict[str, Any]]:
    """Runs on the testbed, where all ranks are nodes of one process."""
    random = np.random.default_rng(seed)
    nodes = Nodes(testbed, multicast=True, timeout_s=60.0, buffer_bytes=buffer_bytes, chains=CHAINS)
    sums = dict.fromkeys(("wrong", "fetched_chunks", "duplicates"), 0)
    bytes_max, began_s = 0, time.monotonic()
    for _ in range(calls):
        gathered = bool(random.integers(2))
        nbytes = int(2 ** random.uniform(0, 18)) * (testbed.hosts if gathered else 1)
        ran = nodes.run("all_gather" if gathered else "broadcast", nbytes)
        bytes_max = max(bytes_max, nbytes)
        for name in sums:
            sums[name] += getattr(ran, name)
    nodes.close()
    took_s = round(time.monotonic() - began_s, 3)
    yield {"calls": calls, **sums, "bytes_max": bytes_max, "took_s": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000, help="of all faults together")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    here = str(Path(__file__).resolve().parent)  # where the process on the testbed finds this file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    share, stamp, wrong = -(-arguments.calls // len(FAULTS)), asdict(Stamp()), 0
    path = Path(os.environ.get("OUT", RESULTS)) / f"mcast-soak-{arguments.hosts}.jsonl"
    with JsonLines(str(path)) as lines:
        for place, (name, (faults, buffer_bytes)) in enumerate(FAULTS.items()):
            # Without offloads: a fault hits one datagram, not tens of them that pass as one.
            where = launcher.Place(arguments.hosts, offloads=False, faults=faults)
            told = {
                "calls": share,
                "buffer_bytes": buffer_bytes,
                "seed": arguments.seed + place,
            }
            for row in launcher.run("mcast_soak:soak", where, told):
                facts = {"faults": name, "hosts": arguments.hosts, "chains": CHAINS}
                lines.write(facts | told | row | stamp)
                print(
                    f"{name:45} {row['calls']:6} calls, {row['wrong']} wrong bytes, "
                    f"{row['fetched_chunks']:7} chunks fetched, {row['took_s']:6.1f} s",
                    flush=True,
                )
                wrong += row["wrong"]
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
