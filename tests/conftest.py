"""What every test shares: hypothesis profiles, and which tests run.

- `pytest`: what CI runs; the same examples on every machine.
- `pytest --hypothesis-profile=quick`: a few examples a property.
- `pytest --long`: also the tests marked `long`, and fresh examples by the thousand, with hours of
  time for each test instead of minutes (unless --timeout says otherwise).
- `pytest --sanitized=asan` (or tsan): the tests worth running on that build, and only on it.
"""

import gc
import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import needs

TESTS = Path(__file__).parent
LONG_LIMIT_S = 2 * 3600.0  # the longest takes ten minutes; sanitizers make it several times that
# numpy's algebra is not used, and the threads it starts take a third of a short process's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Machines and tables of the user who runs the tests are not meant.
os.environ.pop("OFFCORE_MACHINES", None)
os.environ["XDG_CONFIG_HOME"] = str(TESTS / "no-such-folder")

# What a sanitizer's build need not run, by a folder or file of a test's path: what does not touch
# the core, what is about the stand-in driver, what runs tools of the network's,
# what bounds times, and under the thread sanitizer also what starts no thread.
NOT_SANITIZED = {
    "asan": {
        "cli",
        "tidy",
        "loop",
        "examples",
        "fakes",
        "test_mcast_bench.py",
        "test_mcast_gpu.py",
        "test_scale.py",
        "test_testbed.py",
    },
}
# Of tests/cuda: benchmarks, tables, text, and what bounds times.
NOT_SANITIZED["asan"] |= {
    *("test_batch_bench.py", "test_gpu_names.py", "test_kv_scripts.py", "test_numa.py"),
    *("test_proof.py", "test_reduce_kernels.py", "test_slots_by_table.py", "test_stress.py"),
}
# Children leave what is their parent's, which are leaks, and start threads after a fork.
NOT_SANITIZED["asan"] |= {"test_forks.py", "test_after_forks.py", "train", "shim"}
NOT_SANITIZED["asan"] |= {"test_ring_race.py"}  # builds and sanitizes its own
NOT_SANITIZED["asan"] |= {"serving"}  # adapters in Python: what they call has tests in kv
NOT_SANITIZED["tsan"] = NOT_SANITIZED["asan"] | {"golden", "ir", "model", "plan", "property", "sim"}
# gloo's threads are built without it
NOT_SANITIZED["tsan"] |= {"test_mcast_torch.py", "test_torch_meeting.py"}
NOT_SANITIZED["tsan"] |= {  # of folders with others that do start threads
    "test_mcast_claims.py",
    *("test_cutting.py", "test_dying.py", "test_fat_tree.py", "test_lossy.py", "test_strangers.py"),
    *("test_sdma_engine.py", "test_sdma_fuzz.py", "test_sdma_packets.py", "test_sdma_programs.py"),
    "test_sdma_sim.py",
}
# What takes long there and is left to --long: also processes that mostly wait for each other.
LONG_SANITIZED = {
    "asan": {
        "model",
        "test_fat_tree.py",
        "test_mcast_claims.py",
        "test_kv_check.py",
        "test_possible.py",
    },
    "tsan": {"conformance", "faults", "test_kv_check.py"},
}
for _slow in LONG_SANITIZED.values():
    _slow |= {"test_sdma_ways.py", "test_kv_links.py", "test_killed_processes.py"}
    _slow |= {"test_kv_calls.py"}
for _slow in LONG_SANITIZED.values():  # of tests/cuda: several minutes
    _slow |= {
        "test_batch_copy.py",
        "test_batch_feed.py",
        "test_capture.py",
        "test_capture_limits.py",
    }
    _slow |= {"test_cuda.py", "test_reductions_alone.py", "test_refused.py", "test_registration.py"}
    _slow |= {"test_spare_engines.py", "test_split_cuda.py", "test_streamed_views.py"}
    _slow |= {"test_strided.py"}
LONG_SANITIZED["asan"] |= {"test_processes.py", "test_last_words.py", "test_mcast_torch.py"}
LONG_SANITIZED["asan"] |= {"test_on_hosts.py"}  # they run `ip`, which a sanitizer makes slow
LONG_SANITIZED["asan"] |= {"test_torch_meeting.py"}  # as many processes that import torch
LONG_SANITIZED["asan"] |= {"test_large.py", "test_many_ranks.py"}  # the same code with more rows

_shared = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=200, derandomize=True, **_shared)
settings.register_profile("quick", max_examples=20, derandomize=True, **_shared)
settings.register_profile("long", max_examples=20_000, print_blob=True, **_shared)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests marked `long`")
    parser.addoption("--sanitized", choices=sorted(NOT_SANITIZED), help="on this build")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config: pytest.Config) -> None:
    if sanitizer := config.getoption("--sanitized"):
        spec = importlib.util.find_spec("offcore")
        if spec is None or f"/build/{sanitizer}/" not in str(spec.origin):
            raise pytest.UsageError(f"this is not the {sanitizer} build: run `make {sanitizer}`")
    if config.getoption("--long") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("long")
    if config.getoption("--long") and config.getoption("--timeout", None) is None:
        config.option.timeout = LONG_LIMIT_S


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Every worker collects all tests, which a sanitizer makes slow too."""
    sanitizer = config.getoption("--sanitized")
    if sanitizer is None:
        return None
    left_out = NOT_SANITIZED[sanitizer]
    if not config.getoption("--long"):
        left_out = left_out | LONG_SANITIZED[sanitizer]
    return True if left_out & set(collection_path.relative_to(TESTS).parts) else None


def pytest_collection_finish() -> None:
    """What lives from now on is not looked through for garbage again and again."""
    gc.collect()
    gc.freeze()


def _sanitized(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a sanitizer's build runs it, once its file is collected."""
    if config.getoption("--sanitized") == "tsan":
        if item.get_closest_marker("not_tsan"):
            return False
        if "test_random_walks[cuda" in item.nodeid:  # it runs out of memory of its own
            return False
    if config.getoption("--long"):
        return True
    if "cuda" in item.nodeid and "cuda" not in item.path.parts:  # conformance's and transfers'
        return False
    if "test_reproduce_" in item.nodeid:  # most of it is matplotlib
        return False
    return "sim-h200" not in item.nodeid  # in all that the core does it is as an MI300X


def _ranks(item: pytest.Item) -> object:
    called = getattr(item, "callspec", None)
    return None if called is None else called.params.get("ranks")


def _of_few_ranks(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of what is tried with several numbers of ranks: one and three, else the least. What is wrong
    with memory at two, four or eight is wrong there too."""
    tried: dict[str, set[int]] = {}
    for item in items:
        if isinstance(ranks := _ranks(item), int):
            tried.setdefault(item.nodeid.partition("[")[0], set()).add(ranks)
    kept = {name: ranks & {1, 3} or {min(ranks)} for name, ranks in tried.items()}
    return [
        item
        for item in items
        if (few := kept.get(item.nodeid.partition("[")[0])) is None or _ranks(item) in few
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sanitized"):
        kept = [item for item in items if _sanitized(item, config)]
        kept = kept if config.getoption("--long") else _of_few_ranks(kept)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    for item in items:
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: run with --long"))
        for mark in item.iter_markers("needs"):
            if reason := needs.missing(*mark.args):
                item.add_marker(pytest.mark.skip(reason=reason))
