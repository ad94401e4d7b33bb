"""Transfers of one agent of the installed NIXL through the backend OFFCORE, a program of one case:
`nixl_agent.py CASE`, with the driver of OFFCORE_LIBCUDA and plugins from NIXL_PLUGIN_DIR.

It needs no Offcore: memory comes from the driver, by ctypes.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from ctypes import c_uint64
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from cuda_driver import Driver

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # of which one has NIXL's Python interface
DRAM, VRAM = "DRAM", "VRAM"
BACKEND = "OFFCORE"
Entries = list[tuple[int, int, int]]  # offset of the destination, of the source, bytes


def nixl() -> Any:
    """The package that is installed."""
    for name in PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    raise ImportError(f"none of {', '.join(PACKAGES)}")


class Agent:
    """An agent with one backend, and registered memory of GPU 0 and of the host."""

    def __init__(self, nbytes: int, backend: str = BACKEND) -> None:
        api = nixl()
        self.driver = Driver(os.environ.get("OFFCORE_LIBCUDA", "libcuda.so.1"))
        self.driver.start(0)
        self.agent = api.nixl_agent("one", api.nixl_agent_config(backends=[]))
        self.agent.create_backend(backend, {})
        self.nbytes = nbytes
        self.host = np.zeros(nbytes, np.uint8)
        self.gpu = self.driver.get(c_uint64, "cuMemAlloc", nbytes)
        self.kept = {
            kind: self.agent.register_memory([(self.at(kind), nbytes, 0, "")], kind)
            for kind in (DRAM, VRAM)
        }

    def at(self, kind: str) -> int:
        return self.host.ctypes.data if kind == DRAM else self.gpu

    def fill(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        self.host[:] = rng.integers(0, 256, self.nbytes, np.uint8)
        self.driver.put(self.gpu, rng.integers(0, 256, self.nbytes, np.uint8).tobytes())
        return self.look()

    def look(self) -> dict[str, np.ndarray]:
        data = self.driver.read(self.gpu, self.nbytes)
        return {DRAM: self.host.copy(), VRAM: np.frombuffer(data, np.uint8).copy()}

    def lists(self, entries: Entries, dst: str, src: str) -> dict[str, np.ndarray]:
        """Descriptors of both sides, by the side that they are of."""
        column = np.array(entries, np.uint64)
        sides = {"dst": (column[:, 0], dst), "src": (column[:, 1], src)}
        return {
            side: np.stack([self.at(kind) + at, column[:, 2], np.zeros_like(at)], 1)
            for side, (at, kind) in sides.items()
        }

    def request(self, entries: Entries, dst: str, src: str, operation: str) -> Any:
        """Of flat lists, through initialize_xfer."""
        lists = self.lists(entries, dst, src)
        local, remote = ("dst", "src") if operation == "READ" else ("src", "dst")
        kinds = {"dst": dst, "src": src}
        descriptors = [self.agent.get_xfer_descs(lists[s], kinds[s]) for s in (local, remote)]
        return self.agent.initialize_xfer(operation, *descriptors, "one")

    def selector(self, entries: Entries, dst: str, src: str, operation: str) -> Callable[[], Any]:
        """Makes requests of lists that are prepared once, selected from by numbers."""
        lists = self.lists(entries, dst, src)
        local, remote = ("dst", "src") if operation == "READ" else ("src", "dst")
        kinds = {"dst": dst, "src": src}
        sides = [
            self.agent.prep_xfer_dlist(name, lists[side], kinds[side])
            for name, side in (("NIXL_INIT_AGENT", local), ("one", remote))
        ]
        numbers = np.arange(len(entries), dtype=np.int32)
        return lambda: self.agent.make_prepped_xfer(operation, sides[0], numbers, sides[1], numbers)

    def prepared(self, entries: Entries, dst: str, src: str, operation: str) -> Any:
        return self.selector(entries, dst, src, operation)()

    def hold(self, held: bool) -> bool:
        """Whether the engines stand until they are let go: real ones cannot be told to."""
        if not hasattr(self.driver.library, "fakecuda_hold_host_engines"):
            return False
        self.driver.library.fakecuda_hold_host_engines(int(held))
        return held

    def post(self, request: Any) -> None:
        assert self.agent.transfer(request) in ("PROC", "DONE")

    def finish(self, request: Any, wait_s: float = 20) -> None:
        until = time.monotonic() + wait_s
        while (state := self.agent.check_xfer_state(request)) != "DONE":
            assert state == "PROC", state
            assert time.monotonic() < until


def after(before: dict[str, np.ndarray], entries: Entries, dst: str, src: str) -> Any:
    result = {kind: data.copy() for kind, data in before.items()}
    for to, at, nbytes in entries:
        result[dst][to : to + nbytes] = before[src][at : at + nbytes]
    return result


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(found[kind], wanted[kind]) for kind in wanted)


def scattered(rng: random.Random, count: int, nbytes: int, within: bool = False) -> Entries:
    """Entries apart from each other, some of them at equal steps."""
    step = nbytes // (2 * count)
    ats = [nbytes // 2 + step * i for i in range(count)]
    tos = [(step if within else 2 * step) * i for i in range(count)]
    for places in (tos, ats):
        shuffled = places[count // 2 :]
        rng.shuffle(shuffled)
        places[count // 2 :] = shuffled
    return [
        (to, at, step if i < count // 4 else rng.randint(1, step))
        for i, (to, at) in enumerate(zip(tos, ats, strict=True))
    ]


def directions() -> Iterator[tuple[str, str, str]]:
    for dst, src in ((VRAM, DRAM), (DRAM, VRAM), (VRAM, VRAM)):
        for operation in ("READ", "WRITE"):
            yield dst, src, operation


def random_lists() -> None:
    """Every way, each list posted several times, every byte checked."""
    agent = Agent(1 << 20)
    rng = random.Random(1)
    for trial, (dst, src, operation) in enumerate(directions()):
        for make in (agent.request, agent.prepared):
            entries = scattered(rng, rng.choice([1, 7, 100, 1000]), agent.nbytes, dst == src)
            request = make(entries, dst, src, operation)
            for turn in range(3):
                before = agent.fill(100 * trial + turn)
                agent.post(request)
                agent.finish(request)
                assert same(agent.look(), after(before, entries, dst, src)), (dst, src, operation)
            agent.agent.release_xfer_handle(request)


def long_lists() -> None:
    """10,000 descriptors: posting does not wait for them, nor does asking."""
    agent = Agent(32 << 20)
    rng = random.Random(2)
    for dst, src, operation in directions():
        entries = scattered(rng, 10000, agent.nbytes, dst == src)
        request = agent.prepared(entries, dst, src, operation)
        before = agent.fill(3)
        held = agent.hold(dst != src)
        began = time.monotonic()
        agent.post(request)
        took = time.monotonic() - began
        assert took < 0.1, took
        assert not held or agent.agent.check_xfer_state(request) == "PROC"
        agent.hold(False)
        agent.finish(request)
        assert same(agent.look(), after(before, entries, dst, src)), (dst, src, operation)


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return True
    return False


def refusals() -> None:
    """What is no memory of the agent's, or cannot be copied, is refused; no byte changes."""
    agent = Agent(2 << 20)
    before, room = agent.fill(1), agent.nbytes
    for entries, dst, src in (
        ([(0, 0, 100), (room - 10, 200, 100)], VRAM, DRAM),  # behind the registered memory
        ([(0, 0, 100), (50, 200, 100)], VRAM, DRAM),  # on top of each other
        ([(0, 500, 100)], DRAM, DRAM),  # no engine copies that
    ):
        for operation in ("READ", "WRITE"):
            assert refused(lambda e=entries, d=dst, s=src, o=operation: agent.request(e, d, s, o))
    unknown = np.zeros(4096, np.uint8)
    for kind, address in ((VRAM, unknown.ctypes.data), (DRAM, agent.gpu), (VRAM, 4096)):
        region = [(address, 100, 0, "")]
        assert refused(lambda k=kind, r=region: agent.agent.register_memory(r, k, [BACKEND]))
    wrong = [(agent.gpu, 100, 1, "")]  # the other GPU's number
    assert refused(lambda: agent.agent.register_memory(wrong, VRAM, [BACKEND]))
    assert same(agent.look(), before)
    request = agent.request([(0, 0, 100)], VRAM, DRAM, "WRITE")
    agent.agent.deregister_memory(agent.kept[DRAM], [BACKEND])
    agent.agent.register_memory([(agent.at(DRAM), room, 0, "")], DRAM, [BACKEND])
    assert refused(lambda: agent.post(request))
    assert same(agent.look(), before)


def released_under_way() -> None:
    """Releasing waits for the engines, or gives up after OFFCORE_TIMEOUT_S and may be repeated;
    then memory can be deregistered and freed. NIXL keeps Python's lock meanwhile."""
    agent = Agent(8 << 20)
    rng = random.Random(3)
    for dst, src, operation in directions():
        for count, holds in ((1, False), (1, True), (4000, False), (4000, True)):
            entries = scattered(rng, count, agent.nbytes, dst == src)
            request = agent.request(entries, dst, src, operation)
            before = agent.fill(count)
            held = agent.hold(holds and dst != src)
            agent.post(request)
            if held:
                assert agent.agent.check_xfer_state(request) == "PROC"
                assert count == 1 or time.sleep(0.2) is None  # its thread stands in the driver
                assert refused(lambda r=request: agent.agent.release_xfer_handle(r))
                agent.hold(False)
            agent.agent.release_xfer_handle(request)
            found = agent.look()
            whole = same(found, after(before, entries, dst, src))
            assert whole or (count > 1 and not held and same(found, before))  # it had not begun
            time.sleep(0.05)
            assert same(agent.look(), found)
    for kind, kept in agent.kept.items():
        agent.agent.deregister_memory(kept, [BACKEND])
        assert refused(lambda k=kind: agent.request([(0, 0, 100)], k, VRAM, "READ"))


def no_driver() -> None:
    """Without a driver there is no backend."""
    api = nixl()
    agent = api.nixl_agent("one", api.nixl_agent_config(backends=[]))
    assert BACKEND in agent.get_plugin_list()
    assert refused(lambda: agent.create_backend(BACKEND, {}))


def wrong_parameter() -> None:
    api = nixl()
    agent = api.nixl_agent("one", api.nixl_agent_config(backends=[]))
    assert refused(lambda: agent.create_backend(BACKEND, {"gpu": "first"}))
    agent.create_backend(BACKEND, {"gpu": "1"})


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("passed")
    sys.stdout.flush()
