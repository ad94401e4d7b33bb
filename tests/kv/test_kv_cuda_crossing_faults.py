"""Drivers that do not let both engines copy in one direction, or not always, and transfers that are
closed amid that. On the stand-in driver, a process for each test."""

import pytest
from test_cuda import run
from test_kv_cuda import WORLD
from test_kv_cuda_crossing import CROSSED, check_on_gpu


def failing(entry: str, call: int, code: int) -> dict[str, str]:
    """That call fails, of those for crossing alone."""
    before = "world = Small(crossing_bytes=0)\nprint(calls(sys.argv[1]))\nworld.transfer.close()"
    count = int(run(before, entry, prelude=WORLD + CROSSED))
    return {"OFFCORE_FAKE_CUDA_FAIL": f"{entry}:{count + call}:{code}"}


@pytest.mark.parametrize(
    "fault",
    [
        ("cuMemAddressReserve", 1, 2),
        ("cuMemCreate", 1, 801),  # no host memory of this kind
        ("cuMemCreate", 2, 2),  # no room on the GPU
        ("cuMemSetAccess", 1, 1),
        ("cuMemcpy2DAsync", 1, 1),  # such copies are refused
        ("cuMemcpy2DAsync", 2, 1),
        ("cuMemcpy2DAsync", 6, 1),  # those of the cache's steps
        0,  # or not done right: the first one
        1,
        2,
    ],
)
def test_a_driver_that_does_not_do_it(fault: tuple[str, int, int] | int) -> None:
    env = (
        {"OFFCORE_FAKE_CUDA_STRIDED_RIGHT": str(fault)}
        if isinstance(fault, int)
        else failing(*fault)
    )
    code = """
    world = Small()
    for turn in range(2):
        world.check(some(64), np.arange(64), STRAIGHT)
    kept = live()
    for turn in range(2):  # what has failed leaves nothing
        world.transfer.close()
        again = kv.BlockTransfer(
            kv.Layout(Gpu(world.at, world.shape), block_axis=1, layer_axis=0), world.pool,
            crossing_bytes=0, policy="zero_sm")
        world.transfer = again
    gone = {kind: kept[kind] - count for kind, count in live().items()}
    assert gone["allocations"] == gone["mappings"] == gone["reservations"] == 0, gone
    assert done("same_device") == [0]
    world.transfer.close()
    """
    check_on_gpu(code, **env)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_a_refused_copy_fails_its_job_alone(store: bool, crossed: bool) -> None:
    """Later jobs have one engine then, if it was a copy that crosses. Until what was enqueued has
    ended, in either stream, nobody gets the slots."""
    code = """
    store, crossed = (word == "True" for word in sys.argv[1:])
    world = Small(linger=60.0)  # so the thread tells everything
    start = world.transfer.store if store else world.transfer.load
    failed = code_of(lambda: start(some(64), np.arange(64)).wait(20))
    assert failed[0] == "driver", failed
    world.image[:] = world.read()
    for turn in range(2):
        paths = STRAIGHT if crossed else ("crossed",)
        world.check(some(64, turn), np.arange(64), paths)
    world.transfer.close()
    """
    # The trials have six strided copies; then come two of the first part, which does not cross, and
    # two that do.
    call = 6 + (4 if crossed else 2)
    check_on_gpu(code, str(store), str(crossed), **failing("cuMemcpy2DAsync", call, 999))


@pytest.mark.parametrize("cancel", [False, True])
def test_closing_amid_what_crosses(cancel: bool) -> None:
    code = """
    for turn in range(6):
        world = Small(blocks=512, page=1024)
        every = some(512, turn, 512)
        job = world.transfer.store(every, np.arange(512))
        time.sleep(0.0005 * turn)
        world.transfer.close(cancel=sys.argv[1] == "True")
        assert job.done()
        result = job.wait(1)
        rows = world.rows(range(result.blocks))
        assert (rows == world.wanted(every[: result.blocks])).all()
        assert result.cancelled == (result.blocks < 512) and (result.blocks == 512 or cancel)
    """.replace("or cancel)", f"or {cancel})")
    check_on_gpu(code, str(cancel))
