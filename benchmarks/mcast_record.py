"""Records multicast between network namespaces: `python benchmarks/mcast_record.py [FOLDER]`.

Runs the commands below, as a user would, and writes their rows, one file a command, to FOLDER
(benchmarks/results), then prints how offcore stands beside the others of the same run. It needs
torch (for gloo), the tools of `offcore mcast testbed`, 16 GiB and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from offcore.sizes import format_bytes
from offcore.tools.records import read_records

RESULTS = Path(__file__).resolve().parent / "results"
GATHERS = ("all_gather", "--sizes", "64K:16M:4", "--per-rank", "--impls", "offcore,ring,gloo")
CASTS = ("broadcast", "--sizes", "1M:64M:4", "--impls", "offcore,ring,gloo")
MANY = ("all_gather", "--per-rank", "--impls", "offcore,ring")
BESIDE = ("all_gather", "--per-rank", "--beside-reduce-scatter", "--batches", "10")
JUMBO = ("--mtu", "9000")
LOSSY = ("--loss", "0.01")
ALL_AT_ONCE = ("--chains", "4")  # without offloads a sender's core is what bounds it
COMMANDS = {
    # A pause of the machine makes a call several times as long: percentiles of many calls.
    "testbed-188": (*MANY, "--hosts", "188", "--sizes", "64K", "--batches", "40"),
    "testbed-1024": (*MANY, "--hosts", "1024", "--sizes", "1K", "--timeout", "300"),
    "all_gather-4": (*GATHERS, "--hosts", "4"),
    "all_gather-8": (*GATHERS, "--hosts", "8"),
    "broadcast-4": (*CASTS, "--hosts", "4"),
    "broadcast-8": (*CASTS, "--hosts", "8"),
    "broadcast-4-jumbo": (*CASTS, "--hosts", "4", *JUMBO),
    "broadcast-8-jumbo": (*CASTS, "--hosts", "8", *JUMBO),
    "all_gather-4-lossy": (*GATHERS, "--hosts", "4", *LOSSY),
    "broadcast-4-lossy": (*CASTS, "--hosts", "4", *LOSSY),
    "reduce_scatter-4": (
        *("reduce_scatter", "--sizes", "64K:4M:4", "--per-rank", "--impls", "offcore,gloo"),
        *("--hosts", "4"),
    ),
    # Appendix B, where sending is what bounds a host, where its link does in both directions, and
    # where the cores do.
    "beside-4-send": (*BESIDE, "--hosts", "4", "--sizes", "1M", "--send-mbit", "400", *ALL_AT_ONCE),
    "beside-8-send": (
        *(*BESIDE, "--hosts", "8", "--sizes", "1M", "--send-mbit", "200", "--chains", "8"),
    ),
    "beside-4-links": (
        *(*BESIDE, "--hosts", "4", "--sizes", "1M", "--send-mbit", "400", "--receive-mbit", "400"),
        *ALL_AT_ONCE,
    ),
    "beside-4": (
        *(*BESIDE, "--hosts", "4", "--sizes", "64K:4M:4", "--impls", "offcore,ring,gloo"),
    ),
    "all_gather-4-lossy-plain": (*GATHERS, "--hosts", "4", *LOSSY, *ALL_AT_ONCE, "--no-offloads"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, help="for the rows")
    parser.add_argument("--only", default=",".join(COMMANDS), help="names of files, less mcast-")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    # Moved into place at the end: results being written would make the commit of the next dirty.
    with tempfile.TemporaryDirectory() as name:
        for which in arguments.only.split(","):
            path = Path(name) / f"mcast-{which}.jsonl"
            command = ("mcast", "bench", *COMMANDS[which], "--json", str(path))
            print("offcore", *command[:-2], flush=True)
            started_s = time.monotonic()
            done = subprocess.run(
                (sys.executable, "-m", "offcore.tools.cli", *command), stdout=subprocess.DEVNULL
            )
            tell(path)
            print(f"  status {done.returncode}, {time.monotonic() - started_s:.0f} s", flush=True)
        for path in sorted(Path(name).iterdir()):
            shutil.move(path, arguments.folder / path.name)


def tell(path: Path) -> None:
    """Each size: offcore's time, and how much longer the others take, or send."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for row in read_records(path):
        found.setdefault(row["bytes"], {})[row["impl"]] = row
    for nbytes, rows in found.items():
        ours = rows.pop("offcore")
        others = (
            f"{name} {row['time_us'] / ours['time_us']:.2f}x the time, "
            f"{row['switch_bytes'] / ours['switch_bytes']:.2f}x the bytes, "
            f"{_sent(row) / _sent(ours):.2f}x sent"
            for name, row in rows.items()
        )
        wrong = f"{ours['wrong']} wrong, {ours['fetched_chunks']} fetched"
        print(f"  {format_bytes(nbytes):>7} {ours['time_us']:12,.0f} us", *others, wrong, sep="; ")


def _sent(row: dict[str, float]) -> float:
    """By a host; rows of many hosts do not say."""
    return row.get("host_sent_bytes") or 1.0


if __name__ == "__main__":
    main()
