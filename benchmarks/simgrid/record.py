"""Records SimGrid's times on paper 004's fat-tree: `python benchmarks/simgrid/record.py`.

Needs SimGrid's SMPI (Debian: `apt install libsimgrid-dev`). Tests compare offcore's simulator with
the rows that this writes, benchmarks/results/simgrid-188.jsonl, and need no SimGrid.

SimGrid runs with its plain fluid model, CM02, without the corrections that fit its default to TCP
on Gigabit Ethernet. Its all-gather "NTSLR" is the ring of neighbours; what it calls "ring" sends
from every rank to every other one.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from offcore.tools.report import Stamp

FOLDER = Path(__file__).resolve().parent
RESULT = FOLDER.parent / "results" / "simgrid-188.jsonl"
RANKS = 188
SIZES = (1024, 4096, 16384, 65536, 262144)
OPTIONS = (
    "--cfg=network/model:CM02",
    "--cfg=network/crosstraffic:no",
    "--cfg=smpi/simulate-computation:no",
    "--cfg=smpi/send-is-detached-thresh:0",
    "--cfg=smpi/async-small-thresh:0",
    "--log=root.thres:critical",
)
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="tree" prefix="host-" radical="0-191" suffix="" speed="1Gf" bw="7GBps" lat="300ns"
           topology="FAT_TREE" topo_parameters="2;16,12;1,18;1,1" sharing_policy="SPLITDUPLEX"/>
</platform>
"""
# What is run, SimGrid's choice of algorithm, and what offcore calls it.
CASES = (
    ("near", None, "message", "near"),
    ("far", None, "message", "far"),
    ("gather", "allgather:NTSLR", "all_gather", "ring"),
    ("gather", "allgather:ring", "all_gather", "linear"),
    ("bcast", "bcast:binomial_tree", "broadcast", "knomial"),
)


def main() -> None:
    stamp = vars(Stamp())
    text = subprocess.run(("smpirun", "-version"), capture_output=True, text=True, check=True)
    version = text.stdout.split()[-1]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tree.xml").write_text(PLATFORM)
        (folder / "hosts").write_text("".join(f"host-{rank}\n" for rank in range(RANKS)))
        source = str(FOLDER / "collectives.c")
        subprocess.run(("smpicc", "-O2", source, "-o", "collectives"), cwd=folder, check=True)
        for what, choice, op, algorithm in CASES:
            words = ["smpirun", "-np", str(RANKS), "-platform", "tree.xml", "-hostfile", "hosts"]
            words += [*OPTIONS, *([f"--cfg=smpi/{choice}"] if choice else [])]
            words += ["./collectives", what, *map(str, SIZES)]
            print(*words, flush=True)
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                nbytes, seconds = line.split()
                place = {"impl": "simgrid", "op": op, "algorithm": algorithm, "hosts": RANKS}
                fact = {"bytes_per_rank": int(nbytes), "time_us": round(float(seconds) * 1e6, 6)}
                rows.append(
                    place | fact | {"simgrid": version, "gbitps": 56, "hop_ns": 300} | stamp
                )
    RESULT.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    print(RESULT)


if __name__ == "__main__":
    main()
