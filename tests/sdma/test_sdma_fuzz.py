"""The program decoder, on dwords that are nearly right: it says what is wrong with them.

What it takes says the same when it is encoded again, and no engine refuses it.
"""

import random

import numpy as np
import pytest

import offcore
from offcore import _core

SIZE = 8192
HEADER = f"""\
program fuzz machine=m ranks=2 variant=v mode=eager protocol=promise native=yes flags=8 span=4
buffer a window {SIZE}
buffer own local {SIZE}
buffer pool host {SIZE}
queue 0.0
"""


def some_command(rng: random.Random) -> str:
    nbytes = rng.choice([1, 4, 64, 256, rng.randint(1, 300)])
    to, at = (rng.choice([1, 4, 64]) * rng.randint(0, 60) for _ in range(2))
    places = f"a[{rng.randint(0, 1)}]+{to} <- {rng.choice(['own[0]', 'pool[host]'])}+{at}"
    rows = f"rows={rng.randint(2, 9)} dst_step={4 * rng.randint(75, 99)} src_step=320"
    word = f"flag[{rng.choice(['0', '1', 'host'])}]:{rng.randint(0, 7)}"
    return rng.choice(
        [
            f"copy {places} bytes={nbytes}",
            f"copy {places} bytes={nbytes} {rows}",
            f"copy a[1]+{to + 64} <- own[0]+{at} bytes={nbytes} rows=2 dst_step=32 src_step=0",
            f"swap a[1]+{to * 64 % 4096} <-> own[0]+{at * 64 % 4096} bytes={nbytes}",
            f"poll {word} >= {rng.randint(1, 4)}",
            f"signal {word} = {rng.randint(1, 4)}",
            f"timestamp {rng.randint(0, 9)}",
            "fence",
        ]
    )


def mutated(dwords: list[int], rng: random.Random) -> list[int]:
    dwords = [*dwords]
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(dwords))
        kind = rng.randrange(5)
        if kind == 0:
            dwords[at] ^= 1 << rng.randrange(32)
        elif kind == 1:
            dwords[at] = rng.choice([0, 1, 5, 7, 8, 63, 0x401, 0x901, 0x08000001, 0xD0000008])
        elif kind == 2:
            del dwords[at : at + rng.choice([1, 4, 7])]
        elif kind == 3:
            dwords[at:at] = dwords[at : at + rng.choice([1, 4, 6, 7, 9])]
        else:
            dwords[at] = (dwords[at] + rng.choice([1, 3, 4, 16, 32, 64])) % (1 << 32)
        dwords = dwords or [0]
    return dwords


class Ground:
    """Memory of an engine's where the model's addresses are. Its flags let every poll pass."""

    def __init__(self, program: _core.Program, addresses: _core.SdmaAddresses) -> None:
        self.memory = _core.SdmaMemory()
        self.flags = []
        for name, _, base in addresses.bases(program):
            array = np.zeros(8 * 64 if name == "flag" else SIZE, np.uint8)
            self.memory.add(base, array)
            self.flags += [array] if name == "flag" else []
        self.memory.add(addresses.scratch, np.zeros(4, np.uint8))
        self.memory.add(addresses.timestamps, np.zeros(32 << 16, np.uint8))

    def run(self, dwords: list[int], seed: int) -> _core.SdmaEngine:
        for array in self.flags:
            array[:] = 255
        ring = _core.SdmaRing(1 << 16)
        engine = _core.SdmaEngine(ring, self.memory, seed=seed, now_ns=0)
        ring.submit(dwords)
        engine.run()
        return engine


def decoded(
    dwords: list[int], empty: _core.Program, addresses: _core.SdmaAddresses
) -> tuple[_core.Program | None, str, str]:
    """The program, or why there is none: the error's code and text."""
    try:
        return _core.sdma_decode({0: dwords}, empty, addresses), "", ""
    except offcore.Error as failure:
        return None, failure.code, str(failure)


def assert_fuzzed_programs_are_told(cases: int, seed: int) -> None:
    rng = random.Random(seed)
    empty = _core.Program.parse(HEADER)
    addresses = _core.SdmaAddresses.model(empty)
    ground = Ground(empty, addresses)
    taken = 0
    for case in range(cases):
        if case % 50 == 0:
            body = "".join(f" {some_command(rng)}\n" for _ in range(rng.randint(1, 9)))
            [stream] = _core.sdma_encode(_core.Program.parse(HEADER + body), addresses)
        dwords = mutated(stream.dwords, rng)
        program, code, told = decoded(dwords, empty, addresses)
        if program is None:
            assert code in ("invalid", "unsupported")
            assert "dword " in told
            continue
        taken += 1
        engine = ground.run(dwords, case)
        assert engine.fault == "", (program, engine.fault)
        [again] = _core.sdma_encode(program, addresses)
        assert _core.sdma_decode({0: again.dwords}, empty, addresses) == program
    assert cases // 5 < taken < cases


def test_fuzzed_programs() -> None:
    assert_fuzzed_programs_are_told(10_000, 1)


@pytest.mark.long
def test_many_fuzzed_programs() -> None:
    assert_fuzzed_programs_are_told(100_000, random.randrange(1 << 30))
