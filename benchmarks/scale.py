"""What many ranks cost: `python benchmarks/scale.py [--ranks 8,72,...] [--json FILE]`.

`plan` plans all ranks' program of a collective (lower, legalize, verify; CPU seconds of one core)
and simulates it without bytes. Machines are nvidia-8 and mi300x-8 with another number of ranks: one
switch, or a link between every two, whatever the number. Commands, signals and engines are a
rank's; a row counts as the one command that it is part of. `flag_bytes` are a rank's flag words
(mi300x: those that all ranks share in host memory), `slot_bytes` what reductions add to a window.

`meet` starts a process a rank on this host: CPU seconds of all of them, and the time from the first
start until the last one has a communicator.

`broadcast` is a multicast on a full-bandwidth fat-tree: simulated time, CPU seconds to simulate it.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import offcore
from offcore import _core, machines
from offcore.tools.mcast import fat_tree
from offcore.tools.report import JsonLines, Stamp

NBYTES = 64 << 20  # of an all-gather's or all-reduce's output, and a broadcast
VARIANTS = ("pcpy", "bcst", "fan", "b2b")
MEETING = (2, 8, 32, 72)  # processes
TREES = ((8, "radix:64"), (72, "radix:64"), (1024, "radix:64"), (65536, "radix:64"))
Row = dict[str, Any]


def machine_of(name: str, ranks: int) -> _core.Machine:
    machine = machines.load(name)
    machine.ranks = ranks
    machine.tuned = []
    return machine


def planned(op: str, variant: str, machine: _core.Machine) -> _core.Program:
    counts = [NBYTES // machine.ranks // 256 * 256] * machine.ranks
    form = _core.Protocol()
    if op == "all_reduce":
        return _core.plan_reduction(op, counts, "sum", "float32", "auto", machine, form)
    return _core.plan(_core.moves_all_gather(counts), variant, machine, form)


def plan(op: str, variant: str, name: str, ranks: int) -> Row:
    machine = machine_of(name, ranks)
    start_s = time.process_time()
    program = planned(op, variant, machine)
    planned_s = time.process_time()
    session = _core.Session("sim", machine, ranks, phantom=True)
    time_ns = session.run(program, checked=False).time_ns
    simulated_s = time.process_time()
    counts = program.counts()
    return {
        "measure": "plan",
        "op": op,
        "machine": name,
        "ranks": ranks,
        "variant": program.variant,
        "bytes": NBYTES,
        "commands": counts.commands / ranks,
        "copies": counts.copies / ranks,
        "signals": counts.syncs / ranks,
        "engines": counts.engines / ranks,
        "flag_bytes": 4 * program.flag_words,
        "slot_bytes": sum(size for label, _, size in program.buffers if label == "slot"),
        "plan_cpu_s": round(planned_s - start_s, 4),
        "simulated_us": time_ns / 1e3,
        "simulation_cpu_s": round(simulated_s - planned_s, 4),
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def in_child(work: Any) -> Any:
    """Of a process of its own: the peak of memory is a process's."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(*work).result()


def join(ready: int, store: str, rank: int, ranks: int) -> None:
    with offcore.Communicator(
        backend="host", store=store, rank=rank, world_size=ranks, timeout=120.0
    ) as comm:
        os.write(ready, b"+")
        comm.barrier()


def meet(ranks: int) -> Row:
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"127.0.0.1:{free.getsockname()[1]}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ready, told = os.pipe()
    start_s = time.perf_counter()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            join(told, store, rank, ranks)
            os._exit(0)
        children.append(child)
    count = 0
    while count < ranks:
        count += len(os.read(ready, ranks))
    took_s = time.perf_counter() - start_s
    for child in children:
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(f"a rank of {ranks} failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "measure": "meet",
        "backend": "host",
        "ranks": ranks,
        "time_s": round(took_s, 4),
        "cpu_s": round(cpu_s, 4),
    }


def multicast(hosts: int, tree: str) -> Row:
    start_s = time.process_time()
    found = fat_tree.measure(
        fat_tree.tree_of(tree, hosts),
        fat_tree.Wire(),
        [fat_tree.Load("broadcast", fat_tree.MULTICAST, NBYTES)],
    )[0]
    return {
        "measure": "broadcast",
        "hosts": hosts,
        "tree": tree,
        "bytes": NBYTES,
        "simulated_us": round(found.time_us, 3),
        "switch_bytes": found.switch_bytes,
        "simulation_cpu_s": round(time.process_time() - start_s, 4),
    }


def rows(given: list[int]) -> Iterator[Row]:
    for ranks in given:
        for name in ("nvidia-8", "mi300x-8"):
            if name == "mi300x-8" and ranks > 256:
                continue  # its pcpy takes minutes to simulate, and there is no such machine
            for variant in VARIANTS:
                yield in_child((plan, "all_gather", variant, name, ranks))
            yield in_child((plan, "all_reduce", "auto", name, ranks))
    for ranks in MEETING:
        yield in_child((meet, ranks))
    for hosts, tree in TREES:
        yield in_child((multicast, hosts, tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="8,72,256,1024", help="of the plans, with commas")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there; - is stdout")
    given = parser.parse_args()
    stamp = asdict(Stamp())
    with JsonLines(given.json) as lines:
        for row in rows([int(ranks) for ranks in given.ranks.split(",")]):
            lines.write({"impl": "offcore"} | row | stamp)
            if not lines.to_stdout:
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
