"""Random caches and objects of LMCache's, in host memory or a GPU's, whose bytes are known."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from offcore.serving import lmcache

FORMATS = {  # axes of a cache of all layers as (planes, layers, blocks), and those outside a tensor
    "NB_NL_TWO_BS_NH_HS": ((2, 1, 0), 0),
    "NL_X_TWO_NB_BS_NH_HS": ((1, 0, 2), 1),
    "NL_X_NB_TWO_BS_NH_HS": ((2, 0, 1), 1),
    "TWO_X_NL_X_NB_BS_NH_HS": ((0, 1, 2), 2),
    "NL_X_NB_BS_NH_TWO_HS": ((2, 0, 1), 1),
}
TOKENS, HEADS = 2, 4


class HostMemory:
    """Tensors in this process's memory, which nobody registers."""

    place: lmcache.Place = ("host", None)
    stream = None

    def tensors(self, image: np.ndarray) -> list[int]:
        self._held = [part.copy() for part in image]
        return [part.ctypes.data for part in self._held]

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.stack(self._held).reshape(shape)

    def register(self, address: int, nbytes: int) -> None:
        pass

    def settle(self) -> None:
        pass


class GpuMemory:
    """Each tensor an allocation of its own, or all in one."""

    place: lmcache.Place = ("cuda", 0)

    def __init__(self, driver: Any, together: bool) -> None:
        self._driver = driver
        self._together = together
        self.stream = driver.stream()

    def tensors(self, image: np.ndarray) -> list[int]:
        each = image[0].nbytes
        if self._together:
            whole = self._driver.memory((image.nbytes + (2 << 20) - 1) >> 21 << 21)
            self._held = [(whole + number * each, each) for number in range(len(image))]
        else:
            made = [self._driver.get(ctypes.c_uint64, "cuMemAlloc", each) for _ in image]
            self._held = [(address, each) for address in made]
        for (address, _), part in zip(self._held, image, strict=True):
            self._driver.put(address, part.tobytes())
        return [address for address, _ in self._held]

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        held = b"".join(self._driver.read(*part) for part in self._held)
        return np.frombuffer(held, np.uint8).reshape(shape).copy()

    def register(self, address: int, nbytes: int) -> None:
        self._driver("cuMemHostRegister", address, nbytes, 0)

    def unregister(self, address: int) -> None:
        self._driver("cuMemHostUnregister", address)

    def settle(self) -> None:
        self._driver("cuStreamSynchronize", self.stream)


class World:
    """A cache of a format, and host memory with room for objects, registered in pieces."""

    def __init__(
        self, rng: np.random.Generator, memory: Any, form: str, *, each: int, piece: int, page: int
    ) -> None:
        self.rng, self.memory, self.each, self.piece = rng, memory, each, piece
        order, outside = FORMATS[form]
        planes = 1 if form == "NL_X_NB_BS_NH_TWO_HS" else int(rng.integers(1, 3))
        if outside == 2 or "TWO_NB" in form or form.startswith("NB_NL"):
            planes = 2
        blocks = each * int(rng.integers(1, 5)) + int(rng.integers(4))
        self.sizes = (planes, int(rng.integers(1, 6)), blocks)
        shape = [0, 0, 0]
        for axis, at in enumerate(order):
            shape[at] = self.sizes[axis]
        self.axes, self.page = order, page
        self.image = rng.integers(0, 256, (*shape, page), np.uint8)
        self.pointers = memory.tensors(self.image.reshape(-1, *shape[outside:], page))
        self.head = int(rng.integers(0, 5)) * 16  # of an object, which another group has
        self.nbytes = self.head + planes * self.sizes[1] * each * page + int(rng.integers(0, 40))
        self._open_host()
        self.shape = SimpleNamespace(
            kv_size=planes,
            nl=self.sizes[1],
            nb=self.sizes[2],
            bs=TOKENS,
            nh=HEADS,
            hs=page // TOKENS // HEADS,
            element_size=1,
            block_stride_elems=0,
        )
        self.form = SimpleNamespace(name=form)

    def _open_host(self) -> None:
        """Room for six objects at any places, some of them over the places where pieces meet."""
        step = -(-self.nbytes // 16) * 16 + 16 * int(self.rng.integers(0, 9))
        pieces = -(-6 * step // self.piece)
        self._backing = np.zeros((pieces + 1) * self.piece + 4096, np.uint8)
        at = -self._backing.ctypes.data % 4096
        self.host = self._backing[at : at + (pieces + 1) * self.piece]
        self.host[:] = self.rng.integers(0, 256, self.host.size, np.uint8)
        self.base = int(self.host.ctypes.data)
        for first in range(0, self.host.size, self.piece):
            self.memory.register(self.base + first, self.piece)
        spare = (self.host.size - 6 * step) // 16 + 1
        shifts = np.sort(self.rng.integers(spare, size=6)) * 16
        self.places = [k * step + int(shift) for k, shift in enumerate(shifts)]

    @property
    def cache(self) -> np.ndarray:
        """As (planes, layers, blocks, bytes)."""
        return self.image.transpose(*self.axes, 3)

    def group(self, blocks: np.ndarray) -> lmcache.Group:
        tokens = self.each * TOKENS
        ids = [int(block) for block in blocks]
        return lmcache.Group(self.pointers, self.shape, self.form, tokens, self.head, ids)

    def row(self, place: int) -> np.ndarray:
        """As (planes, layers, blocks, bytes)."""
        shape = (*self.sizes[:2], self.each, self.page)
        begin = place + self.head
        return self.host[begin : begin + int(np.prod(shape))].reshape(shape)

    def turn(self) -> int:
        """A load or store of some objects, in any order, the first of them perhaps in part. Returns
        how many bytes of the cache and of host memory are wrong."""
        load = bool(self.rng.integers(2))
        count = int(self.rng.integers(1, min(6, self.sizes[2] // self.each) + 1))
        blocks = self.rng.permutation(self.sizes[2])[: count * self.each]
        places = self.rng.permutation(self.places)[:count]
        skip = int(self.rng.integers(self.each + 1)) if self.rng.random() < 0.5 else 0
        chosen = self.rng.permutation(count)[: int(self.rng.integers(1, count + 1))]
        objects = []
        for chunk in chosen:
            own = skip if chunk == 0 else 0
            at = int(places[chunk])
            objects.append(lmcache.Object(self.base + at, at, self.nbytes, int(chunk), [own]))
            named = blocks[chunk * self.each :][own : self.each]
            if load:
                self.cache[:, :, named] = self.row(at)[:, :, own:]
            else:
                self.row(at)[:, :, own:] = self.cache[:, :, named]
        held = self.host.copy()
        if not load:  # what is stored is not there yet
            for item in objects:
                self.row(item.host_offset)[:, :, item.skip_prefix_n_blocks[0] :] ^= 255
        kept = lmcache.copy(
            load, self.memory.place, self.memory.stream, self.piece, [self.group(blocks)], objects
        )
        assert kept == "", kept
        self.memory.settle()
        wrong = (self.memory.read(self.image.shape) != self.image).sum()
        return int(wrong + (self.host != held).sum())

    def close(self) -> None:
        """LMCache lets go of the memory while transfers are kept."""
        for first in range(0, self.host.size, self.piece):
            self.memory.unregister(self.base + first)
