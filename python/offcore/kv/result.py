"""Results of loads and stores of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from offcore import _core
from offcore.facts import Facts

Call = tuple[str, int, float]  # direction, blocks asked for, submit_us


class Transferred(Facts):
    """The result of a job: what was copied, the path taken, and its cost."""

    _given = ("backend",)

    def __init__(
        self, core: _core.KvReport, backend: str, call: Call, links: Sequence[int]
    ) -> None:
        self._core = core
        self._links = links
        self._direction, self._asked, self._submit_us = call
        self.backend = backend

    @property
    def direction(self) -> str:
        """load (host to device) or store."""
        return self._direction

    @property
    def asked(self) -> int:
        """Number of blocks requested."""
        return self._asked

    @property
    def blocks(self) -> int:
        """Number of blocks copied with all layers, from the first requested on. Less than
        asked only if the job was cancelled."""
        return self._core.blocks

    @property
    def layers(self) -> int:
        """Number of layers copied for all blocks, from the first on."""
        return self._core.layers

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled before everything was copied."""
        return self._core.cancelled

    @property
    def bytes(self) -> int:
        """Bytes copied."""
        return self._core.bytes

    @property
    def links(self) -> dict[int, int]:
        """Bytes by the GPU whose link to the host carried them: its own, and those in `links`."""
        return dict(zip(self._links, self._core.link_bytes, strict=True))

    @property
    def pages(self) -> int:
        """Number of descriptors of an equivalent call with one per page."""
        return self._core.pages

    @property
    def commands(self) -> int:
        """Number of copy commands submitted."""
        return self._core.commands

    @property
    def path(self) -> str:
        """By copy engines (threads on host): "strided" (several pages per command), "plain"
        (contiguous bytes), "mixed", "none" (nothing to copy) or "crossed" (both engines of the
        link). "kernel": by SMs, as requested ("mixed" if engines copied a part). "packed": by both,
        in turn."""
        if self.commands == 0:
            return "none"
        if self._core.calls.packs:
            return "packed"
        if self._core.calls.crossed:
            return "crossed"
        if self._core.calls.kernels:
            by_engines = self.calls["batches"] + self.calls["plain"] + self.calls["strided"]
            return "mixed" if by_engines else "kernel"
        strided = self._core.strided
        return "plain" if strided == 0 else "strided" if strided == self.commands else "mixed"

    @property
    def calls(self) -> dict[str, int]:
        """cuda: numbers of driver calls: `batches` with `batched` copies in total, `plain` and
        `strided` copies, `crossed` of these on the other engine, `kernels`, and `packs` (kernels
        that only packed)."""
        calls = self._core.calls
        names = ("batches", "batched", "plain", "strided", "crossed", "kernels", "packs")
        return {name: getattr(calls, name) for name in names}

    @property
    def sms(self) -> int:
        """Maximum number of SMs that packed concurrently; 0: none."""
        return self._core.sms

    @property
    def sm_ms(self) -> float:
        """Milliseconds that SMs spent packing, summed over SMs."""
        return self._core.sm_ns / 1e6

    @property
    def submit_us(self) -> float:
        """The caller's time in load or store."""
        return self._submit_us

    @property
    def enqueue_us(self) -> float:
        """Time to submit the commands, including driver calls."""
        return self._core.enqueue_ns / 1e3

    @property
    def queued_us(self) -> float:
        """Time from the call to the submission of its first command."""
        return self._core.queued_ns / 1e3

    @property
    def copy_us(self) -> float:
        """Time from then to observed completion; virtual on sim."""
        return self._core.copy_ns / 1e3

    @property
    def gbps(self) -> float:
        """Bandwidth over `copy_us`, in 1e9 bytes per second."""
        return self.bytes / self.copy_us / 1e3 if self.copy_us > 0 else 0.0
