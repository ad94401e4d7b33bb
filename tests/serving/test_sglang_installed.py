"""SGLang's adapter in the SGLang that is installed: its hooks, transfer engine and host pool.

The tensors lie in host memory and streams are stand-ins, so no GPU is needed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import needs
from offcore.serving import engines, sglang

needs.require("torch", "sglang")
sys.path.append(str(Path(__file__).parent))
import sglang_engine as fake  # noqa: E402
import torch  # noqa: E402

l2 = pytest.importorskip("sglang.srt.mem_cache.l2_transfer")
mha = pytest.importorskip("sglang.srt.mem_cache.pool_host.mha")
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

LAYERS, PAGES, PAGE, TOKENS = 6, 5, 4, 32


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    @contextlib.contextmanager
    def stream(given: Any) -> Iterator[None]:
        yield

    streams = SimpleNamespace(Stream=SimpleNamespace, Event=Event, stream=stream)
    monkeypatch.setattr(l2, "device_module", streams)
    monkeypatch.setattr(engines, "_said", set())
    monkeypatch.setenv(sglang.VARIABLE, "1")
    kept = vars(l2.L2TransferEngine).copy()
    HookRegistry.reset()
    sglang.register()
    HookRegistry.apply_hooks()
    yield l2.L2TransferEngine("direct")
    HookRegistry.reset()
    for name in ("submit_device_to_host", "submit_host_to_device"):
        setattr(l2.L2TransferEngine, name, kept[name])


def tokens(*pages: int) -> Any:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def test_pages_come_back_elsewhere(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host = object.__new__(mha.MHATokenToKVPoolHost)
    vars(host).update(vars(fake.MHATokenToKVPoolHost(LAYERS, PAGES, PAGE, TOKENS)))
    for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
        monkeypatch.setattr(mha.MHATokenToKVPoolHost, name, None)  # SGLang's own copies
    transfer = l2.L2Transfer(host, SimpleNamespace(), tokens(4, 0), tokens(7, 1))
    done = engine.submit_device_to_host([transfer])
    assert isinstance(done, l2.TransferCompletion)
    wanted = host.device.clone()
    wanted[:, :, tokens(3, 6)] = host.device[:, :, tokens(7, 1)]
    told: list[int] = []
    done = engine.submit_host_to_device(
        [transfer._replace(device_indices=tokens(3, 6))],
        transfer_layer_id_max=LAYERS,
        start_event=Event(),
        on_layer_done=told.append,
    )
    assert isinstance(done, l2.TransferCompletion)
    assert torch.equal(host.device, wanted)
    assert told == list(range(LAYERS))
