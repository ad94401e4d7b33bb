"""NVIDIA's ncu as far as offcore.tools.overlap.counters uses it: runs the process's launches on a
torch that only notes them, and lists invented counters of each kernel. FAKE_NCU makes it fail:
"refused", "killed" (without a word), "silent" (an end without a kernel)."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offcore.tools.overlap import counted, counters

COLUMNS = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC", "Section Name"),
    *("Metric Name", "Metric Unit", "Metric Value"),
)
SMS = 132
REFUSAL = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0. For instructions on enabling permissions and to "
    "get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


class FakeTorch:
    """Notes kernels while it is profiled. One GEMM does not fit, another is two kernels."""

    bfloat16 = "bfloat16"

    def __init__(self) -> None:
        self.kernels: list[tuple[str, int, tuple[int, ...]]] = []
        self._profiled = False
        self.sms: int | None = None
        self.cuda = SimpleNamespace(
            get_device_properties=lambda _: SimpleNamespace(multi_processor_count=SMS),
            profiler=SimpleNamespace(start=self._start, stop=self._stop),
            synchronize=lambda: None,
            init=lambda: None,
            _sleep=lambda _: self._note("at::cuda::<unnamed>::spin_kernel(long)", 1, ()),
        )

    def _start(self) -> None:
        self._profiled = True

    def _stop(self) -> None:
        self._profiled = False

    def _note(self, name: str, blocks: int, shape: tuple[int, ...]) -> None:
        if self._profiled:
            self.kernels.append((name, blocks, shape))

    def randn(self, *shape: int, **_: Any) -> tuple[int, ...]:
        if 106496 in shape:
            raise MemoryError("out of memory")
        return shape

    empty = randn

    def mm(self, a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> None:
        shape = (*a, b[1])
        self._note("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", self.sms or SMS, shape)
        if a[0] == 64:
            self._note("void splitKreduce_kernel<32, 16, int>(T1 *)", 16, shape)


def lines_of(kernels: list[tuple[str, int, tuple[int, ...]]]) -> list[str]:
    """As ncu lists them: strings in quotes, thousands apart, one line a metric."""
    told = ["==PROF== Connected to process 4711 (/usr/bin/python3.12)"]
    told.append(",".join(f'"{one}"' for one in COLUMNS))
    for number, (name, blocks, shape) in enumerate(kernels):
        m, k, n = shape or (1, 1, 1)
        moved = 2 * (m * k + k * n)
        values = (moved, 2 * m * n, 5 * moved, 1e9 * 2.0 * m * n * k / 800e12 * SMS / blocks)
        for metric, value in zip(counters.METRICS.values(), values, strict=True):
            unit = "ns" if "time" in metric else "byte"
            cells = (
                *(number, 4711, "python3.12", "127.0.0.1", name, 1, 7),
                *("(384, 1, 1)", f"({blocks}, 1, 1)", 0, "9.0", "Command line profiler metrics"),
                *(metric, unit, f"{value:,.0f}"),
            )
            told.append(",".join(f'"{one}"' for one in cells))
    return told


def main() -> int:
    how = os.environ.get("FAKE_NCU", "")
    log, folder = Path(sys.argv[sys.argv.index("--log-file") + 1]), Path(sys.argv[-1])
    print("what the process itself prints")
    if how == "killed":
        return 9
    torch = FakeTorch()

    class Limited:
        def __init__(self, _: object, sms: int | None) -> None:
            torch.sms = sms

        def __enter__(self) -> None:
            if torch.sms == SMS - 64:
                raise RuntimeError("cublasSetSmCountTarget(68) returned status 7")

        def __exit__(self, *_: object) -> None:
            torch.sms = None

    counted.sms_for_gemms = Limited  # type: ignore[assignment]
    assert json.loads((folder / counted.JOB).read_text("utf-8"))["runs"] == counters.RUNS
    counted.serve(folder, lambda: torch)
    told = {"refused": [REFUSAL], "silent": ["==WARNING== No kernels were profiled."]}
    log.write_text("\n".join(told.get(how) or lines_of(torch.kernels)) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
