"""vLLM's adapter against the interface that vLLM gives it, in host memory."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import needs
import offcore
from offcore.errors import error
from offcore.serving import engines, vllm

sys.path.append(str(Path(__file__).parent))
import vllm_engine as engine

needs.require("torch")
import torch  # noqa: E402

BLOCKS, PAGE, USED = 32, 48, 40  # of a tensor; the last 8 bytes of a page are padding


@pytest.fixture(params=["0.26.0", "0.33.0+cu130"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _one_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> Iterator[None]:
    engine.install(monkeypatch, version)
    monkeypatch.setattr(engines, "_said", set())
    yield
    for name in (vllm.NAME, vllm.CONNECTOR):
        vars(vllm).pop(name, None)


def caches(layers: int = 3, groups: int = 1, seed: int = 0) -> engine.Caches:
    torch.manual_seed(seed)
    tensors = [
        engine.Tensor(torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8), PAGE)
        for _ in range(layers)
    ]
    refs = [engine.Ref(index, USED) for index in range(layers)]
    return engine.Caches(tensors, [refs] * groups)


def opened(given: engine.Caches, **config: Any) -> Any:
    return vllm.OffcoreOffloadingSpec(engine.Config(**config)).create_worker(given)


def gpu(ids: list[int], sizes: list[int] | None = None, first: list[int] | None = None) -> Any:
    return engine.Blocks(np.array(ids, np.int64), sizes or [len(ids)], first or [0])


def cpu(*ids: int) -> Any:
    return engine.Chunks(np.array(ids, np.int32))


def finished(worker: Any, count: int) -> list[Any]:
    """The results of so many jobs, by number."""
    worker.wait(set(worker._jobs))
    results = worker.get_finished()
    assert len(results) == count
    return sorted(results, key=lambda one: one.job_id)


def bytes_of(given: engine.Caches, blocks: list[int]) -> Any:
    return torch.stack([one.tensor[blocks, :USED] for one in given.tensors])


def came_back(given: engine.Caches, worker: Any, source: Any, chunks: Any, target: Any) -> bool:
    """Stores and loads; whether every byte of the cache is right then."""
    assert worker.submit_store(1, source, chunks)
    (stored,) = finished(worker, 1)
    wanted = [one.tensor.clone() for one in given.tensors]
    for before in wanted:
        before[target.block_ids, :USED] = before[source.block_ids, :USED]
    assert worker.submit_load(2, chunks, target)
    (loaded,) = finished(worker, 1)
    assert (stored.job_id, loaded.job_id) == (1, 2)
    for result in (stored, loaded):
        assert result.success
        assert result.transfer_size == len(source.block_ids) * USED * len(given.tensors)
        assert result.transfer_time >= 0
    worker.shutdown()
    return all(map(torch.equal, [one.tensor for one in given.tensors], wanted))


def test_blocks_come_back_elsewhere() -> None:
    given = caches()
    worker = opened(given)
    assert isinstance(worker, engine.OffloadingWorker)
    assert came_back(given, worker, gpu([3, 9, 4]), cpu(7, 0, 2), gpu([20, 1, 31]))


def test_chunks_of_several_blocks_begin_and_end_within() -> None:
    given = caches()
    worker = opened(given, per_chunk=4)
    # Blocks 2 to 7 of a request: the last two of a chunk, and all of the next one.
    assert came_back(
        given,
        worker,
        gpu([3, 9, 4, 5, 6, 7], first=[2]),
        cpu(5, 1),
        gpu([20, 21, 22, 23, 24, 25], first=[2]),
    )


def test_a_part_of_a_chunk_is_loaded() -> None:
    given = caches()
    worker = opened(given, per_chunk=4)
    worker.submit_store(1, gpu([8, 9, 10, 11]), cpu(3))
    finished(worker, 1)
    wanted = bytes_of(given, [9, 10])
    worker.submit_load(2, cpu(3), gpu([0, 1], first=[1]))
    finished(worker, 1)
    assert torch.equal(bytes_of(given, [0, 1]), wanted)
    worker.shutdown()


def test_groups_take_their_chunks_in_turn() -> None:
    given = caches(groups=3)
    worker = opened(given, per_chunk=2)
    source = gpu([3, 9, 4, 5], [3, 0, 1], [1, 5, 1])
    target = gpu([23, 29, 24, 25], [3, 0, 1], [1, 5, 1])
    assert came_back(given, worker, source, cpu(6, 2, 0), target)


def test_rows_by_hand() -> None:
    spec = gpu([1, 2, 3, 4], [3, 1], [3, 4])
    assert vllm.slots_of(spec, np.array([5, 2, 7], np.int32), 4).tolist() == [23, 8, 9, 28]
    assert vllm.slots_of(gpu([]), np.array([], np.int64), 4).tolist() == []


@pytest.mark.parametrize("chunks", [[], [0], [0, 1, 2]])
def test_chunks_that_do_not_fit_the_blocks(chunks: list[int]) -> None:
    worker = opened(caches(), per_chunk=2)
    with pytest.raises(offcore.Error, match="vLLM names") as refused:
        worker.submit_store(1, gpu([1, 2, 3]), cpu(*chunks))
    assert refused.value.code == "invalid"
    assert worker.get_finished() == []
    worker.shutdown()


@pytest.mark.parametrize(
    ("blocks", "chunks"), [([BLOCKS], [0]), ([-1], [0]), ([0], [8]), ([0], [-1]), ([0, 1], [3, 3])]
)
def test_out_of_range_and_named_twice(blocks: list[int], chunks: list[int]) -> None:
    given = caches()
    before = bytes_of(given, list(range(BLOCKS)))
    worker = opened(given)
    with pytest.raises(offcore.Error) as refused:
        worker.submit_store(1, gpu(blocks), cpu(*chunks))
    assert refused.value.code == "invalid"
    assert worker.submit_store(1, gpu([5]), cpu(3))  # the number is free
    finished(worker, 1)
    assert torch.equal(bytes_of(given, list(range(BLOCKS))), before)
    worker.shutdown()


def test_one_number_twice() -> None:
    worker = opened(caches())
    worker.submit_store(1, gpu([5]), cpu(3))
    with pytest.raises(offcore.Error, match="job 1 is under way"):
        worker.submit_store(1, gpu([6]), cpu(4))
    finished(worker, 1)
    worker.shutdown()


def test_each_job_is_told_once() -> None:
    worker = opened(caches())
    for number in range(8):
        worker.submit_store(number, gpu([number, number + 8]), cpu(number, (number + 1) % 8))
    assert [one.job_id for one in finished(worker, 8)] == list(range(8))
    assert worker.get_finished() == []
    worker.wait({3, 99})  # ended, never heard of
    worker.shutdown()


def test_jobs_under_way_end_at_shutdown() -> None:
    given = caches()
    worker = opened(given)
    rows = worker._pool
    kept = bytes_of(given, [4])
    worker.submit_store(1, gpu([4]), cpu(2))
    worker.wait({1})
    row = rows.row(2)
    for number in range(2, 8):
        worker.submit_load(number, cpu(2), gpu([number + 10]))
    worker.shutdown()
    worker.shutdown()
    for number in range(2, 8):
        assert torch.equal(bytes_of(given, [number + 10]), kept)
    assert bytes(row) == kept.numpy().tobytes()
    with pytest.raises(offcore.Error, match="shut down") as refused:
        worker.submit_load(9, cpu(2), gpu([1]))
    assert refused.value.code == "cancelled"


def test_an_expedited_load() -> None:
    given = caches()
    worker = opened(given)
    worker.submit_store(1, gpu([4]), cpu(2))
    worker.wait({1})
    assert worker.submit_load(2, cpu(2), gpu([9]), expedited=True)
    finished(worker, 2)
    assert torch.equal(bytes_of(given, [9]), bytes_of(given, [4]))
    worker.shutdown()


class Failing:
    """A job that failed."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        raise error("driver", "the copy failed")


@pytest.mark.parametrize("times", [2, 3])
def test_a_failed_copy_is_tried_again(
    times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = caches()
    worker = opened(given)
    worker.submit_store(1, gpu([4]), cpu(2))
    finished(worker, 1)
    right, left = worker._transfer.load, [times]

    def load(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        return Failing() if left[0] >= 0 else right(*args, **options)

    monkeypatch.setattr(worker._transfer, "load", load)
    worker.submit_load(2, cpu(2), gpu([9]))
    if times == 3:
        with pytest.raises(offcore.Error, match="the copy failed"):
            worker.wait({2})
    else:
        assert worker.get_finished() == []
        finished(worker, 1)
        assert torch.equal(bytes_of(given, [9]), bytes_of(given, [4]))
    assert caplog.text.count("tried again") == 2
    worker.shutdown()


def test_pages_with_a_stride() -> None:
    """All layers in one allocation, as newer versions have it."""
    whole = torch.randint(-128, 128, (BLOCKS, 3, PAGE), dtype=torch.int8)
    tensors = [engine.Tensor(whole[:, layer], PAGE) for layer in range(3)]
    given = engine.Caches(tensors, [[engine.Ref(layer, USED) for layer in range(3)]])
    assert came_back(given, opened(given), gpu([3, 9]), cpu(7, 0), gpu([20, 1]))


def test_what_stays_vllms(caplog: pytest.LogCaptureFixture) -> None:
    differ = caches(groups=2)
    differ.group_data_refs[1] = differ.group_data_refs[1][:1]
    uneven = caches()
    uneven.tensors[1].tensor = uneven.tensors[1].tensor[:-1]
    scattered = caches()
    scattered.tensors[0].tensor = torch.zeros((BLOCKS, 2 * PAGE), dtype=torch.int8)[:, ::2]
    scattered.tensors[0].page_size_bytes = PAGE // 2
    for given, config in (
        (differ, {}),
        (uneven, {}),
        (scattered, {}),
        (caches(), {"replicated": True}),
        (caches(), {"chunks": 0}),
    ):
        engines._said.clear()
        caplog.clear()
        assert opened(given, **config) is engine.OWN
        assert opened(given, **config) is engine.OWN
        assert caplog.text.count("keeps its own copies") == 1


def test_the_log_says_that_it_copies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "offcore.serving"):
        assert opened(caches()) is not engine.OWN
    assert caplog.messages == ["vLLM: offcore copies KV blocks"]


@pytest.mark.parametrize("version", ["0.27.1", "1.0"], indirect=True)
def test_another_version(caplog: pytest.LogCaptureFixture) -> None:
    assert opened(caches()) is engine.OWN
    assert opened(caches()) is engine.OWN
    assert caplog.text.count("offcore supports") == 1


def test_another_signature(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.Spec, "create_worker", lambda self, caches, more=None: engine.OWN)
    assert opened(caches()) is engine.OWN
    assert "was expected to take" in caplog.text


def test_the_plugin_registers_the_name_as_often_as_it_is_called() -> None:
    vllm.register()
    vllm.register()
    names = (vllm.NAME, vllm.CONNECTOR)
    assert engine.Factory.known == {name: ("offcore.serving.vllm", name) for name in names}
    assert issubclass(getattr(sys.modules["offcore.serving.vllm"], vllm.NAME), engine.Spec)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.factory", None)
    vllm.register()
    with pytest.raises(offcore.Error) as refused:
        _ = vllm.OffcoreOffloadingSpec
    assert refused.value.code == "unsupported"
    with pytest.raises(AttributeError):
        _ = vllm.nothing


def test_arguments_of_the_transfer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    given = caches()
    worker = opened(given, extra={"offcore": {"ahead_commands": 2, "verify": True}})
    assert came_back(given, worker, gpu([3, 9, 4]), cpu(7, 0, 2), gpu([20, 1, 31]))
    with pytest.raises(TypeError, match="no_such"):
        opened(caches(), extra={"offcore": {"no_such": 1}})


def test_a_forked_child_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = opened(caches())
    own = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(offcore.Error, match="forked"):
            worker.submit_store(1, gpu([1]), cpu(1))
        worker.shutdown()  # the parent's memory stays
    assert worker.submit_store(1, gpu([1]), cpu(1))
    finished(worker, 1)
    worker.shutdown()


def connected(given: engine.Caches, **extra: Any) -> Any:
    """A connector of vLLM's worker, with these caches of layers l0, l1 and so on."""
    names = [f"l{number}" for number in range(len(given.tensors))]
    connector: Any = vllm.OffcoreConnector(
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)),
        None,
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names)]),
    )
    connector.register_kv_caches(given)
    return connector


def test_attention_of_a_layer_waits_for_that_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the step begins: there the loads of all requests have only been started."""
    monkeypatch.setattr(engines, "STEPPED_FROM", 0)
    given = caches()
    connector = connected(given)
    worker = connector.connector_worker.worker
    worker.submit_store(1, gpu([3, 9, 4]), cpu(7, 0, 2))
    finished(worker, 1)
    waited: list[tuple[int, int]] = []
    start = worker._transfer.load

    def load(*args: Any, **options: Any) -> Any:
        assert (options["by_layer"], options["priority"]) == (1, 1)
        job = start(*args, **options)
        wait_layer, blocks = job.wait_layer, len(args[0])

        def layer_waited(layer: int, *rest: Any) -> None:
            waited.append((layer, blocks))
            wait_layer(layer, *rest)

        monkeypatch.setattr(job, "wait_layer", layer_waited)
        return job

    monkeypatch.setattr(worker._transfer, "load", load)
    jobs = {2: engine.Job(cpu(7, 0), gpu([20, 1])), 3: engine.Job(cpu(2), gpu([31]))}
    connector.start_load_kv(jobs, expedited=True)
    for layer, one in enumerate(given.tensors):
        assert waited == [(number, blocks) for number in range(layer) for blocks in (2, 1)]
        connector.wait_for_layer_load(f"l{layer}")
        assert torch.equal(one.tensor[[20, 1, 31], :USED], one.tensor[[3, 9, 4], :USED])
    connector.wait_for_save()
    assert connector.saved
    assert len(waited) == 6  # nothing is waited for twice
    worker.wait({2, 3})
    assert sorted(one.job_id for one in worker.get_finished()) == [2, 3]
    worker.shutdown()


def test_layers_that_no_attention_asked_for_are_there_after_the_step() -> None:
    given = caches()
    connector = connected(given)
    worker = connector.connector_worker.worker
    worker.submit_store(1, gpu([4]), cpu(2))
    finished(worker, 1)
    connector.start_load_kv({2: engine.Job(cpu(2), gpu([9]))}, expedited=True)
    connector.wait_for_save()
    assert torch.equal(bytes_of(given, [9]), bytes_of(given, [4]))
    # Without a step that reads it, the load is waited for as ever.
    connector.start_load_kv({3: engine.Job(cpu(2), gpu([11]))})
    assert torch.equal(bytes_of(given, [11]), bytes_of(given, [4]))
    worker.shutdown()


def test_all_copies_wait_for_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, too: the stream may have been given a kernel that zeroes their blocks."""
    connector = connected(caches())
    worker = connector.connector_worker.worker
    monkeypatch.setattr(worker, "_stream", lambda: "stream")
    waits: list[tuple[str, Any]] = []
    for kind in ("store", "load"):
        right = getattr(worker._transfer, kind)

        def started(
            *args: Any, kind: str = kind, right: Any = right, after: Any = None, **options: Any
        ) -> Any:
            waits.append((kind, after))
            return right(*args, **options)

        monkeypatch.setattr(worker._transfer, kind, started)
    worker.submit_store(1, gpu([4]), cpu(2))
    finished(worker, 1)
    worker.submit_load(2, cpu(2), gpu([9]))
    finished(worker, 1)
    worker.submit_load(3, cpu(2), gpu([11]), expedited=True)
    assert waits == [("store", "stream"), ("load", "stream"), ("load", "stream")]
    worker.shutdown()


@pytest.mark.parametrize("times", [2, 3])
def test_a_load_of_the_step_that_failed_is_tried_again(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = caches()
    connector = connected(given)
    worker = connector.connector_worker.worker
    worker.submit_store(1, gpu([4]), cpu(2))
    finished(worker, 1)
    right, left = worker._transfer.load, [times]

    class Gone(Failing):
        def wait_layer(self, layer: int, stream: Any = None) -> None:
            self.wait()

    def load(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        return Gone() if left[0] >= 0 else right(*args, **options)

    monkeypatch.setattr(worker._transfer, "load", load)
    connector.start_load_kv({2: engine.Job(cpu(2), gpu([9]))}, expedited=True)
    if times == 3:
        with pytest.raises(offcore.Error, match="the copy failed"):
            connector.wait_for_layer_load("l0")
    else:
        connector.wait_for_layer_load("l2")
        assert torch.equal(bytes_of(given, [9]), bytes_of(given, [4]))
    worker.shutdown()


def test_what_the_connector_asks_of_vllm(version: str) -> None:
    connector = connected(caches())
    assert connector.extra["spec_name"] == vllm.NAME
    assert connector.extra["sync_load_budget_bytes"] == vllm.BUDGET
    # Graphs may not hide the waits; 0.26 loads all layers before a request runs.
    piecewise = connector.requires_piecewise_for_cudagraph
    assert piecewise({}) == version.startswith("0.33")
    assert not piecewise({"sync_load_budget_bytes": 0})
    connector.connector_worker.worker.shutdown()
    other = connected(caches(), sync_load_budget_bytes=7)
    assert other.extra["sync_load_budget_bytes"] == 7
    other.connector_worker.worker.shutdown()


@pytest.mark.parametrize("version", ["0.27.1"], indirect=True)
def test_another_versions_connector_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    made = vllm.OffcoreConnector
    assert issubclass(made, engine.OffloadingConnector)
    assert not issubclass(made, vllm.Connector)
    assert "offcore supports" in caplog.text


def test_a_worker_of_vllms_own_waits_by_itself() -> None:
    connector = connected(caches(), spec_name="OWN_SPEC", spec_module_path="vllm_engine")
    connector.wait_for_layer_load("l0")
    connector.wait_for_save()
    assert connector.saved
