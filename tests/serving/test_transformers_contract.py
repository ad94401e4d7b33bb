"""transformers' adapter against the interface that transformers gives it, in host memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import needs
import offcore
from offcore.serving import engines
from offcore.serving import transformers as serving

needs.require("torch")
sys.path.append(str(Path(__file__).parent))
import transformers_engine as engine  # noqa: E402

PROMPT = list(range(100, 126))  # six blocks and a half


@pytest.fixture(params=["5.17.0"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    monkeypatch.setattr(engines, "_said", set())
    monkeypatch.setattr(serving, "_replaced", {})
    monkeypatch.setattr(serving, "_tiers", {})
    return engine.install(monkeypatch, version)


@pytest.fixture
def model() -> Iterator[engine.Model]:
    model = engine.Model()
    yield model
    serving.disable(model)


def running(model: engine.Model, tier: Any, batching: Any = None) -> engine.Engine:
    """An engine whose host memory is registered."""
    run = engine.Engine(model, batching)
    tier.wait_ready(20)
    return run


def request(name: str, tokens: list[int]) -> engine.Request:
    return engine.Request(name, tokens)


@pytest.mark.parametrize("one_allocation", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_what_one_engine_computed_another_loads(
    model: engine.Model, one_allocation: bool, stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "STEPPED_FROM", 0 if stepped else 1 << 40)
    alone = engine.Engine(model).generate(request("a", PROMPT))
    tier = serving.enable(model, 1 << 20, one_allocation=one_allocation)
    assert running(model, tier).generate(request("a", PROMPT)) == alone
    assert (tier.counts["stored"], tier.counts["loaded"]) == (6, 0)
    other = engine.Engine(model)
    assert other.begin(request("b", PROMPT)) == 24
    assert other.forward(request("b", PROMPT), 24) == alone
    assert other.cache._total_prefix_length == 24
    other.cache.free_blocks("b")
    longer = [*PROMPT[:16], 1, 2, 3, 4, 5]
    assert other.generate(request("c", longer)) == engine.Engine(engine.Model()).generate(
        request("c", longer)
    )
    assert tier.counts["loaded"] == 6  # what the cache has is not loaded again
    assert tier.counts["stored"] == 7


@pytest.mark.parametrize(
    ("graphs", "stepped"),
    [((False, False), True), (False, True), ((False, True), False), (True, False), (None, False)],
)
def test_the_model_begins_with_the_first_layers(
    model: engine.Model, graphs: Any, stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a layer when it takes that one out, not for all layers before it begins; where
    graphs may replay the model, for all."""
    monkeypatch.setattr(engines, "STEPPED_FROM", 0)
    tier = serving.enable(model, 1 << 20)
    alone = running(model, tier).generate(request("a", PROMPT))
    run = running(model, tier, engine.Batching(use_cuda_graph=graphs))
    found = run.begin(request("b", PROMPT))
    ((job, _),) = run.cache._loading
    wait_layer, waited = job.wait_layer, []

    def layer_waited(layer: int, *rest: Any) -> None:
        waited.append((layer, run.order[-1] if run.order else -1))
        wait_layer(layer, *rest)

    monkeypatch.setattr(job, "wait_layer", layer_waited)
    monkeypatch.setattr(job, "done", lambda: False)
    wanted = [(layer, layer) for layer in range(4)] if stepped else [(3, -1)]
    for _ in range(2):  # waited for once
        assert run.forward(request("b", PROMPT), found) == alone
        assert waited == wanted
    assert tier.counts["loaded"] == 6


def test_a_larger_load_comes_in_more_steps() -> None:
    """So that little is left to compute once the last layers have come; each costs commands."""
    of = {mib: engines.layers_together(28, mib << 20) for mib in (15, 16, 100, 128, 256, 448, 4096)}
    assert of == {15: 0, 16: 4, 100: 4, 128: 4, 256: 2, 448: 1, 4096: 1}


def test_a_batchs_requests_wait_for_a_layer_of_all_of_them(
    model: engine.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All loads have begun before the model does; before a layer it waits for that one of each."""
    monkeypatch.setattr(engines, "STEPPED_FROM", 0)
    tier = serving.enable(model, 1 << 20)
    prompts = {name: [ord(name) * 50 + at for at in range(14)] for name in "ab"}
    alone = {name: running(model, tier).generate(request(name, prompts[name])) for name in "ab"}
    run = running(model, tier)
    found = {name: run.begin(request(name, prompts[name])) for name in "ab"}
    jobs = [job for job, _ in run.cache._loading]
    waited: list[tuple[int, int, int]] = []
    for number, job in enumerate(jobs):
        wait_layer = job.wait_layer

        def layer_waited(layer: int, *rest: Any, own: int = number, wait: Any = wait_layer) -> None:
            waited.append((layer, own, run.order[-1] if run.order else -1))
            wait(layer, *rest)

        monkeypatch.setattr(job, "wait_layer", layer_waited)
        monkeypatch.setattr(job, "done", lambda: False)
    for name in "ab":
        assert run.forward(request(name, prompts[name]), found[name]) == alone[name]
    assert waited == [(layer, own, layer) for layer in range(4) for own in range(2)]


def test_a_failed_load_ends_the_batch(model: engine.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = serving.enable(model, 1 << 20)
    running(model, tier).generate(request("a", PROMPT))
    run = engine.Engine(model)
    found = run.begin(request("b", PROMPT))
    ((job, _),) = run.cache._loading

    def failed(*_: Any) -> None:
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(job, "wait_stream", failed)
    with pytest.raises(RuntimeError, match="the copy failed"):
        run.forward(request("b", PROMPT), found)


def test_preempted_requests_come_back(model: engine.Model) -> None:
    tier = serving.enable(model, 1 << 20)
    run = running(model, tier)
    assert run.manager.space == 0.0  # the tier takes the place of the engine's memory
    first = request("a", PROMPT)
    alone = run.forward(first, run.begin(first))
    assert run.manager._offload_to_cpu([first]) == {"a"}
    assert first.is_cpu_offloaded
    run.cache.free_blocks("a")
    for name in "bc":  # others take all blocks
        run.generate(request(name, [ord(name) * 10 + at for at in range(4 * engine.BLOCKS)]))
    run.cache.tables["a"] = run.cache._block_manager.get_free_blocks(7, None, True, 0)
    first.position_offset = len(PROMPT)
    future = SimpleNamespace(state=first, complete_blocks=0)
    assert run.forward(first, len(PROMPT), [future]) == alone
    assert (first.is_cpu_offloaded, first.allocated_blocks, future.complete_blocks) == (False, 7, 6)
    assert (tier.counts["swapped_out"], tier.counts["swapped_in"]) == (7, 7)


def test_a_request_that_is_dropped_gives_its_rows_back(model: engine.Model) -> None:
    tier = serving.enable(model, 1 << 20)
    run = running(model, tier)
    first = request("a", PROMPT)
    run.forward(first, run.begin(first))
    pool = run.cache.transfer.pools[0]
    before = pool.free_blocks
    run.manager._offload_to_cpu([first])
    assert pool.free_blocks == before - 7
    run.manager._return_cpu_blocks("a")
    end = time.monotonic() + 10
    while pool.free_blocks < before and time.monotonic() < end:  # the store reads them until then
        time.sleep(0.001)
    assert pool.free_blocks == before
    assert tier.counts["swapped_in"] == 0


def test_the_log_says_that_it_copies(
    model: engine.Model, api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serving.enable(model, 1 << 20)
    with caplog.at_level("INFO", "offcore.serving"):
        engine.Engine(model)
    assert caplog.messages == ["transformers: offcore copies KV blocks"]


def test_the_log_says_nothing_where_no_block_fits(
    model: engine.Model, api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serving.enable(model, 64)
    with (
        caplog.at_level("INFO", "offcore.serving"),
        pytest.raises(offcore.Error, match="a block takes"),
    ):
        engine.Engine(model)
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["5.16.2", "5.24.0", "6.0"], indirect=True)
def test_another_version(model: engine.Model, api: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        serving.enable(model, 1 << 20)
    assert api.PagedAttentionCache is engine.PagedAttentionCache
    assert engine.Engine(model).manager.space == 1.0
    assert caplog.text.count("offcore supports") == 1


def test_another_signature(
    model: engine.Model,
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine.PagedAttentionCache, "free_blocks", lambda self, one, more: None)
    serving.enable(model, 1 << 20)
    assert api.PagedAttentionCache is engine.PagedAttentionCache
    assert "was expected to take" in caplog.text


def test_disabled_the_engine_has_its_own_again(model: engine.Model, api: Any) -> None:
    serving.enable(model, 1 << 20)
    assert api.PagedAttentionCache is not engine.PagedAttentionCache
    serving.disable(model)
    assert api.PagedAttentionCache is engine.PagedAttentionCache
