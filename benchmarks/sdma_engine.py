"""How many packets a second an emulated SDMA engine executes: `python benchmarks/sdma_engine.py`.

One engine, one thread, packets in flight in random order: copies and broadcasts of 64 bytes, a poll
that has passed with a FENCE, and the engine queues of an 8-rank all-gather of 1 KiB a rank. The
target is 500,000 a second. The time is that of fetching and executing; packets are in the ring.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

import offcore
from offcore import _core
from offcore.tools.report import JsonLines, Stamp

RING_BYTES = 1 << 24
REPETITIONS = 9


def workloads() -> Iterator[tuple[str, list[int], _core.SdmaMemory]]:
    memory = _core.SdmaMemory()
    memory.add(0, np.zeros(1 << 20, np.uint8))
    copies, broadcasts, words = (_core.SdmaEncoder() for _ in range(3))
    for i in range(100_000):
        at = 64 * (i % 4096)
        copies.copy((1 << 19) + at, at, 64)
        broadcasts.broadcast([(1 << 19) + at, (1 << 18) + at], at, 64)
        words.poll(0, 0)
        words.fence(64, i)
    yield "copies of 64 bytes", copies.dwords, memory
    yield "broadcasts of 64 bytes", broadcasts.dwords, memory
    yield "polls and fences", words.dwords, memory
    yield "all_gather b2b, 8 ranks, 8K", *collective()


def collective() -> tuple[list[int], _core.SdmaMemory]:
    machine = offcore.machines.load("mi300x-8")
    moves = _core.moves_all_gather([1024] * 8)
    program = _core.plan(moves, "b2b", machine, _core.Protocol(entry=False))
    addresses = _core.SdmaAddresses.model(program)
    memory = _core.SdmaMemory()
    for _, _, base in addresses.bases(program):
        memory.add(base, np.zeros(1 << 16, np.uint8))
    streams = _core.sdma_encode(program, addresses)
    return [dword for stream in streams for dword in stream.dwords] * 1000, memory


def packets_per_s(dwords: list[int], memory: _core.SdmaMemory, seed: int) -> float:
    ring = _core.SdmaRing(RING_BYTES)
    engine = _core.SdmaEngine(ring, memory, seed=seed)
    ring.submit(dwords)
    start = time.perf_counter()
    assert engine.run() == "idle", engine.fault
    return float(engine.counts["packets"] / (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE|-")
    target = parser.parse_args().json
    stamp = vars(Stamp())
    with JsonLines(target) as lines:
        for name, dwords, memory in workloads():
            found = [packets_per_s(dwords, memory, seed) for seed in range(1, REPETITIONS + 1)]
            row = {
                "impl": "offcore",
                "metric": "sdma_packets",
                "op": name,
                "machine": "emulated engine",
                "value_per_s": round(statistics.median(found)),
                "value_per_s_min": round(min(found)),
            }
            lines.write(row | stamp)
            if target != "-":
                print(f"{name:30} {row['value_per_s']:>12,} packets/s (least {min(found):,.0f})")


if __name__ == "__main__":
    main()
