"""batch_copy on the stand-in driver: streams, captures, peers, and what it refuses. A process for
each test, since a driver is set up once."""

import json

import pytest
from test_capture import BEGIN
from test_cuda import run

PRELUDE = (
    BEGIN
    + """
import functools, json, random
from cuda_driver import MIB, WAIT, WRITE, mem_op
from offcore import batch_copy, BatchPolicy

class Memory:
    '''Windows of some GPUs and pinned host memory, with entries between them.'''

    def __init__(self, gpus=1, room=1 << 16):
        self.room = room
        self.comm = opened_comm(gpus)
        self.window = self.comm.window(room)
        self.host = self.comm.host_array(room)

    @functools.cached_property
    def gpus(self):
        return Gpus(range(self.comm.ranks))

    def at(self, home, offset):
        return (self.host.ctypes.data if home < 0 else self.window.address(home)) + offset

    def fill(self, *seed):
        self.host[:] = noise(self.room, *seed, 99)
        for rank in range(self.comm.ranks):
            self.window.write(noise(self.room, *seed, rank), rank=rank)
        return self.look()

    def look(self):
        found = {rank: look(self.window, rank) for rank in range(self.comm.ranks)}
        return {-1: self.host.copy(), **found}

    def copy(self, entries, **options):
        dsts = [self.at(*dst) for dst, _, _ in entries]
        srcs = [self.at(*src) for _, src, _ in entries]
        return batch_copy(dsts, srcs, [n for *_, n in entries], **{"timeout": 10, **options})

def opened_comm(gpus):
    return offcore.Communicator(backend="cuda", ranks=gpus, timeout=5)

def after(before, entries):
    result = {home: data.copy() for home, data in before.items()}
    for (d, to), (s, at), n in entries:
        result[d][to : to + n] = before[s][at : at + n]
    return result

def same(found, wanted):
    return all(np.array_equal(found[home], wanted[home]) for home in wanted)

def scattered(count, nbytes, dst=0, src=-1, seed=1, room=1 << 16):
    rng = random.Random(seed)
    ours, theirs = (rng.sample(range(room // nbytes // 2), count) for _ in range(2))
    return [((dst, 2 * d * nbytes), (src, 2 * s * nbytes), nbytes) for d, s in zip(ours, theirs)]
"""
)


@pytest.mark.parametrize("stream", ["own", "0", "1", "made"])
def test_a_batch_is_in_the_streams_order(stream: str) -> None:
    """Behind what came before it in the stream, and before what comes after it."""
    code = """
    memory = Memory()
    driver = memory.gpus.driver
    stream = memory.gpus.streams()[0] if sys.argv[1] == "made" else None
    if sys.argv[1] in "01":
        stream = int(sys.argv[1])
    entries = scattered(80, 256, dst=-1, src=0)
    for turn in range(1, 9):
        if stream is None:
            memory.window.write(np.full(memory.room, turn, np.uint8))
        else:
            driver("cuMemsetD8Async", memory.at(0, 0), turn, memory.room, stream)
        handle = memory.copy(entries, stream=stream)
        if stream is None:
            handle.wait()
        driver("cuMemsetD8Async", memory.at(0, 0), 100, memory.room, stream or 0)
        result = handle.wait()
        assert result.path == "batches", result
        assert result.calls == {"batches": 3, "batched": 80, "plain": 0, "strided": 0}
        for (_, at), _, n in entries:
            assert (memory.host[at : at + n] == turn).all(), (turn, at)
        assert memory.gpus.settle([stream or 0])
    """
    assert run(code, stream, prelude=PRELUDE) == ""


def test_captured_batches_are_replayed() -> None:
    code = """
    memory = Memory()
    streams = memory.gpus.streams()
    entries = scattered(30, 64) + [((0, 40000 + 700 * i), (-1, 30000 + 70 * i), 70)
                                   for i in range(8)]
    swapped = [((0, 60000), (-1, 60000), 33)]
    with memory.gpus.graph(streams) as graph:
        handle = memory.copy(entries, stream=streams[0])
        exchange = memory.copy(swapped, stream=streams[0], policy=BatchPolicy(swap=True))
    assert handle.done()
    result = handle.wait()
    assert (result.mode, result.path, result.copy_us) == ("capture", "strided+loop", None), result
    assert result.calls["plain"] == 30 and calls("cuMemcpyBatchAsync") == 0
    for turn in range(10):
        before = memory.fill(turn)
        graph.replay()
        assert memory.gpus.settle(streams)
        wanted = after(before, entries + swapped + [(s, d, n) for d, s, n in swapped])
        assert same(memory.look(), wanted), turn
        # The same stream outside of a graph.
        before = memory.fill(turn + 1000)
        assert memory.copy(entries, stream=streams[0]).wait().mode == "eager"
        assert same(memory.look(), after(before, entries))
    """
    assert run(code, prelude=PRELUDE) == ""


def test_several_gpus_are_not_captured() -> None:
    code = """
    memory = Memory(2)
    streams = memory.gpus.streams()
    with memory.gpus.graph(streams):
        code, told = code_of(lambda: memory.copy([((0, 0), (1, 0), 8)], stream=streams))
    assert code == "unsupported" and "2 GPUs cannot be captured" in told, (code, told)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_an_older_driver_copies_one_by_one_and_the_result_says_so() -> None:
    code = """
    memory = Memory()
    before = memory.fill(1)
    entries = scattered(64, 64)
    result = memory.copy(entries).wait()
    assert same(memory.look(), after(before, entries))
    assert (result.path, result.calls["plain"], result.calls["batches"]) == ("loop", 64, 0)
    """
    assert run(code, prelude=PRELUDE, OFFCORE_FAKE_CUDA_DRIVER="12080") == ""


def test_copies_within_a_gpu_say_what_makes_them() -> None:
    code = """
    memory = Memory()
    entries = [((0, 100 * i), (0, 30000 + 110 * i), 90) for i in range(40)]
    for own_copy, told in (("engine", "hint"), ("sm", "sm")):
        before = memory.fill(1)
        result = memory.copy(entries, kind="d2d", policy=BatchPolicy(own_copy=own_copy)).wait()
        assert result.own_copy == told
        assert same(memory.look(), after(before, entries))
    assert memory.copy(scattered(9, 64)).wait().own_copy == "none"
    """
    assert run(code, prelude=PRELUDE) == ""


def test_batches_of_several_gpus() -> None:
    """Between peers, within each and with the host: begun and ended on all streams at once."""
    code = """
    memory = Memory(3)
    driver = memory.gpus.driver
    streams = memory.gpus.streams()
    rng = random.Random(3)
    for turn in range(12):
        before = memory.fill(turn)
        slots = iter(rng.sample(range(600), 600))
        homes = [-1, 0, 1, 2]
        entries = []
        for _ in range(60):
            dst, src = rng.choice([(d, s) for d in homes for s in homes if max(d, s) >= 0])
            places = next(slots) * 100, next(slots) * 100
            entries.append(((dst, places[0]), (src, places[1]), rng.randint(0, 100)))
        threshold = 0 if turn % 2 else None
        given = {gpu: streams[gpu] for gpu in range(3)}
        handle = memory.copy(entries, stream=given, policy=BatchPolicy(b2b_bytes_max=threshold))
        # What comes later on any of the streams comes after all of it.
        for gpu in range(3):
            driver("cuMemsetD8Async", memory.at(gpu, 0), 7, 1, streams[gpu])
        result = handle.wait()
        assert memory.gpus.settle(streams)
        wanted = after(before, entries)
        for gpu in range(3):
            wanted[gpu][0] = 7
        assert same(memory.look(), wanted), turn
        assert result.ranks == 3 and result.syncs > 0
    assert calls("cuCtxEnablePeerAccess") == 6
    """
    assert run(code, prelude=PRELUDE) == ""


def test_streams_of_several_gpus() -> None:
    code = """
    class Stream:  # as torch's
        def __init__(self, handle, index):
            self.cuda_stream = handle
            self.device = type("Device", (), {"index": index, "type": "cuda"})
    memory = Memory(2)
    one, other = memory.gpus.streams()
    entries = [((0, 0), (1, 0), 100)]
    for stream, names in (
        (one, "a stream for each of them"),
        ({0: one}, "0, 1: pass a stream for each"),
        ([one], "a stream for each of them"),
        ([Stream(one, 0), Stream(other, 0)], "a stream of GPU 0 was given for GPU 1"),
        (["x", other], "a str is not a stream"),
    ):
        code, told = code_of(lambda: memory.copy(entries, stream=stream))
        assert code == "invalid" and names in told, told
    before = memory.fill(2)
    memory.copy(entries, stream=[Stream(one, 0), Stream(other, 1)]).wait()
    assert same(memory.look(), after(before, entries))
    """
    assert run(code, prelude=PRELUDE) == ""


def test_what_is_refused_is_refused_before_anything_is_enqueued() -> None:
    code = """
    memory = Memory()
    good = ((0, 0), (-1, 0), 64)
    device, host = memory.at(0, 0), memory.at(-1, 0)
    pageable = np.zeros(4096, np.uint8)
    size = 2 * MIB  # which a window maps twice in a row
    memory.copy([good]).wait()
    before = done("plain", "strided", "batched"), live()
    for dst, src, nbytes, code, names in (
        (device + 64, pageable.ctypes.data, 64, "invalid", "entry 1: its source lies in ordinary"),
        (pageable.ctypes.data, device, 64, "invalid", "pin it"),
        (0, host + 64, 64, "invalid", "entry 1: its destination is null"),
        (device + 64, host + memory.room - 8, 64, "invalid", "source leaves its pinned memory by"),
        (device + 2 * size - 8, host + 64, 64, "invalid", "leaves the memory of its GPU by 56"),
        (device + 64, host + 64, 1 << 64, "invalid", "sizes must be"),
        (device + 32, host + 64, 64, "invalid", "entries 0 and 1: the destination of entry 0 and"),
        (device + 64, device + 70, 64, "invalid", "entry 1: its destination and its source overl"),
        (host + 8192, host + 64, 64, "unsupported", "entry 1 goes from host memory to host memory"),
    ):
        found, told = code_of(lambda: batch_copy(
            [device, dst], [host, src], [64, nbytes], backend="cuda"))
        assert (found, names in told) == (code, True), (found, told)
    assert (done("plain", "strided", "batched"), live()) == before
    """
    assert run(code, prelude=PRELUDE) == ""


def test_an_entry_over_two_registrations_is_refused() -> None:
    code = """
    import mmap
    memory = Memory()
    d = memory.gpus.driver
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    view = np.frombuffer(pages, np.uint8)
    for part in range(2):
        d("cuMemHostRegister", view.ctypes.data + 2 * part * mmap.PAGESIZE, 2 * mmap.PAGESIZE, 1)
    at = view.ctypes.data + 2 * mmap.PAGESIZE - 100
    memory.fill(1)
    code, told = code_of(lambda: batch_copy([memory.at(0, 0)], [at], [300], backend="cuda"))
    assert code == "invalid" and "the second one from byte 100 on" in told, told
    view[:] = 5
    batch_copy([memory.at(0, 0), memory.at(0, 100)], [at, at + 100], [100, 200]).wait()
    assert (memory.look()[0][:300] == 5).all()
    for part in range(2):
        d("cuMemHostUnregister", view.ctypes.data + 2 * part * mmap.PAGESIZE)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_layers_further_apart_than_a_pitch_may_be() -> None:
    """They are slices of a box: one command a block all the same."""
    code = """
    memory = Memory()
    d = memory.gpus.driver
    stride, layers = (1 << 31) + 6 * MIB, 5
    start = d.reserve(layers * stride)
    for layer in range(layers):
        d("cuMemMap", start + layer * stride, 2 * MIB, 0, d.create(2 * MIB), 0)
        assert d.set_access(start + layer * stride, 2 * MIB, [0]) == 0
    first = memory.fill(3)[-1]
    for store in (False, True):
        places = [(start + layer * stride + 512 * block, memory.at(-1, (7 * block + layer) * 512))
                  for block in (3, 0, 2, 9) for layer in range(layers)]
        dsts, srcs = zip(*[place[::-1] if store else place for place in places])
        result = batch_copy(list(dsts), list(srcs), [512] * len(places)).wait()
        assert (result.commands, result.folded, result.path) == (4, 20, "strided"), result
        memory.host[:] = memory.host if store else 0
    for _, at in places:
        at -= memory.at(-1, 0)
        assert np.array_equal(memory.host[at : at + 512], first[at : at + 512])
    assert calls("cuMemcpy3DAsync") == 8
    """
    assert run(code, prelude=PRELUDE) == ""


@pytest.mark.parametrize("how", ["allocated", "one"])
def test_no_command_has_rows_in_several_allocations(how: str) -> None:
    """Even where they lie at equal steps: an H200's driver refuses to write such rows."""
    code = """
    memory = Memory()
    d = memory.gpus.driver
    if sys.argv[1] == "one":
        start = d.get(ctypes.c_uint64, "cuMemAlloc", 8 * MIB)
    else:
        each = [d.get(ctypes.c_uint64, "cuMemAlloc", 2 * MIB) for _ in range(4)]
        start = each[0]
        assert each == list(range(start, start + 8 * MIB, 2 * MIB))
    memory.host[:] = noise(memory.room, 5)
    first = memory.host.copy()
    blocks = (3, 0, 2, 9)
    places = [(start + layer * 2 * MIB + 512 * block, memory.at(-1, (7 * block + layer) * 512))
              for block in blocks for layer in range(4)]
    dsts, srcs = zip(*places)
    result = batch_copy(list(dsts), list(srcs), [512] * len(places)).wait()
    strided = 4 if sys.argv[1] == "one" else 0
    assert (calls("cuMemcpy2DAsync"), result.folded) == (strided, 4 * strided), result
    memory.host[:] = 0
    batch_copy(list(srcs), list(dsts), [512] * len(places)).wait()
    for _, at in places:
        at -= memory.at(-1, 0)
        assert np.array_equal(memory.host[at : at + 512], first[at : at + 512])
    """
    assert run(code, how, prelude=PRELUDE) == ""


def test_threads_and_streams_of_their_own() -> None:
    code = """
    memory = Memory()
    streams = [memory.gpus.streams()[0] for _ in range(4)]
    share = memory.room // 4
    wrong = []
    def work(index):
        memory.gpus.driver("cuCtxSetCurrent", memory.gpus.contexts[0])
        mine = range(index * share, (index + 1) * share)
        for turn in range(15):
            data = noise(share, index, turn)
            memory.host[mine.start : mine.stop] = data
            out = memory.comm.host_array(share)
            rng = random.Random(turn * 4 + index)
            cuts = [i * 128 for i in range(share // 128)]
            rng.shuffle(cuts)
            base = [memory.at(0, mine.start + cut) for cut in cuts]
            handles = [
                batch_copy(base, [memory.at(-1, mine.start + cut) for cut in cuts],
                           [128] * len(cuts), stream=streams[index], timeout=20),
                batch_copy([out.ctypes.data + cut for cut in cuts], base, [128] * len(cuts),
                           stream=streams[index], timeout=20),
            ]
            handles[1].wait()
            if not np.array_equal(out, data):
                wrong.append((index, turn))
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    """
    assert run(code, prelude=PRELUDE) == ""


def test_arrays_are_kept_until_the_copies_have_ended() -> None:
    code = """
    import gc
    memory = Memory()
    stream = memory.gpus.streams()[0]
    driver = memory.gpus.driver
    gate = memory.comm.host_array(64, "uint32")
    word = memory.gpus.driver.get(c_uint64, "cuMemHostGetDevicePointer", gate.ctypes.data, 0)
    driver.mem_ops(stream, mem_op(WAIT, word, 1))
    host = memory.comm.host_array(4096)
    host[:] = 9
    kept = weakref.ref(host)
    class Here:  # an array on the GPU
        __cuda_array_interface__ = {"shape": (4096,), "typestr": "|u1", "strides": None,
                                    "data": (memory.at(0, 0), False), "version": 3}
    handle = batch_copy([Here()], [host], stream=stream)
    del host
    gc.collect()
    assert kept() is not None and not handle.done()
    code, told = code_of(lambda: handle.wait(0.05))
    assert code == "timeout" and "batch did not end" in told, told
    gate[0] = 1
    assert handle.wait().bytes == 4096
    gc.collect()
    assert kept() is None
    assert (memory.look()[0][:4096] == 9).all()
    """
    assert run(code, prelude=PRELUDE) == ""


def test_tensors_on_a_gpu() -> None:
    """What torch's look like to batch_copy."""
    code = """
    class Tensor:
        def __init__(self, home, offset, nbytes, contiguous=True):
            self.is_cuda, self.is_cpu, self.get_device = home >= 0, home < 0, lambda: home
            self.data_ptr = lambda: memory.at(home, offset)
            self.nbytes, self.itemsize, self.dtype = nbytes, 2, "float16"
            self.is_contiguous = lambda: contiguous
            self.is_conj = self.is_neg = lambda: False
    memory = Memory(2)
    before = memory.fill(8)
    entries = [((0, 100 * i), (-1, 3000 + 130 * i), 90) for i in range(9)]
    dsts = [Tensor(*dst, n) for dst, _, n in entries]
    srcs = [Tensor(*src, n) for _, src, n in entries]
    result = batch_copy(dsts, srcs).wait(10)
    assert (result.backend, result.ranks) == ("cuda", 1)
    assert same(memory.look(), after(before, entries))
    code, told = code_of(lambda: batch_copy(dsts, [*srcs[:8], Tensor(-1, 0, 90, False)]))
    assert code == "invalid" and "entry 8: its source is not contiguous" in told, told
    code, told = code_of(lambda: batch_copy(dsts, [*srcs[:8], Tensor(-1, 0, 88)]))
    assert code == "invalid" and "entry 8: its destination has 90 bytes, its source 88" in told
    peers = batch_copy([Tensor(1, 0, 64)], [Tensor(0, 0, 64)], kind="d2d").wait(10)
    assert peers.ranks == 2 and np.array_equal(memory.look()[1][:64], memory.look()[0][:64])
    """
    assert run(code, prelude=PRELUDE) == ""


def test_a_call_that_fails_half_way_spoils_no_later_one() -> None:
    code = """
    memory = Memory()
    entries = scattered(200, 64)
    code, told = code_of(lambda: memory.copy(entries))
    assert code == "memory" and "cuMemcpyBatchAsync" in told, (code, told)
    memory.gpus.driver("cuCtxSynchronize")  # what had been enqueued goes on
    before = memory.fill(1)
    memory.copy(entries).wait()
    assert same(memory.look(), after(before, entries))
    """
    failing = {"OFFCORE_FAKE_CUDA_FAIL": "cuMemcpyBatchAsync:3"}
    assert run(code, prelude=PRELUDE, **failing) == ""


def test_the_process_may_end_while_a_batch_is_under_way() -> None:
    code = """
    memory = Memory()
    handle = memory.copy(scattered(200, 64))
    """
    assert run(code, prelude=PRELUDE) == ""


def test_after_a_fork() -> None:
    code = """
    memory = Memory()
    memory.copy(scattered(9, 64)).wait()
    child = os.fork()
    if child == 0:
        code, told = code_of(lambda: memory.copy(scattered(9, 64)))
        os._exit(0 if code == "invalid" and "fork" in told else 1)
    assert os.waitpid(child, 0)[1] == 0
    """
    assert run(code, prelude=PRELUDE) == ""


def test_a_process_ends_well_although_a_backend_did_not_open() -> None:
    code = """
    memory = Memory()
    code, told = code_of(lambda: memory.copy(scattered(9, 64), backend="cuda",
                                            machine="mi300x-8"))
    assert code == "unsupported" and "keeps flags in host memory" in told, (code, told)
    """
    assert run(code, prelude=PRELUDE) == ""


def test_what_does_not_copy_within_a_gpu_for_batches_is_told() -> None:
    """Spare engines among it, which are a communicator's."""
    code = """
    memory = Memory()
    for own_copy in ("engines", "none", None):
        policy = BatchPolicy(own_copy=own_copy)
        code, told = code_of(lambda: memory.copy(scattered(9, 64), policy=policy))
        assert code == "invalid" and f"own_copy '{own_copy}' of a batch: pass engine or sm" in told
    """
    assert run(code, prelude=PRELUDE) == ""


@pytest.mark.parametrize("options", [{"machine": "mi300x-8"}, {"backend": "host"}])
def test_cpus_are_not_handed_addresses_of_gpus(options: dict[str, str]) -> None:
    """A machine's name may choose a backend whose engines are CPUs; they would end the process."""
    code = """
    memory, options = Memory(), json.loads(sys.argv[1])
    before = memory.fill(1)
    context = ctypes.c_void_p()
    assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert lib.cuCtxPushCurrent_v2(context) == 0
    for entry, side in (((0, 0), (-1, 0), 64), "destination"), (((-1, 0), (0, 0), 64), "source"):
        entries = [((-1, 128), (-1, 0), 64), entry]
        code, told = code_of(lambda: memory.copy(entries, **options))
        assert code == "invalid" and f"entry 1: its {side} is memory of a GPU" in told, told
    found = memory.look()
    assert all((found[home] == before[home]).all() for home in before)
    """
    assert run(code, json.dumps(options), prelude=PRELUDE) == ""
