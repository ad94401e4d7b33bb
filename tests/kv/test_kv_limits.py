"""Parts of transfers keep a machine's limits, as every other program does."""

import json
from pathlib import Path

import numpy as np
import pytest

import offcore
from offcore import kv

LAYERS, BLOCKS, PAGE = 6, 5, 6000


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"rows_max": 4},
        {"pitch_bytes_max": PAGE},
        {"copy_bytes_max": 4096},
        {"copy_bytes_max": 4096, "rows_max": 4},
    ],
)
def test_a_transfer_on_a_machine_of_small_limits(tmp_path: Path, limits: dict[str, int]) -> None:
    given = json.loads(offcore.machines.path_of("h200-2").read_text("utf-8"))
    given["name"] = "small"
    given["limits"] |= limits
    path = tmp_path / "small.json"
    path.write_text(json.dumps(given), "utf-8")
    cache = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, PAGE), np.uint8)
    wanted = cache.copy()
    layout = kv.Layout(cache, block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 2 * BLOCKS, backend="sim", machine=str(path))
    with pool, kv.BlockTransfer(layout, pool, verify=True) as transfer:
        slots = pool.allocate(BLOCKS, timeout=10)
        named = [3, 0, 4, 1]
        transfer.store(named, slots[:4]).wait(10)
        for block, slot in zip(named, slots, strict=False):
            assert pool.row(slot).tobytes() == wanted[:, block].tobytes()
        transfer.load(named[::-1], slots[:4]).wait(10)
    wanted[:, named[::-1]] = wanted[:, named]
    assert np.array_equal(cache, wanted)
