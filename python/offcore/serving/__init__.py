"""Adapters: the KV transfers of `offcore.kv` in serving engines. See docs/serving.md.

| module | engine |
|---|---|
| `offcore.serving.transformers` | transformers' continuous batching: host prefix tier, offloading |
| `offcore.serving.vllm` | vLLM's offloading connector: the worker's copies, layer by layer |

An adapter imports its engine only when it is used, replaces what moves KV blocks, and leaves the
rest to the engine. It knows some versions of it; of another one it changes nothing, and says so
once in the log "offcore.serving".
"""
