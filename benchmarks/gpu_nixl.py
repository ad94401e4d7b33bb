"""What a transfer costs in NIXL by the backend OFFCORE: to describe it, to post it, and until done.

    NIXL_PLUGIN_DIR=FOLDER python benchmarks/gpu_nixl.py

FOLDER has libplugin_OFFCORE.so; NIXL is installed. Lists are pages of a paged cache's blocks (one
page a layer, which fold into a strided copy a block) or pages without a pattern, between host
memory and GPU 0. `fresh`: initialize_xfer of two lists. `selected`: make_prepped_xfer of lists that
NIXL has prepared. `post`: transfer() of one of them, posted again and again. `done`: from there
until check_xfer_state() says so. Medians. Every list is checked byte for byte once.

--cpu-time: all but `done` in CPU time of the calling thread, so that others on the machine count
little: on the stand-in driver (OFFCORE_LIBCUDA), where `done` and the rate mean nothing. --backend
UCX measures another backend of that folder.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("serving", "fakes")]
import nixl_agent  # type: ignore[import-not-found] # noqa: E402
from nixl_agent import DRAM, VRAM, Agent, Entries  # noqa: E402

LAYERS = 40
WAYS = {"load": (VRAM, DRAM, "READ"), "store": (DRAM, VRAM, "READ")}


def pages(count: int, page: int) -> Entries:
    """Blocks of LAYERS pages each: layer after layer on the GPU, side by side on the host."""
    blocks = count // LAYERS
    order = random.Random(1).sample(range(2 * blocks), blocks)
    return [
        ((layer * 2 * blocks + at) * page, (block * LAYERS + layer) * page, page)
        for block, at in enumerate(order)
        for layer in range(LAYERS)
    ]


def apart(count: int, page: int) -> Entries:
    """Every second page, none where the one before it is."""
    rng = random.Random(2)
    tos, ats = (rng.sample(range(count), count) for _ in range(2))
    return [(2 * to * page, 2 * at * page, page) for to, at in zip(tos, ats, strict=True)]


def turned(entries: Entries, way: str) -> Entries:
    return entries if way == "load" else [(at, to, nbytes) for to, at, nbytes in entries]


def median_us(
    told: argparse.Namespace, call: Callable[[], Any], end: Callable[[Any], None]
) -> float:
    clock = time.thread_time_ns if told.cpu_time else time.perf_counter_ns
    taken = []
    for _ in range(told.turns):
        began = clock()
        result = call()
        taken.append((clock() - began) / 1e3)
        end(result)
    return statistics.median(taken)


def measure(agent: Agent, name: str, count: int, page: int, way: str, told: Any) -> str:
    dst, src, operation = WAYS[way]
    entries = turned((pages if name == "pages" else apart)(count, page), way)
    lists = agent.lists(entries, dst, src)
    sides = [agent.agent.get_xfer_descs(lists[s], kind) for s, kind in (("dst", dst), ("src", src))]
    release = agent.agent.release_xfer_handle
    fresh = median_us(told, lambda: agent.agent.initialize_xfer(operation, *sides, "one"), release)
    selected = agent.selector(entries, dst, src, operation)
    made = median_us(told, selected, release)
    request = selected()
    before = agent.fill(count)
    agent.post(request)
    agent.finish(request)
    if not nixl_agent.same(agent.look(), nixl_agent.after(before, entries, dst, src)):
        raise SystemExit(f"{name} of {count}: wrong bytes")
    post = median_us(told, lambda: agent.post(request), lambda _: agent.finish(request))
    ends = []
    for _ in range(told.turns):
        began = time.perf_counter_ns()
        agent.post(request)
        agent.finish(request)
        ends.append((time.perf_counter_ns() - began) / 1e3)
    release(request)
    done = statistics.median(ends)
    rate = count * page / done / 1e3
    times = f"{fresh:10.0f} {made:10.0f} {post:8.1f} {done:10.0f} {rate:7.1f}"
    return f"{way:6} {name:6} {count:7} {page:7} {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backend", default="OFFCORE", help="of NIXL_PLUGIN_DIR")
    parser.add_argument("--page", type=int, nargs="+", default=[32768], help="bytes")
    parser.add_argument("--count", type=int, nargs="+", default=[1000, 10000], help="descriptors")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--cpu-time", action="store_true")
    told = parser.parse_args()
    agent = Agent(2 * max(told.page) * max(told.count), told.backend)
    print(f"{told.backend}; us\n{'':31} fresh   selected     post       done    GB/s")
    for page in told.page:
        for count in told.count:
            for name in ("pages", "apart"):
                for way in WAYS:
                    print(measure(agent, name, count, page, way, told), flush=True)


if __name__ == "__main__":
    main()
