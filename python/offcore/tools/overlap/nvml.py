"""What NVIDIA's management library tells of one GPU: energy, clocks, and why they are low."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from offcore.errors import error

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_POLL_S = 0.001
# Reasons for a clock below its maximum, that tell of a limit; the rest are settings or idleness.
_LIMITS = {0x4: "power cap", 0x8: "hardware", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake"}


class Gpu:
    """uuid: as torch gives it, with or without "GPU-". Raises `Error`: unavailable."""

    def __init__(self, uuid: str) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as failure:
            raise error("unavailable", f"NVML: {failure}") from None
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise error("unavailable", f"NVML: {name} gives {status}")

    def energy_mj(self) -> int:
        """Since the driver was loaded. The counter ticks every 100 ms."""
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value

    def tick(self) -> tuple[float, int]:
        """Waits for the counter's next tick: the time in seconds, and the energy in mJ."""
        before = self.energy_mj()
        while (now := self.energy_mj()) == before:
            time.sleep(_POLL_S)
        return time.perf_counter(), now

    def _number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int:
        value = kind()
        self._call(name, self._handle, *arguments, ctypes.byref(value))
        return int(value.value)

    def facts(self) -> dict[str, Any]:
        """Clocks in MHz, power in W (an average over a second), and what limits the clocks."""
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            "memory_mhz": self._number("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            "power_w": round(self._number("nvmlDeviceGetPowerUsage") / 1e3, 1),
            "limited_by": sorted({name for bit, name in _LIMITS.items() if reasons & bit}),
        }
