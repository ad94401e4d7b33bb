"""Packets on emulated engines over a small memory, beside the same packets done one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from offcore import _core
from offcore.errors import error
from offcore.sizes import format_bytes

Bytes = NDArray[np.uint8]
Packet = tuple[str, dict[str, int], int]

MEMORY_MAX = 1 << 30
ROUNDS_MAX = 10_000_000


@dataclass
class Work:
    """Queues by name, and where the memory is that they touch."""

    queues: dict[str, list[int]]
    memory: dict[int, Bytes]


@dataclass
class Done:
    records: list[dict[str, Any]]
    checked: int
    wrong: int
    first_wrong: int
    timestamps: list[dict[str, Any]] = field(default_factory=list)


def of_commands(dwords: list[int], base: int, nbytes: int, seed: int) -> Work:
    """One queue over noise; the words that polls and signals name begin as 0."""
    if not 0 < nbytes <= MEMORY_MAX:
        raise error("invalid", f"--memory has to be 1 to {MEMORY_MAX} bytes")
    data = _noise(nbytes, seed)
    for kind, fields, _ in _core.sdma_unpack(dwords):
        at = fields.get("dst", 0) - base
        if kind in ("poll", "fence", "atomic") and 0 <= at < nbytes:
            data[at : at + (8 if kind == "atomic" else 4)] = 0
    return Work({"0.0": dwords}, {base: data})


def of_program(program: _core.Program, copy_bytes_max: int, seed: int) -> Work:
    """All queues; callers run on engines too. Buffers hold noise, flags 0."""
    addresses = _core.SdmaAddresses.model(program)
    sizes = {name: nbytes for name, _, nbytes in program.buffers}
    sizes["flag"] = program.flag_words * _core.SDMA_WORD_BYTES
    memory: dict[int, Bytes] = {}
    for name, rank, base in addresses.bases(program):
        if sizes[name] > 0:
            memory[base] = _noise(sizes[name], seed, rank + 1, len(memory))
            if name == "flag":
                memory[base][:] = 0
    stamps = [
        int(text.split()[1]) for _, _, queue in program.queues for text in queue if "timest" in text
    ]
    memory[addresses.scratch] = np.zeros(4, np.uint8)
    memory[addresses.timestamps] = np.zeros(32 * (max(stamps, default=0) + 1), np.uint8)
    if sum(data.size for data in memory.values()) > MEMORY_MAX:
        raise error("memory", f"the program's buffers have more than {format_bytes(MEMORY_MAX)}")
    names = [f"{rank}.{queue}" for rank, queue, _ in program.queues]
    streams = _core.sdma_encode(program, addresses, copy_bytes_max, callers=True)
    return Work({names[stream.queue]: stream.dwords for stream in streams}, memory)


def _noise(nbytes: int, *seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def run(work: Work, ring_bytes: int, seed: int) -> Done:
    """Raises `Error`: invalid where an engine stops at a packet, timeout where nobody goes on."""
    before = {base: data.copy() for base, data in work.memory.items()}
    memory = _core.SdmaMemory()
    for base, data in work.memory.items():
        memory.add(base, data)
    rings = {name: _core.SdmaRing(ring_bytes) for name in work.queues}
    engines = {
        name: _core.SdmaEngine(ring, memory, seed=seed and seed + i)
        for i, (name, ring) in enumerate(rings.items())
    }
    _drive(work, rings, engines, random.Random(seed))
    expected = before
    stamps = one_by_one(work.queues, expected)
    done = Done([], 0, 0, 0)
    for name, engine in engines.items():
        done.records.append({"queue": name, "state": engine.state, **engine.counts})
    for address in stamps:
        base, at = _place(work.memory, address, 8)
        ticks = int(work.memory[base][at : at + 8].view(np.uint64)[0])
        expected[base][at : at + 8] = work.memory[base][at : at + 8]
        done.timestamps.append({"address": hex(address), "ticks": ticks})
    for base, data in work.memory.items():
        different = np.flatnonzero(data != expected[base])
        done.checked += data.size
        if different.size and not done.wrong:
            done.first_wrong = base + int(different[0])
        done.wrong += int(different.size)
    return done


def _drive(
    work: Work,
    rings: dict[str, _core.SdmaRing],
    engines: dict[str, _core.SdmaEngine],
    rng: random.Random,
) -> None:
    """Feeds rings as they have room, and lets one engine after the other go on for a while."""
    left = dict(work.queues)
    names = list(left)
    stalled = 0
    for _ in range(ROUNDS_MAX):
        rng.shuffle(names)
        moved = False
        for name in names:
            before = (rings[name].rptr, len(left[name]))
            if left[name]:
                part = rings[name].part_of(left[name])
                if rings[name].try_submit(left[name][:part]):
                    left[name] = left[name][part:]
            state = engines[name].run(rng.randint(1, 16))
            if state == "faulted":
                raise error("invalid", f"queue {name}: {engines[name].fault}")
            moved |= before != (rings[name].rptr, len(left[name])) or state == "busy"
        if not any(left.values()) and all(engine.state == "idle" for engine in engines.values()):
            return
        stalled = 0 if moved else stalled + 1
        if stalled > 1:  # every engine has looked again, and none went on
            parked = [
                f"queue {name} at dword {rings[name].rptr // 4} of its ring"
                for name in sorted(engines)
                if engines[name].state == "parked"
            ]
            raise error("timeout", f"no queue can continue; polls wait: {', '.join(parked[:16])}")
    raise error("timeout", f"no end after {ROUNDS_MAX} rounds")


def one_by_one(queues: dict[str, list[int]], memory: dict[int, Bytes]) -> list[int]:
    """Does packets in the order of each queue, none before the one before has ended; returns where
    timestamps belong. Written without the core, but for the decoding."""
    packets = {name: _core.sdma_unpack(dwords) for name, dwords in queues.items()}
    reached = dict.fromkeys(packets, 0)
    stamps: list[int] = []
    while any(reached[name] < len(queue) for name, queue in packets.items()):
        before = dict(reached)
        for name, queue in packets.items():
            while reached[name] < len(queue) and _do(queue[reached[name]], memory, stamps):
                reached[name] += 1
        if before == reached:
            raise error("timeout", "executed one by one, the packets wait for each other")
    return stamps


def _place(memory: dict[int, Bytes], address: int, nbytes: int) -> tuple[int, int]:
    for base, data in memory.items():
        if base <= address and address + nbytes <= base + data.size:
            return base, address - base
    raise error("invalid", f"{nbytes} bytes at {address:#x} are not in the memory")


def _do(packet: Packet, memory: dict[int, Bytes], stamps: list[int]) -> bool:
    """False where a poll does not pass."""
    kind, fields, _ = packet

    def cells(address: int, nbytes: int) -> Bytes:
        base, at = _place(memory, address, nbytes)
        return memory[base][at : at + nbytes]

    dst = fields.get("dst", 0)
    if kind == "poll":
        word = int(cells(dst, 4).view(np.uint32)[0]) & fields["mask"]
        value = fields["value"]
        return (True, word < value, word <= value, word == value, word != value, word >= value,
                word > value)[fields["func"]]  # fmt: skip
    if kind == "fence":
        cells(dst, 4).view(np.uint32)[0] = fields["value"]
    elif kind == "atomic":
        word64 = cells(dst, 8).view(np.uint64)
        word64[0] = (int(word64[0]) + fields["value"]) % (1 << 64)
    elif kind == "timestamp":
        stamps.append(dst)
    elif kind == "fill":
        cells(dst, fields["bytes"]).view(np.uint32)[:] = fields["value"]
    elif kind == "rect":
        for to, what, nbytes in _rows(fields):
            cells(to, nbytes)[:] = cells(what, nbytes).copy()
    elif kind != "trap":
        nbytes = fields["bytes"]
        one, other = cells(dst, nbytes), cells(fields["src"], nbytes)
        old = one.copy()
        one[:] = other.copy()
        if kind == "swap":
            other[:] = old
        elif kind == "broadcast":
            cells(fields["dst2"], nbytes)[:] = one
    return True


def _rows(fields: dict[str, int]) -> list[tuple[int, int, int]]:
    """Each row of a rectangle: dst, src, bytes."""
    element = 1 << fields["element"]

    def at(side: str, y: int, z: int) -> int:
        return fields[side] + element * (
            fields[f"{side}_x"]
            + (fields[f"{side}_y"] + y) * fields[f"{side}_pitch"]
            + (fields[f"{side}_z"] + z) * fields[f"{side}_slice"]
        )

    return [
        (at("dst", y, z), at("src", y, z), fields["width"] * element)
        for z in range(fields["depth"])
        for y in range(fields["height"])
    ]


def table(done: Done) -> Table:
    columns = (
        "packets",
        "moves",
        "bytes",
        "overtaken",
        "fences",
        "atomics",
        "polls",
        "parks",
        "laps",
    )
    shown = Table(title="emulated engines", box=box.SIMPLE_HEAD, title_justify="left")
    shown.add_column("queue")
    for column in columns:
        shown.add_column(column, justify="right")
    for record in done.records:
        shown.add_row(record["queue"], *(str(record[column]) for column in columns))
    stamps = "".join(f"timestamp at {one['address']}: {one['ticks']} ticks of 10 ns\n"
                     for one in done.timestamps)  # fmt: skip
    shown.caption = f"{stamps}{done.checked} bytes checked, {done.wrong} wrong"
    shown.caption_justify = "left"
    return shown
