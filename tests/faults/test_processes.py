"""Ranks that die, come late or not at all: the others end, in time, and say who it was."""

import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from groups import Start
from stream import Stream

import offcore
from stores import free_store

TIMEOUT_S = 5


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_calls_end_well(start_ranks: Start, ranks: int) -> None:
    for rank in start_ranks(ranks, seed=ranks, calls=150):
        assert rank.event() == {"ready": True}
        end = rank.end()
        assert end["calls"] == 150
        assert "code" not in end, end


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_any_moment(start_ranks: Start, seed: int) -> None:
    rng = random.Random(seed)
    group = start_ranks(3, seed=seed)
    for rank in group:
        assert rank.event() == {"ready": True}
    time.sleep(rng.random() / 2)
    victim = rng.randrange(3)
    killed = time.time()
    group[victim].process.send_signal(signal.SIGKILL)
    for number, rank in enumerate(group):
        if number == victim:
            continue
        end = rank.end()
        assert end["code"] == "peer", end
        assert f"rank {victim}" in end["message"]
        assert end["at"] - killed < TIMEOUT_S


def test_a_rank_killed_before_any_call(start_ranks: Start) -> None:
    group = start_ranks(3, settings=lambda rank: {"die": "met"} if rank == 1 else {})
    for number in (0, 2):
        end = group[number].end()
        assert end["code"] == "peer", end
        assert "rank 1" in end["message"]
        assert end["calls"] <= 0


def test_a_frozen_rank(start_ranks: Start) -> None:
    """A rank that is alive and does nothing: the others time out, naming what they wait for."""
    group = start_ranks(3, settings=lambda rank: {"timeout": 1})
    for rank in group:
        assert rank.event() == {"ready": True}
    group[2].process.send_signal(signal.SIGSTOP)
    ends = [group[number].end() for number in (0, 1)]
    for end in ends:
        assert end["code"] in ("timeout", "peer"), end
        assert "queue" in end["message"] or "rank" in end["message"]
    assert "timeout" in [end["code"] for end in ends]
    group[2].process.send_signal(signal.SIGCONT)
    end = group[2].end()
    assert end["code"] in ("timeout", "peer"), end


def test_a_missing_rank(start_ranks: Start) -> None:
    # Processes may take a second to start on a machine that is busy.
    group = start_ranks(4, settings=lambda rank: None if rank == 2 else {"timeout": 4})
    began = time.monotonic()
    for rank in group:
        end = rank.end()
        assert end["code"] == "timeout", end
        assert "rank 2" in end["message"]
    assert time.monotonic() - began < 14


def test_a_late_rank(start_ranks: Start) -> None:
    group = start_ranks(3, calls=20, settings=lambda rank: {"delay": 1} if rank == 0 else {})
    assert ["code" in rank.end() for rank in group] == [False] * 3


def test_ranks_that_leave_early_are_no_loss(start_ranks: Start) -> None:
    """A rank that closed is not dead; who still calls waits for it in vain, and is told."""

    def one(rank: int, store: str) -> tuple[str, str]:
        with offcore.Communicator(
            backend="host", store=store, rank=rank, world_size=2, timeout=1
        ) as comm:
            out = comm.empty(8)
            comm.broadcast(out).wait()
            if rank == 1:
                return "", ""
            time.sleep(0.2)
            with pytest.raises(offcore.Error) as failed:
                comm.broadcast(out, root=1).wait()
            return failed.value.code, str(failed.value)

    store = free_store()
    with ThreadPoolExecutor(2) as pool:
        (code, message), _ = pool.map(one, range(2), [store] * 2)
    assert code in ("timeout", "peer")
    assert "rank 1" in message or "queue" in message


@pytest.mark.parametrize("spare_bytes", [1 << 20, 12 << 20, 40 << 20, 100 << 20])
def test_little_address_space(
    start_ranks: Start, spare_bytes: int, request: pytest.FixtureRequest
) -> None:
    """Memory or threads that cannot be had are an error on all ranks, not an end by signal."""
    if request.config.getoption("--sanitized"):
        pytest.skip("a sanitizer needs all the address space it can get")
    settings = {"spare_bytes": spare_bytes, "timeout": 1}
    group = start_ranks(2, calls=10, settings=lambda rank: settings if rank else {"timeout": 1})
    ends = [rank.end() for rank in group]
    assert ends[1].get("code") in (None, "memory", "driver"), ends
    assert ends[0].get("code") in (None, "memory", "driver", "peer", "timeout"), ends
    assert (ends[0].get("code") is None) == (ends[1].get("code") is None), ends


@pytest.mark.needs("unshare")
def test_a_full_dev_shm(start_ranks: Start) -> None:
    """Windows are no files in /dev/shm: that it is full is no matter."""
    script = "mount -t tmpfs -o size=4k none /dev/shm && head -c 8k /dev/zero > /dev/shm/full; exec"
    prefix = ("unshare", "-m", "sh", "-c", script + ' "$@"', "sh")
    tried = subprocess.run(
        [*prefix[:-2], script.removesuffix("exec") + " df /dev/shm", "sh"],
        capture_output=True,
        text=True,
    )
    if "100%" not in tried.stdout:
        pytest.skip(f"/dev/shm cannot be replaced here: {tried.stderr.strip()}")
    for rank in start_ranks(2, calls=30, prefix=prefix):
        end = rank.end()
        assert "code" not in end, end


def test_nothing_stays(start_ranks: Start) -> None:
    """Killed groups leave no shared memory and no process."""
    before = set(os.listdir("/dev/shm"))
    for seed in range(3):
        group = start_ranks(2, seed=seed)
        for rank in group:
            assert rank.event() == {"ready": True}
        for rank in group:
            rank.process.send_signal(signal.SIGKILL)
        for rank in group:
            rank.process.wait(10)
            assert not Path(f"/proc/{rank.process.pid}/maps").exists()
    assert set(os.listdir("/dev/shm")) <= before


def test_many_threads_with_a_communicator_each(as_threads) -> None:
    """Two groups of three ranks in one process, making random calls at once."""

    def group(seed: int) -> list[int]:
        def work(comm: offcore.Communicator, rank: int) -> int:
            stream = Stream(comm, rank, seed)
            for _ in range(60):
                stream.step()
            return stream.calls

        return as_threads(3, work)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(group, (1, 2))) == [[60] * 3] * 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_kills(start_ranks: Start, seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4, 6])
    group = start_ranks(ranks, seed=seed)
    for rank in group:
        assert rank.event() == {"ready": True}
    time.sleep(rng.random())
    victims = set(rng.sample(range(ranks), rng.randint(1, ranks - 1)))
    for victim in victims:
        group[victim].process.send_signal(signal.SIGKILL)
    for number, rank in enumerate(group):
        if number not in victims:
            end = rank.end()
            assert end["code"] == "peer", end
            assert any(f"rank {victim}" in end["message"] for victim in victims)
