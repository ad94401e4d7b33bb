"""SGLang's adapter against the interface that SGLang gives it, in host memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import needs
import offcore
from offcore.errors import error
from offcore.serving import engines, sglang

needs.require("torch")
sys.path.append(str(Path(__file__).parent))
import sglang_engine as fake  # noqa: E402
import torch  # noqa: E402

LAYERS, PAGES, PAGE, TOKENS = 6, 5, 4, 34  # the last two tokens are no page


@pytest.fixture(params=["1"])
def asked(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _one_sglang(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    fake.install(monkeypatch, "0.5.23")
    monkeypatch.setenv(sglang.VARIABLE, asked)
    monkeypatch.setattr(engines, "_said", set())
    sglang.register()


def tokens(*pages: int) -> Any:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def pool(layers: int = LAYERS, **changes: Any) -> Any:
    return fake.MHATokenToKVPoolHost(layers, PAGES, PAGE, TOKENS, **changes)


def store(engine: Any, host: Any, to: Any, of: Any) -> Any:
    return fake.hooked(engine, "submit_device_to_host")([fake.Transfer(host, None, to, of)])


def load(engine: Any, host: Any, of: Any, to: Any, **more: Any) -> Any:
    more = {"transfer_layer_id_max": host.layer_num, **more}
    submit = fake.hooked(engine, "submit_host_to_device")
    return submit([fake.Transfer(host, None, of, to)], **more)


@pytest.mark.parametrize("asked", ["1", '{"ahead_commands": 2, "verify": true}'], indirect=True)
@pytest.mark.parametrize("layers", [1, 3, 6])
def test_pages_come_back_elsewhere(layers: int) -> None:
    engine, host = fake.Engine(), pool(layers)
    assert store(engine, host, tokens(4, 0, 2), tokens(7, 1, 3)) == "completion device_to_host"
    assert engine.events == [("begin", "to the host", None), "end"]
    for kind in range(2):
        for at, of in ((4, 7), (0, 1), (2, 3)):
            wanted = host.device[kind, :, of * PAGE : (of + 1) * PAGE]
            assert torch.equal(host.kv_buffer[kind, at], wanted)
    assert not host.kv_buffer[:, [1, 3]].any()
    wanted = host.device.clone()
    wanted[:, :, tokens(0, 6)] = host.device[:, :, tokens(3, 7)]
    told: list[int] = []
    done = load(
        engine,
        host,
        tokens(2, 4),
        tokens(0, 6),
        start_event="started",
        on_layer_done=lambda layer: told.append(layer),
    )
    assert (done, told) == ("completion host_to_device", list(range(layers)))
    assert engine.events[2] == ("begin", "to the device", "started")
    assert torch.equal(host.device, wanted)


def test_the_log_says_that_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "offcore.serving"):
        store(fake.Engine(), pool(), tokens(1), tokens(5))
    assert caplog.messages == ["SGLang: offcore copies KV blocks"]


def test_a_layer_is_there_when_it_is_told_of() -> None:
    engine, host = fake.Engine(), pool()
    store(engine, host, tokens(1), tokens(5))
    wanted = host.device[:, :, tokens(5)].clone()
    host.device[:, :, tokens(2)] = -1
    seen: list[bool] = []

    def look(layer: int) -> None:
        seen.append(torch.equal(host.device[:, layer, tokens(2)], wanted[:, layer]))

    load(engine, host, tokens(1), tokens(2), on_layer_done=look)
    assert seen == [True] * LAYERS


def test_what_stays_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    class MLATokenToKVPoolHost(fake.MHATokenToKVPoolHost):
        pass

    class Device:
        host_transfer_translate = abs

    engine = fake.Engine()
    others = [
        MLATokenToKVPoolHost(LAYERS, PAGES, PAGE, TOKENS),
        pool(layout="layer_first"),
        pool(target_layer_num=LAYERS - 1),
        pool(dcp_size=2),
        pool(shared_allocation_domain=object()),
        pool(device_rows_packed=False),
    ]
    for host in others:
        engines._said.clear()
        caplog.clear()
        assert store(engine, host, tokens(1), tokens(5)) == fake.OWN
        assert load(engine, host, tokens(1), tokens(5)) == fake.OWN
        assert caplog.text.count("SGLang keeps its own copies") == 1
    host = pool()
    assert store(fake.Engine("kernel"), host, tokens(1), tokens(5)) == fake.OWN
    assert load(engine, host, tokens(1), tokens(5), transfer_layer_id_max=LAYERS + 1) == fake.OWN
    for odd in (tokens(1)[:3], tokens(1) + 1, tokens(1).flip(0)):
        assert store(engine, host, tokens(1)[: len(odd)], odd) == fake.OWN
    submit = fake.hooked(engine, "submit_device_to_host")
    one = fake.Transfer(host, None, tokens(1), tokens(5))
    assert submit([one, one]) == fake.OWN
    assert submit([one._replace(layer_mapper=abs)]) == fake.OWN
    assert submit([one._replace(device_pool=Device)]) == fake.OWN


def test_numbers_out_of_range_and_named_twice() -> None:
    engine, host = fake.Engine(), pool()
    for to, of in (
        (tokens(PAGES), tokens(5)),
        (tokens(0), tokens(TOKENS // PAGE)),
        (tokens(1, 1), tokens(5, 6)),
    ):
        with pytest.raises(offcore.Error) as refused:
            store(engine, host, to, of)
        assert refused.value.code == "invalid"
    assert not host.kv_buffer.any()
    assert store(engine, host, tokens(1), tokens(5)) == "completion device_to_host"


def test_a_failed_copy_is_told_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise error("driver", "the copy failed")

    engine, host = fake.Engine(), pool()
    store(engine, host, tokens(1), tokens(5))
    hook, _ = fake.HookRegistry.hooks[f"{sglang.ENGINE}.submit_device_to_host"]
    (cache,) = hook.__self__._caches.values()
    cache._jobs.append(Failed())
    with pytest.raises(offcore.Error, match="the copy failed"):
        load(engine, host, tokens(1), tokens(2))
    assert load(engine, host, tokens(1), tokens(2)) == "completion host_to_device"


@pytest.mark.parametrize("asked", ["", "0"], indirect=True)
def test_nobody_asked() -> None:
    assert fake.HookRegistry.hooks == {}


@pytest.mark.parametrize("asked", ['{"no_such": 1}'], indirect=True)
def test_no_such_argument() -> None:
    with pytest.raises(TypeError, match="no_such"):
        store(fake.Engine(), pool(), tokens(1), tokens(5))


def test_a_malformed_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.VARIABLE, "{policy}")
    with pytest.raises(offcore.Error, match=sglang.VARIABLE) as refused:
        sglang.register()
    assert refused.value.code == "invalid"


def test_another_version(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake.install(monkeypatch, "0.6.0")
    sglang.register()
    assert fake.HookRegistry.hooks == {}
    assert "offcore supports SGLang 0.5.23, not 0.6.0" in caplog.text
