"""However a benchmark ends, no worker process outlives it."""

import os
import signal
import time
from pathlib import Path

import pytest

WORDS = ("bench", "all_gather", "--backend", "host", "--ranks", "2", "--sizes", "64K")
LONG = (*WORDS, "--variants", "auto", "--iters", "1000000", "--json", "-")


def children_of(pid):
    """By the kernel's own list."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_running(pid):
    try:
        # A zombie has ended: only its new parent has not asked for its status yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, limit_s=30):
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
    return value


def workers_of(process):
    """Both workers, once they measure."""
    found = wait_for(lambda: (c := children_of(process.pid)) and len(c) == 2 and c)
    wait_for(lambda: all(is_measuring(pid) for pid in found))
    return found


def is_measuring(pid):
    """Whether it has opened its communicator: it has mapped shared memory."""
    try:
        return "memfd:" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(start_cli, number):
    process = start_cli(*LONG)
    workers = workers_of(process)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    wait_for(lambda: not any(map(is_running, workers)))


def test_a_killed_worker_is_reported(start_cli):
    process = start_cli(*LONG, "--timeout", "5")
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("offcore: ")
    assert "Traceback" not in err
    wait_for(lambda: not any(map(is_running, workers)))


def test_silent_workers_are_ended_and_named(start_cli):
    """A library may hang without a word: then the run ends, and says in which step."""
    process = start_cli(*LONG, "--timeout", "3")
    workers = workers_of(process)
    time.sleep(1)  # past what they say at the start
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told.startswith("offcore: timeout: the process of rank ")
    assert "said nothing for 12 s, in step 'auto at 65536 bytes'" in told
    wait_for(lambda: not any(map(is_running, workers)))
