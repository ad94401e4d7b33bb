"""What benchmarks/serving_vllm.py does without vLLM: its arms, sizes, rows and help; and its turns,
with engines that answer as vLLM's would."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import needs

needs.require("torch", "transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import serving_vllm as bench  # noqa: E402


def test_help_needs_no_vllm() -> None:
    command = [sys.executable, str(BENCHMARKS / "serving_vllm.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "zero_sm" in done.stdout


def test_arms_differ_by_the_spec_alone() -> None:
    own, ours, zero = (bench.transfer_of(arm, 1 << 30) for arm in ("own", "ours", "zero_sm"))
    assert own is not None
    assert ours is not None
    assert zero is not None
    assert bench.transfer_of("recompute", 1 << 30) is None
    extra = "kv_connector_extra_config"
    assert own[extra] == {"cpu_bytes_to_use": 1 << 30}
    assert ours[extra] == own[extra] | bench._SPEC
    assert zero[extra] == ours[extra] | {"offcore": {"policy": "zero_sm"}}
    assert {key: own[key] for key in own if key != extra} == {
        key: ours[key] for key in ours if key != extra
    }
    assert set(bench.CONNECTORS) | {"gpu"} == set(bench.ARMS)


def test_memory_holds_the_largest_case() -> None:
    config = bench.config_of("7b")
    token = bench.kv_bytes(config)
    assert token == 2 * 28 * 4 * 128 * 2
    args = bench.arguments(["--prompts", "1024,8192", "--batches", "8,1"])
    assert args.cases == [(1024, 1), (8192, 8), (1024, 8), (8192, 1)]
    cache, host = bench.sizes_of(args, token)
    assert cache >= 8 * (8192 + args.new) * token
    assert 2 * 8 * 8192 * token <= host <= 24 << 30
    made = bench.arguments_of(args, "own", config, "folder")
    assert made["max_model_len"] >= 8192 + args.new
    assert made["kv_transfer_config"]["kv_connector_extra_config"]["cpu_bytes_to_use"] == host


def answer(ttft: float, tokens: list[list[int]], cached: int) -> dict[str, Any]:
    count = len(tokens)
    return {"seconds": 2.0, "ttft": [ttft] * count, "tokens": tokens, "cached": [cached] * count}


def test_rows() -> None:
    right, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    found = {
        "gpu": [answer(0.05, other, 90)] * 3,
        "own": [answer(ttft, right, 96) for ttft in (0.3, 0.1, 0.2)],
        "ours": [answer(0.1, right, 96), answer(0.1, other, 64), answer(0.1, right, 96)],
    }
    gpu, own, ours = bench.rows_of(found, (100, 2, 100))
    assert (own["ttft_ms"], own["tokens_s"], own["expected"]) == (pytest.approx(200), 2.0, 96)
    assert (own["same_tokens"], ours["same_tokens"]) == (1.0, pytest.approx(5 / 6))
    assert (gpu["expected"], "same_tokens" in gpu, ours["cached"]) == (0, False, 64)
    assert [bench.unexpected(row) for row in (gpu, own, ours)] == [False, False, True]
    assert bench.unexpected(own | {"batch": 1, "same_tokens": 0.5})
    assert not bench.unexpected(own | {"cached": 80, "same_tokens": 0.5})


class Stand:
    """An engine that has everything cached, and fails at its third call."""

    def __init__(self, arm: str, fails: bool = False) -> None:
        self.arm, self.fails, self.calls, self.closed = arm, fails, 0, False

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        self.calls += 1
        if self.fails and self.calls == 3:
            raise RuntimeError("out of memory")
        return answer(0.1, [prompt[:new] for prompt in prompts], 64)

    def forget(self, wait_s: float) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_an_arm_that_fails_leaves_the_others() -> None:
    args = bench.arguments(["--rounds", "4", "--arms", "recompute,gpu,own,ours"])
    stands = {"recompute": Stand("recompute"), "own": Stand("own", True), "ours": Stand("ours")}
    engines: Any = dict(stands)
    seen = bench.prompts_of("seen", 2, 64, 512)
    found, errors = bench.rounds_of(engines, args, (64, 2, 100), seen, 512)
    assert errors == [
        {"arm": "own", "prompt": 64, "batch": 2, "hit": 100, "error": "out of memory"}
    ]
    assert {arm: len(rounds) for arm, rounds in found.items()} == {"gpu": 4, "ours": 4}
    assert set(engines) == {"recompute", "ours"}
    assert stands["own"].closed
    assert bench.arms_at(args, 0) == ["recompute", "own", "ours"]


def test_rounds_end_in_time() -> None:
    args = bench.arguments(["--rounds", "5", "--limit", "0"])
    engines: Any = {"recompute": Stand("recompute"), "ours": Stand("ours")}
    seen = bench.prompts_of("seen", 1, 64, 512)
    found, _ = bench.rounds_of(engines, args, (64, 1, 0), seen, 512)
    assert {arm: len(rounds) for arm, rounds in found.items()} == {"recompute": 1, "ours": 1}
