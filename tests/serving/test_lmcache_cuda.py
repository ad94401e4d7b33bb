"""LMCache's adapter on the stand-in driver, in a stream, with memory registered in pieces."""

from pathlib import Path

import pytest
from lmcache_worlds import FORMATS
from test_cuda import run

WORLDS = f"""
import functools
sys.path += [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "fakes")!r}]
from cuda_driver import Driver
from lmcache_worlds import GpuMemory, World
from offcore import kv
from offcore.serving import lmcache
driver = Driver(os.environ["OFFCORE_LIBCUDA"])
driver.start(0)

def with_policy(policy, **options):
    made = functools.partial(kv.BlockTransfer, policy=policy, verify=True, **options)
    lmcache.kv = type("Kv", (), dict(vars(kv), BlockTransfer=made))

def worlds(form, **shape):
    for policy in ("zero_sm", "pack"):
        with_policy(policy)
        memory = GpuMemory(driver, together=False)
        world = World(np.random.default_rng(1), memory, form, **shape)
        yield memory, world
        world.close()
"""


def check_on_gpu(code: str, *args: str) -> None:
    assert run(code, *args, prelude=WORLDS) == ""


@pytest.mark.parametrize("policy", ["auto", "zero_sm", "pack"])
@pytest.mark.parametrize("form", FORMATS)
def test_random_objects(form: str, policy: str) -> None:
    code = """
    form, policy = sys.argv[1:]
    with_policy(policy)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        memory = GpuMemory(driver, together=bool(seed % 2))
        each, page = int(rng.choice([1, 2, 4, 16])), 16 * int(rng.choice([1, 5, 64, 256]))
        world = World(rng, memory, form, each=each, piece=1 << 16, page=page)
        for _ in range(6):
            assert world.turn() == 0, seed
        world.close()
    """
    check_on_gpu(code, form, policy)


def test_the_streams_order() -> None:
    """The caller does not wait for the stream, and what comes behind in it finds the blocks."""
    code = """
    for memory, world in worlds("NL_X_NB_BS_NH_TWO_HS", each=4, piece=1 << 16, page=1024):
        word = np.zeros(1024, np.uint32)
        driver("cuMemHostRegister", word.ctypes.data, word.nbytes, 0)
        at = int(world.places[0])
        item = lmcache.Object(world.base + at, at, world.nbytes, 0, [0])
        group = world.group(np.array([2, 0, 3, 1]))
        place, stream = memory.place, memory.stream
        (first, nbytes), = memory._held[:1]
        before = world.row(at).copy()
        for turn in (1, 2):
            driver("cuStreamWaitValue32", stream, word.ctypes.data, turn, 0)
            driver("cuMemsetD8Async", first, turn, nbytes, stream)
            assert lmcache.copy(False, place, stream, world.piece, [group], [item]) == ""
            driver("cuMemsetD8Async", first, 99, nbytes, stream)
            assert lmcache.copy(True, place, stream, world.piece, [group], [item]) == ""
            assert (world.row(at) == before).all()
            put_word(word, turn)
            driver("cuStreamSynchronize", stream)
            before = world.row(at).copy()
            assert (before[0, 0] == turn).all()
            assert (before[:, 1:] == world.cache[:, 1:, [2, 0, 3, 1]]).all()
            image = memory.read(world.image.shape).transpose(*world.axes, 3)
            assert (image[:, :, [2, 0, 3, 1]] == before).all()
            assert (image[0, 0, 4:] == 99).all()
        lmcache.forget()
        driver("cuMemHostUnregister", word.ctypes.data)
    """
    check_on_gpu(code)


def test_nothing_is_under_way_after_an_error() -> None:
    """Pieces that are smaller than LMCache says: the driver refuses what leaves one."""
    code = """
    for memory, world in worlds("NL_X_TWO_NB_BS_NH_HS", each=3, piece=1 << 14, page=4096):
        groups = [world.group(np.arange(3))]
        at = int(world.places[1])
        items = [lmcache.Object(world.base + at, at, world.nbytes, 0, [0])]
        call = lambda piece: lmcache.copy(
            False, memory.place, memory.stream, piece, groups, items)
        code, told = code_of(lambda: call(1 << 30))
        assert code == "driver", (code, told)
        world.host[:] = 7
        assert lmcache._transfer_of.cache_info().currsize == 0
        driver("cuCtxSynchronize")
        assert (world.host == 7).all()
        assert call(1 << 14) == ""
        memory.settle()
        assert (world.row(at) == world.cache[:, :, :3]).all()
    """
    check_on_gpu(code)
