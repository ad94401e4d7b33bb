"""FSDP2's communication on copy engines, whatever the process group's backend is.

    for layer in model.layers: fully_shard(layer)
    fully_shard(model)
    offcore.fsdp.enable(model)          # collective: after fully_shard, before the first step
    ...                                 # train as before
    print(offcore.fsdp.report(model))   # what ran

Parameters are all-gathered into window memory, gradients reduce-scattered with FSDP2's own scaling
folded in, each direction in a lane of its own; HSDP's all-reduce goes by a group of the backend
"offcore". Models on CPUs go by shared memory. Groups that span hosts evenly use offcore inside each
(docs/hosts.md); others, and GPUs without peer access, stay with their own backend, and one line of
the log says so. See docs/training.md.
"""

from offcore.fsdp.enable import disable, enable, report

__all__ = ["disable", "enable", "report"]
