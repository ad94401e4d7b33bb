"""Blocks that hold every SM but one, so that what runs meanwhile needs no more than that one.

A block takes an SM: its 1,024 threads have all of the shared memory, so that no other block of any
kernel fits beside it, of which each needs 1 KiB at least. One SM stays empty: a kernel with another
split of shared memory and L1 than the blocks' starts on no SM where one of them is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

THREADS = 1024
SMALL = 8  # small blocks for each SM, that try to start anywhere
PLACES = 1024  # SMs are numbered below it
STARTS_S = 2.0
STARTED, RELEASE, ENDED, HELD, ROAMED = 0, 1, 2, 8, 8 + PLACES  # words of 32 bits
WORDS = ROAMED + PLACES


def faults(words: Any, sms: int) -> list[str]:
    """What is wrong with a GPU's words of the time when the SMs were to be held; nothing: at every
    moment until then all but one were, and nothing else could start there."""
    held, roamed = words[HELD:ROAMED], words[ROAMED:WORDS]
    found = []
    if words[ENDED]:
        found.append(f"{words[ENDED]} blocks had gone before the ping-pong ended")
    if words[STARTED] != sms - 1 or (held > 0).sum() != sms - 1:
        found.append(f"{words[STARTED]} blocks held {(held > 0).sum()} of {sms} SMs")
    if roamed.sum() != SMALL * sms:
        found.append(f"{roamed.sum()} of {SMALL * sms} small blocks ran on the SM that was free")
    if (beside := int(roamed[held > 0].sum())) > 0:
        found.append(f"{beside} small blocks ran on SMs that were held")
    return found


@dataclass
class Holders:
    """Of one GPU. Everything is allocated by __init__: once they run nothing may be."""

    cupy: Any
    gpu: int
    kernels: dict[str, Any]

    def __post_init__(self) -> None:
        with self.cupy.cuda.Device(self.gpu) as device:
            self.sms = int(device.attributes["MultiProcessorCount"])
            self._shared = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
            self.kernels["hold_sms"].max_dynamic_shared_size_bytes = self._shared
            self._words = self.cupy.zeros(WORDS, "uint32")
            self._streams = [self.cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
            self.cupy.cuda.get_current_stream().synchronize()

    def start(self) -> list[str]:
        """Until they hold the SMs, and small blocks have tried to start there: what is wrong."""
        words = [np.uint64(self._words.data.ptr + 4 * word) for word in range(ROAMED + 1)]
        with self.cupy.cuda.Device(self.gpu):
            with self._streams[0]:
                places = words[STARTED], words[RELEASE], words[ENDED], words[HELD]
                shape = (self.sms - 1,), (THREADS,)
                self.kernels["hold_sms"](*shape, places, shared_mem=self._shared)
            if not self._until(lambda: self._seen()[STARTED] == self.sms - 1):
                return ["the SMs did not fill"]
            with self._streams[2] as stream:
                self.kernels["roam"]((SMALL * self.sms,), (32,), (words[ROAMED],))
            return [] if self._until(lambda: stream.done) else ["small blocks ran nowhere"]

    def end(self) -> list[str]:
        """Releases the SMs, after a last look: what was wrong until then."""
        with self.cupy.cuda.Device(self.gpu):
            seen = self._seen()
            release = self._words[RELEASE : RELEASE + 1]
            release.set(np.ones(1, "uint32"), stream=self._streams[1])
            for stream in self._streams:
                stream.synchronize()
        return faults(seen, self.sms)

    def _seen(self) -> Any:
        return self._words.get(stream=self._streams[1])

    def _until(self, ready: Any) -> bool:
        deadline = time.monotonic() + STARTS_S
        while not ready():
            if time.monotonic() > deadline:
                return False
        return True
