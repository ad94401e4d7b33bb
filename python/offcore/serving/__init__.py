"""Adapters: the KV transfers of `offcore.kv` in serving engines. See docs/serving.md.

| module | engine |
|---|---|
| `offcore.serving.transformers` | transformers' continuous batching: host prefix tier, offloading |
| `offcore.serving.vllm` | vLLM's offloading connector: the worker's copies, layer by layer |
| `offcore.serving.sglang` | SGLang's hierarchical cache: copies between its GPU and host pools |
| `offcore.serving.lmcache` | LMCache's CUDA device: copies of objects of token-major layouts |

An adapter imports its engine only when used, and replaces only what moves KV blocks. With engine
versions that it does not support it changes nothing and logs this once ("offcore.serving").
"""
