"""Window memory as torch tensors, which no array library in between makes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import needs
import offcore
from offcore import _core
from offcore.comm import exchange, requests
from offcore.comm.registration import Registration

needs.require("torch")
import torch  # noqa: E402

import offcore.torch  # noqa: E402

DTYPES = "bool uint8 int16 uint16 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn"


def filled(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2, nbytes, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def bits(tensor: Any) -> Any:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() > 0 else np.empty(0, np.uint8)


@pytest.mark.parametrize("name", DTYPES.split())
def test_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    with offcore.Communicator(backend="host", ranks=2) as comm:
        for shape in ((4, 6), (), (24,), (0, 3)):
            inputs = comm.next_input(shape, dtype)
            sent = [filled(shape, dtype, rank) for rank in range(2)]
            for given, values in zip(inputs, sent, strict=True):
                assert (given.dtype, tuple(given.shape)) == (dtype, shape)
                assert given.is_contiguous()
                given.copy_(values)
            view = comm.all_gather_view(inputs)
            assert view.wait().in_place == (given.numel() > 0)
            for out in view.out:
                assert (out.dtype, tuple(out.shape)) == (dtype, (2, *shape))
                assert np.array_equal(bits(out), np.concatenate([bits(s) for s in sent]))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_core_reads_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on the rank's GPU, of torch's own class and contiguous; others go another way."""
    out, inp = torch.zeros(6, dtype=torch.bfloat16), torch.arange(6, dtype=torch.bfloat16)
    assert _core.plain_dtype(out, -1) is None
    with offcore.Communicator(backend="host", ranks=1) as comm:
        started = comm._core.start(
            "all_gather", out, inp, (), 0, "auto", "auto", 0, None, [], (out, inp), 20.0
        )
        started.wait(20.0)
    assert torch.equal(out, inp)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)
    assert _core.plain_dtype(out, 3) is torch.bfloat16
    lazy = torch.zeros(6, dtype=torch.complex64).conj(), torch._neg_view(out)
    sparse = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    others = (None, 7, out[::2], torch.nn.Parameter(out), [out], *lazy, *sparse)
    assert [_core.plain_dtype(other, 3) for other in others] == [None] * len(others)
    assert _core.plain_dtype(out, 2) is None
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: "none")
    with pytest.raises(RuntimeError, match="cast"):
        _core.plain_dtype(out, 3)


@pytest.mark.parametrize(
    "lazy", [torch.zeros(6, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(6))]
)
def test_lazy_tensors_are_refused(lazy: Any) -> None:
    """Their memory holds other values: what came was not conjugated."""
    with offcore.Communicator(backend="host", ranks=1) as comm:
        for given in ((torch.zeros_like(lazy), lazy), (lazy, torch.zeros_like(lazy))):
            with pytest.raises(offcore.Error, match="lazy conjugate or negative") as refused:
                comm.all_gather(*given)
            assert refused.value.code == "invalid"


def test_an_all_to_all_with_counts_looks_up_plain_tensors_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later calls may have other counts, of the same kind and elsewhere."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)
    looked: list[int] = []

    def place_of(comm: Any, number: int, buffer: Any) -> Any:
        looked.append(number)
        return requests.place_of(comm, number, buffer)

    monkeypatch.setattr(exchange, "place_of", place_of)
    with offcore.Communicator(backend="host", ranks=1) as comm:
        comm._device = 3
        out, inp = (torch.from_numpy(comm.empty((8, 16))) for _ in range(2))

        def call(rows: int, kind: Any, buffer: Any = out, asked: bool = True) -> None:
            out[:], inp[:] = 0, torch.arange(128).view(8, 16) + rows
            counts, received = (torch.full((1,), n, dtype=kind) for n in (rows, 99))
            comm.all_to_all_v(
                buffer, inp, counts, counts_on_device=True, received=received if asked else None
            ).wait()
            assert torch.equal(out[:rows], inp[:rows])
            assert not out[rows:].any()
            assert int(received) == (rows if asked else 99)

        for rows in range(6):
            call(rows, torch.int64)
        assert looked == [0, 1]
        for turn in range(3):
            call(turn, torch.int32)
            call(turn, torch.int64, asked=False)
        assert looked == [0, 1] * 3
        call(3, torch.int64, torch.nn.Parameter(out, requires_grad=False))
        call(3, torch.int64)
        assert looked == [0, 1] * 4
        opened = len(comm._exchanges)
        core = SimpleNamespace(deregister=lambda _: None)
        Registration(core, 1, comm._exchanges).close()  # memory that was here may be gone
        call(4, torch.int64)
        assert looked == [0, 1] * 5
        assert len(comm._exchanges) == opened - 2  # of three kinds of counts, and the engines
        for wrong in (torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.int16)):
            for _ in range(2):
                with pytest.raises(offcore.Error, match="counts"):
                    comm.all_to_all_v(out, inp, wrong, counts_on_device=True)


def test_each_call_has_its_own_memory_and_tensors() -> None:
    """Shapes, dtypes and sizes change from call to call, also so that the slots grow; what was
    handed out stays as it was handed out, whatever is done to the tensors of other calls."""
    with offcore.Communicator(backend="host", ranks=1) as comm:
        held: list[Any] = []
        for turn in range(24):
            shape = [(8, 16), (128,), (2, 4, 8), (1 << 12, turn)][turn % 4]
            dtype = [torch.int32, torch.bfloat16, torch.float32][turn % 3]
            inp = filled(shape, dtype, turn)
            view = comm.all_gather_view(inp)
            view.wait()
            assert view.out is view.out
            assert (view.out.shape, view.out.dtype) == ((1, *shape), dtype)
            held.append((view.out, bits(inp).copy()))
            for out, expected in held[-3:]:
                assert np.array_equal(bits(out), expected), turn
            if dtype is torch.float32:
                view.out.requires_grad_()
            else:
                view.out.unsqueeze_(0)
            addresses = {out.data_ptr() for out, _ in held[-4:]}
            assert len(addresses) == len(held[-4:])
        assert not any(out.requires_grad for out, _ in held if out.dtype is not torch.float32)


def test_tensors_keep_their_memory() -> None:
    """After the slots have grown, and after the communicator has gone."""
    comm = offcore.Communicator(backend="host", ranks=2)
    small = comm.all_gather_view([filled((100,), torch.int32, rank) for rank in range(2)])
    small.wait()
    own = comm.empty(300, torch.float64)
    own[1][:] = 7
    kept = [out.view(-1) for out in small.out]
    del small
    large = comm.all_gather_view([filled((1 << 16,), torch.int32, rank) for rank in range(2)])
    large.wait()
    kept += [out[:1, :100].reshape(-1) for out in large.out]
    comm.close()
    del comm, large
    expected = [filled((100,), torch.int32, rank) for rank in range(2)]
    for out in kept[:2]:
        assert torch.equal(out, torch.cat(expected))
    assert torch.equal(kept[2], filled((1 << 16,), torch.int32, 0)[:100])
    assert (own[1] == 7).all()


def test_windows_as_tensors() -> None:
    with offcore.Communicator(backend="host", ranks=2) as comm:
        window = comm.window(1000)
        window.tensor(1)[:] = 9
        assert (window.array(1) == 9).all()
        assert window.tensor(1).dtype is torch.uint8
        for wrong in (lambda: window.tensor(), lambda: window.tensor(2)):
            with pytest.raises(offcore.Error) as refused:
                wrong()
            assert refused.value.code == "invalid"


def test_wrong_tensors() -> None:
    with offcore.Communicator(backend="host", ranks=1) as comm:
        out = torch.zeros(8, dtype=torch.int32)
        for wrong, words in (
            (torch.zeros(8, 2, dtype=torch.int32).t()[0], "contiguous"),
            (torch.zeros(8, dtype=torch.int32, device="meta"), "meta"),
        ):
            with pytest.raises(offcore.Error, match=words) as refused:
                comm.all_gather(out, wrong)
            assert refused.value.code == "invalid"
        with pytest.raises(offcore.Error, match="dtype") as refused:
            comm.all_gather(out, out.view(torch.float32).clone())
        assert refused.value.code == "invalid"


def test_a_communicator_of_torch_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error, an AssertionError or a RuntimeError, names no way on."""

    def none() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", none)
    with pytest.raises(offcore.Error, match=r"torch has no GPU .*offcore\.Communicator") as refused:
        offcore.torch.Communicator()
    assert refused.value.code == "unavailable"
