"""Objects of LMCache's, copied by its adapter, for kv_check.py: every byte is checked."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from offcore.serving import lmcache


class Objects:
    """K and V of layers, and host memory with room for objects of 16 blocks, registered by the MiB
    as LMCache does it."""

    each, layers, blocks, piece, most = 16, 9, 192, 1 << 20, 12

    def __init__(self, chance: random.Random, device: str) -> None:
        self.chance = chance
        self.gpu = device == "cuda"
        self.page = 4096 + 512 * chance.randrange(8)
        shape = (2, self.blocks, self.page)
        self.tensors = [
            torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(self.layers)
        ]
        self.nbytes = 2 * self.layers * self.each * self.page
        self.step = self.nbytes + (64 << 10) >> 12 << 12
        pieces = -(-self.most * self.step // self.piece)
        whole = np.zeros((pieces + 1) * self.piece, np.uint8)
        self.host = whole[-whole.ctypes.data % 4096 :][: pieces * self.piece]
        if self.gpu:
            for at in range(0, self.host.size, self.piece):
                place = self.host.ctypes.data + at
                assert int(torch.cuda.cudart().cudaHostRegister(place, self.piece, 0)) == 0

    def copy(self, direction: str, blocks: Any, places: list[int], skip: int) -> None:
        """As LMCache calls it."""
        sizes = {"kv_size": 2, "nl": self.layers, "nb": self.blocks, "bs": 16, "nh": 1}
        shape = SimpleNamespace(**sizes, hs=self.page // 16, element_size=1, block_stride_elems=0)
        form = SimpleNamespace(name="NL_X_TWO_NB_BS_NH_HS")
        pointers = [tensor.data_ptr() for tensor in self.tensors]
        group = lmcache.Group(pointers, shape, form, 16 * self.each, 0, blocks.tolist())
        objects = [
            lmcache.Object(
                self.host.ctypes.data + at, at, self.nbytes, chunk, [0 if chunk else skip]
            )
            for chunk, at in enumerate(places)
        ]
        device = torch.device("cuda", 0) if self.gpu else torch.device("cpu")
        lmcache.transfer((), SimpleNamespace(name=direction), device, self.piece, [group], objects)

    def row(self, at: int) -> torch.Tensor:
        """An object, as (planes, layers, blocks, page)."""
        row = torch.from_numpy(self.host[at : at + self.nbytes])
        return row.view(2, self.layers, self.each, self.page)

    def wrong(self) -> int:
        """Of a store and a load of the same objects, into other blocks, in one stream."""
        chance = self.chance
        count = chance.randrange(1, self.most)
        named, targets = (torch.randperm(self.blocks)[: count * self.each] for _ in range(2))
        slots = chance.sample(range(self.most), count)
        places = [slot * self.step + 4096 * chance.randrange(16) for slot in slots]
        skip = chance.randrange(self.each)
        self.host[:] = 0
        for tensor in self.tensors:
            tensor.random_(0, 256)
        self.copy("D2H", named, places, skip)
        before = torch.stack([tensor[:, named] for tensor in self.tensors], 1)
        for tensor in self.tensors:
            tensor.zero_()
        self.copy("H2D", targets, places, skip)
        after = torch.stack([tensor[:, targets] for tensor in self.tensors], 1)
        nonzero = sum(int((tensor != 0).sum()) for tensor in self.tensors)
        if self.gpu:
            torch.cuda.synchronize()
        wrong = int((after[:, :, skip:] != before[:, :, skip:]).sum())
        wrong += nonzero - int((before[:, :, skip:] != 0).sum())
        rows = torch.cat([self.row(at) for at in places], 2)
        wrong += int((rows[:, :, skip:] != before[:, :, skip:].cpu()).sum())
        return wrong + int((self.host != 0).sum()) - int((rows[:, :, skip:] != 0).sum())
