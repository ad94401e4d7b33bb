"""What many ranks cost: `python benchmarks/scale.py [--ranks 8,72,...] [--json FILE]`.

`plan` plans all ranks' program of a collective (lower, legalize, verify; CPU seconds of one core)
and simulates it without bytes. Machines are nvidia-8 and mi300x-8 with another number of ranks: one
switch, or a link between every two, whatever the number. Commands, signals and engines are a
rank's; a row counts as the one command that it is part of. `flag_bytes` are a rank's flag words
(mi300x: those that all ranks share in host memory), `slot_bytes` what reductions add to a window.

`part` is what a rank plans of an all-gather whose shape it knows: its own queues, from those of
half the size (CPU seconds, the mean of many). `whole_cpu_s` is the first call of the shape.
`choice` is how long the cost model weighs an all-gather's variants, of each size.

`meet` starts a process a rank on this host: CPU seconds of all of them, and the time from the first
start until the last one has a communicator.

`hosts` is a group of torch.distributed that spans hosts of 8 ranks (docs/hosts.md), 1,024 of them
at most. A rank's `inside` operations are planned and simulated on nvidia-8, the fastest variant of
each; its rail on a tree of its own, by a ring, and where the engine is multicast by that; nothing
of the two overlaps. `copied_bytes` are put in order within the GPU, which takes no time here.
`memory_bytes` is what a rank needs beside its tensors on a GPU, `received_bytes` what it gets from
other hosts. `store` is what a rank reads before the group opens, and how long that and its
conclusions take: measured, with a store on this host.

`broadcast` is a multicast on a full-bandwidth fat-tree: simulated time, CPU seconds to simulate it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import time
import uuid
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
PARTS = 200  # that are timed together
MEETING = (2, 8, 32, 72)  # processes
HOSTS, LOCAL = (2, 16, 128, 1024), 8
SPANNING = (64 << 20, 1 << 30)  # whole tensors
TREE = "radix:64"
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


def part(variant: str, name: str, ranks: int) -> Row:
    machine, form = machine_of(name, ranks), _core.Protocol()
    unit = NBYTES // ranks // 256 * 128
    scale = _core.ScaleRange(unit)
    start_s = time.process_time()
    program = _core.plan(_core.moves_all_gather([unit] * ranks), variant, machine, form, scale)
    planned_s = time.process_time()
    if not scale.holds(2 * unit):
        raise SystemExit(f"{variant} on {name}: another plan at twice the size")
    own = _core.part_of(program, ranks // 2)
    scaled_s = time.process_time()
    for _ in range(PARTS):
        _core.scaled(own, unit, 2 * unit)
    return {
        "measure": "part",
        "op": "all_gather",
        "machine": name,
        "ranks": ranks,
        "variant": variant,
        "bytes": NBYTES,
        "whole_cpu_s": round(planned_s - start_s, 4),
        "part_cpu_s": round((time.process_time() - scaled_s) / PARTS, 7),
    }


def choice(name: str, ranks: int) -> Row:
    machine, form = machine_of(name, ranks), _core.Protocol()
    moves = _core.moves_all_gather([NBYTES // ranks // 256 * 256] * ranks)
    start_s = time.process_time()
    variant, _ = _core.choose(moves, NBYTES, machine, form)
    return {
        "measure": "choice",
        "op": "all_gather",
        "machine": name,
        "ranks": ranks,
        "variant": variant,
        "bytes": NBYTES,
        "choice_cpu_s": round(time.process_time() - start_s, 4),
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


def inside(op: str, nbytes: int) -> tuple[float, float]:
    """(us simulated, CPU seconds to plan) of an operation of a host's ranks."""
    machine, form = machine_of("nvidia-8", LOCAL), _core.Protocol()
    counts = [nbytes // LOCAL // 4 * 4] * LOCAL
    start_s = time.process_time()
    if op == "all_gather":
        moves = _core.moves_all_gather(counts)
        programs = [_core.plan(moves, variant, machine, form) for variant in VARIANTS]
    else:
        programs = [_core.plan_reduction(op, counts, "sum", "float32", "auto", machine, form)]
    planned_s = time.process_time() - start_s
    session = _core.Session("sim", machine, LOCAL, phantom=True)
    return min(session.run(one, checked=False).time_ns for one in programs) / 1e3, planned_s


def rail(op: str, algorithm: str, hosts: int, nbytes: int) -> float:
    load = fat_tree.Load(op, algorithm, nbytes, chains=4 if algorithm == "multicast" else 1)
    [found] = fat_tree.measure(fat_tree.tree_of(TREE, hosts), fat_tree.Wire(), [load])
    return found.time_us


def spanning(hosts: int, nbytes: int) -> list[Row]:
    """A group of so many hosts: its calls of a whole tensor."""
    from offcore.distributed.hosts import _SMALL  # imports torch

    block, part = nbytes // hosts // LOCAL, nbytes // LOCAL
    far = (hosts - 1) * block
    joined = nbytes // hosts < _SMALL
    count, size = (1, nbytes) if joined else (hosts, nbytes // hosts)
    memory = part + nbytes * joined
    ways = {  # operations inside, with their bytes; by rail; memory; bytes from other hosts
        "all_gather": ([("all_gather", count, size)], ["all_gather"], memory, far),
        "reduce_scatter": ([("reduce_scatter", count, size)], ["reduce_scatter"], memory, far),
        "all_reduce": (
            [("reduce_scatter", 1, nbytes), ("all_gather", 1, nbytes)],
            ["reduce_scatter", "all_gather"],
            part,
            2 * far,
        ),
    }
    rows = []
    for op, (operations, steps, memory, received) in ways.items():
        told = [(count, *inside(kind, size)) for kind, count, size in operations]
        row: Row = {
            "measure": "hosts",
            "op": op,
            "hosts": hosts,
            "ranks": LOCAL,
            "bytes": nbytes,
            "operations": sum(count for count, _, _ in told),
            "plan_cpu_s": round(sum(planned for _, _, planned in told), 5),
            "inside_us": round(sum(count * took for count, took, _ in told), 1),
            "ring_us": round(sum(rail(step, "ring", hosts, part) for step in steps), 1),
            "copied_bytes": nbytes if joined and op != "all_reduce" else 0,
            "memory_bytes": memory,
            "received_bytes": received,
        }
        if op == "all_gather":
            row["multicast_us"] = round(rail(op, "multicast", hosts, part), 1)
        rows.append(row)
    return rows


def store(hosts: int) -> Row:
    """What a rank of a group that spans hosts reads of the others, and how long that takes."""
    import torch.distributed as dist

    from offcore.distributed import reach

    ranks = hosts * LOCAL
    facts = [
        json.dumps(
            {
                "place": f"{rank // LOCAL:032x} 4026531840",
                "missing": "",
                "gpu": str(uuid.UUID(int=rank)),
                "not_peers": [],
            }
        )
        for rank in range(ranks)
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, is_master=True)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    for rank, one in enumerate(facts):
        client.set(f"facts/{rank}", one)
    start_s = time.perf_counter()
    told = [one.decode() for one in client.multi_get([f"facts/{rank}" for rank in range(ranks)])]
    read_s = time.perf_counter() - start_s
    found = reach.hosts_of(told)
    if reach.obstacle(told) or len(found) != hosts:
        raise SystemExit("the facts are not those of these hosts")
    decided_s = time.perf_counter() - start_s - read_s
    del server
    return {
        "measure": "store",
        "hosts": hosts,
        "ranks": LOCAL,
        "bytes": sum(map(len, told)),
        "read_s": round(read_s, 4),
        "decided_s": round(decided_s, 4),
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


def rows(given: list[int], only: list[str]) -> Iterator[Row]:
    def wanted(measure: str) -> bool:
        return not only or measure in only

    for ranks in given if wanted("plan") else ():
        for name in ("nvidia-8", "mi300x-8"):
            if name == "mi300x-8" and ranks > 256:
                continue  # its pcpy takes minutes to simulate, and there is no such machine
            for variant in VARIANTS:
                yield in_child((plan, "all_gather", variant, name, ranks))
            yield in_child((plan, "all_reduce", "auto", name, ranks))
    for ranks in given if wanted("part") else ():
        for variant in VARIANTS:
            yield in_child((part, variant, "nvidia-8", ranks))
    for ranks in given if wanted("choice") else ():
        yield in_child((choice, "nvidia-8", ranks))
    for ranks in MEETING if wanted("meet") else ():
        yield in_child((meet, ranks))
    for hosts in HOSTS:
        for nbytes in SPANNING if wanted("hosts") else ():
            yield from in_child((spanning, hosts, nbytes))
        if wanted("store"):
            yield in_child((store, hosts))
    for hosts, tree in TREES if wanted("broadcast") else ():
        yield in_child((multicast, hosts, tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="8,72,256,1024", help="of the plans, with commas")
    parser.add_argument("--only", nargs="*", default=[], help="measures, such as hosts store")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there; - is stdout")
    given = parser.parse_args()
    stamp = asdict(Stamp())
    with JsonLines(given.json) as lines:
        for row in rows([int(ranks) for ranks in given.ranks.split(",")], given.only):
            lines.write({"impl": "offcore"} | row | stamp)
            if not lines.to_stdout:
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
