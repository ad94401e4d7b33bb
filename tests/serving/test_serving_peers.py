"""What benchmarks/serving.py measures beside offcore: copies of others, and its speedups."""

import sys
from pathlib import Path
from typing import Any

import pytest

import needs

needs.require("torch", "transformers")
import torch  # noqa: E402

from offcore import _core, kv  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from serving_peers import DriverTransfer, TorchTransfer  # noqa: E402
from serving_table import speedups  # noqa: E402


@pytest.mark.parametrize("peer", ["loop", "torch"])
def test_peers_copy_what_they_are_told(peer: str) -> None:
    """The rows of a tier, and back into other blocks."""
    torch.manual_seed(3)
    tensors = [torch.randn(12, 40) for _ in range(6)]
    layout = kv.Layout(list(zip(tensors[::2], tensors[1::2], strict=True)))
    with kv.HostPool(layout.block_bytes, 8, backend="host") as pool:
        slots = pool.allocate(4, timeout=10)
        transfer: Any = TorchTransfer(layout, pool)
        if peer == "loop":
            transfer = DriverTransfer(layout, pool, _core.copy_by_loop)
        wanted = [tensor.clone() for tensor in tensors]
        for tensor in wanted:
            tensor[[8, 2, 5, 11]] = tensor[[3, 4, 9, 0]]
        transfer.store([3, 4, 9, 0], slots).wait()
        job = transfer.load([8, 2, 5, 11], slots, by_layer=1)
        assert job.done()
        for found, given in zip(tensors, wanted, strict=True):
            assert torch.equal(found, given)
        transfer.close()


def test_speedups_over_peers() -> None:
    place = {"model": "7b", "prompt": 8192, "batch": 8}
    arms = {"loop": (90, 100), "kernel": (60, 130), "ours": (45, 150), "packed": (60, 195)}
    rows = [
        {"arm": arm, "hit": hit, "ttft_ms": ttft * (200 - hit) / 100, "tokens_s": rate} | place
        for hit in (100, 50)
        for arm, (ttft, rate) in arms.items()
    ]
    rows.append({"arm": "separate", "hit": "-", "error": "it failed"} | place)
    lines = speedups(rows)
    assert lines[1].startswith("7b 8192 x 8, 100 %: ours/loop 2.00 1.50, packed/loop 1.50 1.95, ")
    assert lines[2].startswith("7b 8192 x 8, 50 %: ")
    assert lines[-1] == "at most: loop 2.00 1.95, kernel 1.33 1.50"
    assert speedups([row for row in rows if row["arm"] != "ours"][-1:]) == []
