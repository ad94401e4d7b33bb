"""Faults of simulated engines, met by collectives: an error or the right bytes."""

import random

import numpy as np
import pytest

import offcore
from oracles import Bytes, Case, equal_case, noise
from random_faults import random_fault

RANKS = 4
PART = 512
OPS = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")
FAULTY = ("slow_engine", "late_signal", "lost_signal", "flipped_byte", "dead_rank")


class Rig:
    """A communicator with these faults, and one case on it."""

    def __init__(self, case: Case, machine: str, faults: list[dict], seed: int = 0) -> None:
        self.case = case
        self.comm = offcore.Communicator(
            backend="sim", machine=machine, ranks=case.ranks, faults=faults, seed=seed
        )
        self.size = max(case.out_bytes(rank) or 0 for rank in range(case.ranks))
        self.out = self.comm.empty(self.size)

    def call(self, seed: int, variant: str, protocol: str = "auto") -> int:
        """Runs the case on fresh bytes; the number of wrong ones."""
        case = self.case
        inputs: list[Bytes | None] = []
        for rank in range(case.ranks):
            size = case.in_bytes(rank)
            inputs.append(None if size is None else noise(size, seed, rank))
            self.out[rank][:] = 0
        root = {} if case.op.startswith("all") else {"root": case.root}
        call = getattr(self.comm, case.op)
        call(self.out, inputs, variant=variant, protocol=protocol, **root).wait()
        expected = case.expected(inputs)
        return sum(
            int((out[: data.size] != data).sum())
            for out, data in zip(self.out, expected, strict=True)
            if data is not None
        )


@pytest.mark.parametrize("machine", ["mi300x-8", "h200-4"])
@pytest.mark.parametrize("op", OPS)
def test_random_faults(op: str, machine: str) -> None:
    """Of any fault: what is slow or late ends right, what is lost or dead is an error that says so,
    and a flipped byte is exactly one wrong byte."""
    seen = dict.fromkeys(FAULTY, 0)
    for seed in range(60):
        rng = random.Random(f"{op} {machine} {seed}")
        case = equal_case(op, RANKS, PART, root=rng.randrange(RANKS))
        healthy = Rig(case, machine, [])
        variant = rng.choice(healthy.comm.variants(op))
        protocol = rng.choice(["barrier", "eager"])
        program = healthy.comm.program(op, 4096, variant=variant, protocol=protocol)
        fault = random_fault(seed, program)
        rig = Rig(case, machine, [fault], seed)
        kind = fault["kind"]
        try:
            wrong = [rig.call(turn, variant, protocol) for turn in range(3)]
        except offcore.Error as error:
            check_error(error, kind, fault)
            seen[kind] += 1
        else:
            # A rooted operation may have fewer queues than the program above.
            assert sum(wrong) == (1 if kind == "flipped_byte" and sum(wrong) else 0), (fault, wrong)
            seen[kind] += kind in ("slow_engine", "late_signal") or sum(wrong)
    assert all(seen.values()), seen


def check_error(error: offcore.Error, kind: str, fault: dict) -> None:
    assert kind in ("lost_signal", "dead_rank"), (kind, str(error))
    message = str(error)
    if kind == "lost_signal":
        assert error.code == "timeout"
        assert "stuck: queue " in message
        assert " at command " in message
        assert "(poll flag[" in message
    else:
        assert error.code == "peer"
        assert f"rank {fault['rank']}" in message


def test_after_a_lost_signal_the_wait_may_be_repeated() -> None:
    case = equal_case("all_gather", RANKS, PART)
    rig = Rig(case, "h200-4", [{"kind": "lost_signal", "rank": 1, "queue": 0, "nth": 1}])
    assert rig.call(0, "b2b") == 0
    handle = rig.comm.all_gather(rig.out, [noise(PART, 1, r) for r in range(RANKS)], variant="b2b")
    for _ in range(2):
        with pytest.raises(offcore.Error) as failed:
            handle.wait()
        assert failed.value.code == "timeout"
        assert "queue 0.caller at command" in str(failed.value)
    rig.comm.close()


def test_a_dead_rank_is_dead_for_good() -> None:
    case = equal_case("all_to_all", RANKS, PART)
    rig = Rig(case, "mi300x-8", [{"kind": "dead_rank", "rank": 2, "ns": 1000}])
    for _ in range(3):
        with pytest.raises(offcore.Error) as failed:
            rig.call(0, "pcpy")
        assert failed.value.code == "peer"
        assert "rank 2" in str(failed.value)


def test_several_faults_at_once() -> None:
    """Slowness everywhere changes times and nothing else."""
    faults = [
        {"kind": "slow_engine", "rank": rank, "queue": queue, "factor": 1 + 7 * rank + queue}
        for rank in range(RANKS)
        for queue in range(3)
    ]
    faults += [
        {"kind": "late_signal", "rank": 1, "queue": "caller", "nth": n, "ns": 70000}
        for n in range(9)
    ]
    for op in OPS:
        rig = Rig(equal_case(op, RANKS, PART), "mi300x-8", faults)
        for variant in rig.comm.variants(op):
            for protocol in ("barrier", "eager"):
                assert [rig.call(turn, variant, protocol) for turn in range(3)] == [0, 0, 0]


def test_the_native_check_counts_what_is_wrong() -> None:
    """wrong_bytes, which benchmarks trust, sees a flipped byte, and nothing where nothing is."""
    flip = {"kind": "flipped_byte", "rank": 0, "queue": 0, "nth": 5}
    comm = offcore.Communicator(backend="sim", machine="mi300x-8", ranks=3, faults=[flip])
    out = comm.empty(3000)
    sent = [np.empty(1000, np.uint8) for _ in range(3)]
    wrong = []
    for turn in range(4):
        for rank in range(3):
            offcore.fill(sent[rank], turn, offset=1000 * rank)
        comm.all_gather(out, sent, variant="b2b").wait()
        wrong.append(sorted(offcore.wrong_bytes(out[r], 0, 3000, turn) for r in range(3)))
    # Three copies a call: the sixth is of the second one.
    assert wrong == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
