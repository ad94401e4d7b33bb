"""Strided copies told to the driver several at once, where the machine says so."""

import json
from pathlib import Path

import pytest
from test_kv_cuda import check_on_gpu

from offcore import machines


def machine_folder(folder: Path, together: int) -> str:
    """Machines that are told of so many strided copies by one call."""
    for path in machines.path_of("h200-2").parent.glob("*.json"):
        machine = json.loads(path.read_text("utf-8"))
        machine["batches"]["strided_batch"] = together
        (folder / path.name).write_text(json.dumps(machine), "utf-8")
    return str(folder)


COUNTED = """
    names = "cuMemcpy3DBatchAsync", "cuMemcpy2DAsync", "cuMemcpyBatchAsync", "cuMemcpyAsync"
    counted = lambda: np.array([calls(name) for name in names])
"""


@pytest.mark.parametrize(
    ("together", "told"),
    [
        (0, (0, 70, 0)),
        (1, (0, 70, 0)),
        (4, (18, 0, 70)),  # parts of 16, and one of 6
        (8, (10, 0, 70)),  # the first 4 first: the engine need not wait for the others
        (32, (4, 0, 70)),  # 4, 28, 32, 6
    ],
)
def test_every_byte_and_every_call(
    tmp_path: Path, together: int, told: tuple[int, int, int]
) -> None:
    code = """
    batches, strided, batched = eval(sys.argv[1])
    world = World(layers=5, blocks=128, page=512)
    rng = np.random.default_rng(5)
    for turn in range(3):
        blocks, slots = rng.permutation(128)[:70], rng.permutation(256)[:70]
        before = counted()
        stored = world.transfer.store(blocks, slots).wait()
        assert (counted() - before).tolist() == [batches, strided, 0, 0], counted() - before
        assert stored.path == "strided" and stored.commands == 70
        assert stored.calls == dict(
            batches=batches, batched=batched, plain=0, strided=strided, kernels=0), stored
        assert (world.rows(slots) == world.wanted(blocks)).all()
        others = rng.permutation(128)[:70]
        world.image[:, others] = world.image[:, blocks].copy()
        before = counted()
        loaded = world.transfer.load(others, slots).wait()
        assert (counted() - before).tolist() == [batches, strided, 0, 0], counted() - before
        assert (world.read() == world.image).all()
    # Layer by layer, and two at a time; jobs that meet.
    for by_layer in (True, 2):
        world.fill(by_layer)
        world.transfer.store(blocks, slots, by_layer=by_layer).wait()
        assert (world.rows(slots) == world.wanted(blocks)).all()
    world.meet()
    world.transfer.close()
    """
    folder = machine_folder(tmp_path, together)
    check_on_gpu(COUNTED + code, str(told), OFFCORE_MACHINES=folder)


@pytest.mark.parametrize("lacks", ["", "cuMemcpy3DBatchAsync"])
def test_layers_further_apart_than_a_pitch(tmp_path: Path, lacks: str) -> None:
    """They are slices; a driver without such batches is told of one after the other."""
    code = """
    step, MIB = 3 << 30, 1 << 20
    at = driver.reserve(2 * step + 4 * MIB)
    image = np.random.default_rng(1).integers(0, 256, (3, 64, 512), np.uint8)
    for k in range(3):
        driver("cuMemMap", at + k * step, 2 * MIB, 0, driver.create(2 * MIB), 0)
        driver.set_access(at + k * step, 2 * MIB, [0])
        driver.put(at + k * step, image[k].tobytes())
    layout = kv.Layout(Gpu(at, (3, 64, 512), (step, 512, 1)), block_axis=1, layer_axis=0)
    pool = kv.HostPool(layout.block_bytes, 16, backend="cuda")
    pool.allocate(16, timeout=10)
    with kv.BlockTransfer(layout, pool) as transfer:
        result = transfer.store([3, 63, 7, 20], [0, 1, 2, 9]).wait()
        assert (result.calls["batches"], result.calls["strided"]) == eval(sys.argv[1]), result
        for slot, block in zip([0, 1, 2, 9], [3, 63, 7, 20]):
            assert (pool.row(slot) == image[:, block].reshape(-1)).all()
        transfer.load([30, 5, 40], [9, 0, 1]).wait()
    image[:, [30, 5, 40]] = image[:, [20, 3, 63]].copy()
    for k in range(3):
        got = np.frombuffer(driver.read(at + k * step, 64 * 512), np.uint8).reshape(64, 512)
        assert (got == image[k]).all(), k
    """
    told = "(0, 4)" if lacks else "(1, 0)"
    folder = machine_folder(tmp_path, 8)
    check_on_gpu(code, told, OFFCORE_MACHINES=folder, OFFCORE_FAKE_CUDA_LACKS=lacks)


def test_a_batch_that_the_driver_refuses_fails_its_job_alone(tmp_path: Path) -> None:
    code = """
    world = World()
    blocks = [5, 3, 9, 1, 0, 2, 4, 15]
    assert world.transfer.store(blocks, np.arange(8)).wait(10).calls["batches"] == 2
    code, told = code_of(lambda: world.transfer.load(blocks, np.arange(8)).wait(10))
    assert (code, "cuMemcpy3DBatchAsync" in told) == ("driver", True), told
    assert world.transfer.load(blocks[::-1], np.arange(8)).wait(10).blocks == 8
    assert (world.read()[:, blocks] == world.image[:, blocks[::-1]]).all()
    world.transfer.close()
    """
    refused = {"OFFCORE_FAKE_CUDA_FAIL": "cuMemcpy3DBatchAsync:4:1"}
    check_on_gpu(code, OFFCORE_MACHINES=machine_folder(tmp_path, 8), **refused)


def test_a_batch_copy_too(tmp_path: Path) -> None:
    """Many strided copies of one call of batch_copy, beside plain ones."""
    code = """
    from offcore import batch_copy
    world = World(layers=8, blocks=64, page=512)
    host = world.rows  # rows of the pool, a chunk of 8 each
    entries = [(world.pool.row(slot).ctypes.data + 512 * layer,
                world.at + (layer * 64 + block) * 512, 512)
               for slot, block in zip(range(0, 40, 4), range(0, 50, 5)) for layer in range(8)]
    dsts, srcs, sizes = zip(*entries)
    before = counted()
    result = batch_copy(dsts, srcs, sizes).wait()
    told = (counted() - before).tolist()
    assert told[0] > 0 and told[1] <= 1, told
    blocks = list(range(0, 50, 5))
    assert (world.rows(range(0, 40, 4)) == world.wanted(blocks)).all()
    """
    check_on_gpu(COUNTED + code, OFFCORE_MACHINES=machine_folder(tmp_path, 16))
