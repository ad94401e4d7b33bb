"""One worker process a rank: started, listened to, ended.

Workers speak JSON, an object a line. Nothing outlives the parent: workers are killed in a finally,
and by the kernel should the parent be killed itself (see rank_worker.py). A worker that dies or
falls silent in a step (a library may hang, and never tell) is an error that shows what it last
wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import offcore
from offcore.errors import error

Event = dict[str, Any]

_START_S = 60.0  # imports (torch takes seconds) and the rendezvous
_SILENCE_FACTOR = 4  # a worker's own waits time out first, and tell more
_LOOK_S = 0.5
_TAIL_LINES = 8


def environment_of(variables: dict[str, str]) -> dict[str, str]:
    """This process's, these variables, and a PYTHONPATH with which workers find packages where this
    process found them."""
    root = str(Path(str(offcore.__file__)).parent.parent)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    return os.environ | variables | {"PYTHONPATH": path}


class RankProcesses:
    """timeout_s: of a worker's own waits. environment: what workers get besides this process's.
    module: what they run."""

    def __init__(
        self,
        ranks: int,
        job: dict[str, Any],
        timeout_s: float,
        environment: dict[str, str],
        module: str = "offcore.tools.bench.rank_worker",
    ) -> None:
        self._ranks = ranks
        self._job = job
        self._environment = environment
        self._module = module
        self._silence_s = _SILENCE_FACTOR * timeout_s
        # When each rank has to have said something, and what it said last that names a step.
        self._due_s = [time.monotonic() + _START_S + self._silence_s] * ranks
        self._steps = ["starting"] * ranks
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._stderr: list[IO[bytes]] = []
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RankProcesses:
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="offcore-"))
            # Bound without listening: nobody else is given the port, and rank 0 may listen there.
            held = self._stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            store = f"127.0.0.1:{held.getsockname()[1]}"
            for rank in range(self._ranks):
                self._start(rank, store, folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int, store: str, folder: str) -> None:
        stderr = self._stack.enter_context((Path(folder) / f"stderr.{rank}").open("w+b"))
        self._stderr.append(stderr)
        process = subprocess.Popen(
            (sys.executable, "-m", self._module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment_of(self._environment),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its workers
        )
        self._processes.append(process)
        thread = threading.Thread(target=self._listen, args=(rank, process), daemon=True)
        thread.start()
        self._threads.append(thread)
        job = self._job | {"rank": rank, "store": store, "parent": os.getpid(), "folder": folder}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: _listen tells
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while being read
            for line in process.stdout:
                event = json.loads(line)
                more_s = self._silence_s + event.get("more_s", 0)
                self._due_s[rank] = time.monotonic() + more_s
                self._events.put((rank, event))
        self._due_s[rank] = float("inf")
        self._events.put((rank, {"event": "exit"}))

    def outcomes(self, progress: Callable[[float], None]) -> Iterator[list[Event]]:
        """For each row or skip, what every rank said of it, by rank."""
        waiting: list[deque[Event]] = [deque() for _ in range(self._ranks)]
        ended: set[int] = set()
        while len(ended) < self._ranks:
            rank, event = self._next()
            kind = event["event"]
            if kind == "progress":
                if rank == 0:
                    progress(event["steps"])
            elif kind == "step":
                self._steps[rank] = event["name"]
            elif kind == "error":
                raise error(event["code"], event["message"])
            elif kind == "end":
                ended.add(rank)
            elif kind == "exit":
                if rank not in ended:
                    raise error("peer", self._obituary(rank))
            else:
                waiting[rank].append(event)
            if all(waiting):
                yield [own.popleft() for own in waiting]

    def _next(self) -> tuple[int, Event]:
        while True:
            self._check_silence()
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=_LOOK_S)

    def _check_silence(self) -> None:
        rank = min(range(self._ranks), key=self._due_s.__getitem__)
        if time.monotonic() > self._due_s[rank]:
            raise error(
                "timeout",
                f"the process of rank {rank} has said nothing for {self._silence_s:.0f} s, in step "
                f"'{self._steps[rank]}': it was ended",
            )

    def _obituary(self, rank: int) -> str:
        code = self._processes[rank].wait()
        self._stderr[rank].seek(0)
        tail = self._stderr[rank].read().decode(errors="replace").strip().splitlines()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return "\n  ".join((f"the process of rank {rank} {how}", *tail[-_TAIL_LINES:]))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()
        self._stack.close()
