"""The KV caches of models: how many layers, and how large a block's page of one layer is."""

from __future__ import annotations

from dataclasses import dataclass

from offcore.errors import error

BLOCK_TOKENS = 16
_ELEMENT_BYTES = 2  # bf16
_KEY_AND_VALUE = 2


@dataclass(frozen=True)
class Geometry:
    """Of a paged cache: a block has `page_bytes` of each layer, keys and values together."""

    model: str
    layers: int
    page_bytes: int
    block_tokens: int = BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        """Of a block with all its layers."""
        return self.layers * self.page_bytes

    def blocks(self, tokens: int) -> int:
        """How many hold so many tokens."""
        return -(-tokens // self.block_tokens)


def _model(name: str, layers: int, heads: int, head_dim: int) -> Geometry:
    page = heads * head_dim * _ELEMENT_BYTES * _KEY_AND_VALUE * BLOCK_TOKENS
    return Geometry(name, layers, page)


# Layers, KV heads and their size, from the models' published configurations.
MODELS = {
    one.model: one
    for one in (
        _model("qwen2.5-0.5b", 24, 2, 64),
        _model("qwen2.5-1.5b", 28, 2, 128),
        _model("qwen2.5-7b", 28, 4, 128),
        _model("qwen2.5-14b", 48, 8, 128),
        _model("qwen2.5-32b", 64, 8, 128),
        _model("llama-3.2-1b", 16, 8, 64),
        _model("llama-3.2-3b", 28, 8, 128),
        _model("llama-3.1-8b", 32, 8, 128),
    )
}


def geometry(model: str) -> Geometry:
    """Raises `Error`: invalid, with the names that there are."""
    if model not in MODELS:
        raise error("invalid", f"no model is called '{model}': there are {', '.join(MODELS)}")
    return MODELS[model]
