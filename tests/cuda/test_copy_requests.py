"""Copies that are prepared once and posted many times, on the stand-in driver: what stands behind
NIXL's backend (shim/nixl). A process for each test, since a driver is set up once."""

import pytest
from test_capture import BEGIN
from test_cuda import run

PRELUDE = (
    BEGIN
    + """
import random, time
from cuda_driver import MIB
from foreign import driver, plain
from offcore import _core, machines

HOST, PAGE = -1, 4096

class Sides:
    '''Memory of a GPU and of the host, registered, and requests between random places of them.'''

    def __init__(self, nbytes=4 << 20, gpu=0):
        self.requests = _core.CopyRequests(machines.load("h200-2"))
        self.gpu = gpu
        self.tensor = plain(gpu, nbytes)
        whole = np.zeros(nbytes + 2 * PAGE, np.uint8)
        self.host = whole[-whole.ctypes.data % PAGE :][:nbytes]
        self.kept = [self.requests.add(self.at(home), nbytes, home) for home in (gpu, HOST)]

    def at(self, home):
        return self.host.ctypes.data if home == HOST else self.tensor.address

    def fill(self, seed):
        self.host[:] = noise(len(self.host), seed)
        self.tensor.put(noise(len(self.host), seed, 1))
        return self.look()

    def look(self):
        return {HOST: self.host.copy(), self.gpu: self.tensor.read().copy()}

    def prepare(self, entries, dst, src, memories=None):
        '''entries: (offset of the destination, of the source, bytes)'''
        return self.requests.prepare(
            [self.at(dst) + to for to, _, _ in entries],
            [self.at(src) + at for _, at, _ in entries],
            [nbytes for *_, nbytes in entries],
            dst, src, self.kept if memories is None else memories)

    def finish(self, request, wait_s=20):
        until = time.monotonic() + wait_s
        while not self.requests.done(request):
            assert time.monotonic() < until
            time.sleep(1e-4)

def refusal(call, *args):
    return code_of(lambda: call(*args))[0]

def after(before, entries, dst, src):
    result = {home: data.copy() for home, data in before.items()}
    for to, at, nbytes in entries:
        result[dst][to : to + nbytes] = before[src][at : at + nbytes]
    return result

def same(found, wanted):
    return all(np.array_equal(found[home], wanted[home]) for home in wanted)

def unlike_entries(count, step=1500):
    '''That no strided copy takes, of 10000 in 16 MiB.'''
    rng = random.Random(count)
    ats = rng.sample(range(0, count * step, step), count)
    return [(step * i, at, rng.randint(500, 1000)) for i, at in enumerate(ats)]

def random_entries(rng, room, within):
    '''Apart from each other: a regular part, as pages of layers are, and one that is not.'''
    most = rng.choice([256, 1024, 4096])
    cells = list(range(room // most // (2 if within else 1)))
    count = rng.randint(1, min(len(cells), 300))
    tos = rng.sample(cells, count)
    ats = [cell + (len(cells) if within else 0) for cell in rng.sample(cells, count)]
    step = rng.randint(1, 4)
    regular = min(count, len(cells) // 4)
    for i in range(regular):
        tos[i], ats[i] = i, (len(cells) if within else 0) + i * step % len(cells)
    used, entries = set(), []
    for to, at in zip(tos, ats):
        if to not in used:
            size = most if rng.random() < 0.7 else rng.randint(1, most)
            entries.append((to * most, at * most, size))
        used.add(to)
    rng.shuffle(entries)
    return entries
"""
)
DIRECTIONS = [("load", "0, HOST"), ("store", "HOST, 0"), ("within", "0, 0")]


@pytest.mark.parametrize(
    "homes", [homes for _, homes in DIRECTIONS], ids=[d for d, _ in DIRECTIONS]
)
def test_random_requests_are_posted_again_and_again(homes: str) -> None:
    """Every byte is checked after each post, also of what no entry names."""
    code = """
    dst, src = eval(sys.argv[1])
    sides = Sides(1 << 20)
    rng = random.Random(sys.argv[1])
    for trial in range(12):
        entries = random_entries(rng, 1 << 20, dst == src)
        request = sides.prepare(entries, dst, src)
        for turn in range(3):
            before = sides.fill(100 * trial + turn)
            sides.requests.post(request)
            sides.finish(request)
            assert same(sides.look(), after(before, entries, dst, src)), (trial, turn)
    """
    assert run(code, homes, prelude=PRELUDE) == ""


def test_a_flat_list_of_pages_is_folded_where_it_is_prepared() -> None:
    """10,000 entries, as of 100 pages of 100 layers: strided copies, however often it is posted."""
    code = """
    sides = Sides(16 << 20)
    page, layers, blocks = 512, 100, 100
    entries = [(layer * 2 * blocks * page + 2 * block * page, (block * layers + layer) * page, page)
               for layer in range(layers) for block in range(blocks)]
    request = sides.prepare(entries, 0, HOST)
    plan = request.plan
    assert (plan.moves, plan.strided) == (10000, 100), (plan.moves, plan.strided)
    for turn in range(3):
        before = sides.fill(turn)
        sides.requests.post(request)
        sides.finish(request)
        assert same(sides.look(), after(before, entries, 0, HOST))
    """
    assert run(code, prelude=PRELUDE) == ""


def test_ten_thousand_entries_without_a_pattern_do_not_hold_whoever_posts_them() -> None:
    """The driver's queue takes 1024: the caller is back while the engines still stand."""
    code = """
    sides = Sides(16 << 20)
    for dst, src in ((0, HOST), (HOST, 0)):
        entries = unlike_entries(10000)
        request = sides.prepare(entries, dst, src)
        small = sides.prepare([(0, 0, 100)], src, dst)
        before = sides.fill(5)
        driver.library.fakecuda_hold_host_engines(1)
        began = time.monotonic()
        sides.requests.post(request)
        took = time.monotonic() - began
        assert not sides.requests.done(request)
        assert took < 0.1, took
        assert refusal(sides.requests.post, request) == "invalid"
        time.sleep(0.2)  # its thread stands in the driver
        driver.library.fakecuda_hold_host_engines(0)
        sides.finish(request)
        assert same(sides.look(), after(before, entries, dst, src))
        sides.requests.post(small)
        sides.finish(small)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_each_direction_has_its_own_way() -> None:
    """What is posted after a load that cannot begin does not wait for it in another direction."""
    code = """
    sides = Sides(16 << 20)
    entries = unlike_entries(10000)
    load = sides.prepare(entries, 0, HOST)
    within = sides.prepare([((16 << 20) - 4000, (16 << 20) - 8000, 4000)], 0, 0)
    driver.library.fakecuda_hold_host_engines(1)
    sides.requests.post(load)
    sides.requests.post(within)
    sides.finish(within)
    assert not sides.requests.done(load)
    driver.library.fakecuda_hold_host_engines(0)
    sides.finish(load)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_what_cannot_be_copied_is_refused_before_anything_is() -> None:
    code = """
    room = 2 << 20
    sides = Sides(room)
    before = sides.fill(1)
    other, elsewhere = np.zeros(room, np.uint8), plain(1, room)
    def refused(entries, dst, src, code, *words):
        try:
            sides.prepare(entries, dst, src)
        except offcore.Error as error:
            assert error.code == code and all(word in str(error) for word in words), error
        else:
            raise AssertionError(entries)
    refused([(0, 0, 100), (50, 400, 100)], 0, HOST, "invalid", "entr")
    refused([(0, 900, 100), (100, room - 10, 100)], 0, 0, "invalid", "entry 1")
    refused([(0, 0, 100), (room - 10, 0, 100)], 0, HOST, "invalid", "entry 1", "destination")
    refused([(0, 0, 100), (200, 0, 100)], HOST, HOST, "unsupported", "host memory")
    refused([(0, 0, 100)], 1, HOST, "invalid", "GPU")
    refused([(0, 0, 100)], 1, 0, "unsupported", "GPU 0 to GPU 1")
    offset = other.ctypes.data - sides.host.ctypes.data
    refused([(0, 0, 100), (200, offset, 100)], 0, HOST, "invalid", "entry 1", "source")
    offset = elsewhere.address - sides.tensor.address
    refused([(0, offset, 100)], HOST, 0, "invalid", "GPU 1")
    add = sides.requests.add
    assert refusal(add, 0, 10, HOST) == refusal(add, sides.at(0), 0, 0) == "invalid"
    assert refusal(add, sides.at(HOST), 10, 0) == refusal(add, sides.at(0), 10, HOST) == "invalid"
    assert refusal(add, other.ctypes.data, 10, 0) == refusal(add, sides.at(0), 10, 1) == "invalid"
    assert refusal(add, sides.at(0), room + 1, 0) == "invalid"
    assert same(sides.look(), before)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_host_memory_is_pinned_as_long_as_it_is_registered() -> None:
    """Once, however often it is registered; what others have pinned is left alone."""
    code = """
    def pinned():
        return driver.library.fakecuda_live(b"registrations") - base
    base = 0
    requests = _core.CopyRequests(machines.load("h200-2"), 0)
    own = np.zeros(100, np.uint8)
    requests.remove(requests.add(own.ctypes.data, 100, HOST), 5)
    base = pinned()
    whole = np.zeros(8 * PAGE, np.uint8)
    at = whole.ctypes.data + -whole.ctypes.data % PAGE
    outer, inner = requests.add(at, 4 * PAGE, HOST), requests.add(at + 100, PAGE, HOST)
    assert pinned() == 1
    assert refusal(requests.add, at + 3 * PAGE, 3 * PAGE, HOST) == "driver"  # a part of it
    requests.remove(outer, 5)
    assert pinned() == 1
    outer = requests.add(at, 4 * PAGE, HOST)
    requests.remove(inner, 5)
    requests.remove(outer, 5)
    assert pinned() == 0
    driver.start(0)
    driver("cuMemHostRegister", at, 4 * PAGE, 1)
    again = requests.add(at + PAGE, PAGE, HOST)
    requests.remove(again, 5)
    assert pinned() == 1
    """
    assert run(code, prelude=PRELUDE) == ""


def test_requests_are_cancelled_and_memory_is_removed_under_way() -> None:
    code = """
    sides = Sides(16 << 20)
    requests, room = sides.requests, 16 << 20
    many = unlike_entries(10000)
    before = sides.fill(3)
    running, waiting = sides.prepare(many, 0, HOST), sides.prepare([(0, 900, 99)], 0, HOST)
    stored = sides.prepare([(0, 900, 99)], HOST, 0)
    driver.library.fakecuda_hold_host_engines(1)
    requests.post(running)
    while not requests.done(running) and calls("cuMemcpyBatchAsync") < 9:
        time.sleep(1e-3)
    requests.post(waiting)
    requests.cancel(waiting, 0.5)  # at once: nothing of it has begun
    assert requests.done(waiting)
    assert refusal(requests.cancel, running, 0.05) == "timeout"
    assert refusal(requests.remove, sides.kept[1], 0.05) == "timeout"
    assert not requests.done(running)
    driver.library.fakecuda_hold_host_engines(0)
    requests.cancel(running, 20)
    assert requests.done(running)
    assert same(sides.look(), after(before, many, 0, HOST))
    requests.remove(sides.kept[1], 20)
    for request in (running, waiting, stored):
        assert refusal(requests.post, request) == "invalid"
    assert same(sides.look(), after(before, many, 0, HOST))
    """
    assert run(code, prelude=PRELUDE) == ""


def test_memory_whose_removal_timed_out_is_registered_again() -> None:
    """Once nobody holds it any more and the driver has given it back."""
    code = """
    sides = Sides(16 << 20)
    requests, address = sides.requests, sides.at(HOST)
    running = sides.prepare(unlike_entries(10000), 0, HOST)
    driver.library.fakecuda_hold_host_engines(1)
    requests.post(running)
    assert refusal(requests.remove, sides.kept[1], 0.05) == "timeout"
    sides.kept = None
    again = requests.add(address, 16 << 20, HOST)  # it is pinned still
    driver.library.fakecuda_hold_host_engines(0)
    requests.cancel(running, 20)
    again = running = None
    told, until = "driver", time.monotonic() + 10
    while told and time.monotonic() < until:
        told = refusal(requests.add, address, 16 << 20, HOST)
    assert not told, told
    """
    assert run(code, prelude=PRELUDE) == ""


def test_who_drops_all_of_it_under_way_loses_no_byte() -> None:
    code = """
    sides = Sides(4 << 20)
    entries = unlike_entries(2000)
    before = sides.fill(7)
    request = sides.prepare(entries, HOST, 0)
    sides.requests.post(request)
    time.sleep(0.05)
    sides.requests = request = None
    found = sides.host.copy()
    assert np.array_equal(found, after(before, entries, HOST, 0)[HOST])
    time.sleep(0.2)
    assert np.array_equal(sides.host, found)  # nothing is copied any more
    """
    assert run(code, prelude=PRELUDE) == ""


def test_failures_are_told_to_whoever_asks() -> None:
    """Memory that is gone when the request is posted; a GPU that fails while it is under way."""
    code = """
    sides, gone = Sides(1 << 20), plain(0, 4096)
    to = gone.address - sides.tensor.address
    request = sides.prepare([(0, 0, 1000)], 0, HOST)
    freed = sides.prepare([(to, 0, 1000)], 0, HOST)
    driver("cuMemFree", gone.address)
    assert refusal(sides.requests.post, freed) == "invalid"
    assert sides.requests.done(freed)
    room, stream = driver.reserve(8 * MIB), driver.stream()
    driver("cuMemMap", room, 2 * MIB, 0, driver.create(2 * MIB), 0)
    assert driver.set_access(room, 2 * MIB, [0]) == 0
    driver.library.fakecuda_hold_host_engines(1)
    sides.requests.post(request)
    assert driver.copy_2d(stream, room, 2 * MIB, sides.tensor.address, 64, 64, 3) == 0
    told, until = "", time.monotonic() + 10
    while not told and time.monotonic() < until:
        told = refusal(sides.requests.done, request)
    assert told == "driver", told
    assert sides.requests.done(request)
    assert refusal(sides.requests.post, request) == "driver"
    os._exit(0)
    """
    assert run(code, prelude=PRELUDE) == ""
