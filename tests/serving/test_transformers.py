"""The adapter of transformers in the engine itself, on a CPU."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import needs

needs.require("torch", "transformers")
import torch  # noqa: E402
import transformers  # noqa: E402

from offcore.serving import engines  # noqa: E402
from offcore.serving import transformers as serving  # noqa: E402

if not engines.known("transformers", transformers.__version__, serving.VERSIONS):
    versions = " or ".join(serving.VERSIONS)
    pytest.skip(
        f"needs transformers {versions}, not {transformers.__version__}", allow_module_level=True
    )


def test_a_second_call_loads_what_the_first_one_computed() -> None:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    model: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).eval()
    model.set_attn_implementation("paged|sdpa")
    draw = random.Random(0)
    prompts = [[draw.randrange(512) for _ in range(100)] for _ in range(3)]
    batching = transformers.generation.configuration_utils.ContinuousBatchingConfig(
        block_size=16, num_blocks=64, max_batch_tokens=128, use_cuda_graph=False
    )
    generation = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)

    def tokens() -> list[list[int]]:
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        return sorted(list(one.generated_tokens) for one in outputs.values())

    alone = tokens()
    tier = serving.enable(model, 4 << 20)
    try:
        assert tokens() == alone
        assert tier.counts["stored"] == 3 * 6
        assert tokens() == alone
        assert tier.counts["loaded"] == 3 * 6
    finally:
        serving.disable(model)


def test_the_measurement_runs_on_a_cpu(tmp_path: Path) -> None:
    """All arms that need no GPU, with the tokens of recomputing."""
    script = Path(__file__).parents[2] / "benchmarks" / "serving.py"
    arms = "recompute,gpu,engine,ours,separate,packed,loop,batch,kernel"
    words = ["--model", "tiny", "--hits", "0,70,100", "--rounds", "1", "--arms", arms]
    words += ["--json", str(tmp_path / "rows.jsonl")]
    ran = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "at most: loop" in ran.stdout
