"""Operations on registered torch tensors, from each of torch's allocators.

Run by gpu_plain.py at the end. What expandable segments give is VMM memory, over several
allocations where it is large; what cudaMalloc gives is opened by IPC; cudaMallocAsync's, managed
and pinned memory is refused. Every byte of the registered tensor is checked, around the outputs
too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
PARTS = (1, 4099, 65_536, MIB + 3, 20 * MIB, 64 * MIB)
OFFSETS = (0, 1, 12_345, 2 * MIB - 7)
LARGE = 10 * MIB  # from here on a tensor begins at the same place of a granule on all ranks
AROUND = 85  # what all other bytes are
MANAGED_GLOBAL = 1


class Interface:
    """Memory that no torch allocates."""

    def __init__(self, address: int, nbytes: int) -> None:
        place = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = place


def managed(nbytes: int) -> Interface:
    place = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemAllocManaged(
        ctypes.byref(place), ctypes.c_size_t(nbytes), ctypes.c_uint(MANAGED_GLOBAL)
    )
    if code != 0:
        raise RuntimeError(f"cuMemAllocManaged: {code}")
    return Interface(place.value, nbytes)


class Registered:
    def __init__(self, plain: Any) -> None:
        self.torch, self.comm, self.bytes = plain.torch, plain.comm, plain.bytes
        self.rank, self.ranks = plain.rank, plain.ranks
        self.wrong = self.calls = 0
        self.failures: list[str] = []
        named = self.comm.variants("all_gather", in_place=True)
        self.variants = [name for name in named if not name.startswith("prelaunch")]
        option = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        self.refused = "cudaMallocAsync" in option
        self.strided = "expandable" in option

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)
            print(f"rank {self.rank}: {what}", flush=True)

    def refuses(self, tensor: Any, what: str) -> None:
        import offcore

        try:
            self.comm.register(tensor).close()
            self.expect(False, f"{what} was registered")
        except offcore.Error as error:
            self.expect(error.code == "unsupported", f"{what}: {error.code}: {error}")

    def count(self, whole: Any, first: int, nbytes: int, wrong: int, what: str) -> None:
        """Also the bytes around the output."""
        around = (whole[:first], whole[first + nbytes :])
        wrong += sum(int((part != AROUND).sum()) for part in around)
        self.calls += 1
        self.wrong += wrong
        self.expect(wrong == 0, f"{what}: {wrong} wrong bytes")

    def all_gather(self, whole: Any, first: int, size: int, seed: int, variant: str) -> None:
        whole.fill_(AROUND)
        out = whole[first:][: self.ranks * size]
        self.bytes.fill(out[self.rank * size :][:size], self.rank, seed)
        result = self.comm.all_gather(out, variant=variant, protocol="barrier").wait()
        parts = enumerate(out.reshape(self.ranks, size))
        wrong = sum(self.bytes.wrong(part, rank, seed) for rank, part in parts)
        what = f"all_gather of {size} from {first} on by {variant}"
        self.count(whole, first, out.numel(), wrong, what)
        self.expect(result.registered and not result.staged, f"{what}: {result}")
        rows = result.variant in ("fan", "bcst") and self.ranks > 2
        if not self.strided or whole.nbytes >= LARGE:
            self.expect(result.native == (self.strided or not rows), f"{what}: {result}")

    def all_to_all(self, whole: Any, first: int, size: int, seed: int) -> None:
        whole.fill_(AROUND)
        out = whole[first:][: self.ranks * size]
        given = self.torch.empty_like(out)
        for peer, part in enumerate(given.reshape(self.ranks, size)):
            self.bytes.fill(part, self.rank, seed, first=peer * size)
        result = self.comm.all_to_all(out, given, protocol="barrier").wait()
        wrong = sum(
            self.bytes.wrong(part, rank, seed, first=self.rank * size)
            for rank, part in enumerate(out.reshape(self.ranks, size))
        )
        what = f"all_to_all of {size} from {first} on"
        self.count(whole, first, out.numel(), wrong, what)
        self.expect(result.registered and not result.staged, f"{what}: {result}")

    def cases(self) -> Iterator[tuple[int, int]]:
        for size in PARTS:
            for offset in OFFSETS:
                yield size, offset

    def run(self) -> None:
        pinned = self.torch.empty(MIB, dtype=self.torch.uint8, pin_memory=True)
        self.refuses(pinned, "pinned memory")
        self.refuses(managed(MIB), "managed memory")
        if self.refused:
            tensor = self.torch.empty(4 * MIB, dtype=self.torch.uint8, device="cuda")
            return self.refuses(tensor, "memory of cudaMallocAsync")
        for seed, (size, offset) in enumerate(self.cases()):
            room = offset + self.ranks * size + 1000
            whole = self.torch.empty(room, dtype=self.torch.uint8, device="cuda")
            with self.comm.register(whole):
                for variant in ("auto", *self.variants):
                    self.all_gather(whole, offset, size, seed, variant)
                self.all_to_all(whole, offset, size, seed)
                again = self.comm.register(whole[:100])
            self.all_gather(whole, offset, size, seed + 1, "auto")
            again.close()
            out = whole[: self.ranks]
            staged = self.comm.all_gather(out, protocol="barrier").wait().staged
            self.expect(staged, "registered after the last close")
            del whole, out
            if seed % 5 == 0:  # other memory comes to the same addresses
                self.torch.cuda.empty_cache()


def registered_tensors(plain: Any) -> bool:
    """All ranks call it. Whether all was right."""
    registered = Registered(plain)
    registered.run()
    print(
        f"rank {registered.rank}: {registered.calls} operations on registered tensors, "
        f"{registered.wrong} wrong bytes, {len(registered.failures)} failures",
        flush=True,
    )
    return not registered.failures
