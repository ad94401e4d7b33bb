"""Models with random weights, and attention over paged caches, for serving.py; serving_vllm.py has
their sizes from here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

MODELS = {  # layers, hidden, intermediate, heads, KV heads, vocabulary
    "tiny": (2, 64, 128, 4, 2, 512),
    "0.5b": (24, 896, 4864, 14, 2, 151936),
    "1.5b": (28, 1536, 8960, 12, 2, 151936),
    "7b": (28, 3584, 18944, 28, 4, 152064),
    "llama8b": (32, 4096, 14336, 32, 8, 128256),
}


def flash(
    q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, most: tuple[int, int], scale: Any
) -> Any:
    """torch's own flash attention of sequences one behind the other, (tokens, heads, size)."""
    ends_q, ends_k = ends_q.to(torch.int32), ends_k.to(torch.int32)
    call = torch.ops.aten._flash_attention_forward
    return call(q, k, v, ends_q, ends_k, *most, 0.0, True, False, scale=scale)[0]


def paged_flash(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[Any, None]:
    """What the engine calls for a layer, without a mask."""
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = kwargs["cache"].update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, **indices
    )
    out = flash(
        query[0].transpose(0, 1).contiguous(),
        key.contiguous(),
        value.contiguous(),
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"],
        (int(kwargs["max_seqlen_q"]), int(kwargs["max_seqlen_k"])),
        module.scaling,
    )
    return out.unsqueeze(0), None


def attention() -> str:
    """The engine's name of torch's flash attention, where it gives what attention with a mask does;
    else "paged|sdpa", which builds whole masks and is slow."""
    if not torch.cuda.is_available():
        return "paged|sdpa"
    try:
        torch.manual_seed(1)
        like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v = (torch.randn(n, heads, 64, **like) for n, heads in ((80, 4), (200, 2), (200, 2)))
        ends_q = torch.tensor([0, 16, 80], device="cuda")
        ends_k = torch.tensor([0, 100, 200], device="cuda")
        found = flash(q, k, v, ends_q, ends_k, (64, 100), 0.125)
        for (a, b), (c, d) in (((0, 16), (0, 100)), ((16, 80), (100, 200))):
            seen = torch.ones(b - a, d - c, dtype=torch.bool, device="cuda").tril(d - c - (b - a))
            parts = [one.transpose(0, 1).float() for one in (q[a:b], k[c:d], v[c:d])]
            parts[1:] = [one.repeat_interleave(2, 0) for one in parts[1:]]
            wanted = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen)
            torch.testing.assert_close(
                found[a:b].transpose(0, 1).float(), wanted, atol=2e-2, rtol=2e-2
            )
    except (AssertionError, RuntimeError, TypeError) as why:
        print(f"torch's flash attention cannot be used: {str(why).splitlines()[0]}", flush=True)
        return "paged|sdpa"
    AttentionInterface.register("paged|torch_varlen", paged_flash)
    return "paged|torch_varlen"


def config_of(name: str) -> Any:
    """The configuration of a model, as transformers names it."""
    layers, hidden, intermediate, heads, kv_heads, vocabulary = MODELS[name]
    made = LlamaConfig if name.startswith("llama") else Qwen2Config
    return made(
        architectures=["LlamaForCausalLM" if made is LlamaConfig else "Qwen2ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=name in ("0.5b", "1.5b"),
    )


def model_of(name: str, device: str, attend: str) -> Any:
    """A model with random weights."""
    model_class = LlamaForCausalLM if name.startswith("llama") else Qwen2ForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = model_class(config_of(name)).eval()
    torch.set_default_dtype(torch.float32)
    model.set_attn_implementation(attend)
    return model
