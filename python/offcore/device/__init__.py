"""Headers for kernels that move data by requests: docs/gpu-driven.md."""

from pathlib import Path

__all__ = ["include_path"]


def include_path() -> str:
    """The folder to compile with: `#include <offcore/device.cuh>` is found under it."""
    return str(Path(__file__).parents[1] / "include")
