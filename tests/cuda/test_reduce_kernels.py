"""The kernels that are committed, and how programs that reduce are enqueued."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offcore import _core, machines

KERNELS = Path(__file__).parents[2] / "core/backend/cuda/kernels"


@pytest.mark.parametrize("kernels", ["reduce", "pack", "exchange"])
def test_the_committed_ptx_is_what_the_source_compiles_to(kernels: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    if "release 13.0" not in version.stdout:
        pytest.skip("another version of nvcc writes other PTX")
    command = [sys.executable, str(KERNELS / "compile.py"), "--print", kernels]
    compiled = subprocess.run(command, capture_output=True, text=True, check=True)
    assert compiled.stdout == (KERNELS / f"{kernels}_ptx.inc").read_text()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce", "reduce"])
@pytest.mark.parametrize(("name", "ranks"), [("h100-2", 2), ("h200-4", 3), ("mi300x-8", 8)])
def test_slots_are_bounded(name: str, ranks: int, op: str, staged: bool) -> None:
    """Large programs pass verify, and take slots of at most eight chunks a peer."""
    machine = machines.load(name)
    form = _core.Protocol(entry=False, staged=staged)
    for nbytes in (1 << 28, 1 << 33):
        parts = _core.equal_parts(nbytes, ranks)
        program = _core.plan_reduction(op, parts, "sum", "float32", "auto", machine, form)
        slot = {kind: size for kind, _, size in program.buffers}["slot"]
        rings = 2 if staged and op != "reduce_scatter" else 1
        assert slot <= rings * max(8 * 26 << 20, (ranks - 1) * 8 * 4 << 20) + (1 << 20)
