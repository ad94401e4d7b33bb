"""A model of paper 003's engines on its machine: V100 behind one PCIe 3.0 switch.

An external engine (the paper's FPGA) takes a request, reads the sender's memory across the link and
writes the receiver's, several requests at once; its outgoing link carries writes and requests to
read. The software engine calls cudaMemcpy for one request after the other, and signals by words in
host memory. C-Drv has two events and two synchronisations of streams a way.

Three numbers are fitted, each to one that the paper publishes: what cudaMemcpy takes to start (the
software engine's one way), what lies between two of them (3.87x), and how many requests the
external engine has in flight (it saturates from 8 KB). Everything else is PCIe's, or is taken from
another table or section than the one it predicts. Payloads of 128 bytes are assumed; with 256 the
external engine's peak would be 4.1 % below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offcore.tools.papers.findings import Finding, percent

KIB, MIB = 1 << 10, 1 << 20
TOLERANCE = 0.15
SATURATED = 0.99  # of the peak
SIZES = tuple(1 << power for power in range(10, 25))

ONE_WAY_US = {"C-Drv": 39.3, "G-Drv-S": 11.2, "G-Drv-H": 4.32}
PEAK_BELOW, BESIDE_MEMCPY, HARDWARE_FROM, SOFTWARE_FROM = 0.0368, 3.87, 8 * KIB, 4 * MIB


@dataclass(frozen=True)
class Model:
    link: float = 15754.0  # bytes a us: PCIe 3.0, 16 lanes, after its code
    payload: int = 128  # bytes of a packet
    asked: int = 512  # by a request to read
    header: int = 24  # of a packet with an address of 64 bits, and its frame
    round_trip_us: float = 2.0  # II-B: a GPU thread reads 4 bytes across the link
    signal_us: float = 2.5  # III-B: by words in host memory, 2 to 3 us
    trigger_us: float = 3.8  # table I
    synchronise_us: float = 11.6  # table I
    copy_us: float = field(init=False)  # fitted
    gap_us: float = field(init=False)  # fitted
    in_flight: int = field(init=False)  # fitted

    def __post_init__(self) -> None:
        fit = object.__setattr__
        fit(self, "copy_us", ONE_WAY_US["G-Drv-S"] - 2 * self.signal_us)
        fit(self, "in_flight", 1)
        while self.hardware(HARDWARE_FROM) < SATURATED * self.hardware_peak:
            fit(self, "in_flight", self.in_flight + 1)
        taken_us = BESIDE_MEMCPY * HARDWARE_FROM / self.hardware(HARDWARE_FROM)
        fit(self, "gap_us", taken_us - HARDWARE_FROM / self.software_peak)

    @property
    def software_peak(self) -> float:
        """Bytes a us of writes alone."""
        return self.link * self.payload / (self.payload + self.header)

    @property
    def hardware_peak(self) -> float:
        """Of writes and requests to read in one direction."""
        packets = self.asked / self.payload
        return self.link * self.asked / (self.asked + (packets + 1) * self.header)

    def hardware(self, nbytes: int) -> float:
        """Bytes a us of many messages of that size."""
        one_us = self.round_trip_us + nbytes / self.hardware_peak
        return min(self.hardware_peak, self.in_flight * nbytes / one_us)

    def software(self, nbytes: int) -> float:
        return nbytes / (self.gap_us + nbytes / self.software_peak)

    def one_way_us(self) -> dict[str, float]:
        """Of a few bytes. The external engine: a word to it, a read, a write with a word behind."""
        events_us = 2 * (self.trigger_us + self.synchronise_us)
        return {
            "C-Drv": events_us + self.copy_us,
            "G-Drv-S": 2 * self.signal_us + self.copy_us,
            "G-Drv-H": 2 * self.round_trip_us,
        }


def findings(model: Model) -> list[Finding]:
    ways = model.one_way_us()
    below = 1 - model.hardware_peak / model.software_peak
    ratio = model.hardware(HARDWARE_FROM) / model.software(HARDWARE_FROM)
    hardware_from, software_from = (
        next(size for size in SIZES if rate(size) >= SATURATED * peak)
        for rate, peak in (
            (model.hardware, model.hardware_peak),
            (model.software, model.software_peak),
        )
    )
    claims = (
        ("CPU-driven: one way, us", ONE_WAY_US["C-Drv"], ways["C-Drv"], False),
        ("software engine: one way, us", ONE_WAY_US["G-Drv-S"], ways["G-Drv-S"], True),
        ("hardware engine: one way, us", ONE_WAY_US["G-Drv-H"], ways["G-Drv-H"], False),
        (
            "hardware engine's peak below the software's (packets of 128 B), %",
            100 * PEAK_BELOW,
            100 * below,
            False,
        ),
        ("8 KB messages by hardware beside cudaMemcpy, times", BESIDE_MEMCPY, ratio, True),
        (
            "hardware engine: within 1 % of its peak from, KiB",
            HARDWARE_FROM / KIB,
            hardware_from / KIB,
            True,
        ),
        (
            "software engine: within 1 % of its peak from, KiB",
            SOFTWARE_FROM / KIB,
            software_from / KIB,
            False,
        ),
    )
    found = []
    for claim, published, value, fitted in claims:
        off = value / published - 1
        found.append(
            Finding(
                "F4",
                f"model: {claim}",
                f"{published:g}",
                f"{value:.4g}",
                percent(off),
                "fitted" if fitted else "predicted",
                abs(off) <= TOLERANCE,
            )
        )
    return found
