"""What a load or store of KV blocks did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offcore import _core
from offcore.facts import Facts


class Transferred(Facts):
    """What a job copied, by which path, and what that cost."""

    _given = ("backend",)

    def __init__(
        self, core: _core.KvReport, backend: str, call: dict[str, Any], links: Sequence[int]
    ) -> None:
        self._core = core
        self._links = links
        self._call = call
        self.backend = backend

    @property
    def direction(self) -> str:
        """load (host to device) or store."""
        direction: str = self._call["direction"]
        return direction

    @property
    def asked(self) -> int:
        """Blocks that were named."""
        asked: int = self._call["asked"]
        return asked

    @property
    def blocks(self) -> int:
        """Blocks that were copied, with all layers: the first ones of those named. Fewer than
        asked only where the job was cancelled."""
        return self._core.blocks

    @property
    def layers(self) -> int:
        """Layers that were copied for all blocks: the first ones."""
        return self._core.layers

    @property
    def cancelled(self) -> bool:
        """Whether something was left out."""
        return self._core.cancelled

    @property
    def bytes(self) -> int:
        """Bytes that were copied."""
        return self._core.bytes

    @property
    def links(self) -> dict[int, int]:
        """Bytes by the GPU over whose link to the host they went: the own one, and those that lent
        theirs."""
        return dict(zip(self._links, self._core.link_bytes, strict=True))

    @property
    def pages(self) -> int:
        """Descriptors that a call which names each page would have had."""
        return self._core.pages

    @property
    def commands(self) -> int:
        """Copy commands that were submitted."""
        return self._core.commands

    @property
    def path(self) -> str:
        """What ran: "strided" (several pages a command), "plain" (contiguous bytes), "mixed", or
        "none" where nothing was copied: by copy engines, on host by threads. "crossed": by both
        engines of the link, strided copies and maybe pages submitted one by one. "kernel": by
        SMs, as asked ("mixed" where it left something to engines). "packed": by both, in turn."""
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
        """cuda: how often the driver was called for these copies: `batches` of `batched` copies in
        all, `plain` and `strided` copies, `crossed` of these for the other engine, `kernels`, and
        `packs`, kernels that only packed."""
        calls = self._core.calls
        names = ("batches", "batched", "plain", "strided", "crossed", "kernels", "packs")
        return {name: getattr(calls, name) for name in names}

    @property
    def sms(self) -> int:
        """SMs that packed at a time, at most; 0: none did."""
        return self._core.sms

    @property
    def sm_ms(self) -> float:
        """Milliseconds that SMs were busy packing, all of them together."""
        return self._core.sm_ns / 1e6

    @property
    def submit_us(self) -> float:
        """What the call of load or store took its caller."""
        submit_us: float = self._call["submit_us"]
        return submit_us

    @property
    def enqueue_us(self) -> float:
        """What handing over the commands took, the driver's calls included."""
        return self._core.enqueue_ns / 1e3

    @property
    def queued_us(self) -> float:
        """From the call until its first command was enqueued."""
        return self._core.queued_ns / 1e3

    @property
    def copy_us(self) -> float:
        """From then until the end was seen; virtual on sim."""
        return self._core.copy_ns / 1e3

    @property
    def gbps(self) -> float:
        """1e9 bytes a second of `copy_us`."""
        return self.bytes / self.copy_us / 1e3 if self.copy_us > 0 else 0.0
